"""What this rank does now, and how long it has spent on what.

Invariant: between the first call of `enter` and any later moment every second belongs to exactly one activity, so
that the times add up to the time that passed. Clocks of other hosts play no part. This module must not import torch
nor judge what takes too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol


class Activity(IntEnum):
    """What a rank can be busy with; the numbers are part of the progress page and stay as they are.

    START lasts until a checkpoint is looked for. DATA lasts from the end of a step until the next batch is there, the
    record of the step in it. REPEAT is a step that an earlier attempt had done. SCRIPT is what a script that owns its
    loop does with a batch besides its step.
    """

    START = 0
    LOAD = 1
    DATA = 2
    STEP = 3
    REPEAT = 4
    VALIDATE = 5
    SAVE = 6
    END = 7
    SCRIPT = 8


class HeartbeatSink(Protocol):
    """Somewhere that others see what this rank does."""

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Show the activity, the steps that are done, and since when (monotonic seconds)."""
        ...


class Progress:
    """The activities of one rank; `began` is when its first one did, on the given monotonic clock in seconds.

    `reached` is the most steps that an earlier attempt has done: those before it are repeated.
    """

    def __init__(
        self, page: HeartbeatSink | None = None, clock: Callable[[], float] = time.monotonic, began: float | None = None
    ) -> None:
        self._page = page
        self._clock = clock
        self._activity = Activity.START
        self._since = clock() if began is None else began
        self._spent = dict.fromkeys(Activity, 0.0)
        self.reached = 0

    @property
    def activity(self) -> Activity:
        """What the rank is busy with."""
        return self._activity

    def enter(self, activity: Activity, step: int) -> None:
        """From now on the rank is busy with `activity`, with `step` steps done."""
        now = self._clock()
        self._spent[self._activity] += now - self._since
        self._activity, self._since = activity, now
        if self._page is not None:
            self._page.write(activity, step, now)

    def take_step(self, step: int) -> None:
        """From now on the rank takes the step after `step`: its first time, or again."""
        self.enter(Activity.REPEAT if step < self.reached else Activity.STEP, step)

    def spent(self) -> dict[Activity, float]:
        """Seconds by activity up to now."""
        return self._spent_until(self._clock())

    def as_facts(self) -> dict[str, Any]:
        """For a record: `spent`, seconds by activity in lower case, and `unfinished_s` of a step under way, in it."""
        now = self._clock()
        spent = {each.name.lower(): round(seconds, 6) for each, seconds in self._spent_until(now).items() if seconds}
        if self._activity not in (Activity.STEP, Activity.REPEAT):
            return {"spent": spent}
        return {"spent": spent, "unfinished_s": round(now - self._since, 6)}

    def _spent_until(self, now: float) -> dict[Activity, float]:
        return {**self._spent, self._activity: self._spent[self._activity] + now - self._since}
