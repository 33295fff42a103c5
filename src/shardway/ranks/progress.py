"""What this rank does now, how long it has spent on what, and when its process began.

Invariants:
- From the first `enter` on every second belongs to exactly one activity, so that the times add up to the time that
  passed.
- Clocks of two hosts are never compared; an age that cannot be known on this host is 0.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from shardway.ranks.standby_gate import find_released
from shardway.rundir.attempts import Attempt, AttemptStart


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


# --- When this process began, or the job that it is a part of

_STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Place of `starttime` in /proc/self/stat behind the name of the program (its field 22; proc(5))."""


def find_began(attempt: Attempt | None, environ: Mapping[str, str]) -> float:
    """When the attempt began, in seconds of `time.monotonic()`.

    That is when its job began where that is known and this is the host that said so, else when this process did (a
    spare: when it was released).
    """
    released = find_released(environ)
    age_s = process_age_s() if released is None else max(0.0, time.monotonic() - released)
    started = attempt.read_started() if attempt is not None else None
    if started is not None:
        age_s = max(age_s, job_age_s(started))
    return time.monotonic() - age_s


def process_age_s() -> float:
    """Seconds since this process began, Python's start and all imports in them; 0 on a system that does not tell."""
    try:
        fields = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def job_age_s(started: AttemptStart) -> float:
    """Seconds since a job began, by this host's clock; 0 for a job of another host, or where the clock was set."""
    if started.host != socket.gethostname() or not started.started:
        return 0.0
    age_s = time.time() - started.started
    return age_s if 0 <= age_s <= _uptime_s() else 0.0


def _uptime_s() -> float:
    """Seconds since this machine was started: no job of it is older."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return float("inf")
