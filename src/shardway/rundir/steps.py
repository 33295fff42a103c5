"""The names of checkpoints' folders: the same on the file system of the run and on a node's own disk.

Invariant: the name of a complete one is never that of an unfinished one. This module must not know where they stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shardway.rundir.look import list_names

_STEP = re.compile(r"step-(\d{9})")
_PARTIAL = re.compile(r"\.step-.*\.partial")
_SET_ASIDE = re.compile(r"(?:damaged|undone)-step-(\d{9})(\.\d+)?")


def step_name(step: int) -> str:
    """The folder of a complete checkpoint."""
    return f"step-{step:09d}"


def partial_name(step: int, mark: str = "") -> str:
    """The folder of one that is not complete; `mark` says whose it is."""
    return f".{step_name(step)}{mark and f'.{mark}'}.partial"


def step_of_checkpoint(folder: Path) -> int | None:
    """The step that the name of a checkpoint's folder says, also of one that was set aside; None for another name."""
    match = _STEP.fullmatch(folder.name) or _SET_ASIDE.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first; none where there is no such folder.

    Raises JobError where the file system does not answer.
    """
    return find_steps(list_names(folder))


def find_steps(names: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among the names in a folder, oldest first."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def list_partials(folder: Path) -> list[Path]:
    """What stands in a folder and never became complete."""
    return sorted(folder / name for name in list_names(folder) if _PARTIAL.fullmatch(name))
