"""Finds the line of a key in a TOML text, for "run.toml:12" in origins and errors.

Invariant: a wrong answer is impossible for what `tomllib` accepts; where a key is written in a way that this
scanner does not know (quoted, in an inline table, in an array of tables), it is left out rather than guessed. It
must not read values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*=.*")
_TOKEN = re.compile(
    r"""
      \"{3} (?: \\. | [^\\] )*? \"{3} \"{0,2}   # strings over several lines
    | '{3} .*? '{3} '{0,2}
    | " (?: \\. | [^"\\] )* "                   # strings on one line
    | ' [^']* '
    | \# [^\n]*
    | [\[\]{}\n]
    """,
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> line number (from 1) of every key and table head in a valid TOML text."""
    found: dict[str, int] = {}
    lines, table = text.split("\n"), ""
    for number in _statement_lines(text):
        line = lines[number - 1]
        if head := _TABLE.fullmatch(line):
            table = re.sub(r"\s", "", head[1])
            found.setdefault(table, number)
        elif line.lstrip().startswith("["):
            table = "?"  # a head of another form: its keys get a name that no key has
        elif (pair := _KEY.fullmatch(line)) and table != "?":
            found.setdefault(f"{table}.{pair[1]}".lstrip("."), number)
    return found


def _statement_lines(text: str) -> Iterator[int]:
    """The lines that no string and no bracket of an earlier line reaches into."""
    number, depth = 1, 0
    yield number
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        number += token[0].count("\n")
        if token[0] == "\n" and depth == 0:
            yield number
