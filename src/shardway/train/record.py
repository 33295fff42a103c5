"""Records a run: events of every rank that has something to report, status by rank 0, the time of earlier attempts, the
last report of a rank that ends at once.

Invariants:
- Earlier attempts: the cost does not grow with the length of the run, since only the end of the event file and
  status.json are read. What is damaged or missing counts as nothing left.
- Recording never changes the run. What the file system refuses during the run is kept and written later; at the start
  and at the end of an attempt it becomes one JobError with what to do. A run that no longer holds its directory writes
  nothing (Fenced). Rank 0 writes one event per step; every event file states where an attempt began.
- A step waits for no status: one thread writes those of a running attempt, the newest only; what a caller wants written
  `now` is written by the caller, and no older status follows it.
- A file system that hangs does not keep the process from its end: the last report has a few seconds, then the process
  ends without it. What was saved is not touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardway.errors import Fenced, JobError, LateStop, LostContact, UserError, render_reason
from shardway.ranks.failure import AttemptEnd, RankFault, report_end, report_fault
from shardway.ranks.hang import ACTIVITY_PHRASES
from shardway.ranks.heartbeat import Progress
from shardway.ranks.start import Ranks
from shardway.ranks.stop import SignalWatch, StopWatchdog, leave_now
from shardway.rundir.attempts import BY_SIGNAL, SECOND_SIGNAL, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event, EventWriter
from shardway.rundir.file_io import refusals, refused
from shardway.units import render_seconds
from shardway.watch.trackers.base import TrackerThread

# --- what earlier attempts left


def read_earlier(run: RunDir) -> dict[str, Any]:
    """Facts for the event that starts the next attempt, before it has written anything: the most steps that an attempt
    has `reached`, and of the last status what holds times (`before`), since the next one replaces it."""
    status = run.read_status()
    found = [status.get("step"), status.get("reached")]
    for event in run.last_events():
        key = {"step": "step", "started": "reached"}.get(event["event"], "")
        found.append(event.get(key))
    reached = max((value for value in found if isinstance(value, int)), default=0)
    kept = {key: status[key] for key in ("pid", "host", "step", "spent", "time") if key in status}
    return ({"reached": reached} if reached > 0 else {}) | ({"before": kept} if "spent" in status else {})


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


class StatusThread:
    """Writes the newest status that it was given, in a thread that begins with the first: a step does not wait for a
    file system, which takes milliseconds to replace a file. What it refuses is tried again with the next status."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write, self._newest, self._is_writing, self._ends = write, dict[str, Any](), False, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, facts: dict[str, Any]) -> None:
        """A status in place of one that waits; returns at once."""
        with self._changed:
            self._newest = facts
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shardway-status", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Drop a status that waits, and wait for one that is being written."""
        with self._changed:
            self._newest = {}
            self._changed.wait_for(lambda: not self._is_writing)

    def close(self) -> None:
        """As `settle`, and the thread ends."""
        self.settle()
        if self._thread is None:
            return
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        self._thread, self._ends = None, False

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._newest) or self._ends)
                if self._ends:
                    return
                facts, self._newest, self._is_writing = self._newest, {}, True
            try:
                with contextlib.suppress(OSError, JobError):  # where it may not write, the next event raises
                    self._write(facts)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()


