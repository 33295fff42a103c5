"""Writes run files: the commented one of `shardway init` and the resolved one of a run directory.

Invariant: what is written here loads again to the same values. This module must not choose values.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from shardway.runfile.schema import RunFile, Section


def render_value(value: Any) -> str:
    """One value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return f"[{', '.join(map(render_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_render_key(name)} = {render_value(entry)}" for name, entry in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def render_run(values: RunFile, origins: Mapping[str, str], keep: Callable[[str], bool]) -> str:
    """A run file with every key that `keep` wants, each with its origin beside it."""
    lines = [f"format = {values.format}"]
    for section, table in _tables(values):
        kept = {name: value for name, value in table.items() if keep(f"{section}.{name}")}
        lines += ["", f"[{section}]"] if kept else []
        for name, value in kept.items():
            origin = _escape(origins[f"{section}.{name}"])  # of a file whose name may hold any byte
            lines.append(f"{f'{name} = {render_value(value)}':<40} # {origin}")
    return "\n".join(lines) + "\n"


def render_commented(values: RunFile, chosen: Mapping[str, Any]) -> str:
    """A run file for a newcomer: the `chosen` keys set, every other key as a comment with its default."""
    lines = [
        "# A Shardway run file. Keys that are commented out stand at their defaults.",
        "# `shardway config explain KEY` says more of a key; `shardway train THIS_FILE` runs it.",
        f"format = {values.format}",
    ]
    for section, table in _tables(values):
        model: Section = getattr(values, section)
        lines += ["", *_comment((type(model).__doc__ or "").strip()), f"[{section}]"]
        for name, default in table.items():
            lines += _comment(type(model).model_fields[name].description or "")
            dotted = f"{section}.{name}"
            entry = f"{name} = {render_value(chosen.get(dotted, default))}"
            lines.append(entry if dotted in chosen else f"# {entry}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """A text without characters that a terminal would obey, or that are none in UTF-8: as TOML writes them."""
    return "".join(char if char.isprintable() else _escape_one(char) for char in text)


def _escape_one(char: str) -> str:
    return f"\\u{ord(char):04X}" if ord(char) < 0x10000 else f"\\U{ord(char):08X}"


def _render_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else render_value(name)


def _tables(values: RunFile) -> list[tuple[str, dict[str, Any]]]:
    dump = values.model_dump(mode="json")
    return [(name, table) for name, table in dump.items() if isinstance(table, dict)]


def _comment(text: str) -> list[str]:
    return [f"## {line}" for line in textwrap.wrap(text, 100)]
