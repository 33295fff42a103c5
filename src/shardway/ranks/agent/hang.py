"""Hang detection: which ranks hang, from their heartbeats, and how long each activity may take.

The hang timeout is three times the 99th percentile plus five seconds. Activities that wait for a file system get a
minute more: storage is slow for a while every day, and a restart would meet the same storage. Until an activity was
seen a few times, and for the first step of a start (compilers, caches, connections), the timeout is that of a start.

Invariants:
- Everything here is pure but for its own memory; no clock is read.
- A timeout never falls below its margin, and grows only with observations.
- A rank's age counts only while its observer was running, so that a suspended observer (Ctrl-Z, a closed lid, a machine
  that swaps) blames no rank. What counts is when a heartbeat changed, never a comparison of two clocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from shardway.ranks.agent.heartbeat import HeartbeatEntry
from shardway.ranks.progress import Activity
from shardway.runfile.schema import RunSection

# --- hang timeouts, learnt from observations

MARGIN_S = 5.0
FACTOR = 3.0
STORAGE_S = 60.0
"""Further time for activities that wait for a file system."""

ENOUGH = 3
"""Observations from which on an activity counts as known."""

_KEPT = 1000
_ON_STORAGE = frozenset((Activity.LOAD, Activity.DATA, Activity.SCRIPT, Activity.VALIDATE, Activity.SAVE))
_SAME = {Activity.REPEAT: Activity.STEP}


@dataclass(frozen=True)
class ActivitySpan:
    """The time of a rank in an activity; `is_first`: in the first step since the ranks started."""

    activity: Activity
    is_first: bool = False


class HangTimeout:
    """Limits for every activity in seconds. `fixed_s` overrides what was learnt; `start_s` holds until then."""

    def __init__(self, start_s: float, fixed_s: float | None = None) -> None:
        self._start_s = start_s
        self._fixed_s = fixed_s
        self._seen: dict[Activity, deque[float]] = {}

    def observe(self, span: ActivitySpan, seconds: float) -> None:
        """Record the duration of an activity."""
        if not span.is_first:
            self._seen.setdefault(_SAME.get(span.activity, span.activity), deque(maxlen=_KEPT)).append(seconds)

    def usual_s(self, activity: Activity) -> float | None:
        """The 99th percentile (nearest rank) of the observations; None while there are too few."""
        seen = self._seen.get(_SAME.get(activity, activity), ())
        if len(seen) < ENOUGH:
            return None
        return sorted(seen)[math.ceil(0.99 * len(seen)) - 1]

    def limit_s(self, span: ActivitySpan, *, stopped: bool) -> float:
        """How long this activity may take now; `stopped`: its process is, so slow storage is no excuse."""
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
        """What was learnt, for display: seconds by activity."""
        known = {activity: self.usual_s(activity) for activity in self._seen}
        return {activity.name.lower(): usual for activity, usual in known.items() if usual is not None}


def read_patience(settings: RunSection) -> HangTimeout | None:
    """The hang timeout of a run file; None where it turns the search for hangs off."""
    limit = settings.hang_timeout
    if limit == "off":
        return None
    return HangTimeout(settings.start_timeout, None if limit == "auto" else float(limit))


# --- finding the ranks that hang

WORDS = {
    Activity.START: "while starting",
    Activity.LOAD: "while loading a checkpoint",
    Activity.DATA: "while waiting for data",
    Activity.STEP: "in a step",
    Activity.REPEAT: "in a step",
    Activity.VALIDATE: "in a validation",
    Activity.SAVE: "in a save",
    Activity.END: "while ending",
    Activity.SCRIPT: "in its script",
}

_ORDER = {
    Activity.DATA: 1,
    Activity.SCRIPT: 2,
    Activity.STEP: 3,
    Activity.REPEAT: 3,
    Activity.VALIDATE: 4,
    Activity.SAVE: 5,
    Activity.END: 6,
}
"""Order of activities at the same number of steps; only rank 0 can tell that a step is repeated. A script comes before
its step and once more after it: a rank in its script may keep others waiting in the step."""

_IN_STEP = frozenset((Activity.DATA, Activity.SCRIPT, Activity.STEP, Activity.REPEAT))

_CHANGES_OF_STEP = 3
"""Heartbeat changes in a step: waiting for data, having data, beginning the step."""

_FIRST_CHANGES = 8
"""Changes of a heartbeat up to the first step or the one after: start, load, and twice those of a step."""


class Stopped(StrEnum):
    """Whose process is stopped (state T of proc(5)): none (false), the rank's, or that of a data loader."""

    NOBODY = ""
    RANK = "rank"
    LOADER = "loader"

    @property
    def why(self) -> str:
        """The cause, to follow the description of what a rank did."""
        words = {self.RANK: ", stopped by a signal", self.LOADER: ", its loader process stopped by a signal"}
        return words.get(self, "")


@dataclass(frozen=True)
class Sighting:
    """A rank at one moment: its heartbeat, and whether one of its processes is stopped."""

    entry: HeartbeatEntry
    stopped: Stopped = Stopped.NOBODY


Place = tuple[int, int]
"""The progress of a rank: steps done, and the position of its activity within a step."""


@dataclass(frozen=True)
class Behind:
    """The progress of the hindmost of some ranks (None: unknown), and whether any of them is stopped."""

    place: Place | None = None
    stopped: bool = False


NOBODY = Behind()


