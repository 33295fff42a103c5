"""How long before the wall-time an attempt stops, and its last report.

Invariants:
- Only rank 0 reads the clock, and its request reaches the others; a rank that waits for data reads its own clock, since
  rank 0 may wait for it. The margin is never less than the measured steps and saves of this attempt need.
- Last report: a file system that hangs does not keep the process: the report has a few seconds, then the process ends
  without it. What was saved is not touched.
- No torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from shardway.errors import LateStop, UserError, render_reason
from shardway.ranks.failure import RankFault, report_end, report_fault
from shardway.ranks.hang import ACTIVITY_PHRASES
from shardway.ranks.heartbeat import Progress
from shardway.ranks.stop import SignalWatch, StopWatchdog, leave_now
from shardway.rundir.attempts import BY_SIGNAL, SECOND_SIGNAL, Attempt, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.units import MAX_SECONDS, render_seconds

# --- the deadline and its margin

TEARDOWN_S = 30.0
"""Seconds reserved for the end of the ranks and of the job script after the last save."""
TEARDOWN_LEAST_S, TEARDOWN_PART = 2.0, 0.1
"""For a short wall-time, the reserve is no more than these seconds plus this part of it."""
LAST_SAVES = 3
"""The slowest of this many last saves counts, since a file system has good and bad minutes."""
SAVES, STEPS = 2.0, 2.0
"""Factors: a save on its cadence may come right before the last one, and one more step may follow the current one."""

ESTIMATED_RATE = 200e6
"""Bytes per second that one rank writes, syncs and reads back, until a save was measured (a slow shared disk)."""
ESTIMATED_BYTES = 12
"""Bytes of state per parameter until then: fp32 weights and two moments."""
ESTIMATED_LEAST_S = 1.0


@dataclass(frozen=True)
class Pace:
    """Seconds that were measured before this attempt; None if not measured."""

    save_s: float | None = None
    validation_s: float | None = None

    def as_facts(self) -> dict[str, float]:
        """The measured values, as a status holds them."""
        facts = {"save_seconds": self.save_s, "validation_seconds": self.validation_s}
        return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True)
class Margin:
    """How many seconds before the deadline the run stops, and why so many."""

    seconds: float
    reason: str


class Deadline:
    """The end of the wall-time as rank 0 sees it, and what has been measured so far."""

    def __init__(
        self,
        at: float,
        wall_s: float,
        fixed_margin_s: float | None = None,
        before: Pace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`at` is in Unix seconds, `wall_s` the whole wall-time; a fixed margin is `run.stop_margin`."""
        self._at, self._clock, self._fixed = at, clock, fixed_margin_s
        self._teardown_s = min(TEARDOWN_S, TEARDOWN_LEAST_S + TEARDOWN_PART * wall_s)
        self._before = before or Pace()
        self._saves: deque[float] = deque(maxlen=LAST_SAVES)
        self._first_step_s: float | None = None
        self._step_s: float | None = None
        self._validation_s = self._before.validation_s
        self._estimated_save_s = ESTIMATED_LEAST_S
        self._passed = ""

    @property
    def left_s(self) -> float:
        """Seconds until the wall-time ends."""
        return self._at - self._clock()

    def expect_save_of(self, parameters: float) -> None:
        """Estimate the time of a save until one was measured, from the parameters that a rank answers for."""
        self._estimated_save_s = ESTIMATED_LEAST_S + parameters * ESTIMATED_BYTES / ESTIMATED_RATE

    def took_step(self, seconds: float) -> None:
        """A step was measured. The first of an attempt compiles and fills caches: it counts only until there is
        another."""
        if self._first_step_s is None:
            self._first_step_s = seconds
        else:
            self._step_s = max(self._step_s or 0.0, seconds)

    def took_save(self, seconds: float) -> None:
        """A save was measured."""
        self._saves.append(seconds)

    def took_validation(self, seconds: float) -> None:
        """A validation was measured."""
        self._validation_s = max(self._validation_s or 0.0, seconds)

    def margin(self) -> Margin:
        """The wall-time that must be left for the run to begin another step."""
        if self._fixed is not None:
            return Margin(self._fixed, "run.stop_margin says so")
        save, why = self._save()
        step = self._longest_step()
        parts = [f"{SAVES:g} x {save:.1f} s ({why})", f"{STEPS:g} x {step:.1f} s for the longest step"]
        if self._validation_s:
            parts.append(f"{self._validation_s:.1f} s for a validation")
        parts.append(f"{self._teardown_s:.1f} s to end")
        seconds = SAVES * save + STEPS * step + (self._validation_s or 0.0) + self._teardown_s
        return Margin(seconds, " + ".join(parts))

    def is_near(self) -> bool:
        """Whether it is time to stop; it stays so, and `describe` gives the clock at that moment."""
        if not self._passed and self.left_s < self.margin().seconds:
            self._passed = self.describe()
        return bool(self._passed)

    def fits_validation(self) -> bool:
        """Whether a validation that begins now ends early enough for a save; True until one was measured."""
        if self._fixed is not None:
            return self.left_s - (self._validation_s or 0.0) > self._fixed
        return self.left_s - (self._validation_s or 0.0) > self._save()[0] + self._teardown_s

    def has_passed(self) -> bool:
        """Whether no more time is left than a save and the end take."""
        return self.left_s < (self._fixed if self._fixed is not None else self._save()[0] + self._teardown_s)

    def seen_here(self, left_s: float) -> Deadline:
        """The same on a host whose clock may differ; `left_s` are left now."""
        self._at = self._clock() + left_s
        return self

    def describe(self) -> str:
        """ "deadline in 50.0 s, margin 9.2 s: 2 x 0.6 s (the last save took 0.6 s) + ..."."""
        if self._passed:
            return self._passed
        margin = self.margin()
        return f"deadline in {self.left_s:.1f} s, margin {margin.seconds:.1f} s: {margin.reason}"

    def facts(self) -> dict[str, Any]:
        """The state of the clock, for an event."""
        return {"left_s": self.left_s, "margin_s": self.margin().seconds, "reason": self.describe()}

    def _save(self) -> tuple[float, str]:
        if self._saves:
            return max(self._saves), f"the slowest of the last {len(self._saves)} saves"
        if self._before.save_s is not None:
            return self._before.save_s, f"the last save of an earlier attempt took {self._before.save_s:.1f} s"
        return self._estimated_save_s, "an estimate, since nothing was saved yet"

    def _longest_step(self) -> float:
        return self._step_s if self._step_s is not None else self._first_step_s or 0.0