class Recorder:
    """Events and status of one rank, and the result of the attempt that it is a part of.

    `is_open`: the run has begun, so that events belong to it. `show` takes each event of this rank for display to the
    user, and on rank 0 `trackers` hands them to the trackers of the run; neither ever raises.
    """

    def __init__(
        self,
        directory: RunDir,
        ranks: Ranks,
        *,
        every_rank: bool,
        attempt: Attempt | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._directory, self._ranks, self._attempt = directory, ranks, attempt
        self._progress = progress or Progress()
        self._every_rank = every_rank
        self._writer: EventWriter | None = None
        self._status: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "world": ranks.world}
        self._status_at = 0.0
        self._status_thread = StatusThread(lambda facts: self._write_status(facts, durable=False))
        self._trouble: OSError | None = None
        self.is_open = False
        self.show: Callable[[Event], None] | None = None
        self.trackers: TrackerThread | None = None
        self.ended: tuple[str, AttemptEnd] | None = None
        """State and reason of the end that was recorded."""

    def open(self, directory: RunDir) -> None:
        self._directory, self.is_open = directory, True

    @property
    def step_done(self) -> int:
        """The last finished step on this rank; 0 before the first."""
        return int(self._status.get("step", 0))

    def begin(self, step: int, **facts: Any) -> None:
        """The start of an attempt at `step`: by rank 0 with all facts, and marked in the events of every other rank.

        Ranks of an earlier world that this one lacks are marked too: what they wrote after `step` is undone as well.
        """
        earlier: dict[str, Any] = {}
        if self._ranks.is_first:  # steps of earlier attempts count as repeated from now on
            earlier = read_earlier(self._directory)
            self._progress.reached = earlier.get("reached", 0)
            if "reached" in earlier:
                self.keep(reached=earlier["reached"])
        self.event("started", step=step, epoch=self._directory.epoch, **facts, **earlier)
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
                with refusals(self._directory.path), self._directory.event_writer(rank) as writer:
                    writer.write(name, step=step, world=world)
        elif self._every_rank or self._ranks.rank in known:
            self._write(name, {"step": step, "world": world})

    def event(self, name: str, /, **facts: Any) -> None:
        """An event of the whole run: written by rank 0."""
        if self._ranks.is_first:
            self._write(name, {**facts, **(self._progress.as_facts() if name in _WITH_TIMES else {})})

    def own_event(self, name: str, /, **facts: Any) -> None:
        """An event of this rank alone, which the rank itself writes."""
        self._write(name, {"rank": self._ranks.rank, **facts})

    def step(self, facts: dict[str, Any], ids: list[int] | None) -> None:
        """A finished step: by rank 0, and with `ids` by every rank for its own samples."""
        if self._ranks.is_first or self._every_rank:
            self._write("step", facts if ids is None else {**facts, "ids": ids})

    def fault(self, **facts: Any) -> None:
        """What ended this rank, and after which step; the rank itself writes it. Before the run has begun only for an
        agent of Shardway, which reports it."""
        if not self.is_open:
            if self._ranks.placement.launcher == "shardway":
                with refusals(self._directory.path):
                    self._directory.write_setup_fault(self._ranks.rank, {"rank": self._ranks.rank, **facts})
            return
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

    def status(self, *, now: bool = False, **facts: Any) -> None:
        """Update status.json on rank 0: beside the training and at most once a second, or `now` and durably."""
        self._status.update(facts)
        if not self._ranks.is_first or (not now and time.monotonic() - self._status_at < STATUS_EVERY_S):
            return
        self._status_at = time.monotonic()
        facts = {**self._status, **self._progress.as_facts(), "time": time.time()}
        if not now:
            self._status_thread.take(facts)
            return
        self._status_thread.settle()
        try:
            self._write_status(facts, durable=True)
        except OSError as error:
            raise refused(self._directory.path, error) from error

    def _write_status(self, facts: dict[str, Any], *, durable: bool) -> None:
        self._directory.check_writer()
        self._directory.write_status(durable=durable, **facts)

    def keep(self, **facts: Any) -> None:
        """Facts that later statuses keep, although they are not passed again."""
        self._status.update(facts)

    def failed(self, reason: str) -> None:
        """State "failed", unless this attempt never began and an earlier one has left its own state."""
        if "state" in self._status or (self._ranks.is_first and not self._directory.read_status()):
            self.status(now=True, state="failed", reason=reason)
            self.ended = ("failed", AttemptEnd(Ending.CRASHED, reason))

    def end(self, event: str, end: AttemptEnd, exit_code: int = 0) -> None:
        """How the run ended here: its last event, its status, and the result of the attempt."""
        step = self.step_done
        if self.is_open:
            failure = {"failure": end.failure} if end.failure else {}
            self.event(event, step=step, reason=end.reason, ending=end.state, **failure)
            if self._writer is not None:
                with refusals(self._directory.path):
                    self._writer.flush()
            self.status(now=True, state=event, step=step, reason=end.reason)
            self.ended = (event, end)
        if self._attempt is not None and self._ranks.is_first:
            with refusals(self._directory.path):
                result = Result(end.state, end.reason, step, exit_code, end.failure, by="rank 0")
                report_end(self._attempt, result)

    def close(self) -> None:
        """Close the event file, and wait for the trackers and for a status that is being written."""
        self._status_thread.close()
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
        event = {**facts, "event": name, "time": time.time()}
        if self.show is not None:
            self.show(event)
        if self.trackers is not None:
            self.trackers.take(event)
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


