"""Waits for a job of a run to begin: for its first events, or for its end where it never wrote one.

Invariant: the run directory is looked at often, the scheduler ever more rarely, and one look at which it knows no job
ends nothing: its accounting may lag behind. This module must not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardway.launch.hosts.base import Host
from shardway.launch.runs.job_status import read_standing
from shardway.launch.runs.ledger import read_ledger
from shardway.launch.runs.logs import render_end
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir

PAUSE_S = 0.5
FIRST_GAP_S, LONGEST_GAP_S = 10.0, 80.0
"""Seconds between two questions to the scheduler: 10, 20, 40 and then 80."""
SETTLED_S = 5.0
"""Seconds after the first rank in which the others begin to write."""


def trains_a_run_file(run: RunDir) -> bool:
    """Whether the last order of a run was a run file, whose ranks write events; a command of the person's need not."""
    orders = [attempt for attempt in run.attempts() if attempt.order_path.exists()]
    return bool(orders) and orders[-1].run_file.exists()


@dataclass(frozen=True)
class SchedulerSnapshot:
    """What a look at the scheduler gave: attempts that wait or run for all that is known, and how the last one ended,
    in a sentence that is empty while it has not."""

    active: tuple[Attempt, ...]
    end: str


@dataclass(frozen=True)
class Beginning:
    """The begin of a job of `run`, a directory that `host` sees; times are in seconds of `clock`."""

    host: Host
    run: RunDir
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait(self, rank: int) -> str:
        """Wait until somebody trains here, and this rank has events or should have them.

        Empty then, and where no job waits or runs but events are there; else how the last attempt ended.
        """
        training = _Training(self.run, rank, self.clock)
        if training.is_seen():
            return ""
        look, questions = self._look(), _Questions()
        if not look.active:
            return "" if self.run.ranks_with_events() else look.end
        questions.note(look, self.clock())
        while questions.gone < 2:
            self.sleep(PAUSE_S)
            if training.is_seen():
                return ""
            written = any(attempt.result_path.exists() for attempt in look.active)
            if written or self.clock() >= questions.next_s:
                look = self._look()
                questions.note(look, self.clock())
                if written and not look.active:
                    break
        return look.end

    def _look(self) -> SchedulerSnapshot:
        standings = read_standing(self.host, read_ledger(self.host, self.run.path))
        active = tuple(standing.entry.attempt for standing in standings if standing.is_active)
        return SchedulerSnapshot(active, render_end(standings[-1]) if standings and not active else "")


@dataclass
class _Questions:
    """When the scheduler is asked next, and how often in a row it knew no job."""

    next_s: float = 0.0
    gap_s: float = 0.0
    gone: int = 0

    def note(self, look: SchedulerSnapshot, now: float) -> None:
        self.gone = 0 if look.active else self.gone + 1
        self.gap_s = min(2 * self.gap_s, LONGEST_GAP_S) if look.active and self.gap_s else FIRST_GAP_S
        self.next_s = now + self.gap_s
        if not look.active:
            self.gap_s = 0.0


@dataclass
class _Training:
    """Whether somebody trains here, and a rank has begun to write or had the time to. Events that come say so too: not
    every file system shows a lock to other machines."""

    run: RunDir
    rank: int
    clock: Callable[[], float]
    since: float | None = None

    def __post_init__(self) -> None:
        self._further = self.run.follow_events(self.rank, from_end=True)

    def is_seen(self) -> bool:
        ranks = self.run.ranks_with_events()
        if self._further.new_events():
            return True
        if self.run.find_writer() is None or not ranks:
            return False
        self.since = self.clock() if self.since is None else self.since
        return self.rank in ranks or self.clock() - self.since > SETTLED_S
