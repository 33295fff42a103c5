"""The state of a run after each of its events: the one fold that status, live view and report share.

Invariants:
- Memory grows with validations, saves and attempts, never with steps. After a resume from step s, or a rollback to it,
  only faults and the time account remain of what came after s. This module reads files only through a RunDir.
- The keys of `as_json` are stable; an unknown value is None. This module does not render for people.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shardway.best import LOSS, Monitor
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.rundir.lineage import SkippedRange
from shardway.watch.account import Book, TimeAccount
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
    text,
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
                attempt.step, attempt.first_step = whole(event, "step") or 0, None
                self._undo_after(attempt.step)
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


# --- All facts of a run that `shardway status` shows

GONE = "the process is gone (killed?)"
"""Reason of a run whose status is "running" although no process holds its lock."""


@dataclass(frozen=True)
class RunSummary:
    """Where a run stands.

    `state` is "new" (nothing recorded yet), "running", "finished", "stopped" or "failed". Losses are NaN where they
    were not a number. `tokens_per_s` and `samples_per_s` are medians over the last 20 steps; `unit` names the one that
    the run is measured in. `seconds_left` is None unless the run is running. Times are Unix seconds: `started` of the
    first attempt, `updated` of the last event; `wall_s` adds up all attempts. `restarts`: how often ranks restarted in
    place, as part of their attempt. `account` is the time account; None where it was not recorded. `left_out`: the
    data that the run skipped by itself. `best_validation` is the best by the metric `monitor`, `best_checkpoint` the
    best whose step is saved. `local_checkpoints_ignored`: the step from which two starts failed, so that the
    checkpoints on the nodes' disks were ignored.
    """

    name: str
    path: Path
    state: str
    reason: str
    step: int
    total_steps: int | None
    loss: float | None
    smooth_loss: float | None
    grad_norm: float | None
    lr: float | None
    unit: str
    tokens_per_s: float | None
    samples_per_s: float | None
    seconds_left: float | None
    validation: ValidatedEvent | None
    best_validation: ValidatedEvent | None
    last_save: Save | None
    checkpoints: tuple[int, ...]
    world: int | None
    device: str
    host: str
    parameters: int | None
    started: float | None
    updated: float | None
    wall_s: float
    attempts: int
    writer: str | None
    account: TimeAccount | None
    left_out: tuple[SkippedRange, ...] = ()
    local_checkpoints_ignored: int | None = None
    restarts: int = 0
    monitor: str = "loss"
    best_checkpoint: ValidatedEvent | None = None
    logged: Logged | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data for strict JSON: paths as strings, numbers that are not finite as None."""
        account = self.account.as_json() if self.account else None
        plain: dict[str, Any] = _as_plain({**asdict(self), "account": account})
        return plain


def summarise(run: RunDir) -> RunSummary:
    """The state of the run now. Raises JobError where status.json is damaged."""
    return summarise_progress(run, read_progress(run))


def summarise_progress(run: RunDir, progress: RunProgress) -> RunSummary:
    """The state of the run, for a reader that has read its events already."""
    now = _find_state(run, progress)
    start, saved, status = progress.start, run.checkpoint_steps(), run.read_status()
    ignored = whole(status, "local_checkpoints_ignored")  # called tier_dropped until 2026-11
    return RunSummary(
        name=run.path.resolve().name,
        path=run.path,
        state=now.state,
        reason=now.reason,
        step=progress.step if start else now.step,
        total_steps=progress.total_steps or now.total_steps,
        loss=progress.loss,
        smooth_loss=progress.smooth_loss,
        grad_norm=progress.last("grad_norm"),
        lr=progress.last("lr"),
        unit="tokens" if start and start.counts_tokens else "samples",
        tokens_per_s=progress.typical("tokens_per_s"),
        samples_per_s=progress.typical("samples_per_s"),
        seconds_left=progress.seconds_left if now.state == "running" else None,
        validation=progress.validations[-1] if progress.validations else None,
        logged=progress.logged,
        best_validation=progress.best_validation,
        last_save=progress.saves[-1] if progress.saves else None,
        checkpoints=tuple(saved),
        world=start.world if start else None,
        device=start.device if start else "",
        host=start.host if start else "",
        parameters=start.parameters if start else None,
        started=progress.attempts[0].start.time if start else None,
        updated=progress.attempts[-1].last_time if start else None,
        wall_s=progress.wall_s,
        attempts=sum(not attempt.again for attempt in progress.attempts),
        restarts=sum(attempt.again for attempt in progress.attempts),
        writer=now.writer,
        account=progress.book.account(status, time.time() if now.state == "running" else None),
        left_out=_left_out(run),
        local_checkpoints_ignored=ignored if ignored is not None else whole(status, "tier_dropped"),
        monitor=progress.monitor.metric,
        best_checkpoint=progress.find_best(saved),
    )


def _left_out(run: RunDir) -> tuple[SkippedRange, ...]:
    """The skipped ranges; none where the file cannot be read, which the run reports when it continues."""
    with contextlib.suppress(JobError):
        return run.left_out.read()
    return ()


def find_runs(root: Path) -> list[RunDir]:
    """The runs directly under `root`, by name; `root` itself where it is a run; none where it is not a folder."""
    if RunDir(root).exists():
        return [RunDir(root)]
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if os.path.isdir(root) else []
    return [run for run in map(RunDir, folders) if run.exists()]


@dataclass(frozen=True)
class _RunState:
    state: str
    reason: str
    step: int
    total_steps: int | None
    writer: str | None


def _find_state(run: RunDir, progress: RunProgress) -> _RunState:
    """The state by status.json, or by the events where it is missing, checked against the lock's holder."""
    writer, status = run.find_writer(), run.read_status()
    ending = progress.ending
    open_state = "running" if progress.attempts or writer else "new"
    state = text(status, "state") or (ending.state if ending else open_state)
    reason = text(status, "reason") or (ending.reason if ending else "")
    if state == "running" and writer is None:
        writer = run.find_writer()  # it may have started between the first look and the reading of its status
        state, reason = ("running", reason) if writer else ("failed", GONE)
    return _RunState(state, reason, whole(status, "step") or 0, whole(status, "total_steps"), writer)


def _as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