def read_pace(status: Mapping[str, Any]) -> Pace:
    """The measurements of an earlier attempt, from its status."""
    times = (status.get(name) for name in ("save_seconds", "validation_seconds"))
    return Pace(*(float(value) if _is_time(value) else None for value in times))


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 <= value < MAX_SECONDS


def find_deadline(attempt: Attempt | None, fixed_margin_s: float | None, before: Pace) -> Deadline | None:
    """The deadline that the job of this attempt has written down; None if there is none."""
    started = attempt.read_started() if attempt is not None else None
    if started is None or started.deadline <= 0:
        return None
    begun = started.started or time.time()
    return Deadline(started.deadline, max(0.0, started.deadline - begun), fixed_margin_s, before)


# --- the last report of a rank, by another thread before the process ends at once, since its main thread cannot

REPORT_S = 3.0
"""The most seconds that the report may take."""

KILLED = 130
"""Exit code of a process that a second signal ended."""

_SHOWN = 3


@dataclass(frozen=True)
class ExitReport:
    """The last report of one rank. `origin` is the origin of `run.stop_timeout`, which is `limit_s` seconds."""

    directory: RunDir
    rank: int
    limit_s: float
    origin: str
    progress: Progress
    attempt: Attempt | None = None
    may_write: Callable[[], bool] = lambda: True
    """Whether the run has begun, so that events belong to it."""

    def watchdog(self, signals: SignalWatch) -> StopWatchdog:
        """The stop watchdog of this rank, which ends the process after the last report."""

        def pass_on() -> None:
            self._pass_on(lambda: signals.received is not None)

        return StopWatchdog(
            signals, self.limit_s, on_late=self._end_late, on_killed=self._end_killed, on_unnoticed=pass_on
        )

    def _pass_on(self, is_noticed: Callable[[], bool]) -> None:
        """A signal reached this rank alone, and it waits for others: the stop file asks them to stop."""
        with contextlib.suppress(OSError, UserError):  # without a stop file, the others get a signal as well
            if not self.directory.stop_requested() and not is_noticed():
                self.directory.request_stop(f"{BY_SIGNAL} asked rank {self.rank} for a stop")

    def _end_late(self) -> None:
        frames = _main_frames()
        message = self._explain(frames)
        _within(REPORT_S, lambda: self._report_late(message, frames))
        leave_now(message, LateStop.exit_code)

    def _explain(self, frames: list[str]) -> str:
        saved = ["the last checkpoint"]
        _within(REPORT_S, lambda: saved.insert(0, self.directory.describe_base()))
        doing = ACTIVITY_PHRASES.get(self.progress.activity, "")
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
        _within(REPORT_S, self._report_killed)
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

    thread = threading.Thread(target=guarded, name="exit report", daemon=True)
    thread.start()
    thread.join(seconds)


def _main_frames() -> list[str]:
    """Where the main thread is, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = traceback.extract_stack(frame) if frame is not None else []
    return [f"{each.name} ({each.filename}:{each.lineno})" for each in reversed(found)]
