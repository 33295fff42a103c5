"""What a fault is, and how it finds the moment and the process that it strikes.

Invariant: a fault is real (a signal, a file, a mount, a process), strikes only what belongs to the command that it is
given, and is over when its command is. What has to come of it is in its `expects`, and for the test to say.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from commands import Command, Room, find_ranks
from shardway.ranks.heartbeat import HEARTBEATS, VARIABLE, HeartbeatEntry, heartbeat_path, read_heartbeat
from shardway.rundir.directory import RunDir

DEVICE = os.environ.get("SHARDWAY_CHAOS_DEVICE", "cpu")
"""What the ranks compute on: cpu or cuda."""

_MOST_RANKS = torch.cuda.device_count() if DEVICE == "cuda" else math.inf

RANKS = int(min(2, _MOST_RANKS))
"""So many are there, where a fault says nothing else."""

FIRST, LAST = 22, 130
"""Steps between which most faults strike: after the first checkpoint, and with some to come."""

_NEXT_PAGE_S = 0.5

EVERY = 20
"""Steps from one checkpoint to the next, where a fault sets no other number."""


@dataclass(frozen=True)
class Struck:
    """When a fault struck (Unix seconds, this host), and whom; the command that goes on, where it is another."""

    time: float
    whom: str
    command: Command | None = None


@dataclass(frozen=True)
class Aftermath:
    """What is left of a run that is at its end, in the folder of its test; `said`: what its starts wrote to stderr."""

    run: RunDir
    home: Path
    said: list[str]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Rank 0's events of one name, undone ones too."""
        return [event for event in self.run.all_events() if event["event"] == name]

    @property
    def restarts(self) -> int:
        return len(self.events("restarted"))


def anything(after: Aftermath) -> None:
    """Nothing is asked beyond the numbers of the run."""


def starts_again_since(*words: str) -> Callable[[Aftermath], None]:
    """Once, and the reason has these words."""

    def expects(after: Aftermath) -> None:
        (restarted,) = after.events("restarted")
        for each in words:
            assert each in restarted["reason"], restarted["reason"]

    return expects


@dataclass(frozen=True)
class Fault:
    """A fault: its name in the table, what strikes, what the run needs for it, and what is expected.

    `words` change no numbers; those of `base` do, so that the undisturbed run has them as well. Both may name
    "{folder}", where `prepare` puts files. `room` is where the command runs. Losses may differ by `tolerance`
    (relative); 0.0: not in one bit.
    """

    name: str
    strike: Callable[[Command, random.Random], Struck]
    words: tuple[str, ...] = ()
    environ: Callable[[Path, random.Random], Mapping[str, str]] = field(default=lambda folder, dice: {})
    restarts_itself: bool = True
    """Whether nobody has to give the command again."""
    is_further: bool = False
    """Whether `make test` leaves it out, since other tests or another fault show much of it."""
    expects: Callable[[Aftermath], None] = anything
    base: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    room: Callable[[Path], AbstractContextManager[Room]] = field(default=lambda folder: nullcontext(Room()))
    tolerance: float = 0.0
    is_timed: bool = True
    """Whether the dates of events say how long things took."""
    least_ranks: int = 1
    """For how many there has to be a device."""
    device: str = ""
    """The only one that it concerns; "": all of them."""

    @property
    def cannot_be(self) -> str:
        """Why it cannot happen to ranks on DEVICE; "" where it can."""
        if self.device not in ("", DEVICE):
            return f"concerns {self.device} alone"
        return f"needs {self.least_ranks} devices" if self.least_ranks > _MOST_RANKS else ""


# --- whom


def any_rank(dice: random.Random) -> int:
    """The number of one of the ranks."""
    return dice.randrange(RANKS)


def children(command: Command) -> dict[int, psutil.Process]:
    """The ranks that live, by number."""
    return find_ranks(psutil.Process(command.process.pid).children(recursive=False))


def see(command: Command, rank: int) -> HeartbeatEntry | None:
    """What a rank shows its agent."""
    page = _find_page(command, rank)
    return read_heartbeat(page) if page is not None else None


def _find_page(command: Command, rank: int) -> Path | None:
    """The page with the rank's process id: one that was a spare has the variables of an earlier start."""
    child = children(command).get(rank)
    try:
        folder = child.environ().get(VARIABLE, "") if child is not None else ""
    except psutil.Error:
        return None
    if child is None or not folder:
        return None
    pages = (heartbeat_path(each, rank) for each in Path(folder).parent.glob(f"{HEARTBEATS.prefix}*"))
    return next(
        (page for page in pages if (entry := read_heartbeat(page)) is not None and entry.pid == child.pid), None
    )


def wait_for(command: Command, rank: int, holds: Callable[[HeartbeatEntry], bool]) -> None:
    """Until what a rank shows is so. Looks often, and only now and then whose page it is, which takes longer than many
    a phase of a step."""
    page: Path | None = None
    next_s = 0.0

    def is_so() -> bool:
        nonlocal page, next_s
        if page is None or time.monotonic() >= next_s:
            page, next_s = _find_page(command, rank), time.monotonic() + _NEXT_PAGE_S
        entry = read_heartbeat(page) if page is not None else None
        return entry is not None and holds(entry)

    command.wait_until(is_so, pause_s=0.005)
    command.note_processes()


def wait_for_some_step(command: Command, dice: random.Random) -> None:
    """Until a moment within a random step, wherever the ranks are then."""
    step = dice.randrange(FIRST, LAST)
    wait_for(command, 0, lambda entry: entry.step >= step)
    time.sleep(dice.uniform(0.0, 0.02))


def strike(process: psutil.Process, number: signal.Signals, whom: str) -> Struck:
    """Send a signal."""
    struck = Struck(time.time(), whom)
    process.send_signal(number)
    return struck


def wait_for_mark(name: str, whom: str = "a rank") -> Callable[[Command, random.Random], Struck]:
    """It strikes by itself, and leaves a mark of this name; when it did is the age of the mark."""

    def act(command: Command, dice: random.Random) -> Struck:
        mark = command.home / name
        command.wait_until(mark.exists)
        command.note_processes()
        return Struck(mark.stat().st_mtime, whom)

    return act


def kill_all(command: Command) -> None:
    """kill -9 the agent and all its ranks."""
    command.note_processes()
    for process in (psutil.Process(command.process.pid), *children(command).values()):
        process.kill()
    command.end()
