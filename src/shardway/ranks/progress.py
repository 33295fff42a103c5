"""What this rank does now, and how long it has spent on what.

Invariant: between the first call of `enter` and any later moment every second belongs to exactly one activity, so
that the times add up to the time that passed. Clocks of other hosts play no part. This module must not import torch
nor judge what takes too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol


class Activity(IntEnum):
    """What a rank can be busy with; the numbers are part of the progress page and stay as they are."""

    START = 0
    LOAD = 1
    DATA = 2
    STEP = 3
    REPEAT = 4
    VALIDATE = 5
    SAVE = 6
    END = 7


class Page(Protocol):
    """Somewhere that others see what this rank does."""

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Show the activity, the steps that are done, and since when (monotonic seconds)."""
        ...


class Progress:
    """The activities of one rank; `began` is when its first one did, on the given monotonic clock in seconds."""

    def __init__(
        self, page: Page | None = None, clock: Callable[[], float] = time.monotonic, began: float | None = None
    ) -> None:
        self._page = page
        self._clock = clock
        self._activity = Activity.START
        self._since = clock() if began is None else began
        self._spent = dict.fromkeys(Activity, 0.0)

    def enter(self, activity: Activity, step: int) -> None:
        """From now on the rank is busy with `activity`, with `step` steps done."""
        now = self._clock()
        self._spent[self._activity] += now - self._since
        self._activity, self._since = activity, now
        if self._page is not None:
            self._page.write(activity, step, now)

    def spent(self) -> dict[Activity, float]:
        """Seconds by activity up to now."""
        now = dict(self._spent)
        now[self._activity] += self._clock() - self._since
        return now
