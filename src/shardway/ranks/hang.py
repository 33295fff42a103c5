"""Hang detection: how long each activity may take, which ranks hang by their heartbeats, and what an agent does then.

The hang timeout is three times the 99th percentile plus five seconds. Activities that wait for a file system get a
minute more: storage is slow for a while every day, and a restart would meet the same storage. Until an activity was
seen a few times, and for the first step of a start (compilers, caches, connections), the timeout is that of a start.

`HeartbeatWatch` reads the heartbeats of the ranks that this process has started, and ends them all if one hangs. A rank
that is only stopped is resumed first, and so is a process that loads data for it, so that the run loses nothing.

Invariants:
- A timeout never falls below its margin, and grows only with observations.
- A rank's age counts only while its observer was running, so that a suspended observer (Ctrl-Z, a closed lid, a machine
  that swaps) finds no rank guilty. What counts is when a heartbeat changed, never a comparison of two clocks.
- `HangTimeout` and `HangFinder` read no clock and touch no process.
- Signals go only to children of this process, whatever a heartbeat contains, and SIGCONT also to their children.
- No torch. What follows a hang is not decided here: the watch stores what it found in `found`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from shardway.ranks.evidence import HangEvidence, ask_for_records, ask_for_stacks, group_stacks
from shardway.ranks.heartbeat import (
    HEARTBEATS,
    HeartbeatEntry,
    heartbeat_path,
    private_folder,
    read_heartbeat,
)
from shardway.runfile.schema import RunSection
from shardway.telemetry.activity import Activity

# --- hang timeouts, learnt from observations

MARGIN_S = 5.0
FACTOR = 3.0
STORAGE_S = 60.0  # further time for activities that wait for a file system
ENOUGH = 3  # observations from which on an activity counts as known
_ON_STORAGE = frozenset((Activity.LOAD, Activity.DATA, Activity.SCRIPT, Activity.VALIDATE, Activity.SAVE))


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
        self._seen = {activity: deque[float](maxlen=1000) for activity in Activity}
        self._seen[Activity.REPEAT] = self._seen[Activity.STEP]

    def observe(self, span: ActivitySpan, seconds: float) -> None:
        if not span.is_first:
            self._seen[span.activity].append(seconds)

    def usual_s(self, activity: Activity) -> float | None:
        """The 99th percentile (nearest rank) of the observations; None while there are too few."""
        seen = sorted(self._seen[activity])
        return seen[math.ceil(0.99 * len(seen)) - 1] if len(seen) >= ENOUGH else None

    def limit_s(self, span: ActivitySpan, *, stopped: bool) -> float:
        """How long this activity may take now; `stopped`: its process is stopped, so slow storage is no excuse."""
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


def read_hang_timeout(settings: RunSection) -> HangTimeout | None:
    """The hang timeout of a run file; None where it turns the search for hangs off."""
    limit = settings.hang_timeout
    if limit == "off":
        return None
    return HangTimeout(settings.start_timeout, None if limit == "auto" else float(limit))


# --- finding the ranks that hang

_ACTIVITIES = {
    Activity.START: (0, "while starting"),
    Activity.LOAD: (0, "while loading a checkpoint"),
    Activity.DATA: (1, "while waiting for data"),
    Activity.SCRIPT: (2, "in its script"),
    Activity.STEP: (3, "in a step"),
    Activity.REPEAT: (3, "in a step"),
    Activity.VALIDATE: (4, "in a validation"),
    Activity.SAVE: (5, "in a save"),
    Activity.SAMPLE: (6, "while generating samples"),
    Activity.END: (7, "while ending"),
}
"""Order of activities at the same number of steps, and each in words. Only rank 0 can tell that a step is repeated. A
script comes before its step and once more after it: a rank in its script may keep others waiting in the step."""

ACTIVITY_PHRASES = {activity: words for activity, (_, words) in _ACTIVITIES.items()}

_IN_STEP = frozenset((Activity.DATA, Activity.SCRIPT, Activity.STEP, Activity.REPEAT))


class StoppedProcess(StrEnum):
    """Which process is stopped (state T of proc(5)): none (false), that of the rank, or that of a data loader."""

    NONE = ""
    RANK = "rank"
    LOADER = "loader"


StepPosition = tuple[int, int]  # the progress of a rank: steps done, and the position of its activity within a step


@dataclass(frozen=True)
class Sighting:
    """A rank at one moment: its heartbeat, and whether one of its processes is stopped."""

    entry: HeartbeatEntry
    stopped: StoppedProcess = StoppedProcess.NONE

    @property
    def position(self) -> StepPosition:
        return self.entry.step, _ACTIVITIES[self.entry.activity][0]


@dataclass(frozen=True)
class SlowestRank:
    """The progress of the slowest of some ranks (None: unknown), and whether any of them is stopped."""

    position: StepPosition | None = None
    stopped: bool = False


NO_RANKS = SlowestRank()


@dataclass(frozen=True)
class Hang:
    """The ranks at fault, for how long they hang, and what they were doing."""

    ranks: tuple[int, ...]
    seconds: float
    limit_s: float
    sighting: Sighting
    all_alike: bool

    def shift(self, first: int) -> Hang:
        """The same with global rank numbers, `first` being that of this node's first rank."""
        return replace(self, ranks=tuple(rank + first for rank in self.ranks))

    @property
    def message(self) -> str:
        """What happened, in a sentence without process ids."""
        entry, why = self.sighting.entry, ""
        if self.sighting.stopped:
            of_loader = self.sighting.stopped is StoppedProcess.LOADER
            why = ", its loader process stopped by a signal" if of_loader else ", stopped by a signal"
        is_all = self.all_alike and len(self.ranks) > 1
        names = "all ranks" if is_all else " and ".join(f"rank {rank}" for rank in self.ranks)
        what = f"did nothing for {self.seconds:.1f} s {ACTIVITY_PHRASES[entry.activity]} after step {entry.step}"
        return f"{names} {what}{why} (more than {self.limit_s:.1f} s means a hang)"


