from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.ranks.failure import AttemptEnd, find_end
from shardway.ranks.stop import Decision, StepRequests, read_decision
from shardway.rundir.attempts import BY_SIGNAL, Attempt, AttemptStart, Ending
from shardway.train.stops import (
    ESTIMATED_BYTES,
    ESTIMATED_RATE,
    Deadline,
    Pace,
    find_deadline,
    read_pace,
)

SECONDS = st.floats(0.0, 1e4)
ROUNDED_S = 1e-6
"""Where as much is left as the margin, to the last bits of these sums, either answer is right."""


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_margin_is_what_was_measured() -> None:
    """Two saves, two steps, a validation, and what the end takes."""
    deadline = Deadline(4600.0, 3600.0, clock=Clock())
    for save in (9.0, 1.0, 3.0, 2.0):  # the slowest of the last three
        deadline.took_save(save)
    for step in (60.0, 0.5, 0.7, 0.6):  # the first compiles
        deadline.took_step(step)
    deadline.took_validation(5.0)
    deadline.took_validation(4.0)
    margin = deadline.margin()
    assert margin.seconds == pytest.approx(2 * 3.0 + 2 * 0.7 + 5.0 + 30.0)
    assert margin.reason == (
        "2 x 3.0 s (the slowest of the last 3 saves) + 2 x 0.7 s for the longest step + 5.0 s for a validation + "
        "30.0 s to end"
    )


@pytest.mark.parametrize(("wall", "teardown"), [(3600.0, 30.0), (280.0, 30.0), (60.0, 8.0), (20.0, 4.0)])
def test_a_short_wall_time_keeps_less_for_the_end(wall: float, teardown: float) -> None:
    assert Deadline(1e9, wall, before=Pace(save_s=0.0)).margin().seconds == pytest.approx(teardown)


def test_the_first_step_counts_while_there_is_no_other() -> None:
    deadline = Deadline(2000.0, 0.0, before=Pace(save_s=0.0))
    deadline.took_step(60.0)
    assert deadline.margin().seconds == pytest.approx(122.0)
    deadline.took_step(1.0)
    assert deadline.margin().seconds == pytest.approx(4.0)


def test_before_the_first_save_it_is_that_of_an_earlier_attempt_or_an_estimate() -> None:
    earlier = Deadline(2000.0, 0.0, before=read_pace({"save_seconds": 12.5, "validation_seconds": 3}), clock=Clock())
    assert earlier.margin().seconds == pytest.approx(2 * 12.5 + 3.0 + 2.0)
    assert "the last save of an earlier attempt took 12.5 s" in earlier.describe()
    unknown = Deadline(2000.0, 0.0, before=read_pace({"save_seconds": "soon"}), clock=Clock())
    for odd in (float("nan"), float("inf"), 10**400, -1, None):
        assert read_pace({"save_seconds": odd, "validation_seconds": odd}) == Pace(None, None)
    unknown.expect_save_of(ESTIMATED_RATE / ESTIMATED_BYTES * 9)
    assert unknown.margin().seconds == pytest.approx(2 * 10.0 + 2.0)
    assert "an estimate, since nothing was saved yet" in unknown.describe()
    unknown.took_save(4.0)
    assert unknown.margin().seconds == pytest.approx(2 * 4.0 + 2.0)


def test_a_margin_of_the_run_file_is_taken_as_it_is() -> None:
    deadline = Deadline(4600.0, 3600.0, fixed_margin_s=120.0, clock=Clock())
    deadline.took_save(500.0)
    assert deadline.describe() == "deadline in 3600.0 s, margin 120.0 s: run.stop_margin says so"
    deadline.took_validation(3400.0)
    assert deadline.fits_validation()
    deadline.took_validation(3481.0)
    assert not deadline.fits_validation()


@settings(max_examples=60)
@given(left=st.floats(-1e4, 1e4), save=SECONDS, step=SECONDS, validation=SECONDS, wall=SECONDS)
def test_it_is_near_when_less_is_left_than_the_margin(
    left: float, save: float, step: float, validation: float, wall: float
) -> None:
    clock = Clock()
    deadline = Deadline(clock.now + left, wall, clock=clock)
    deadline.took_save(save)
    deadline.took_step(step)
    deadline.took_validation(validation)
    needed = deadline.margin().seconds
    assert needed >= 2 * save + 2 * step + validation
    assert deadline.is_near() == (deadline.left_s < needed)
    assert deadline.fits_validation() or left < needed + ROUNDED_S


