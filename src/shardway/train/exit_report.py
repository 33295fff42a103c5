"""The last report of a rank, written by another thread before the process ends at once, since its main thread cannot.

Invariant: a file system that hangs does not keep the process: the report has a few seconds, then the process ends
without it. What was saved is not touched. This module must not import torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardway.errors import LateStop, UserError, render_reason
from shardway.ranks.agent.hang import WORDS
from shardway.ranks.attempt import RankFault, report_end, report_fault
from shardway.ranks.progress import Progress
from shardway.ranks.shutdown import leave_now
from shardway.ranks.signals import Duties
from shardway.rundir.attempts import BY_SIGNAL, SECOND_SIGNAL, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.units import render_seconds

SAY_S = 3.0
"""The most seconds that writing may take."""

KILLED = 130
"""Exit code of a process that a second signal ended."""

_SHOWN = 3


@dataclass(frozen=True)
class ExitReport:
    """What the last report of one rank needs. `origin` is where `run.stop_timeout`, `limit_s` seconds, came from."""

    directory: RunDir
    rank: int
    limit_s: float
    origin: str
    progress: Progress
    attempt: Attempt | None = None
    may_write: Callable[[], bool] = lambda: True
    """Whether the run has begun, so that events belong to it."""

    def duties(self, was_heard: Callable[[], bool]) -> Duties:
        """The functions that its stop watchdog calls; `was_heard`: whether the main thread has handled the signal."""
        return Duties(self.limit_s, self._end_late, self._end_killed, lambda: self._pass_on(was_heard))

    def _pass_on(self, was_heard: Callable[[], bool]) -> None:
        """A signal reached this rank alone, and it waits for others: the stop file asks them to stop."""
        with contextlib.suppress(OSError, UserError):  # without a stop file, the others get a signal as well
            if not self.directory.stop_requested() and not was_heard():
                self.directory.request_stop(f"{BY_SIGNAL} asked rank {self.rank} for a stop")

    def _end_late(self) -> None:
        frames = _main_frames()
        message = self._explain(frames)
        _within(SAY_S, lambda: self._report_late(message, frames))
        leave_now(message, LateStop.exit_code)

    def _explain(self, frames: list[str]) -> str:
        saved = ["the last checkpoint"]
        _within(SAY_S, lambda: saved.insert(0, self.directory.describe_base()))
        doing = WORDS.get(self.progress.activity, "")
        return (
            f"the stop took longer than run.stop_timeout = {render_seconds(self.limit_s)} ({self.origin}), so rank "
            f"{self.rank} was ended {doing}.\n"
            f"  It was at: {' < '.join(frames[:_SHOWN]) or 'n/a'}\n"
            "  Nothing that was saved has changed. To do: run the same command again: it goes on from "
            f"{saved[0]}. If its steps and saves take that long, raise run.stop_timeout."
        )

    def _report_late(self, message: str, frames: list[str]) -> None:
        kind, code = LateStop.__name__, LateStop.exit_code
        step = self.directory.read_step()
        stacks = [{"ranks": [self.rank], "frames": frames}]
        facts = {"rank": self.rank, "kind": kind, "exit_code": code, "message": message, "stacks": stacks}
        self._write("fault", "failed", facts, render_reason(message))
        report_fault(self.attempt, f"rank {self.rank}", RankFault(kind, message, code), step)
        if self.attempt is None:  # the job script of an attempt reads the stop file
            self.directory.clear_stop()

    def _end_killed(self) -> None:
        _within(SAY_S, self._report_killed)
        leave_now("ended at once by a second signal", KILLED)

    def _report_killed(self) -> None:
        facts = {"step": self.directory.read_step(), "reason": SECOND_SIGNAL, "ending": Ending.STOPPED}
        self._write("stopped", "stopped", facts, SECOND_SIGNAL)
        if self.attempt is not None and self.rank == 0:
            result = Result(Ending.STOPPED, SECOND_SIGNAL, self.directory.read_step(), KILLED, by="rank 0")
            report_end(self.attempt, result)

    def _write(self, event: str, state: str, facts: dict[str, Any], reason: str) -> None:
        """An event of this rank, and on rank 0 the status, unless the main thread has written it."""
        status = self.directory.read_status()
        if not self.may_write():
            return
        if self.rank == 0 and status.get("state") != "running":
            return
        with self.directory.event_writer(self.rank) as events:
            events.write(event, **facts)
        if self.rank == 0:
            self.directory.change_state(status, state, reason)


def _within(seconds: float, work: Callable[[], None]) -> None:
    def guarded() -> None:
        with contextlib.suppress(Exception):  # the process ends whatever could not be written
            work()

    thread = threading.Thread(target=guarded, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)


def _main_frames() -> list[str]:
    """Where the main thread is, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = traceback.extract_stack(frame) if frame is not None else []
    return [f"{each.name} ({each.filename}:{each.lineno})" for each in reversed(found)]
