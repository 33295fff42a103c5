"""The state of a run after each of its events: the one fold that status, live view and report share.

Invariants:
- Memory grows with validations, saves and attempts, never with steps. After a resume from step s, or a rollback to it,
  only faults and the time account remain of what came after s. Reading events never raises.
- The time account: rank 0 books each of its seconds on one activity (`shardway.ranks.heartbeat`) and reports the sums
  in its events and in status.json. The rows add up to `wall_s`, the time from the beginning of the first attempt to the
  last sign of life (or to now); times that a rank measured itself take precedence over differences of dates.
- A clock that was set back makes no time negative: what passed between events is counted from each to the next.
- The keys of `as_json` are stable; an unknown value is None. This module reads files only through a RunDir, and does
  not render for people.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.rundir.names import SkippedRange
from shardway.units import LOSS, Monitor
from shardway.watch.facts import (
    MOST_SECONDS,
    EndedEvent,
    Evaluation,
    FaultEvent,
    Logged,
    SampledEvent,
    Save,
    Start,
    ValidatedEvent,
    measured,
    number,
    read_ending,
    read_evaluation,
    read_fault,
    read_logged,
    read_sampled,
    read_save,
    read_start,
    read_validation,
    seconds,
    text,
    whole,
)

# --- dates


class SteadyClock:
    """The dates of events, given in the order written, as a time that goes on where a clock was set back. `back_s`: by
    how much dates went back in all; `set_back`: the last such step, from one date to another. A single date that
    stands out is damage and moves nothing, nor do steps of less than LEAST_S, by which clocks are kept right."""

    LEAST_S = 10.0

    def __init__(self) -> None:
        self.back_s = 0.0
        self.set_back: tuple[float, float] | None = None
        self._before = self._last = self._odd = 0.0  # 0: none
        self._now = 0.0

    def read(self, date: float) -> float:
        """The time of an event with this date (Unix seconds, 0 for none)."""
        if not date:
            return self._now
        odd, self._odd = self._odd, 0.0
        if odd and date < self._last:  # the next date agrees with it: the clock was set
            self.back_s += self._last - odd
            self.set_back = self._last, odd
            self._before = self._last = odd
        if self._last and date < min(self._before, self._last - self.LEAST_S):
            self._odd = date
            return self._now
        self._before, self._last = self._last or date, date
        self._now = date + self.back_s
        return self._now


# --- the time account: what the time of all attempts was spent on

_WORK = ("step", "repeat")
_ROWS = {"validate": "validation_s", "sample": "validation_s"} | {
    name: f"{name}_s" for name in ("start", "load", "data", "save", "script", "end")
}
"""Activity of rank 0 -> row of the account. Steps are split between two rows; samples count as validation; an unknown
activity is unaccounted."""


@dataclass(frozen=True)
class TimeAccount:
    """Seconds of rank 0, by purpose; together `wall_s`.

    `productive_s`: steps that hold, each counted once. `lost_s`: steps that a resume undid, and unfinished ones.
    `idle_s`: from an attempt's last sign of life to the beginning of the next. `unaccounted_s`: after the last record
    of an attempt that was killed or still runs. Not part of the sum: `repeated_s` is time in steps that had been done
    before, `undone_steps` is the number of undone steps.

    The share of productive time is also called goodput, or effective training time ratio (ETTR; Kokolis et al. 2024,
    arXiv 2410.21680). Waiting for data, saves and validation do not count as productive here.
    """

    productive_s: float = 0.0
    lost_s: float = 0.0
    start_s: float = 0.0
    load_s: float = 0.0
    data_s: float = 0.0
    save_s: float = 0.0
    validation_s: float = 0.0
    script_s: float = 0.0
    end_s: float = 0.0
    idle_s: float = 0.0
    unaccounted_s: float = 0.0
    repeated_s: float = 0.0
    undone_steps: int = 0

    @property
    def rows(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ROW_NAMES}

    @property
    def wall_s(self) -> float:
        """From the beginning of the first attempt to the end of the account."""
        return math.fsum(self.rows.values())

    @property
    def productive_share(self) -> float | None:
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        return {"wall_s": self.wall_s, "productive_share": self.productive_share, **asdict(self)}


ROW_NAMES = tuple(each.name for each in fields(TimeAccount) if each.name not in ("repeated_s", "undone_steps"))
"""The fields of an account that add up, in display order."""


@dataclass(frozen=True)
class _SpentAt:
    """Rank 0's time spent so far (seconds by activity) when `step` steps were done, at `time` (Unix seconds). `work_s`:
    seconds in steps, of which `unfinished_s` in one that is not finished."""

    time: float
    step: int
    spent: Mapping[str, float]
    unfinished_s: float = 0.0

    @property
    def work_s(self) -> float:
        return sum(self.spent.get(name, 0.0) for name in _WORK)

    @property
    def finished_s(self) -> float:
        return max(0.0, self.work_s - self.unfinished_s)


@dataclass
class _AttemptTime:
    """An attempt that continued from step `base` at `started` (Unix seconds); `step`, `last_time` are the last seen. A
    rollback within an attempt begins another entry: `before` is what rank 0 had spent until then."""

    base: int
    started: float
    step: int
    last_time: float
    owner: tuple[Any, Any]
    records: list[_SpentAt] = field(default_factory=list)
    before: Mapping[str, float] = field(default_factory=dict)

    def begun(self) -> float:
        return self.records[0].time - math.fsum(self.records[0].spent.values()) if self.records else self.started

    def add(self, source: Mapping[str, Any], at: float) -> None:
        """Add the times in an event or a status of `at`, if it has any and they are newer than the last record."""
        spent = _read_spent(source)
        if not at or spent is None or (self.records and at < self.records[-1].time):
            return
        spent = {name: max(0.0, each - self.before.get(name, 0.0)) for name, each in spent.items()}
        step = whole(source, "step")
        step = self.step if step is None else step
        self.records.append(_SpentAt(at, step, spent, max(0.0, seconds(source, "unfinished_s") or 0.0)))
        self.step = max(self.step, step)

    def kept_work_s(self, keep: int) -> float:
        """Seconds in finished steps up to `keep`: exact where a record was made there, as at every save."""
        before = [record for record in self.records if record.step <= keep]
        after = next((record for record in self.records if record.step > keep), None)
        if not before or keep <= self.base:
            return 0.0
        last = before[-1]
        if after is None:
            return last.finished_s
        part = (keep - last.step) / (after.step - last.step)
        return last.finished_s + part * max(0.0, after.finished_s - last.finished_s)


class Book:
    """Builds the account from rank 0's events, given in the order written."""

    def __init__(self) -> None:
        self._attempts: list[_AttemptTime] = []
        self.clock = SteadyClock()

    def update(self, event: Event) -> float:
        """Book an event; returns its time by a clock that is never set back (Unix seconds, 0 where unknown)."""
        attempt = self._attempts[-1] if self._attempts else None
        if event["event"] == "started":
            before = event.get("before")
            if attempt is not None and isinstance(before, Mapping) and attempt.owner == _owner(before):
                attempt.add(before, self._place(before))
        at, base = self.clock.read(seconds(event, "time") or 0.0), whole(event, "step") or 0
        if event["event"] == "started":
            self._attempts.append(_AttemptTime(base, at, base, at, _owner(event)))
            self._attempts[-1].add(event, at)
        elif attempt is not None:
            attempt.last_time = max(attempt.last_time, at)
            if event["event"] == "rolled_back":  # ends the attempt at the step reached, and begins another entry
                attempt.add({**event, "step": attempt.step}, at)
                spent = event.get("spent")
                before = {str(name): number(spent, name) or 0.0 for name in spent} if isinstance(spent, Mapping) else {}
                self._attempts.append(_AttemptTime(base, at, base, at, attempt.owner, before=before))
                self._attempts[-1].add(event, at)
            elif event["event"] == "step":
                attempt.step = base or attempt.step
            elif "spent" in event:
                attempt.add(event, at)
        return at

    def _place(self, status: Mapping[str, Any]) -> float:
        """The time of a status that was written after the events so far."""
        date = seconds(status, "time")
        return date + self.clock.back_s if date else 0.0

    def account(self, status: Mapping[str, Any], now: float | None = None) -> TimeAccount | None:
        """The account including the last status; up to `now` (Unix seconds) if the run goes on. None where no time was
        booked: the run never began, or is older than time records."""
        attempts = [*self._attempts]
        if attempts and attempts[-1].owner == _owner(status):
            attempts[-1] = replace(attempts[-1], records=[*attempts[-1].records])
            attempts[-1].add(status, self._place(status))
        if not any(attempt.records for attempt in attempts):
            return None
        return _add_up(attempts, now and now + self.clock.back_s)


