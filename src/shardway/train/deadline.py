"""When a run has to stop before its wall-time ends.

Invariants:
- Only rank 0 reads the clock, and its request reaches the others; a rank that waits for data reads its own, since rank
  0 may wait for it. The margin is never less than the measured steps and saves of this attempt need.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from shardway.rundir.attempts import Attempt
from shardway.units import MAX_SECONDS

# --- the deadline and its margin

TEARDOWN_S = 30.0
"""Seconds reserved for the end of the ranks and of the job script after the last save."""
TEARDOWN_LEAST_S, TEARDOWN_PART = 2.0, 0.1
"""For a short wall-time, the reserve is no more than these seconds plus this part of it."""
LAST_SAVES = 3
"""The slowest of this many last saves counts, since a file system has good and bad minutes."""
SAVES, STEPS = 2.0, 2.0
"""Factors: a save on its cadence may come right before the last one, and one more step may follow the current one."""

ESTIMATED_RATE = 200e6
"""Bytes per second that one rank writes, syncs and reads back, until a save was measured (a slow shared disk)."""
ESTIMATED_BYTES = 12
"""Bytes of state per parameter until then: fp32 weights and two moments."""
ESTIMATED_LEAST_S = 1.0


@dataclass(frozen=True)
class Pace:
    """Seconds that were measured before this attempt; None if not measured."""

    save_s: float | None = None
    validation_s: float | None = None

    def as_facts(self) -> dict[str, float]:
        """The measured values, as a status holds them."""
        facts = {"save_seconds": self.save_s, "validation_seconds": self.validation_s}
        return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True)
class Margin:
    """How many seconds before the deadline the run stops, and why so many."""

    seconds: float
    reason: str


class Deadline:
    """The end of the wall-time as rank 0 sees it, and what has been measured so far."""

    def __init__(
        self,
        at: float,
        wall_s: float,
        fixed_margin_s: float | None = None,
        before: Pace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`at` is in Unix seconds, `wall_s` the whole wall-time; a fixed margin is `run.stop_margin`."""
        self._at, self._clock, self._fixed = at, clock, fixed_margin_s
        self._teardown_s = min(TEARDOWN_S, TEARDOWN_LEAST_S + TEARDOWN_PART * wall_s)
        self._before = before or Pace()
        self._saves: deque[float] = deque(maxlen=LAST_SAVES)
        self._first_step_s: float | None = None
        self._step_s: float | None = None
        self._validation_s = self._before.validation_s
        self._estimated_save_s = ESTIMATED_LEAST_S
        self._passed = ""

    @property
    def left_s(self) -> float:
        """Seconds until the wall-time ends."""
        return self._at - self._clock()

    def expect_save_of(self, parameters: float) -> None:
        """Estimate the time of a save until one was measured, from the parameters that a rank answers for."""
        self._estimated_save_s = ESTIMATED_LEAST_S + parameters * ESTIMATED_BYTES / ESTIMATED_RATE

    def took_step(self, seconds: float) -> None:
        """A step was measured. The first of an attempt compiles and fills caches: it counts only until there is
        another."""
        if self._first_step_s is None:
            self._first_step_s = seconds
        else:
            self._step_s = max(self._step_s or 0.0, seconds)

    def took_save(self, seconds: float) -> None:
        """A save was measured."""
        self._saves.append(seconds)

    def took_validation(self, seconds: float) -> None:
        """A validation was measured."""
        self._validation_s = max(self._validation_s or 0.0, seconds)

    def margin(self) -> Margin:
        """The wall-time that must be left for the run to begin another step."""
        if self._fixed is not None:
            return Margin(self._fixed, "run.stop_margin says so")
        save, why = self._save()
        step = self._longest_step()
        parts = [f"{SAVES:g} x {save:.1f} s ({why})", f"{STEPS:g} x {step:.1f} s for the longest step"]
        if self._validation_s:
            parts.append(f"{self._validation_s:.1f} s for a validation")
        parts.append(f"{self._teardown_s:.1f} s to end")
        seconds = SAVES * save + STEPS * step + (self._validation_s or 0.0) + self._teardown_s
        return Margin(seconds, " + ".join(parts))

    def is_near(self) -> bool:
        """Whether it is time to stop; it stays so, and `describe` gives the clock at that moment."""
        if not self._passed and self.left_s < self.margin().seconds:
            self._passed = self.describe()
        return bool(self._passed)

    def fits_validation(self) -> bool:
        """Whether a validation that begins now ends early enough for a save; True until one was measured."""
        if self._fixed is not None:
            return self.left_s - (self._validation_s or 0.0) > self._fixed
        return self.left_s - (self._validation_s or 0.0) > self._save()[0] + self._teardown_s

    def has_passed(self) -> bool:
        """Whether no more time is left than a save and the end take."""
        return self.left_s < (self._fixed if self._fixed is not None else self._save()[0] + self._teardown_s)

    def seen_here(self, left_s: float) -> Deadline:
        """The same on a host whose clock may differ; `left_s` are left now."""
        self._at = self._clock() + left_s
        return self

    def describe(self) -> str:
        """ "deadline in 50.0 s, margin 9.2 s: 2 x 0.6 s (the last save took 0.6 s) + ..."."""
        if self._passed:
            return self._passed
        margin = self.margin()
        return f"deadline in {self.left_s:.1f} s, margin {margin.seconds:.1f} s: {margin.reason}"

    def facts(self) -> dict[str, Any]:
        """The state of the clock, for an event."""
        return {"left_s": self.left_s, "margin_s": self.margin().seconds, "reason": self.describe()}

    def _save(self) -> tuple[float, str]:
        if self._saves:
            return max(self._saves), f"the slowest of the last {len(self._saves)} saves"
        if self._before.save_s is not None:
            return self._before.save_s, f"the last save of an earlier attempt took {self._before.save_s:.1f} s"
        return self._estimated_save_s, "an estimate, since nothing was saved yet"

    def _longest_step(self) -> float:
        return self._step_s if self._step_s is not None else self._first_step_s or 0.0


def read_pace(status: Mapping[str, Any]) -> Pace:
    """The measurements of an earlier attempt, from its status."""
    times = (status.get(name) for name in ("save_seconds", "validation_seconds"))
    return Pace(*(float(value) if _is_time(value) else None for value in times))


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < MAX_SECONDS


def find_deadline(attempt: Attempt | None, fixed_margin_s: float | None, before: Pace) -> Deadline | None:
    """The deadline that the job of this attempt has written down; None if there is none."""
    started = attempt.read_started() if attempt is not None else None
    if started is None or started.deadline <= 0:
        return None
    begun = started.started or time.time()
    return Deadline(started.deadline, max(0.0, started.deadline - begun), fixed_margin_s, before)
