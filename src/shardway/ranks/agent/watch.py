"""Watches the heartbeats of the ranks that this process has started, and ends them all if one hangs.

A rank that is only stopped is resumed first, and so is a process that loads data for it, so that the run loses nothing.

Invariant: signals go only to children of this process, whatever a heartbeat contains, and SIGCONT also to their
children. This module does not decide what comes after: it stores what it found in `found`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from shardway.ranks.agent.flight_records import NOTHING, Heard, merge_heard
from shardway.ranks.agent.hang import (
    NOBODY,
    Behind,
    Hang,
    HangFinder,
    HangTimeout,
    Sighting,
    Stopped,
    find_behind,
    find_place,
)
from shardway.ranks.agent.heartbeat import PAGES, HeartbeatEntry, page_path, private_folder, read_page
from shardway.ranks.agent.stacks import StackGroup, ask_for_records, ask_for_stacks, group_stacks, merge_groups
from shardway.ranks.progress import Activity

LOOK_EVERY_S = 0.25
SHARE_S = 2.0
"""How long hanging ranks are left alone if ranks on other nodes wait for them, so that those are asked as well before
they lose contact: their agents get the news within half a second."""

_STOPPED = "T"
_LOADERS_WAITED_FOR = frozenset((Activity.DATA, Activity.VALIDATE))


@dataclass(frozen=True)
class Seen:
    """Where the ranks that answered were, and their collectives."""

    groups: tuple[StackGroup, ...] = ()
    heard: Heard = NOTHING

    def shift(self, first: int) -> Seen:
        """The same with global rank numbers, `first` being that of this node's first rank."""
        groups = tuple(replace(group, ranks=_add(group.ranks, first)) for group in self.groups)
        return Seen(groups, self.heard.shift(first))


UNSEEN = Seen()


@dataclass(frozen=True)
class DetectedHang:
    """A hang, and what was seen of the ranks then."""

    hang: Hang
    seen: Seen = UNSEEN

    def shift(self, first: int) -> DetectedHang:
        """The same with global rank numbers, `first` being that of this node's first rank."""
        return DetectedHang(replace(self.hang, ranks=_add(self.hang.ranks, first)), self.seen.shift(first))


class HeartbeatWatch:
    """While entered, a thread reads the heartbeats of `ranks` local ranks; `on_wake` is called with those it resumed.

    `behind` is the progress of these ranks; `has_hang`: one of them hangs. The caller sets `elsewhere`, the progress of
    ranks on other nodes, and `is_asked` if one of those hangs: then `seen` of these ranks is needed.
    """

    def __init__(
        self, folder: Path, ranks: int, patience: HangTimeout, on_wake: Callable[[Hang], None], share_s: float = 0.0
    ) -> None:
        self.folder = folder
        self._share_s = share_s
        self._ranks = ranks
        self._on_wake = on_wake
        self._finder = HangFinder(patience, longest_tick_s=2 * LOOK_EVERY_S)
        self._woken: dict[int, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.found: DetectedHang | None = None
        self.seen: Seen | None = None
        self.has_hang = self.is_asked = False
        self.behind = self.elsewhere = NOBODY

    def __enter__(self) -> HeartbeatWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while self.found is None and not self._done.wait(LOOK_EVERY_S):
            sightings = self._see()
            self.behind = find_behind(sightings)
            if self.is_asked and self.seen is None:
                self.seen = self._ask(sightings)
            hang = self._finder.look(sightings, time.monotonic(), self.elsewhere)
            if hang is not None and not self._wake(hang, sightings):
                self._end(hang, sightings)

    def _see(self) -> dict[int, Sighting]:
        """The ranks that have a heartbeat and live, by local rank."""
        entries = {rank: read_page(page_path(self.folder, rank)) for rank in range(self._ranks)}
        states = {rank: _child_state(entry.pid) for rank, entry in entries.items() if entry is not None}
        return {
            rank: Sighting(entry, _find_stopped(entry, states[rank]))
            for rank, entry in entries.items()
            if entry is not None and states[rank] not in ("", "Z")
        }

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

    def _end(self, hang: Hang, sightings: dict[int, Sighting]) -> None:
        self.has_hang = True
        if self.seen is None:
            self.seen = self._ask(sightings)
        self._done.wait(self._share_s)
        self.found = DetectedHang(hang, self.seen)
        for sighting in sightings.values():
            _send(sighting.entry.pid, signal.SIGKILL)

    def _ask(self, sightings: dict[int, Sighting]) -> Seen:
        awake = {
            rank: sighting.entry.pid for rank, sighting in sightings.items() if sighting.stopped is not Stopped.RANK
        }
        stacks = ask_for_stacks(self.folder, awake)
        return Seen(tuple(group_stacks(stacks)), ask_for_records(self.folder, sightings))


@dataclass
class Unwatched:
    """Stands in for a watch if hangs are not looked for."""

    folder: None = None
    found: None = None
    seen: None = None
    has_hang: bool = False
    is_asked: bool = False
    behind: Behind = NOBODY
    elsewhere: Behind = NOBODY


@contextlib.contextmanager
def watched(
    ranks: int, patience: HangTimeout | None, on_wake: Callable[[Hang], None], share_s: float = 0.0
) -> Iterator[HeartbeatWatch | Unwatched]:
    """Watch the ranks that are started meanwhile with the watch's folder; without `patience` they are not watched."""
    if patience is None:
        yield Unwatched()
        return
    with private_folder(PAGES) as folder, HeartbeatWatch(folder, ranks, patience, on_wake, share_s) as watch:
        yield watch


def _find_stopped(entry: HeartbeatEntry, state: str) -> Stopped:
    if state == _STOPPED:
        return Stopped.RANK
    # A rank may have hundreds of threads, each with children: they are looked at only if it waits for long.
    waits = entry.activity in _LOADERS_WAITED_FOR and time.monotonic() - entry.since > 2 * LOOK_EVERY_S
    return Stopped.LOADER if waits and state and _list_stopped_children(entry.pid) else Stopped.NOBODY


def _list_stopped_children(pid: int) -> list[int]:
    """Stopped children of any thread of a process; none where the kernel does not list children."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a process that has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [child for child in found if _child_state(child, pid) == _STOPPED]


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


def _add(ranks: tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(rank + first for rank in ranks)


def merge_seen(parts: Sequence[Seen]) -> Seen:
    """What was seen on several nodes."""
    groups = merge_groups(group for part in parts for group in part.groups)
    return Seen(tuple(groups), merge_heard(part.heard for part in parts))


def merge_found(hangs: Sequence[Hang], seen: Seen, ranks: int) -> DetectedHang | None:
    """The findings of several nodes as one hang of `ranks` ranks, with global rank numbers; None for none.

    Stopped ranks are at fault, else those behind all others.
    """
    if not hangs:
        return None
    order = sorted(hangs, key=lambda hang: (not hang.sighting.stopped, find_place(hang.sighting)))
    first = order[0]
    alike = [
        hang
        for hang in order
        if hang.sighting.stopped == first.sighting.stopped and find_place(hang.sighting) == find_place(first.sighting)
    ]
    blamed = tuple(sorted(rank for hang in alike for rank in hang.ranks))
    return DetectedHang(replace(first, ranks=blamed, all_alike=len(blamed) == ranks), seen)
