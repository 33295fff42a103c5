"""Settings as TOML, YAML, shell arrays and calls of Python.

Invariant: what is written is read back as the values that came in. This module must not know what a setting means.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Scalar: TypeAlias = str | int | float | bool
Value: TypeAlias = Scalar | Sequence["Value"] | Mapping[str, "Value"] | None
Settings: TypeAlias = Mapping[str, Value]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
"""That YAML reads as something else than text."""


def write_toml(tables: Mapping[str, Settings]) -> str:
    """Tables with their settings; those that are None or a table without settings are left out."""
    parts = []
    for name, settings in tables.items():
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items() if value is not None]
        if lines:
            parts.append("\n".join([f"[{name}]", *lines, ""]))
    return "\n".join(parts)


def _toml(value: Value) -> str:
    if isinstance(value, list | tuple):
        inner = [_toml(each) for each in value]
        long = any(isinstance(each, list | tuple) for each in value)
        return "[\n  " + ",\n  ".join(inner) + ",\n]" if long else f"[{', '.join(inner)}]"
    return json.dumps(value)


def write_yaml(settings: Settings, indent: str = "") -> str:
    """Settings with those below them further in; lists on one line."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{write_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_yaml(value)}\n")
    return "".join(lines)


def _yaml(value: Value) -> str:
    plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return str(value) if plain else json.dumps(value)


def write_flags(flags: Settings) -> str:
    """Options as words of a shell array, one a line; True is an option without value, None and False are no option."""
    return "".join(
        f"  {_flag(name, value)}\n" for name, value in flags.items() if value is not None and value is not False
    )


def _flag(name: str, value: Value) -> str:
    words = [f"--{name}"]
    if isinstance(value, list | tuple):
        words += [str(each) for each in value]
    elif value is not True:
        words.append(str(value))
    return " ".join(shlex.quote(word) for word in words)


def write_call(callee: str, settings: Settings, indent: str = "") -> str:
    """A call of Python with keywords, one a line."""
    lines = [f"{indent}    {key}={literal(value)},\n" for key, value in settings.items()]
    return f"{callee}(\n{''.join(lines)}{indent})" if lines else f"{callee}()"


def literal(value: Value) -> str:
    """A value as Python writes it, texts in double quotes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(each) for each in value)}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
