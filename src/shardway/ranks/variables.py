"""Launcher variables as numbers and lists of hosts, and the one error that says what is wrong with them.

Invariants:
- A variable that is missing or no number is a SiteError with its name and value, never a default.
- The expansion has the order and the zero padding that `scontrol show hostnames` prints. Errors are `ValueError` with a
  sentence that names the text.

Sources: scontrol(1) "show hostnames"; srun(1) SLURM_STEP_TASKS_PER_NODE.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from shardway.errors import SiteError

Environ = Mapping[str, str]

AGENT_VARIABLE = "SHARDWAY_AGENT"
"""Tells the ranks that an agent of ours has started them: its process id."""


def read_int(environ: Environ, launcher: str, name: str) -> int:
    """The whole number in `name`, 0 or more; SiteError where it is missing or anything else."""
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise variables_error(environ, launcher, (name,), f"{name} is an integer from 0 on")
    return int(text)


def read_optional_int(environ: Environ, launcher: str, name: str | None) -> int | None:
    """As `read_int`, but None where there is no such variable."""
    return read_int(environ, launcher, name) if name is not None and name in environ else None


def first_set(environ: Environ, *names: str) -> str:
    """The first name that is set; the first of all where none is, so that an error can name it."""
    return next((name for name in names if name in environ), names[0])


def first_value(environ: Environ, *names: str) -> str:
    """The first value that is not empty, or ""."""
    return next((environ[name] for name in names if environ.get(name)), "")


def variables_error(
    environ: Environ, launcher: str, names: tuple[str, ...], allowed: str, remedy: str = ""
) -> SiteError:
    """The error for these variables of this launcher; without a remedy it says how to start afresh."""
    found = ", ".join(
        f'{name}="{_in_one_line(environ[name])}"' if name in environ else f"{name} not set" for name in names
    )
    program = "torchrun" if launcher == "the environment" else launcher
    fresh = f"start the ranks with {program} from a fresh shell; for a single rank, unset its variables"
    return SiteError(
        f"the variables of {launcher} do not place this process among the ranks: {found}\n"
        f"      allowed: {allowed}\n"
        f"      to do: {remedy or fresh}"
    )


def _in_one_line(value: str) -> str:
    """A value as bash would write it after `$`: a list of hosts may have a line each."""
    return value.replace("\n", "\\n")


# --- Slurm's short forms -> lists: "n[01-03,7],login1" -> host names, "2(x3),1" -> tasks of each node

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
