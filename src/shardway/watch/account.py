"""The time account of a run: what the time of all its attempts was spent on.

Rank 0 books each of its seconds on one activity (`shardway.ranks.heartbeat`) and reports the sums in its events and in
status.json. The account is made from these sums: the time in steps that remain after resumes, other work, and the
time between attempts.

Invariant: the rows add up to `wall_s`, the time from the beginning of the first attempt to the last sign of life (or
to now); times that a rank measured itself take precedence over differences of dates. Memory grows with saves and
attempts, never with steps; reading never raises. This module neither reads files nor renders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from shardway.rundir.events import Event
from shardway.watch.facts import MOST_SECONDS, number, seconds, text, whole

_WORK = ("step", "repeat")
_ROWS = {
    "start": "start_s",
    "load": "load_s",
    "data": "data_s",
    "validate": "validation_s",
    "save": "save_s",
    "script": "script_s",
    "end": "end_s",
}
"""Activity of rank 0 -> row of the account. Steps are split between two rows; an unknown activity is unaccounted."""


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
        """The rows that add up: seconds by field name."""
        return {name: getattr(self, name) for name in ROW_NAMES}

    @property
    def wall_s(self) -> float:
        """From the beginning of the first attempt to the end of the account."""
        return math.fsum(self.rows.values())

    @property
    def productive_share(self) -> float | None:
        """Between 0 and 1; None where no time has passed."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Every row, their sum and the share of productive time."""
        return {"wall_s": self.wall_s, "productive_share": self.productive_share, **asdict(self)}


ROW_NAMES = tuple(each.name for each in fields(TimeAccount) if each.name not in ("repeated_s", "undone_steps"))
"""The fields of an account that add up, in display order."""


@dataclass(frozen=True)
class _SpentAt:
    """Rank 0's time spent so far (seconds by activity) when `step` steps were done, at `time` (Unix seconds)."""

    time: float
    step: int
    spent: Mapping[str, float]
    unfinished_s: float = 0.0

    @property
    def total_s(self) -> float:
        return math.fsum(self.spent.values())

    @property
    def work_s(self) -> float:
        """Seconds in finished steps."""
        return max(0.0, self._all_work_s - self.unfinished_s)

    @property
    def _all_work_s(self) -> float:
        return sum(self.spent.get(name, 0.0) for name in _WORK)

    def lost_s(self, kept_s: float) -> float:
        """Seconds in steps other than those that are kept."""
        return max(0.0, self._all_work_s - kept_s)


@dataclass
class _AttemptTime:
    """An attempt that continued from step `base` at `started` (Unix seconds); `step`, `last_time` are the last seen.

    A rollback within an attempt begins another entry: `before` is what rank 0 had spent until then.
    """

    base: int
    started: float
    step: int
    last_time: float
    owner: tuple[Any, Any]
    records: list[_SpentAt] = field(default_factory=list)
    before: Mapping[str, float] = field(default_factory=dict)

    def begun(self) -> float:
        """When its first activity began."""
        return self.records[0].time - self.records[0].total_s if self.records else self.started

    def add(self, source: Mapping[str, Any]) -> None:
        """Add the times in an event or a status, if they are newer than the last record."""
        found = _read_record(source, self.step)
        if found is not None and (not self.records or found.time >= self.records[-1].time):
            spent = {name: max(0.0, each - self.before.get(name, 0.0)) for name, each in found.spent.items()}
            self.records.append(replace(found, spent=spent))
            self.step = max(self.step, found.step)

    def owns(self, status: Mapping[str, Any]) -> bool:
        """Whether the same process wrote that status."""
        return _owner(status) == self.owner

    def kept_work_s(self, keep: int) -> float:
        """Seconds in finished steps up to `keep`: exact where a record was made there, as at every save."""
        before = [record for record in self.records if record.step <= keep]
        after = next((record for record in self.records if record.step > keep), None)
        if not before or keep <= self.base:
            return 0.0
        last = before[-1]
        if after is None:
            return last.work_s
        part = (keep - last.step) / (after.step - last.step)
        return last.work_s + part * max(0.0, after.work_s - last.work_s)


