"""Finds the line of a key in a TOML text, for "run.toml:12" in origins and errors.

Invariant: a wrong answer is impossible for what `tomllib` accepts with one key a line; where a key is written in a
way that this scanner does not know (an inline table), it is left out rather than guessed. It must not read values.
"""

from __future__ import annotations

import re

_TABLE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-]+)\s*=\s*(.*)$")


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> line number (from 1) of every key and table head in a TOML text."""
    found: dict[str, int] = {}
    table, skipping = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        if skipping:
            skipping = "" if _ends(line, skipping) else skipping
        elif head := _TABLE.match(line):
            table = head[1].replace(" ", "")
            found.setdefault(table, number)
        elif pair := _KEY.match(line):
            found.setdefault(f"{table}.{pair[1]}".lstrip("."), number)
            skipping = _opens(pair[2])
    return found


def _opens(value: str) -> str:
    """What must close a value that goes on in the next lines; empty where it ends on its own line."""
    for quotes in ('"""', "'''"):
        if value.startswith(quotes):
            return "" if value.count(quotes) >= 2 else quotes
    if value.startswith("["):
        return "" if _bracket_depth(value) <= 0 else "]"
    return ""


def _ends(line: str, closer: str) -> bool:
    return closer in line if closer != "]" else _bracket_depth(line) < 0


def _bracket_depth(line: str) -> int:
    bare = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", line)
    return bare.count("[") - bare.count("]")