def _add_up(attempts: Sequence[_AttemptTime], now: float | None) -> TimeAccount:
    rows = dict.fromkeys((*ROW_NAMES, "repeated_s"), 0.0)
    undone, earliest = 0, attempts[0].begun()
    for place, attempt in enumerate(attempts):
        is_last = place == len(attempts) - 1
        keep = min((later.base for later in attempts[place + 1 :]), default=attempt.step)
        undone += max(0, attempt.step - max(keep, attempt.base))
        begun = attempt.begun()
        rows["idle_s"] += max(0.0, begun - earliest)
        overlap = max(0.0, earliest - begun)
        end = max(attempt.last_time, (now or 0.0) if is_last else 0.0, earliest)
        if attempt.records:
            last = attempt.records[-1]
            end = max(end, last.time)
            kept_s = min(attempt.kept_work_s(keep), last.finished_s)
            rows["productive_s"] += kept_s
            rows["lost_s"] += max(0.0, last.work_s - kept_s)
            rows["repeated_s"] += last.spent.get("repeat", 0.0)
            for name, spent_s in last.spent.items():
                if name not in _WORK:
                    rows[_ROWS.get(name, "unaccounted_s")] += spent_s
            rows["unaccounted_s"] += max(0.0, end - max(last.time, earliest))
            rows["start_s"] -= min(overlap, attempt.records[0].spent.get("start", 0.0))
        else:
            rows["unaccounted_s"] += end - max(begun, earliest)
        earliest = end
    return TimeAccount(**rows, undone_steps=undone)


