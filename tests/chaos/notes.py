"""Which seeds are tried, and a line for each case that was: how it came out, and what it has cost (`docs/faults.csv`).

Invariant: without SHARDWAY_CHAOS_NOTES in the environment nothing is written; a case that fails is noted too.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the table is made where no fault is
    from faults.strike import Struck

    from shardway.rundir.directory import RunDir

FILE = "SHARDWAY_CHAOS_NOTES"
"""Names the file that lines are added to."""


def seeds() -> range:
    """Those that are asked for: SHARDWAY_CHAOS_TIMES of them (one), from SHARDWAY_CHAOS_FIRST on (0)."""
    first = int(os.environ.get("SHARDWAY_CHAOS_FIRST", "0"))
    return range(first, first + int(os.environ.get("SHARDWAY_CHAOS_TIMES", "1")))


@dataclass
class Note:
    """A line. `starts`: how often the command was given; times in seconds, None where there is nothing to tell."""

    fault: str
    seed: int
    date: str
    came_out: bool = False
    whom: str = ""
    starts: int | None = None
    noticed_s: float | None = None
    trains_s: float | None = None
    steps_again: int | None = None

    def tell(self, struck: Struck, starts: int, run: RunDir, *, is_timed: bool = True) -> None:
        """What it has cost; `is_timed`: whether the dates of events say how long things took."""
        self.whom, self.starts = struck.whom, starts
        if not is_timed:
            return
        after = [event for event in run.all_events() if event["time"] > struck.time]
        begun = [event for event in after if event["event"] == "started"]
        again = begun[0]["time"] if begun else struck.time
        steps = (event["time"] for event in after if event["event"] == "step" and event["time"] >= again)
        self.noticed_s = _since(struck, next((event["time"] for event in after if event["event"] == "restarted"), None))
        self.trains_s = _since(struck, next(steps, None))
        self.steps_again = max(0, _last_step(run, struck) - begun[0]["step"]) if begun else 0


@contextmanager
def noted(fault: str, seed: int) -> Iterator[Note]:
    """Note how a case came out, by its name in the table; one that is skipped leaves nothing."""
    note = Note(fault, seed, datetime.now(UTC).date().isoformat())
    try:
        yield note
        note.came_out = True
    except (Exception, pytest.fail.Exception):
        _write(note)
        raise
    _write(note)


def read_notes(path: Path) -> list[Note]:
    """The lines of a file, oldest first; none where nothing could be tried."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _write(note: Note) -> None:
    name = os.environ.get(FILE)
    if not name:
        return
    with open(name, "a", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            rows.writerow([each.name for each in fields(Note)])
        rows.writerow(_show(value) for value in asdict(note).values())


def _show(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else value


def _read(row: dict[str, str]) -> Note:
    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    starts, again = number("starts"), number("steps_again")
    return Note(
        row["fault"],
        int(row["seed"]),
        row["date"],
        row["came_out"] == "yes",
        row["whom"],
        None if starts is None else int(starts),
        number("noticed_s"),
        number("trains_s"),
        None if again is None else int(again),
    )


def _since(struck: Struck, time: float | None) -> float | None:
    return None if time is None else time - struck.time


def _last_step(run: RunDir, struck: Struck) -> int:
    """The last step that was recorded before a fault struck."""
    before = (event["step"] for event in run.all_events() if event["time"] <= struck.time and "loss" in event)
    return max(before, default=0)
