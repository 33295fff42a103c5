"""Slurm's short forms -> lists: "n[01-03,7],login1" -> host names, "2(x3),1" -> tasks of each node.

Invariant: the expansion has the order and the zero padding that `scontrol show hostnames` prints. Errors are
`ValueError` with a sentence that names the text. This module must not read the environment.

Source: scontrol(1) "show hostnames"; srun(1) SLURM_STEP_TASKS_PER_NODE.
"""

from __future__ import annotations

import itertools
import re

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^\]]*)\]|(?P<plain>[^\[]+)")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<nodes>[0-9]+)\))?")


def parse_hostlist(text: str) -> list[str]:
    """Host names in order: "n[08-10],r[1-2]c[0-1]" -> n08 n09 n10 r1c0 r1c1 r2c0 r2c1."""
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise ValueError(f'"{text}" is not a Slurm host list such as "n[01-03,7],login1"')
    return [host for item in items for host in _expand_item(item)]


def _expand_item(item: str) -> list[str]:
    choices = [
        [part["plain"]] if part["plain"] else _expand_ranges(item, part["ranges"]) for part in _PART.finditer(item)
    ]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_ranges(item: str, ranges: str) -> list[str]:
    return [number for text in ranges.split(",") for number in _expand_range(item, text)]


def _expand_range(item: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    last = match and (match["last"] or match["first"])
    if match is None or last is None or int(match["first"]) > int(last):
        raise ValueError(f'"{text}" in the host list item "{item}" is not a range such as "01-16"')
    width = len(match["first"])
    return [f"{number:0{width}d}" for number in range(int(match["first"]), int(last) + 1)]


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node in order: "2(x3),1" -> [2, 2, 2, 1]."""
    matches = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts: list[int] = []
    for match in matches:
        if match is None:
            raise ValueError(f'"{text}" is not a list of tasks per node such as "2(x3),1"')
        counts += [int(match["tasks"])] * int(match["nodes"] or 1)
    return counts
