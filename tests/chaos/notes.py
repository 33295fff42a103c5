"""Which seeds are tried, and notes of what a fault has cost, a line each, for the table of docs/faults.md (`table.py`).

Invariant: without SHARDWAY_CHAOS_NOTES in the environment nothing is written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from faults.strike import Struck

from shardway.rundir.directory import RunDir


def seeds() -> range:
    """Those that are asked for: SHARDWAY_CHAOS_TIMES of them (one), from SHARDWAY_CHAOS_FIRST on (0)."""
    first = int(os.environ.get("SHARDWAY_CHAOS_FIRST", "0"))
    return range(first, first + int(os.environ.get("SHARDWAY_CHAOS_TIMES", "1")))


@dataclass(frozen=True)
class Case:
    """A fault by its name in the table, with one seed; whether the dates of events say how long things took."""

    fault: str
    seed: int
    is_timed: bool = True


def take_note(case: Case, struck: Struck, starts: int, run: RunDir) -> None:
    """A line for the table where one is wanted; `starts`: how often the command was given."""
    path = os.environ.get("SHARDWAY_CHAOS_NOTES")
    if not path:
        return
    facts = {"fault": case.fault, "seed": case.seed, "whom": struck.whom, "starts": starts}
    facts |= _times(struck, run) if case.is_timed else {"noticed_s": None, "trains_s": None, "steps_lost": None}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def _times(struck: Struck, run: RunDir) -> dict[str, float | None]:
    """How long it took, by the dates of the run's events."""
    after = [event for event in run.all_events() if event["time"] > struck.time]
    begun = [event for event in after if event["event"] == "started"]
    steps = [event["time"] for event in after if event["event"] == "step"]
    lost = max(
        (event["step"] for event in run.all_events() if event["time"] <= struck.time and "loss" in event), default=0
    )
    again = begun[0]["time"] if begun else struck.time
    return {
        "noticed_s": next((event["time"] - struck.time for event in after if event["event"] == "restarted"), None),
        "trains_s": next((time - struck.time for time in steps if time >= again), None),
        "steps_lost": max(0, lost - begun[0]["step"]) if begun else 0,
    }
