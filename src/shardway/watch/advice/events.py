"""A run's events folded for advice: its progress, its steps, and what interrupted them.

Invariants:
- Memory grows with saves, validations and attempts, never with steps: of many an even choice is kept, each with its own
  time. Some may also be left out where events are read, as in a first look at a long file.
- Folding one event takes a few microseconds, and no NumPy until the steps are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardway.errors import ShardwayError
from shardway.plain_arrays import find_arrays
from shardway.rundir.events import Event
from shardway.watch.facts import number, seconds, whole
from shardway.watch.progress import RunProgress

WARM_STEPS = 10  # steps that compile, warm up and allocate
MOST_STRETCHES = 8192  # of steps that are kept


@dataclass(frozen=True)
class StepEvidence:
    """The steps of the last start. `warm` and `last`: when the first steps, which compile and allocate, and the last
    one ended (Unix seconds). Arrays of usual stretches of one or more steps (none of the first ones, no save or
    validation inside): `count` of steps; `passed`, seconds from the end of the step before; `took`, of those, in
    steps."""

    warm: float
    last: float
    count: Any
    passed: Any
    took: Any

    @property
    def period_s(self) -> float | None:
        """Median seconds from step to step, usual ones."""
        np = find_arrays()

        return float(np.median(self.passed / self.count)) if len(self.count) else None

    @property
    def between_share(self) -> float | None:
        """The share of usual steps' time that passes between steps: waiting for data, and a script's own work."""
        total = float(self.passed.sum())
        if self.count.sum() < WARM_STEPS or total <= 0:
            return None
        return max(0.0, 1.0 - float(self.took.sum()) / total)


Break = tuple[float, float]
"""A save or a validation: its begin and end (Unix seconds)."""


class FoldedEvents:
    """What advice needs of a run's events, given in the order written. Some steps may be left out, as in a first look
    at a long file: a step stands for those between it and the one before it."""

    def __init__(self, progress: RunProgress | None = None) -> None:
        self.progress = progress or RunProgress()
        self.breaks: list[Break] = []
        self._begin()

    def _begin(self) -> None:
        """Forget the steps: a start begins, or the run goes back."""
        self._first: list[tuple[int, float]] = []  # steps of this start until then, and when they ended
        self._rows: list[tuple[float, float, int, float]] = []  # end of a stretch, seconds, steps, seconds in steps
        self._stride, self._seen, self._steps = 1, 0, 0
        self._last: tuple[int, float] | None = None

    def update(self, event: Event) -> None:
        """Add one event."""
        self.progress.update(event)
        name = event["event"]
        if name in ("started", "rolled_back"):
            self._begin()
            return
        at, spent_s = seconds(event, "time"), number(event, "seconds")
        if at is None:
            return
        if name == "step":
            if spent_s is not None:
                self._add_step(whole(event, "step"), at, spent_s)
        elif name in ("saved", "validation", "validation_stopped"):
            self.breaks.append((at - (spent_s or 0.0), at))

    def _add_step(self, step: int | None, at: float, spent_s: float) -> None:
        last_step, last_at = self._last or (None, at)
        count = step - last_step if step is not None and last_step is not None else 1
        self._last = (step if step is not None else (last_step or 0) + 1, at)
        if count < 1 or at < last_at:
            return
        self._steps += count
        if len(self._first) < WARM_STEPS:
            self._first.append((self._steps, at))
        self._seen += 1
        if last_step is None or self._seen % self._stride:
            return
        self._rows.append((at, at - last_at, count, spent_s * count))
        if len(self._rows) == MOST_STRETCHES:
            self._rows, self._stride = self._rows[1::2], 2 * self._stride

    def list_steps(self) -> StepEvidence | None:
        """The steps of the last start; None before the first."""
        if self._last is None or not self._first:
            return None
        np = find_arrays()

        warm_steps = min(WARM_STEPS, max(1, self._steps // 4))
        warm = next((at for steps, at in self._first if steps >= warm_steps), self._first[-1][1])
        ended, passed, count, took = np.array(self._rows or [(0.0, 0.0, 1, 0.0)], np.float64).T
        usual = (ended > warm) & np.isfinite(took) & bool(self._rows)
        for begin, end in self.breaks:
            # Every step that it falls into, also where a save is written in the background.
            first, last = np.searchsorted(ended, begin), np.searchsorted(ended - passed, end)
            usual[first:last] = False
        return StepEvidence(warm, self._last[1], count[usual], passed[usual], took[usual])


def fold(events: Iterable[Event]) -> FoldedEvents:
    """Events folded, as far as they can be read."""
    folded = FoldedEvents()
    with contextlib.suppress(ShardwayError, OSError):
        for event in events:
            folded.update(event)
    return folded
