"""Events of steps as columns: what is read from them is what the events themselves say."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from watch_events import event, started, step

from shardway.rundir.events import Event, drop_undone
from shardway.watch.facts import measured, whole
from shardway.watch.report.compare import WARM_UP, list_step_times
from shardway.watch.report.event_log import EventLog

numbers = st.floats(-1e9, 1e9) | st.just(None) | st.just("many") | st.integers(0, 99)
steps = st.fixed_dictionaries(
    {"event": st.just("step"), "step": st.integers(0, 40)},
    optional={"loss": numbers, "seconds": numbers, "samples_per_s": numbers, "time": st.integers(0, 90)},
)
others = st.fixed_dictionaries(
    {"event": st.sampled_from(("started", "rolled_back", "saved")), "step": st.integers(0, 40)}
)
runs = st.lists(steps | others, max_size=60)


def _split(events: list[Event], key: str) -> list[list[tuple[Any, ...]]]:
    """The series of a number, event by event."""
    parts: list[list[tuple[Any, ...]]] = [[]]
    for each in events:
        if each["event"] in ("started", "rolled_back"):
            parts.append([])
        elif each["event"] == "step" and key in each:
            value, at = measured(each, key), float(each.get("time") or 0)
            if parts[-1] and at < parts[-1][-1][2]:
                parts.append([])
            parts[-1].append((whole(each, "step"), None if math.isnan(value) else value, at))
    return [part for part in parts if part]


@given(runs)
def test_series_are_those_of_the_events(events: list[Event]) -> None:
    log = EventLog(events)
    found = [
        [
            (at_step, None if math.isnan(value) else value, at)
            for at_step, value, at in zip(part.step.tolist(), part.value.tolist(), part.time.tolist(), strict=True)
        ]
        for part in log.list_series("loss")
    ]
    assert found == _split(events, "loss")
    assert log.steps == sum(each["event"] == "step" for each in events)
    walked = [each for before, *_ in log.walk() for each in before]
    assert walked == log.others[: len(walked)]
    assert log.list_series("unknown") == []


@given(runs)
def test_steps_that_hold_are_those_of_the_last_start(events: list[Event]) -> None:
    kept = drop_undone(iter(events))
    starts = [place for place, each in enumerate(kept) if each["event"] == "started"]
    held = [each for each in kept[starts[-1] if starts else 0 :] if each["event"] == "step"]
    log = EventLog(events)
    assert log.numbers[log.find_valid()].tolist() == [each["step"] for each in held]


@given(runs)
def test_step_times_leave_the_warm_up_of_each_attempt_out(events: list[Event]) -> None:
    attempts: list[list[float]] = [[]]
    for each in events:
        if each["event"] == "started":
            attempts.append([])
        elif each["event"] == "step" and measured(each, "seconds") > 0:
            attempts[-1].append(measured(each, "seconds"))
    expected = [took for times in attempts for took in times[min(WARM_UP, len(times) // 5) :]]
    assert list_step_times(EventLog(events)) == expected


def test_many_steps_take_little_memory() -> None:
    """As dictionaries these are 10 MB."""
    tracemalloc.start()
    try:
        log = EventLog([started()])
        for number in range(1, 10_001):
            log.add(step(number, float(number)))
        log.add(event("finished", 10_000, 1e4))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 10_000 * 100
    assert log.column("loss")[-1] == 10 / 10_001