def _owner(source: Mapping[str, Any]) -> tuple[Any, Any]:
    return whole(source, "pid"), text(source, "host")


def _read_spent(source: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds by activity in an event or a status; None where there are none that can be true."""
    spent = source.get("spent")
    if not isinstance(spent, Mapping):
        return None
    times = {str(name): max(0.0, number(spent, name) or 0.0) for name in spent}
    return times if all(value < MOST_SECONDS for value in times.values()) else None


# --- the fold

RECENT_STEPS = 20  # steps over which speed and loss are smoothed


@dataclass
class AttemptProgress:
    """One start of the run and its progress: `step` is the last step done, `last_time` the date of the last event.
    `begun`, `now` and the times of steps are by a clock that is never set back; `set_back`: from the highest to the
    lowest date at which it was. `again`: the ranks restarted in place after a failure, as part of the attempt
    before."""

    start: Start
    step: int
    last_time: float
    begun: float
    now: float
    set_back: tuple[float, float] | None = None
    first_step: int | None = None
    first_step_time: float = 0.0
    last_step_time: float = 0.0
    ending: EndedEvent | None = None
    again: bool = False
    faults: list[FaultEvent] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last event."""
        return max(0.0, self.now - self.begun)

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last date (Unix seconds)."""
        high, low = self.set_back or (self.last_time, self.start.time)
        return min(self.start.time, low), max(self.last_time, high)

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
        self.sampled: SampledEvent | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT_STEPS)
        self.book = Book()
        self._restarted: Event | None = None

    def update(self, event: Event) -> None:
        """Add one event; events of unknown names only count as a sign of life."""
        set_back = self.book.clock.set_back
        at = self.book.update(event)
        if event["event"] == "started":
            # An attempt may end before its ranks have restarted; then the next one starts.
            last, self._restarted = self._restarted, None
            again = bool(self.attempts) and last is not None and last.get("agent") == event.get("agent")
            start = read_start(event)
            self.attempts.append(AttemptProgress(start, start.step, start.time, at, at, again=again))
            self._undo_after(start.step)
        elif not self.attempts:  # the event of the start was lost, or comes later
            start = read_start({"time": event.get("time")})
            self.attempts.append(AttemptProgress(start, start.step, start.time, at, at))
        attempt = self.attempts[-1]
        attempt.last_time, attempt.now = seconds(event, "time") or attempt.last_time, at
        if (found := self.book.clock.set_back) is not None and found is not set_back:
            high, low = attempt.set_back or found
            attempt.set_back = max(high, found[0]), min(low, found[1])
        match event["event"]:
            case "step":
                attempt.step = whole(event, "step") or attempt.step
                attempt.last_step_time = at
                if attempt.first_step is None:
                    attempt.first_step, attempt.first_step_time = attempt.step, at
                self.recent.append(event)
            case "rolled_back":
                attempt.step, attempt.first_step = whole(event, "step") or 0, None
                self._undo_after(attempt.step)
            case "validation":
                self.validations.append(read_validation(event))
            case "logged":
                self.logged = read_logged(event)
            case "sampled":
                self.sampled = read_sampled(event)
            case "saved":
                self.saves.append(read_save(event))
            case "fault":
                attempt.faults.append(read_fault(event))
            case "restarted":
                self._restarted = event
            case "finished" | "stopped" | "failed":
                attempt.ending = read_ending(event)

    def _undo_after(self, step: int) -> None:
        self.recent.clear()
        self.validations = [validation for validation in self.validations if validation.step <= step]
        self.saves = [save for save in self.saves if save.step <= step]
        self.logged = self.logged if self.logged is not None and self.logged.step <= step else None
        self.sampled = self.sampled if self.sampled is not None and self.sampled.step <= step else None

    # --- current state: that of the attempt that runs, or of the last one

    @property
    def attempt(self) -> AttemptProgress | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def start(self) -> Start | None:
        return self.attempts[-1].start if self.attempts else None

    @property
    def step(self) -> int:
        return self.attempts[-1].step if self.attempts else 0

    @property
    def total_steps(self) -> int | None:
        return self.attempts[-1].start.total_steps if self.attempts else None

    @property
    def ending(self) -> EndedEvent | None:
        """None while it goes on (or if it was killed)."""
        return self.attempts[-1].ending if self.attempts else None

    @property
    def monitor(self) -> Monitor:
        """The metric that picks the best validation."""
        return self.attempts[-1].start.monitor if self.attempts else LOSS

    @property
    def unit(self) -> str:
        """What its speed is measured in."""
        return "tokens" if self.start and self.start.counts_tokens else "samples"

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
        return number(self.recent[-1], key) if self.recent else None

    def typical(self, key: str) -> float | None:
        values = self._recent(key)
        return median(values) if values else None

    @property
    def best_validation(self) -> ValidatedEvent | None:
        """The best by `checkpoint.monitor` (the earliest of equals)."""
        return self.find_best()

    def find_best(self, among: Collection[int] | None = None) -> ValidatedEvent | None:
        """The best validation, or the best among some steps."""
        by_step = {each.step: each for each in self.validations if among is None or each.step in among}
        best = self.monitor.find_best({step: each.metrics for step, each in by_step.items()})
        return by_step[best.step] if best is not None else None

    def find_value(self, monitor: Monitor) -> tuple[float, int] | None:
        """The best validation by a metric, else what the program logged last under its name; with its step."""
        best = monitor.find_best({event.step: event.metrics for event in self.validations})
        if best is not None:
            return float(best.metrics[monitor.metric]), best.step
        logged = self.logged.values.get(monitor.metric) if self.logged else None
        return (logged, self.logged.step) if self.logged and logged is not None else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at this attempt's pace; None where unknown."""
        if self.attempt is None or self.total_steps is None or self.ending is not None:
            return None
        pace = self.attempt.seconds_per_step
        if pace is None and self.recent:
            pace = seconds(self.recent[-1], "seconds")
        return max(0, self.total_steps - self.step) * pace if pace is not None else None

    def _recent(self, key: str) -> list[float]:
        values = (number(event, key) for event in self.recent)
        return [value for value in values if value is not None and math.isfinite(value)]


def read_progress(run: RunDir, names: Sequence[str] = ()) -> RunProgress:
    """The state of a run, from every event of rank 0, or from those of some names, which is many times faster."""
    return fold_events(run.all_events(names=names))


def fold_events(events: Iterable[Event]) -> RunProgress:
    """The state of a run after events of rank 0, in the order written."""
    progress = RunProgress()
    for event in events:
        progress.update(event)
    return progress


_OF_VALIDATIONS = ("started", "validation", "rolled_back")


def read_validations(run: RunDir) -> list[ValidatedEvent]:
    """The valid validations of a run."""
    return read_progress(run, _OF_VALIDATIONS).validations


@dataclass(frozen=True)
class BestCheckpoint:
    """The saved checkpoint with the best validation: its step, the metric and its value."""

    step: int
    metric: str
    value: float


def find_best_checkpoint(run: RunDir) -> BestCheckpoint | None:
    """The best checkpoint; None where no saved step was validated."""
    progress = read_progress(run, _OF_VALIDATIONS)
    best, metric = progress.find_best(run.checkpoint_steps()), progress.monitor.metric
    return BestCheckpoint(best.step, metric, best.metrics[metric]) if best is not None else None


# --- all facts of a run that `shardway status` shows

STARTS = "a start has not begun to train yet; numbers are of before it"
"""The reason of a run that a process holds whose status.json is of an earlier one."""

GONE = "the process is gone (killed?)"  # reason of a run whose status is "running" although no process holds its lock


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
    checkpoints on the nodes' disks were ignored. `damaged`: how many damaged samples the last attempt left out.
    `clock_back_s`: by how much dates in the events go back; times leave that out. `events_end`: the step at which the
    events end although status.json is of a later one; None where they are whole. `sampled`: the last samples of the
    model in training; `evaluations`: results of `shardway evaluate`, the oldest first.
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
    damaged: str = ""
    clock_back_s: float = 0.0
    events_end: int | None = None
    sampled: SampledEvent | None = None
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def rate(self) -> float | None:
        """Tokens or samples a second, whichever `unit` names."""
        return self.tokens_per_s if self.unit == "tokens" else self.samples_per_s

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
    # By status.json, or by the events where it is missing, checked against the holder of the lock.
    writer, status = run.find_writer(), run.read_status()
    start, ending = progress.start, progress.ending
    state = text(status, "state") or (ending.state if ending else "running" if start or writer else "new")
    reason = text(status, "reason") or (ending.reason if ending else "")
    if state == "running" and writer is None:
        writer = run.find_writer()  # it may have started between the first look and the reading of its status
        state, reason = ("running", reason) if writer else ("failed", GONE)
    since: float | None = time.time() if state == "running" else None
    if writer is not None and status and run.is_claimed_anew():
        state, reason, since = "running", STARTS, None
    saved = run.checkpoint_steps()
    if state == "new" and saved and saved[-1]:  # step 0 is of an import
        reason = f"no event of it can be read, but it has a checkpoint of step {saved[-1]}"
    elif state == "new" and (imported := run.read_import()):
        reason = f"begins with weights from {imported}"
    left_out: tuple[SkippedRange, ...] = ()
    with contextlib.suppress(JobError):  # a file that cannot be read: the run reports it when it continues
        left_out = run.left_out.read()
    ignored = whole(status, "local_checkpoints_ignored")  # called tier_dropped until 2026-11
    events_end = _find_events_end(progress, status, goes_on=state == "running")
    return RunSummary(
        name=run.path.resolve().name,
        path=run.path,
        state=state,
        reason=reason,
        step=progress.step if start and events_end is None else whole(status, "step") or 0,
        total_steps=progress.total_steps or whole(status, "total_steps"),
        loss=progress.loss,
        smooth_loss=progress.smooth_loss,
        grad_norm=progress.last("grad_norm"),
        lr=progress.last("lr"),
        unit=progress.unit,
        tokens_per_s=progress.typical("tokens_per_s"),
        samples_per_s=progress.typical("samples_per_s"),
        seconds_left=progress.seconds_left if since is not None else None,
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
        wall_s=sum(attempt.wall_s for attempt in progress.attempts),
        attempts=sum(not attempt.again for attempt in progress.attempts),
        restarts=sum(attempt.again for attempt in progress.attempts),
        writer=writer,
        account=progress.book.account(status, since),
        left_out=left_out,
        damaged=text(status, "damaged"),
        local_checkpoints_ignored=ignored if ignored is not None else whole(status, "tier_dropped"),
        monitor=progress.monitor.metric,
        best_checkpoint=progress.find_best(saved),
        clock_back_s=progress.book.clock.back_s,
        events_end=events_end,
        sampled=progress.sampled,
        evaluations=tuple(map(read_evaluation, run.read_evaluations())),
    )


_BEHIND_S = 60.0
"""While a run goes on, its events were read a moment before its status."""


def _find_events_end(progress: RunProgress, status: Mapping[str, Any], *, goes_on: bool) -> int | None:
    """The step at which the events end although a later status is of a later step: what followed was lost, or cannot be
    written. None where they are whole."""
    step, last = whole(status, "step") or 0, progress.attempts[-1].last_time if progress.attempts else 0.0
    date = seconds(status, "time") or last
    is_later = date >= last + _BEHIND_S if goes_on else date >= last
    return progress.step if step > progress.step and is_later else None


def find_runs(root: Path) -> list[RunDir]:
    """The runs directly under `root`, by name; `root` itself where it is a run; none where it is not a folder."""
    if RunDir(root).exists():
        return [RunDir(root)]
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if os.path.isdir(root) else []
    return [run for run in map(RunDir, folders) if run.exists()]


def _as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