@dataclass
class _Watched:
    """`age`: seconds since its heartbeat changed; `alone`: seconds since then without another rank keeping it waiting,
    None while one does."""

    entry: HeartbeatEntry
    age: float = 0.0
    alone: float | None = None

    @property
    def span(self) -> ActivitySpan:
        # Eight changes up to the first step or the one after: start, load, and twice those of a step.
        return ActivitySpan(self.entry.activity, self.entry.activity in _IN_STEP and self.entry.changes <= 8)


class HangFinder:
    """Looks at all ranks of a node together; `longest_tick_s` is the most that one look adds to an age."""

    def __init__(self, hang_timeout: HangTimeout, longest_tick_s: float) -> None:
        self._hang_timeout = hang_timeout
        self._longest_tick_s = longest_tick_s
        self._ranks: dict[int, _Watched] = {}
        self._looked_at: float | None = None

    def forgive(self) -> None:
        """Restart all ages: the finding was acted on."""
        for watched in self._ranks.values():
            watched.age, watched.alone = 0.0, None

    def look(self, sightings: Mapping[int, Sighting], now: float, elsewhere: SlowestRank = NO_RANKS) -> Hang | None:
        """The hang that these sightings show, by rank; `now` in monotonic seconds. Ranks that have ended are left out.
        These ranks may be waiting for ranks `elsewhere`, on other nodes."""
        tick = min(now - self._looked_at, self._longest_tick_s) if self._looked_at is not None else 0.0
        self._looked_at = now
        # Suspects wait for no other rank: those behind all others, and those that are stopped.
        slowest = merge_slowest((find_slowest(sightings), elsewhere)).position
        last = None if elsewhere.stopped else slowest
        suspects = [rank for rank, each in sightings.items() if each.stopped or each.position == last]
        self._ranks = {
            rank: self._update(self._ranks.get(rank), sighting.entry, tick, alone=rank in suspects)
            for rank, sighting in sightings.items()
        }
        limits = {
            rank: self._hang_timeout.limit_s(self._ranks[rank].span, stopped=bool(sightings[rank].stopped))
            for rank in suspects
        }
        overdue = [rank for rank in suspects if (self._ranks[rank].alone or 0.0) > limits[rank]]
        if not overdue:
            return None
        at_fault = [rank for rank in overdue if sightings[rank].stopped] or overdue
        first = at_fault[0]
        all_alike = len(at_fault) == len(sightings)
        return Hang(tuple(at_fault), self._ranks[first].age, limits[first], sightings[first], all_alike)

    def _update(self, known: _Watched | None, entry: HeartbeatEntry, tick: float, *, alone: bool) -> _Watched:
        new = _Watched(entry, alone=0.0 if alone else None)
        if known is None:
            return new
        if known.entry.changes == entry.changes:
            since = 0.0 if known.alone is None else known.alone + tick
            return replace(known, age=known.age + tick, alone=since if alone else None)
        # After one change the heartbeat has the exact duration; else it was shorter than a look, or was seen in part.
        exact = entry.changes == known.entry.changes + 1
        seconds = min(entry.since - known.entry.since, known.age + tick) if exact else known.age
        self._hang_timeout.observe(known.span, max(0.0, seconds))
        # Steps that began and ended between two looks; each has three changes: waiting for data, having it, the step.
        for _ in range(min((entry.changes - known.entry.changes) // 3 - 1, ENOUGH)):
            self._hang_timeout.observe(ActivitySpan(Activity.DATA), tick)
            self._hang_timeout.observe(ActivitySpan(Activity.STEP), tick)
        return new


def find_slowest(sightings: Mapping[int, Sighting]) -> SlowestRank:
    """The progress of the slowest of these ranks."""
    return merge_slowest(SlowestRank(each.position, bool(each.stopped)) for each in sightings.values())


def merge_slowest(parts: Iterable[SlowestRank]) -> SlowestRank:
    """The progress of the slowest of all."""
    known = [(part.position, part.stopped) for part in parts if part.position is not None]
    return SlowestRank(min((position for position, _ in known), default=None), any(stopped for _, stopped in known))


# --- the watch over the ranks of this process

LOOK_EVERY_S = 0.25
SHARE_S = 2.0
"""How long hanging ranks are left alone if ranks on other nodes wait for them, so that those are asked as well before
they lose contact: their agents get the news within half a second."""


class HeartbeatWatch:
    """While entered, a thread reads the heartbeats of `ranks` local ranks; `on_wake` is called with those it resumed.
    `slowest` is the progress of these ranks; `has_hang`: one of them hangs, which is `found` once `seen`, the evidence,
    was gathered. The caller sets `elsewhere`, the progress of ranks on other nodes, and `is_asked` if one of those
    hangs: then `seen` of these ranks is needed."""

    def __init__(
        self,
        folder: Path | None,
        ranks: int,
        hang_timeout: HangTimeout,
        on_wake: Callable[[Hang], None],
        share_s: float = 0.0,
    ) -> None:
        self.folder = folder
        self._share_s = share_s
        self._ranks = ranks
        self._on_wake = on_wake
        self._finder = HangFinder(hang_timeout, longest_tick_s=2 * LOOK_EVERY_S)
        self._woken: dict[int, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(folder,), name="watch", daemon=True)
        self.found: Hang | None = None
        self.seen: HangEvidence | None = None
        self.has_hang = self.is_asked = False
        self.slowest = self.elsewhere = NO_RANKS

    def __enter__(self) -> HeartbeatWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self, folder: Path) -> None:
        while self.found is None and not self._done.wait(LOOK_EVERY_S):
            entries = [(rank, read_heartbeat(heartbeat_path(folder, rank))) for rank in range(self._ranks)]
            sightings = {  # ranks that have a heartbeat and live, by local rank
                rank: Sighting(entry, _find_stopped(entry, state))
                for rank, entry in entries
                if entry is not None and (state := _child_state(entry.pid)) not in ("", "Z")
            }
            self.slowest = find_slowest(sightings)
            if self.is_asked and self.seen is None:
                self.seen = self._ask(folder, sightings)
            hang = self._finder.look(sightings, time.monotonic(), self.elsewhere)
            if hang is None or self._wake(hang, sightings):
                continue
            self.has_hang = True
            self.seen = self.seen or self._ask(folder, sightings)
            self._done.wait(self._share_s)
            self.found = hang
            for sighting in sightings.values():
                _send(sighting.entry.pid, signal.SIGKILL)

    def _wake(self, hang: Hang, sightings: dict[int, Sighting]) -> bool:
        """Resume stopped ranks, unless that was tried without effect; returns whether it was tried."""
        stopped = [sightings[rank].entry for rank in hang.ranks if sightings[rank].stopped]
        if not stopped or any(self._woken.get(entry.pid) == entry.changes for entry in stopped):
            return False
        for entry in stopped:
            self._woken[entry.pid] = entry.changes
            for loader in _list_stopped_children(entry.pid):
                _send(loader, signal.SIGCONT, of=entry.pid)
            _send(entry.pid, signal.SIGCONT)
        self._finder.forgive()
        self._on_wake(hang)
        return True

    def _ask(self, folder: Path, sightings: Mapping[int, Sighting]) -> HangEvidence:
        pids = {rank: each.entry.pid for rank, each in sightings.items() if each.stopped is not StoppedProcess.RANK}
        groups = tuple(group_stacks(ask_for_stacks(folder, pids)))
        return replace(ask_for_records(folder, sightings), groups=groups)


@contextlib.contextmanager
def watched(
    ranks: int, hang_timeout: HangTimeout | None, on_wake: Callable[[Hang], None], share_s: float = 0.0
) -> Iterator[HeartbeatWatch]:
    """Watch the ranks that are started meanwhile with the watch's folder; without a timeout there is no folder, and the
    watch sees nothing."""
    if hang_timeout is None:
        yield HeartbeatWatch(None, 0, HangTimeout(0.0), on_wake)
        return
    with private_folder(HEARTBEATS) as folder, HeartbeatWatch(folder, ranks, hang_timeout, on_wake, share_s) as watch:
        yield watch


def _find_stopped(entry: HeartbeatEntry, state: str) -> StoppedProcess:
    if state == "T":
        return StoppedProcess.RANK
    # A rank may have hundreds of threads, each with children: they are looked at only if it waits for long.
    waits = entry.activity in (Activity.DATA, Activity.VALIDATE) and time.monotonic() - entry.since > 2 * LOOK_EVERY_S
    return StoppedProcess.LOADER if waits and _list_stopped_children(entry.pid) else StoppedProcess.NONE


def _list_stopped_children(pid: int) -> list[int]:
    """Stopped children of any thread of a process; none where the kernel does not list children."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a process that has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [child for child in found if _child_state(child, pid) == "T"]


def _send(pid: int, number: signal.Signals, of: int | None = None) -> None:
    """Send a signal to a child of this process, or of the process `of`; does nothing if it is gone."""
    if _child_state(pid, of):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _child_state(pid: int, of: int | None = None) -> str:
    """The state of a child of this process, or of the process `of`, as a letter (proc(5)); empty if it is not such a
    child."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, parent = text.rpartition(")")[2].split()[:2]
    return state if int(parent) == (os.getpid() if of is None else of) else ""


def merge_hangs(hangs: Sequence[Hang], ranks: int) -> Hang | None:
    """The hangs of several nodes as one of `ranks` ranks, with global rank numbers; None for none. Stopped ranks are at
    fault, else those behind all others."""
    if not hangs:
        return None
    first = min(hangs, key=lambda hang: (not hang.sighting.stopped, hang.sighting.position))
    same = (first.sighting.stopped, first.sighting.position)
    alike = [hang for hang in hangs if (hang.sighting.stopped, hang.sighting.position) == same]
    at_fault = tuple(sorted(rank for hang in alike for rank in hang.ranks))
    return replace(first, ranks=at_fault, all_alike=len(at_fault) == ranks)
