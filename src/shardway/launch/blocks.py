"""Shell functions of job scripts, kept as shell in `launch/shell/*.sh`, where editors and linters know them.

A block begins with `#: NAME ARGUMENTS: what it is for` and ends before the next; the line goes into the script as the
purpose of the function.

Invariant: a block goes into a script as it stands in its file; what differs between scripts is a variable that the
script sets. This module must not build or choose text.
"""

from __future__ import annotations

import re
from importlib.resources import files

from shardway.launch.script import ScriptLine

_HEAD = re.compile(r"^#: (?P<name>\w+)", re.MULTILINE)


def read_block(file: str, name: str) -> ScriptLine:
    """The function `name` of `launch/shell/FILE.sh`, with its purpose. Raises KeyError for a name that is not there."""
    return read_blocks(file)[name]


def read_blocks(file: str) -> dict[str, ScriptLine]:
    """Every function of `launch/shell/FILE.sh`, in the order of the file."""
    text = (files("shardway.launch") / "shell" / f"{file}.sh").read_text(encoding="utf-8")
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return {head["name"]: _as_line(text[head.start() : end]) for head, end in zip(heads, ends, strict=True)}


def _as_line(block: str) -> ScriptLine:
    purpose, _, body = block.partition("\n")
    return ScriptLine(body.strip("\n"), purpose.removeprefix("#: "))
