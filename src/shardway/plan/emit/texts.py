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
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON leaves as they are, and TOML or YAML refuse or read as the end of a line."""
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
    return quote(value) if isinstance(value, str) else json.dumps(value)


def quote(text: str) -> str:
    """A text in double quotes that TOML, YAML and Python read alike."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def write_yaml(settings: Settings, indent: str = "") -> str:
    """Settings with those below them further in; lists on one line."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{_yaml(key)}:\n{write_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{_yaml(key)}: {_yaml(value)}\n")
    return "".join(lines)


def _yaml(value: Value) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_yaml(each) for each in value)}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else quote(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(value))  # YAML 1.1 takes 1e-05 for a text


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
    return quote(value) if isinstance(value, str) else repr(value)
