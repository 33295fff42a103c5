"""The progress page of a rank: what it does now, in memory that its agent reads without its help.

A page is a small file in memory (`/dev/shm` where there is one), written by the rank at every change of activity and
read by the agent at any moment, also while the rank is stopped or one of its threads holds Python's lock.

Invariant: a reader gets an entry as it was written or none; a rank that has no page, or cannot make one, runs as well.
Times are those of CLOCK_MONOTONIC, which the processes of a host share. This module must not judge.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardway.ranks.progress import Activity

VARIABLE = "SHARDWAY_PROGRESS"
"""Names the folder of the pages to the ranks that an agent starts."""

_LAYOUT = struct.Struct("<QqqqdQ")
"""Count of changes, process id, activity, steps done, since when (seconds), count of changes again."""

_TRIES = 8

_ACTIVITIES = frozenset(Activity)
"""What a page that something else has written over does not say."""


@dataclass(frozen=True)
class HeartbeatEntry:
    """What a page says: `changes` counts what was written, `since` is in monotonic seconds."""

    changes: int
    pid: int
    activity: Activity
    step: int
    since: float


class HeartbeatWriter:
    """The page of this process; a `Page` for `ranks.progress`. Raises OSError where the file cannot be made.

    Opened once more in the same process, it goes on.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(_LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._changes = int(_LAYOUT.unpack(self._memory[:])[0])

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Show an activity. A reader that comes in between sees two counts that differ."""
        self._changes += 1
        _LAYOUT.pack_into(self._memory, 0, self._changes, os.getpid(), activity, step, now, self._changes)


def read_page(path: Path) -> HeartbeatEntry | None:
    """What a page says now; None where there is none, nothing was written yet, or it is not whole."""
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _LAYOUT.size:
            return None
        first, pid, activity, step, since, last = _LAYOUT.unpack(data)
        if first == last and activity in _ACTIVITIES:
            return HeartbeatEntry(first, pid, Activity(activity), step, since) if first else None
    return None


def page_path(folder: Path, local_rank: int) -> Path:
    """Where the page of a rank of this node is."""
    return folder / f"rank-{local_rank}"


def open_page(environ: Mapping[str, str], local_rank: int) -> HeartbeatWriter | None:
    """The page of this rank where an agent wants one; None where none does or it cannot be made."""
    folder = environ.get(VARIABLE, "")
    if not folder:
        return None
    try:
        return HeartbeatWriter(page_path(Path(folder), local_rank))
    except OSError:
        return None
