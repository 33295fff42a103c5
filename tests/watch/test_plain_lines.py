from __future__ import annotations

import math

import pytest
from watch_events import event, started, step

from shardway.rundir.events import Event
from shardway.watch.words import PlainLines


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _lines(events: list[Event]) -> list[str]:
    """What is told of the events by a clock that shows the time of each."""
    clock = Clock()
    plain = PlainLines(clock=clock)
    told = []
    for each in events:
        clock.now = each["time"]
        told += plain.lines(each)
    return told


def test_story_of_a_run() -> None:
    events = [
        started(total_steps=200),
        *(step(number, number * 0.125) for number in range(1, 101)),
        event("validation", 100, 12.5, loss=2.4, bits_per_byte=3.462, seconds=0.8),
        event("saved", 100, 12.6, name="step-000000100", bytes=14_889_779, seconds=0.31),
        *(step(number, number * 0.125 + 1) for number in range(101, 201)),
        event("validation", 200, 26.1, loss=2.5, accuracy=0.985, seconds=0.8),
        event("finished", 200, 26.2, reason="all 200 steps done"),
    ]
    assert _lines(events) == [
        "started, 200 steps  1.26M parameters, 2 ranks on cpu, 4.1k tokens a step",
        "step   1/200  loss  5.0000  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:16 left",
        "step  41/200  loss  0.2381  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:20 left",
        "step  81/200  loss  0.1220  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:15 left",
        "step 100/200  validation  loss 2.4000  3.462 bits/byte  best so far",
        "step 100/200  saved step-000000100  14.2 MiB in 0.3 s",
        "step 113/200  loss  0.0877  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:12 left",
        "step 153/200  loss  0.0649  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:06 left",
        "step 193/200  loss  0.0515  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:01 left",
        "step 200/200  loss  0.0498  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:00 left",
        "step 200/200  validation  loss 2.5000  98.50% correct",
        "finished at step 200: all 200 steps done",
    ]


def test_the_metric_that_is_watched_is_told() -> None:
    values = ((10, 0.5), (20, 0.75), (30, 0.75))
    found = [event("validation", number, number, loss=2.0, tp=3.0, f1=value) for number, value in values]
    assert _lines([started(monitor="max f1"), *found])[1:] == [
        "step    0/1000  validation  loss 2.0000  f1 0.5  tp 3  best so far",
        "step    0/1000  validation  loss 2.0000  f1 0.75  tp 3  best so far",
        "step    0/1000  validation  loss 2.0000  f1 0.75  tp 3",
    ]


def test_a_deadline_is_told_at_the_start_and_where_it_costs_a_validation() -> None:
    events = [
        started(total_steps=200),
        event("deadline", 0, 0.1, left_s=60.0, margin_s=8.0, reason="60 s left"),
        step(1, 0.2),
        event("validation_skipped", 1, 0.3, left_s=9.0, margin_s=8.0, reason="9 s left"),
    ]
    assert _lines(events)[1:] == [
        "stops in time: 60 s left",
        "step   1/200  loss  5.0000  grad  0.900  lr 1.00e-03  51.2k tokens/s  0:16 left",
        "step   1/200  no validation, which would not end in time: 9 s left",
    ]


def test_resume_stop_and_fault_tell_the_step_that_was_held_back() -> None:
    images = started(step=40, tokens_per_step=32, samples_per_step=32, bytes_per_token=None, world=1)
    events = [
        images,
        step(41, 1.0),
        step(42, 1.1, loss=math.nan, grad_norm=None),
        event("fault", 42, 1.2, kind="UserError", message="no space\n  To do: free some"),
        event("stopped", 42, 1.3, reason="a stop was asked for"),
    ]
    assert _lines(events) == [
        "resumed from step 40 (step-000000040)  1.26M parameters, 1 rank on cpu, 32 samples a step",
        "step   41/1000  loss  0.2381  grad  0.900  lr 1.00e-03    400 samples/s  1:17 left",
        "fault UserError: no space To do: free some",
        "step   42/1000  loss     nan  grad    n/a  lr 1.00e-03    400 samples/s  1:36 left",
        "stopped at step 42: a stop was asked for",
    ]


