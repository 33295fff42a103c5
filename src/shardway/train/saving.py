"""When a run is saved besides its cadence in steps, and what a save that failed means for it.

Invariant: a save that fails while the run goes on costs nothing but the time until the next try; where the run ends, it
is an error. This module must not decide when a run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.save import Keep, prune_checkpoints, save_checkpoint
from shardway.checkpoint.state import State
from shardway.errors import JobError, LostContact, render_reason
from shardway.plan.economy import daly_interval
from shardway.ranks.start import is_out_of_memory
from shardway.train.session import Session

RETRY_S = 30.0
"""How long after a save that failed the next is tried: a file system that was busy or full for a moment is well again,
and one that stays full costs a few tries an hour."""


@dataclass(frozen=True)
class LeastCost:
    """The interval at which saves and what failures undo cost least together (Daly 2006; `plan.economy`).

    `mtbf_s` is the mean time between failures of the whole job, in seconds. `shortest_s` until a save was measured and
    as the least; `longest_s` is for jobs that hardly ever fail, since people stop them too; `most_share` bounds the
    share of the time that goes into saves.
    """

    mtbf_s: float
    shortest_s: float = 120.0
    longest_s: float = 1800.0
    most_share: float = 0.05

    def interval_s(self, save_s: float | None) -> float:
        """Seconds from one save to the next, where a save takes `save_s` (None: not known yet)."""
        if save_s is None:
            return self.shortest_s
        least = max(self.shortest_s, save_s / self.most_share)
        return max(least, min(daly_interval(save_s, self.mtbf_s), self.longest_s))


@dataclass(frozen=True)
class Point:
    """What is saved: the state, the step that it belongs to, the run's counters. `last`: nothing comes after it."""

    state: State
    step: int
    numbers: Mapping[str, Any]
    last: bool


class Saver:
    """Saves on all ranks together; only rank 0's clock counts."""

    def __init__(
        self,
        session: Session,
        every_s: float | LeastCost | None,
        keep: Keep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._every_s = every_s
        self._keep = keep
        self._clock = clock
        self._tried_at = clock()
        self._failed = False
        self._save_s: float | None = None

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save to the next; None where the clock does not ask for any."""
        if isinstance(self._every_s, LeastCost):
            return self._every_s.interval_s(self._save_s)
        return self._every_s

    def is_due(self) -> bool:
        """Whether rank 0 wishes for a save: by the clock, or since the last one failed."""
        since = self._clock() - self._tried_at
        due = self.interval_s is not None and since >= self.interval_s
        return self._session.ranks.is_first and (due or (self._failed and since >= RETRY_S))

    def save(self, point: Point) -> float | None:
        """Save; the seconds that it took, None where this step is saved already or the save failed.

        Raises JobError on every rank where it fails and nothing comes after it, or where memory ran out.
        """
        session, started = self._session, time.perf_counter()
        try:
            saved = save_checkpoint(session.directory, session.ranks, point.state, point.step, point.numbers)
        except LostContact:
            raise
        except JobError as error:
            if point.last or is_out_of_memory(error):
                raise
            self._note_failure(point.step, render_reason(str(error)))
            return None
        self._tried_at, self._failed = self._clock(), False
        if saved is None:
            return None
        self._save_s = seconds = time.perf_counter() - started
        facts = {"next_in_s": self.interval_s} if isinstance(self._every_s, LeastCost) else {}
        session.recorder.event("saved", step=point.step, name=saved.name, bytes=saved.bytes, seconds=seconds, **facts)
        session.recorder.status(saved_step=point.step, save_seconds=seconds, save_failed="")
        if session.ranks.is_first:
            prune_checkpoints(session.directory, self._keep)
        return seconds

    def _note_failure(self, step: int, reason: str) -> None:
        self._tried_at, self._failed = self._clock(), True
        self._session.recorder.event("save_failed", step=step, reason=reason, retry_s=RETRY_S)
        self._session.recorder.status(save_failed=reason)