# --- the last report of a rank, by another thread before the process ends at once, since its main thread cannot

REPORT_S = 3.0
"""The most seconds that the report may take."""

KILLED = 130
"""Exit code of a process that a second signal ended."""


@dataclass(frozen=True)
class ExitReport:
    """The last report of one rank. `origin` is the origin of `run.stop_timeout`, which is `limit_s` seconds;
    `may_write`: whether the run has begun, so that events belong to it."""

    directory: RunDir
    rank: int
    limit_s: float
    origin: str
    progress: Progress
    attempt: Attempt | None = None
    may_write: Callable[[], bool] = lambda: True

    def watchdog(self, signals: SignalWatch) -> StopWatchdog:
        """The stop watchdog of this rank, which ends the process after the last report."""

        def pass_on() -> None:
            """A signal reached this rank alone, and it waits for others: the stop file asks them to stop."""
            with contextlib.suppress(OSError, UserError):  # without a stop file, the others get a signal as well
                if not self.directory.stop_requested() and signals.received is None:
                    self.directory.request_stop(f"{BY_SIGNAL} asked rank {self.rank} for a stop")

        return StopWatchdog(
            signals, self.limit_s, on_late=self._end_late, on_killed=self._end_killed, on_unnoticed=pass_on
        )

    def _end_late(self) -> None:
        # Where the main thread is, innermost first.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = traceback.extract_stack(frame) if frame is not None else []
        frames = [f"{each.name} ({each.filename}:{each.lineno})" for each in reversed(found)]
        saved = ["the last checkpoint"]
        _within(REPORT_S, lambda: saved.insert(0, self.directory.describe_base()))
        doing = ACTIVITY_PHRASES.get(self.progress.activity, "")
        message = (
            f"the stop took longer than run.stop_timeout = {render_seconds(self.limit_s)} ({self.origin}), so rank "
            f"{self.rank} was ended {doing}.\n"
            f"  It was at: {' < '.join(frames[:3]) or 'n/a'}\n"
            "  Nothing that was saved has changed. To do: run the same command again: it goes on from "
            f"{saved[0]}. If its steps and saves take that long, raise run.stop_timeout."
        )
        kind, code = LateStop.__name__, LateStop.exit_code

        def report() -> None:
            step = self.directory.read_step()
            stacks = [{"ranks": [self.rank], "frames": frames}]
            facts = {"rank": self.rank, "kind": kind, "exit_code": code, "message": message, "stacks": stacks}
            self._write("fault", "failed", facts, render_reason(message))
            report_fault(self.attempt, f"rank {self.rank}", RankFault(kind, message, code), step)
            if self.attempt is None:  # the job script of an attempt reads the stop file
                self.directory.clear_stop()

        _within(REPORT_S, report)
        leave_now(message, code)

    def _end_killed(self) -> None:
        def report() -> None:
            facts = {"step": self.directory.read_step(), "reason": SECOND_SIGNAL, "ending": Ending.STOPPED}
            self._write("stopped", "stopped", facts, SECOND_SIGNAL)
            if self.attempt is not None and self.rank == 0:
                result = Result(Ending.STOPPED, SECOND_SIGNAL, self.directory.read_step(), KILLED, by="rank 0")
                report_end(self.attempt, result)

        _within(REPORT_S, report)
        leave_now("ended at once by a second signal", KILLED)

    def _write(self, event: str, state: str, facts: dict[str, Any], reason: str) -> None:
        """An event of this rank, and on rank 0 the status, unless the main thread has written it."""
        status = self.directory.read_status()
        if not self.may_write() or (self.rank == 0 and status.get("state") != "running"):
            return
        with self.directory.event_writer(self.rank) as events:
            events.write(event, **facts)
        if self.rank == 0:
            self.directory.change_state(status, state, reason)


def _within(seconds: float, work: Callable[[], None]) -> None:
    def guarded() -> None:
        with contextlib.suppress(Exception):  # the process ends whatever could not be written
            work()

    thread = threading.Thread(target=guarded, name="exit report", daemon=True)
    thread.start()
    thread.join(seconds)
