"""The state of a run after each of its events: the one fold that status, live view and report share.

Invariant: memory grows with validations, saves and attempts, never with steps. After a resume from step s, or a
rollback to it, only faults and the time account remain of what came after s. This module reads files only through a
RunDir.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardway.best import LOSS, Monitor
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.account import Book
from shardway.watch.facts import (
    EndedEvent,
    FaultEvent,
    Logged,
    Save,
    Start,
    ValidatedEvent,
    measured,
    number,
    read_ending,
    read_fault,
    read_logged,
    read_save,
    read_start,
    read_validation,
    seconds,
    whole,
)

RECENT_STEPS = 20
"""Steps over which speed and loss are smoothed."""


@dataclass
class AttemptProgress:
    """One start of the run and its progress: `step` is the last step done, `last_time` that of any event. `again`: the
    ranks restarted in place after a failure, as part of the attempt before."""

    start: Start
    step: int
    last_time: float
    first_step: int | None = None
    first_step_time: float = 0.0
    last_step_time: float = 0.0
    ending: EndedEvent | None = None
    again: bool = False
    faults: list[FaultEvent] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last event."""
        return max(0.0, self.last_time - self.start.time)

    @property
    def seconds_per_step(self) -> float | None:
        """Wall seconds a step since the first step ended, validations and saves included; None before two steps."""
        if self.first_step is None or self.step <= self.first_step:
            return None
        return max(0.0, self.last_step_time - self.first_step_time) / (self.step - self.first_step)


class RunProgress:
    """Folds events, given in the order written, into the state of the run; `validations` are those before the first
    event given."""

    def __init__(self, validations: Sequence[ValidatedEvent] = ()) -> None:
        self.attempts: list[AttemptProgress] = []
        self.validations = list(validations)
        self.saves: list[Save] = []
        self.logged: Logged | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT_STEPS)
        self.book = Book()
        self._restarted: Event | None = None

    def update(self, event: Event) -> None:
        """Add one event; events of unknown names only count as a sign of life."""
        self.book.update(event)
        if event["event"] == "started":
            self._start(event)
        elif not self.attempts:  # the event of the start was lost, or comes later
            start = read_start({"time": event.get("time")})
            self.attempts.append(AttemptProgress(start, start.step, start.time))
        attempt = self.attempts[-1]
        attempt.last_time = seconds(event, "time") or attempt.last_time
        match event["event"]:
            case "step":
                self._add_step(attempt, event)
            case "rolled_back":
                self._go_back(attempt, whole(event, "step") or 0)
            case "validation":
                self.validations.append(read_validation(event))
            case "logged":
                self.logged = read_logged(event)
            case "saved":
                self.saves.append(read_save(event))
            case "fault":
                attempt.faults.append(read_fault(event))
            case "restarted":
                self._restarted = event
            case "finished" | "stopped" | "failed":
                attempt.ending = read_ending(event)

    def _start(self, event: Event) -> None:
        start, restarted = read_start(event), self._restarted
        # An attempt may end before its ranks have restarted; then the next one starts.
        again = bool(self.attempts) and restarted is not None and restarted.get("agent") == event.get("agent")
        self.attempts.append(AttemptProgress(start, start.step, start.time, again=again))
        self._restarted = None
        self._undo_after(start.step)

    def _go_back(self, attempt: AttemptProgress, step: int) -> None:
        attempt.step, attempt.first_step = step, None
        self._undo_after(step)

    def _undo_after(self, step: int) -> None:
        self.recent.clear()
        self.validations = [validation for validation in self.validations if validation.step <= step]
        self.saves = [save for save in self.saves if save.step <= step]
        self.logged = self.logged if self.logged is not None and self.logged.step <= step else None

    def _add_step(self, attempt: AttemptProgress, event: Event) -> None:
        attempt.step = whole(event, "step") or attempt.step
        attempt.last_step_time = attempt.last_time
        if attempt.first_step is None:
            attempt.first_step, attempt.first_step_time = attempt.step, attempt.last_time
        self.recent.append(event)

    # --- current state

    @property
    def attempt(self) -> AttemptProgress | None:
        """The running attempt, or the last one."""
        return self.attempts[-1] if self.attempts else None

    @property
    def start(self) -> Start | None:
        """The start of the last attempt."""
        return self.attempts[-1].start if self.attempts else None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.attempts[-1].step if self.attempts else 0

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to do."""
        return self.attempts[-1].start.total_steps if self.attempts else None

    @property
    def ending(self) -> EndedEvent | None:
        """How the last attempt ended; None while it goes on (or if it was killed)."""
        return self.attempts[-1].ending if self.attempts else None

    @property
    def wall_s(self) -> float:
        """Seconds of all attempts together, undone steps included."""
        return sum(attempt.wall_s for attempt in self.attempts)

    @property
    def loss(self) -> float | None:
        """Loss of the last step of this attempt; NaN where it was not a number; None before the first."""
        return measured(self.recent[-1], "loss") if self.recent else None

    @property
    def smooth_loss(self) -> float | None:
        """Mean finite loss of the last RECENT_STEPS steps."""
        losses = self._recent("loss")
        return sum(losses) / len(losses) if losses else None

    def last(self, key: str) -> float | None:
        """A number of the last step."""
        return number(self.recent[-1], key) if self.recent else None

    def typical(self, key: str) -> float | None:
        """Median of a number over the last RECENT_STEPS steps."""
        values = self._recent(key)
        return median(values) if values else None

    @property
    def monitor(self) -> Monitor:
        """The metric that picks the best validation."""
        return self.attempts[-1].start.monitor if self.attempts else LOSS

    @property
    def best_validation(self) -> ValidatedEvent | None:
        """The best by `checkpoint.monitor` (the earliest of equals)."""
        return self.find_best()

    def find_best(self, among: Collection[int] | None = None) -> ValidatedEvent | None:
        """The best validation, or the best among some steps."""
        by_step = {each.step: each for each in self.validations if among is None or each.step in among}
        best = self.monitor.find_best({step: each.metrics for step, each in by_step.items()})
        return by_step[best.step] if best is not None else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at this attempt's pace; None where unknown."""
        if self.attempt is None or self.total_steps is None or self.ending is not None:
            return None
        pace = self.attempt.seconds_per_step
        if pace is None and self.recent:
            pace = seconds(self.recent[-1], "seconds")
        if pace is None:
            return None
        return max(0, self.total_steps - self.step) * pace

    def _recent(self, key: str) -> list[float]:
        values = (number(event, key) for event in self.recent)
        return [value for value in values if value is not None and math.isfinite(value)]


def read_validations(run: RunDir) -> list[ValidatedEvent]:
    """The valid validations of a run."""
    return _read_validated(run).validations


@dataclass(frozen=True)
class BestCheckpoint:
    """The saved checkpoint with the best validation: its step, the metric and its value."""

    step: int
    metric: str
    value: float


def find_best_checkpoint(run: RunDir) -> BestCheckpoint | None:
    """The best checkpoint; None where no saved step was validated."""
    progress = _read_validated(run)
    best, metric = progress.find_best(run.checkpoint_steps()), progress.monitor.metric
    return BestCheckpoint(best.step, metric, best.metrics[metric]) if best is not None else None


def _read_validated(run: RunDir) -> RunProgress:
    progress = RunProgress()
    for event in run.all_events(names=("started", "validation", "rolled_back")):
        progress.update(event)
    return progress


def read_progress(run: RunDir) -> RunProgress:
    """The state of a run, from every event of rank 0."""
    progress = RunProgress()
    for event in run.all_events():
        progress.update(event)
    return progress