def test_the_reason_of_a_stop_is_that_of_the_moment_it_was_decided() -> None:
    clock = Clock()
    deadline = Deadline(1100.0, 0.0, clock=clock)
    deadline.took_save(10.0)
    assert not deadline.is_near()
    clock.now = 1090.0
    assert deadline.is_near()
    said = "deadline in 10.0 s, margin 22.0 s: 2 x 10.0 s (the slowest of the last 1 saves) + 2 x 0.0 s for the longest"
    assert deadline.describe().startswith(said)
    clock.now = 1099.0
    deadline.took_save(0.1)
    assert deadline.is_near(), "a wish is not taken back"
    assert deadline.describe().startswith(said)


def test_the_job_says_when_it_ends(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "attempts/0001")
    attempt.make()
    assert find_deadline(None, None, Pace()) is None
    assert find_deadline(attempt, None, Pace()) is None
    attempt.write_started(AttemptStart("7", started=1000.0, deadline=0.0))
    assert find_deadline(attempt, None, Pace()) is None
    attempt.write_started(AttemptStart("7", started=1000.0, deadline=1060.0))
    assert json.loads((attempt.path / "started.json").read_text())["deadline"] == 1060.0
    deadline = find_deadline(attempt, None, Pace(save_s=0.0))
    assert deadline is not None
    assert deadline.left_s < 0
    assert deadline.margin().seconds == pytest.approx(8.0)


# --- which of the reasons gives an end its name

CLOCK = Decision("the wall-time is about to end", deadline=True)
SIGNAL = Decision("a signal asked for a stop")
FILE = Decision("the stop file asked for a stop")


@pytest.mark.parametrize(
    ("decision", "stop_file", "end"),
    [
        (CLOCK, None, AttemptEnd(Ending.DEADLINE, "deadline in 9 s")),
        (SIGNAL, None, AttemptEnd(Ending.STOPPED, SIGNAL.stop_reason, BY_SIGNAL)),
        (FILE, "", AttemptEnd(Ending.STOPPED, FILE.stop_reason)),
        (FILE, "signal came: SIGTERM", AttemptEnd(Ending.STOPPED, "a signal came: SIGTERM", BY_SIGNAL)),
        (FILE, "too slow", AttemptEnd(Ending.STOPPED, "too slow")),
        (FILE, "deadline: USR2", AttemptEnd(Ending.DEADLINE, "USR2")),
        (FILE, "preempted", AttemptEnd(Ending.PREEMPTED, "preempted")),
        (FILE, "stop before the deadline", AttemptEnd(Ending.STOPPED, "stop before the deadline")),
        (FILE, "deadlines: two", AttemptEnd(Ending.STOPPED, "deadlines: two")),
        (FILE, "preempted by one: another, larger", AttemptEnd(Ending.PREEMPTED, "by one: another, larger")),
        # Of two at once: what a person asked for holds the chain, and a job script knows why a signal came.
        (CLOCK, "enough", AttemptEnd(Ending.STOPPED, "enough")),
        (SIGNAL, "Preempted, by a larger job", AttemptEnd(Ending.PREEMPTED, "by a larger job")),
    ],
)
def test_an_end_has_one_name(decision: Decision, stop_file: str | None, end: AttemptEnd) -> None:
    assert find_end(decision, stop_file, "deadline in 9 s") == end


def test_the_clock_alone_makes_it_a_deadline() -> None:
    def decide(*wishes: StepRequests) -> Decision:
        return read_decision([sum(slot) for slot in zip(*(wish.as_numbers() for wish in wishes), strict=True)])

    assert decide(StepRequests(deadline=True), StepRequests()) == CLOCK
    assert not decide(StepRequests(deadline=True), StepRequests(stop_signal=True)).deadline
    assert decide(StepRequests(), StepRequests()) == Decision()
