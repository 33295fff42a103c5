"""Records a run: events of every rank that has something to report, status by rank 0, the time of earlier attempts.

Invariants:
- Earlier attempts: the cost does not grow with the length of the run, since only the end of the event file and
  status.json are read. What is damaged or missing counts as nothing left.
- Recording never changes the run. What the file system refuses during the run is kept and written later; at the start
  and at the end of an attempt it becomes one JobError with what to do. A run that no longer holds its directory writes
  nothing (Fenced). Rank 0 writes one event per step; every event file states where an attempt began.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardway.errors import Fenced, JobError, LostContact, render_reason
from shardway.ranks.failure import AttemptEnd, report_end
from shardway.ranks.heartbeat import Progress
from shardway.ranks.start import Ranks
from shardway.rundir.attempts import Attempt, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event, EventWriter
from shardway.rundir.file_io import refusals, refused
from shardway.watch.trackers.base import TrackerThread

# --- what earlier attempts left

_KEPT = ("pid", "host", "step", "spent", "time")


@dataclass(frozen=True)
class Earlier:
    """`reached`: the most steps that an attempt has done. `last`: the last status, as far as it holds times."""

    reached: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)

    def as_facts(self) -> dict[str, Any]:
        """Facts for the event that starts the next attempt, since its first status replaces the last one."""
        return ({"reached": self.reached} if self.reached else {}) | ({"before": dict(self.last)} if self.last else {})


def read_earlier(run: RunDir) -> Earlier:
    """The state before the next attempt has written anything."""
    status = run.read_status()
    last = {key: status[key] for key in _KEPT if key in status} if "spent" in status else {}
    return Earlier(max(_steps_of(run, status)), last)


def _steps_of(run: RunDir, status: Mapping[str, Any]) -> Iterator[int]:
    yield 0
    yield from (value for key in ("step", "reached") if isinstance(value := status.get(key), int))
    for event in run.last_events():
        key = {"step": "step", "started": "reached"}.get(event["event"], "")
        if isinstance(value := event.get(key), int):
            yield value


def find_early_end(directory: RunDir, step: int) -> str:
    """Why the script has finished the run at this step, if its checkpoint was saved before; else empty."""
    status = directory.read_status()
    here = status.get("state") == "finished" and status.get("step") == step
    return str(status.get("finished_early", "")) if here else ""


# --- the recorder

STATUS_EVERY_S = 1.0
"""Least seconds between two statuses: enough for users and schedulers that read them."""

MOST_WAITING = 100_000
"""The most events that wait for a file system that refuses them: some tens of megabytes, hours of most runs."""

_WITH_TIMES = frozenset(("started", "saved", "rolled_back", "stopped", "finished"))
"""Events that state how rank 0 has spent its time until then: enough to describe a killed attempt."""


class Recorder:
    """Events and status of one rank, and the result of the attempt that it is a part of."""

    def __init__(
        self,
        directory: RunDir,
        ranks: Ranks,
        *,
        every_rank: bool,
        attempt: Attempt | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._directory = directory
        self._attempt = attempt
        self._ranks = ranks
        self._progress = progress or Progress()
        self._every_rank = every_rank
        self._writer: EventWriter | None = None
        self._status: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "world": ranks.world}
        self._status_at = 0.0
        self._trouble: OSError | None = None
        self.is_open = False
        """Whether the run has begun, so that events belong to it."""
        self.show: Callable[[Event], None] | None = None
        """Takes each event of this rank for display to the user; it never raises."""
        self.trackers: TrackerThread | None = None
        """On rank 0, what hands its events to the trackers of the run; it never raises."""

    def open(self, directory: RunDir) -> None:
        """Begin to record, in this directory."""
        self._directory, self.is_open = directory, True

    @property
    def step_done(self) -> int:
        """The last finished step on this rank; 0 before the first."""
        return int(self._status.get("step", 0))

    def begin(self, step: int, **facts: Any) -> None:
        """The start of an attempt at `step`: by rank 0 with all facts, and marked in the events of every other rank.

        Ranks of an earlier world that this one lacks are marked too: what they wrote after `step` is undone as well.
        """
        self.event("started", step=step, epoch=self._directory.epoch, **facts, **self._look_back())
        self._mark("started", step)

    def go_back(self, step: int, **facts: Any) -> None:
        """The run continues from an earlier `step` within this attempt: later steps are undone, as by a start."""
        self._progress.reached = max(self._progress.reached, self.step_done)
        self.event("rolled_back", step=step, **facts)
        self._mark("rolled_back", step)
        self.status(step=step, reached=self._progress.reached)

    def _mark(self, name: str, step: int) -> None:
        """A mark in the events of every rank but the first, including those of an earlier world."""
        known, world = self._directory.ranks_with_events(), self._ranks.world
        if self._ranks.is_first:
            for rank in (rank for rank in known if rank >= world):
                self._mark_absent(rank, name, step)
        elif self._every_rank or self._ranks.rank in known:
            self._write(name, {"step": step, "world": world})

    def _look_back(self) -> dict[str, Any]:
        """On rank 0: facts of earlier attempts for the start event; their steps count as repeated from now on."""
        if not self._ranks.is_first:
            return {}
        earlier = read_earlier(self._directory)
        self._progress.reached = earlier.reached
        self.keep(**({"reached": earlier.reached} if earlier.reached else {}))
        return earlier.as_facts()

    def _mark_absent(self, rank: int, name: str, step: int) -> None:
        with refusals(self._directory.path), self._directory.event_writer(rank) as writer:
            writer.write(name, step=step, world=self._ranks.world)

    def event(self, name: str, /, **facts: Any) -> None:
        """An event of the whole run: written by rank 0."""
        if self._ranks.is_first:
            self._write(name, {**facts, **(self._progress.as_facts() if name in _WITH_TIMES else {})})

    def step(self, facts: dict[str, Any], ids: list[int] | None) -> None:
        """A finished step: by rank 0, and with `ids` by every rank for its own samples."""
        if self._ranks.is_first or self._every_rank:
            self._write("step", facts if ids is None else {**facts, "ids": ids})

    def fault(self, **facts: Any) -> None:
        """What ended this rank, and after which step; the rank itself writes it."""
        self._directory.confirm_writer()
        times = self._progress.as_facts() if self._ranks.is_first else {}
        step = {"step": self.step_done} if "step" in self._status else {}
        self._write("fault", {"rank": self._ranks.rank, **step, **facts, **times})

    @contextlib.contextmanager
    def failure_noted(self, name: str, step: int) -> Iterator[None]:
        """Write an event of this rank if its work in this context ends in an error."""
        try:
            yield
        except (LostContact, Fenced):
            raise
        except Exception as error:
            with contextlib.suppress(JobError):
                self._write(name, {"step": step, "rank": self._ranks.rank, "reason": render_reason(str(error))})
            raise

    def setup_fault(self, **facts: Any) -> None:
        """What ended this rank before the run began: only for an agent of Shardway, which reports it."""
        if self._ranks.placement.launcher == "shardway":
            with refusals(self._directory.path):
                self._directory.write_setup_fault(self._ranks.rank, {"rank": self._ranks.rank, **facts})

    def status(self, *, now: bool = False, **facts: Any) -> None:
        """Update status.json on rank 0; at most once a second unless `now`, and then durably."""
        self._status.update(facts)
        if not self._ranks.is_first or (not now and time.monotonic() - self._status_at < STATUS_EVERY_S):
            return
        self._status_at = time.monotonic()
        try:
            self._directory.check_writer()
            facts = {**self._status, **self._progress.as_facts(), "time": time.time()}
            self._directory.write_status(durable=now, **facts)
        except OSError as error:
            if now:
                raise refused(self._directory.path, error) from error

    def keep(self, **facts: Any) -> None:
        """Facts that later statuses keep, although they are not passed again."""
        self._status.update(facts)

    def failed(self, reason: str) -> None:
        """State "failed", unless this attempt never began and an earlier one has left its own state."""
        began = "state" in self._status
        if began or (self._ranks.is_first and not self._directory.read_status()):
            self.status(now=True, state="failed", reason=reason)

    def end(self, event: str, end: AttemptEnd, exit_code: int = 0) -> None:
        """How the run ended here: its last event, its status, and the result of the attempt."""
        if self.is_open:
            self._write_end(event, end)
        if self._attempt is not None and self._ranks.is_first:
            with refusals(self._directory.path):
                result = Result(end.state, end.reason, self.step_done, exit_code, end.failure, by="rank 0")
                report_end(self._attempt, result)

    def _write_end(self, event: str, end: AttemptEnd) -> None:
        step = self.step_done
        failure = {"failure": end.failure} if end.failure else {}
        self.event(event, step=step, reason=end.reason, ending=end.state, **failure)
        if self._writer is not None:
            with refusals(self._directory.path):
                self._writer.flush()
        self.status(now=True, state=event, step=step, reason=end.reason)

    def close(self) -> None:
        """Close the event file, and wait for the trackers."""
        if self.trackers is not None:
            self.trackers.close()
            self.trackers = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        with refusals(self._directory.path):
            if self._writer is None:
                self._writer = self._directory.event_writer(self._ranks.rank)
        self._writer.keep(name, **facts)
        if self.show is not None:
            self.show({**facts, "event": name, "time": time.time()})
        if self.trackers is not None:
            self.trackers.take({**facts, "event": name, "time": time.time()})
            for failure in self.trackers.take_failures():
                self._write("tracker_failed", {"step": self.step_done, **failure})
        try:
            self._directory.check_writer()
            self._writer.flush()
        except OSError as error:
            if name == "started" or self._writer.waiting > MOST_WAITING:
                raise refused(self._directory.path, error) from error
            self._trouble = error
            return
        if self._trouble is not None:
            reason, self._trouble = self._trouble.strerror, None
            self._write("recorded_late", {"step": self.step_done, "reason": reason})