@dataclass(frozen=True)
class Hang:
    """Ranks that hang: those at fault, for how long, and what they were doing."""

    ranks: tuple[int, ...]
    seconds: float
    limit_s: float
    sighting: Sighting
    all_alike: bool

    @property
    def message(self) -> str:
        """What happened, in a sentence without process ids."""
        entry = self.sighting.entry
        words = WORDS.get(entry.activity, "")
        what = f"did nothing for {self.seconds:.1f} s {words} after step {entry.step}"
        why = self.sighting.stopped.why
        if self.all_alike and len(self.ranks) > 1:
            return f"all ranks {what}{why} (more than {self.limit_s:.1f} s means a hang)"
        names = " and ".join(f"rank {rank}" for rank in self.ranks)
        return f"{names} {what}{why} (more than {self.limit_s:.1f} s means a hang)"


@dataclass
class _Watched:
    """`age`: seconds since its heartbeat changed; `alone`: seconds since then without another rank keeping it waiting,
    None while one does."""

    entry: HeartbeatEntry
    age: float = 0.0
    alone: float | None = None

    def last(self, tick: float, *, alone: bool) -> _Watched:
        """The same after another `tick` seconds."""
        since = 0.0 if self.alone is None else self.alone + tick
        return replace(self, age=self.age + tick, alone=since if alone else None)

    @property
    def span(self) -> ActivitySpan:
        """The rank's activity, and whether it is in or before its first step."""
        return ActivitySpan(
            self.entry.activity, self.entry.activity in _IN_STEP and self.entry.changes <= _FIRST_CHANGES
        )


class HangFinder:
    """Looks at all ranks of a node together; `longest_tick_s` is the most that one look adds to an age."""

    def __init__(self, patience: HangTimeout, longest_tick_s: float) -> None:
        self._patience = patience
        self._longest_tick_s = longest_tick_s
        self._ranks: dict[int, _Watched] = {}
        self._looked_at: float | None = None

    def forgive(self) -> None:
        """Count from now on: the finding was acted on."""
        for watched in self._ranks.values():
            watched.age, watched.alone = 0.0, None

    def look(self, sightings: Mapping[int, Sighting], now: float, elsewhere: Behind = NOBODY) -> Hang | None:
        """The hang that these sightings show, by rank; `now` in monotonic seconds. Ranks that have ended are left out.

        These ranks may be waiting for ranks `elsewhere`, on other nodes.
        """
        tick = min(now - self._looked_at, self._longest_tick_s) if self._looked_at is not None else 0.0
        self._looked_at = now
        suspects = _find_suspects(sightings, elsewhere)
        self._ranks = {
            rank: self._follow(self._ranks.get(rank), sighting.entry, tick, alone=rank in suspects)
            for rank, sighting in sightings.items()
        }
        overdue = [rank for rank in suspects if self._is_overdue(rank, stopped=bool(sightings[rank].stopped))]
        return self._blame(sightings, overdue) if overdue else None

    def _follow(self, known: _Watched | None, entry: HeartbeatEntry, tick: float, *, alone: bool) -> _Watched:
        new = _Watched(entry, alone=0.0 if alone else None)
        if known is None:
            return new
        if known.entry.changes == entry.changes:
            return known.last(tick, alone=alone)
        # After one change the heartbeat has the exact duration; else it was shorter than a look, or was seen in part.
        exact = entry.changes == known.entry.changes + 1
        seconds = min(entry.since - known.entry.since, known.age + tick) if exact else known.age
        self._patience.observe(known.span, max(0.0, seconds))
        between = (entry.changes - known.entry.changes) // _CHANGES_OF_STEP - 1
        for _ in range(min(between, ENOUGH)):  # steps that began and ended between two looks
            self._patience.observe(ActivitySpan(Activity.DATA), tick)
            self._patience.observe(ActivitySpan(Activity.STEP), tick)
        return new

    def _is_overdue(self, rank: int, *, stopped: bool) -> bool:
        watched = self._ranks[rank]
        return watched.alone is not None and watched.alone > self._patience.limit_s(watched.span, stopped=stopped)

    def _blame(self, sightings: Mapping[int, Sighting], overdue: list[int]) -> Hang:
        blamed = [rank for rank in overdue if sightings[rank].stopped] or overdue
        first, watched = sightings[blamed[0]], self._ranks[blamed[0]]
        return Hang(
            ranks=tuple(blamed),
            seconds=watched.age,
            limit_s=self._patience.limit_s(watched.span, stopped=bool(first.stopped)),
            sighting=first,
            all_alike=len(blamed) == len(sightings),
        )


def find_behind(sightings: Mapping[int, Sighting]) -> Behind:
    """The progress of the hindmost of these ranks."""
    return Behind(
        min(map(find_place, sightings.values()), default=None), any(sighting.stopped for sighting in sightings.values())
    )


def merge_behind(parts: Iterable[Behind]) -> Behind:
    """The progress of the hindmost of all."""
    known = [part for part in parts if part.place is not None]
    places = [part.place for part in known if part.place is not None]
    return Behind(min(places, default=None), any(part.stopped for part in known))


def find_place(sighting: Sighting) -> Place:
    """The progress of a rank."""
    return sighting.entry.step, _ORDER.get(sighting.entry.activity, 0)


def _find_suspects(sightings: Mapping[int, Sighting], elsewhere: Behind) -> list[int]:
    """Ranks that no other rank keeps waiting: those behind all others, and those that are stopped."""
    hindmost = merge_behind((find_behind(sightings), elsewhere)).place
    return [
        rank
        for rank, each in sightings.items()
        if each.stopped or (find_place(each) == hindmost and not elsewhere.stopped)
    ]
