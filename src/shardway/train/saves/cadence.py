"""When a save is due by the clock, for one place that checkpoints are written to.

Invariant: a save that failed makes the next one due soon, whatever the interval. This module must not save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardway.plan.economy import daly_interval


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
        """Seconds from one save to the next, where the run stands still for `save_s` at each (None: not known yet)."""
        if save_s is None:
            return self.shortest_s
        least = max(self.shortest_s, save_s / self.most_share)
        return max(least, min(daly_interval(save_s, self.mtbf_s), self.longest_s))


class Cadence:
    """The clock of one place; `every_s` None where only numbers of steps ask for saves."""

    def __init__(self, every_s: float | LeastCost | None, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._tried_at = clock()
        self._stall_s: float | None = None
        self.has_failed = False

    @property
    def interval_s(self) -> float | None:
        """Seconds from one save to the next; None where the clock does not ask for any."""
        if isinstance(self._every_s, LeastCost):
            return self._every_s.interval_s(self._stall_s)
        return self._every_s

    @property
    def is_measured(self) -> bool:
        """Whether the interval follows from what saves take."""
        return isinstance(self._every_s, LeastCost)

    def is_due(self, retry_s: float) -> bool:
        """Whether it is time for a save: by the interval, or so many seconds after one that failed."""
        since = self._clock() - self._tried_at
        due = self.interval_s is not None and since >= self.interval_s
        return due or (self.has_failed and since >= retry_s)

    def try_now(self) -> None:
        """A save begins, or has failed now."""
        self._tried_at = self._clock()

    def fail(self) -> None:
        """A save has failed, now."""
        self.try_now()
        self.has_failed = True

    def succeed(self, stall_s: float) -> None:
        """A save is complete; the run stood still for it so many seconds."""
        self.has_failed, self._stall_s = False, stall_s
