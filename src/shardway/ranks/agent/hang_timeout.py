"""How long an activity of a rank may take before the rank is thought to hang: learnt from how long it took before.

Three times the 99th percentile and five seconds. What waits for a file system gets a minute more: storage is slow for a
while every day, and a restart would meet the same storage. Until an activity was seen a few times, and for the first
step of a start (compilers, caches, connections), the patience is that of a start.

Invariant: pure, without a clock. The patience never falls below its margin, nor grows without an observation that
says so. This module must not look at ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from shardway.ranks.progress import Activity
from shardway.runfile.machine import RunSection

MARGIN_S = 5.0
FACTOR = 3.0
STORAGE_S = 60.0
"""Further patience with activities that wait for a file system."""

ENOUGH = 3
"""Observations from which on an activity counts as known."""

_KEPT = 1000
_ON_STORAGE = frozenset((Activity.LOAD, Activity.DATA, Activity.SCRIPT, Activity.VALIDATE, Activity.SAVE))
_SAME = {Activity.REPEAT: Activity.STEP}


@dataclass(frozen=True)
class ActivitySpan:
    """A time that a rank has spent in an activity; `is_first`: in the first step since the ranks started."""

    activity: Activity
    is_first: bool = False


class HangTimeout:
    """Limits for every activity in seconds. `fixed_s` stands in place of what was learnt; `start_s` until then."""

    def __init__(self, start_s: float, fixed_s: float | None = None) -> None:
        self._start_s = start_s
        self._fixed_s = fixed_s
        self._seen: dict[Activity, deque[float]] = {}

    def observe(self, span: ActivitySpan, seconds: float) -> None:
        """An activity took so long."""
        if not span.is_first:
            self._seen.setdefault(_SAME.get(span.activity, span.activity), deque(maxlen=_KEPT)).append(seconds)

    def usual_s(self, activity: Activity) -> float | None:
        """The 99th percentile (nearest rank) of what was observed; None while that is too little."""
        seen = self._seen.get(_SAME.get(activity, activity), ())
        if len(seen) < ENOUGH:
            return None
        return sorted(seen)[math.ceil(0.99 * len(seen)) - 1]

    def limit_s(self, span: ActivitySpan, *, stopped: bool) -> float:
        """How long this activity may take now; `stopped`: the process is, and no storage will wake it."""
        usual = None if span.is_first else self.usual_s(span.activity)
        if stopped:
            return FACTOR * (usual or 0.0) + MARGIN_S
        if span.activity in (Activity.START, Activity.LOAD, Activity.END):
            return self._start_s
        if self._fixed_s is not None:
            return self._fixed_s
        if usual is None:
            return self._start_s
        return FACTOR * usual + MARGIN_S + (STORAGE_S if span.activity in _ON_STORAGE else 0.0)

    def as_facts(self) -> Mapping[str, float]:
        """What was learnt, for people: seconds by activity."""
        known = {activity: self.usual_s(activity) for activity in self._seen}
        return {activity.name.lower(): usual for activity, usual in known.items() if usual is not None}


def read_patience(settings: RunSection) -> HangTimeout | None:
    """How long ranks may do nothing, as a run file says; None where nobody shall look for hangs."""
    limit = settings.hang_timeout
    if limit == "off":
        return None
    return HangTimeout(settings.start_timeout, None if limit == "auto" else float(limit))