def test_steps_are_told_at_most_every_five_seconds() -> None:
    steps = [step(number, number * 0.01) for number in range(1, 2001)]
    told = [line for line in _lines([started(total_steps=10_000), *steps]) if line.startswith("step")]
    assert len(told) == 4  # at 0.01, 5.01, 10.01 and 15.01 seconds of 20


@pytest.mark.parametrize("name", ["progress", "telemetry"])
def test_unknown_events_have_no_line(name: str) -> None:
    assert _lines([event(name, 1, 0.0)]) == []


def test_data_that_are_left_out_are_told() -> None:
    reason = "data.skip left out 11 samples between positions 16 and 35"
    events = [
        started(total_steps=200),
        event("skip_too_late", 0, 0.1, reason="data.skip: [8, 16] begins\nbefore position 32", spans=[[8, 16]]),
        event("data_skipped", 0, 0.2, reason=reason, samples=11),
    ]
    assert _lines(events)[1:] == [
        "step   0/200  data.skip: [8, 16] begins before position 32",
        f"step   0/200  {reason}",
    ]


def test_troubles_with_the_disk_are_told() -> None:
    events = [
        started(total_steps=200),
        event(
            "checkpoint_quarantined",
            0,
            0.1,
            name="step-000000200",
            kept_as="damaged-step-000000200",
            reason="a shard is missing",
        ),
        event("save_failed", 0, 0.2, reason="no space\nis left", retry_s=30.0),
        event("background_off", 0, 0.2, reason="a copy of the state takes 4 GiB a rank, which some host lacks"),
        event("recorded_late", 0, 0.3, reason="No space left on device"),
    ]
    assert _lines(events)[1:] == [
        "step-000000200 is damaged (a shard is missing) and kept as damaged-step-000000200",
        "step   0/200  not saved: no space is left; the next try is in 0:30",
        "saves are waited for: a copy of the state takes 4 GiB a rank, which some host lacks",
        "step   0/200  events are written again; until now: No space left on device",
    ]


def test_what_the_guard_has_seen_is_told() -> None:
    events = [
        started(total_steps=200),
        event("transient", 3, 0.1, loss=2.5, grad_norm=None),
        event("step_skipped", 4, 0.2, loss=None, grad_norm=None, in_a_row=2, skipped=5, ids=[[1], [2]]),
        event("corruption", 6, 0.3, ranks=[1], hosts=["n1"], decided=True),
        event("corruption", 7, 0.3, ranks=[0, 1], hosts=["n0", "n1"], decided=False),
        event("replica_differs", 8, 0.3, ranks=[2], hosts=["n2"], parameters=["head.weight"]),
        event("spike", 9, 0.4, of="grad_norm", value=12.5, median=0.5, deviations=31.25),
        event("spike", 9, 0.4, of=3),
        event("rolled_back", 5, 0.5, first=8, last=9, start=40, end=72, samples=30),
        event("rolled_back", 5, 0.5, first=8, last=8),
        event(
            "checkpoint_quarantined",
            5,
            0.6,
            name="step-000000008",
            kept_as="undone-step-000000008",
            reason="the run went back",
        ),
    ]
    assert _lines(events)[1:] == [
        "step 3  passes repeated: loss 2.5000, gradient norm not finite the first time, finite the second (a fault "
        "that has passed)",
        "step 4  no update: loss not finite, gradient norm not finite; 2 skipped in a row, its samples are in the "
        "events",
        "step 6  the same passes gave different results on rank 1 (n1): two of three agreed",
        "step 7  the same passes gave different results on rank 0, 1 (n0, n1): all three differed",
        "step 8  copies of weights differ on rank 2 (n2)",
        "step 9  spike: gradient norm 12.5 is 31.2 deviations above the last ones",
        "step 9  spike: n/a n/a is n/a deviations above the last ones",
        "step 5  the run went back to here after a spike in steps 8 to 9 and leaves out 30 samples (positions 40 to "
        "72)",
        "step 5  the run went back to here after a spike in step 8 and leaves out n/a samples (positions n/a to n/a)",
        "step-000000008 is undone (the run went back) and kept as undone-step-000000008",
    ]