class Book:
    """Builds the account from rank 0's events, given in the order written."""

    def __init__(self) -> None:
        self._attempts: list[_AttemptTime] = []

    def update(self, event: Event) -> None:
        """Add one event, undone ones too."""
        if event["event"] == "started":
            self._start(event)
        elif self._attempts:
            attempt = self._attempts[-1]
            attempt.last_time = max(attempt.last_time, _time_of(event))
            if event["event"] == "rolled_back":
                self._go_back(attempt, event)
            elif event["event"] == "step":
                attempt.step = whole(event, "step") or attempt.step
            elif "spent" in event:
                attempt.add(event)

    def _start(self, event: Event) -> None:
        before = event.get("before")
        if isinstance(before, Mapping) and self._attempts and self._attempts[-1].owns(before):
            self._attempts[-1].add(before)
        base = whole(event, "step") or 0
        started = _time_of(event)
        self._attempts.append(_AttemptTime(base, started, base, started, _owner(event)))
        self._attempts[-1].add(event)

    def _go_back(self, attempt: _AttemptTime, event: Event) -> None:
        """End the attempt at the step reached, and begin another entry from the event's step."""
        base, at = whole(event, "step") or 0, _time_of(event)
        attempt.add({**event, "step": attempt.step})
        spent = event.get("spent")
        before = {str(name): number(spent, name) or 0.0 for name in spent} if isinstance(spent, Mapping) else {}
        self._attempts.append(_AttemptTime(base, at, base, at, attempt.owner, before=before))
        self._attempts[-1].add(event)

    def account(self, status: Mapping[str, Any], now: float | None = None) -> TimeAccount | None:
        """The account including the last status; up to `now` (Unix seconds) if the run goes on.

        None where no time was booked: the run never began, or is older than time records.
        """
        attempts = [*self._attempts]
        if attempts and attempts[-1].owns(status):
            attempts[-1] = replace(attempts[-1], records=[*attempts[-1].records])
            attempts[-1].add(status)
        if not any(attempt.records for attempt in attempts):
            return None
        return _add_up(attempts, now)


def _add_up(attempts: Sequence[_AttemptTime], now: float | None) -> TimeAccount:
    rows = dict.fromkeys((*ROW_NAMES, "repeated_s"), 0.0)
    undone, end = 0, attempts[0].begun()
    for place, attempt in enumerate(attempts):
        is_last = place == len(attempts) - 1
        keep = min((later.base for later in attempts[place + 1 :]), default=attempt.step)
        undone += max(0, attempt.step - max(keep, attempt.base))
        rows["idle_s"] += max(0.0, attempt.begun() - end)
        overlap = max(0.0, end - attempt.begun())
        end = _add_attempt(rows, attempt, keep, (end, now if is_last else None))
        rows["start_s"] -= min(overlap, attempt.records[0].spent.get("start", 0.0)) if attempt.records else 0.0
    return TimeAccount(**rows, undone_steps=undone)


def _add_attempt(rows: dict[str, float], attempt: _AttemptTime, keep: int, span: tuple[float, float | None]) -> float:
    """Add one attempt's times; returns when it ended. `span`: the end of the one before, and now if it goes on."""
    earliest, now = span
    end = max(attempt.last_time, now or 0.0, earliest)
    if not attempt.records:
        rows["unaccounted_s"] += end - max(attempt.begun(), earliest)
        return end
    last = attempt.records[-1]
    end = max(end, last.time)
    kept_s = min(attempt.kept_work_s(keep), last.work_s)
    rows["productive_s"] += kept_s
    rows["lost_s"] += last.lost_s(kept_s)
    rows["repeated_s"] += last.spent.get("repeat", 0.0)
    for name, spent_s in last.spent.items():
        if name not in _WORK:
            rows[_ROWS.get(name, "unaccounted_s")] += spent_s
    rows["unaccounted_s"] += max(0.0, end - max(last.time, earliest))
    return end


def _time_of(event: Event) -> float:
    return seconds(event, "time") or 0.0


def _owner(source: Mapping[str, Any]) -> tuple[Any, Any]:
    return whole(source, "pid"), text(source, "host")


def _read_record(source: Mapping[str, Any], step: int) -> _SpentAt | None:
    """The times in an event or a status; None where there are none. `step` is used where none is given."""
    spent, at = source.get("spent"), seconds(source, "time")
    if not isinstance(spent, Mapping) or at is None:
        return None
    times = {str(name): max(0.0, number(spent, name) or 0.0) for name in spent}
    if not all(value < MOST_SECONDS for value in times.values()):
        return None
    unfinished_s = seconds(source, "unfinished_s") or 0.0
    recorded = whole(source, "step")
    return _SpentAt(at, step if recorded is None else recorded, times, unfinished_s if unfinished_s > 0 else 0.0)
