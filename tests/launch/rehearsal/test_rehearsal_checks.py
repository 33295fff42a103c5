from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.launch.rehearsal import (
    RehearsalVerdict,
    TrialOutcome,
    check_deadline,
    check_losses,
    check_reference,
    check_resume,
    check_save,
    check_second_start,
    check_stop,
    check_stop_file,
)
from shardway.rundir.attempts import Attempt, Ending, Result

OK, FAIL, UNKNOWN = RehearsalVerdict.OK, RehearsalVerdict.FAIL, RehearsalVerdict.UNKNOWN


def steps(count: int, first: int = 1, **changed: Any) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": step, "loss": 1 / step, "grad_norm": 2.0, "lr": 0.1, "seconds": 0.5, **changed}
        for step in range(first, first + count)
    ]


def trial(
    *events: dict[str, Any], state: Ending | None = None, code: int = 0, number: int = 1, **facts: Any
) -> TrialOutcome:
    result = Result(state, "why") if state else None
    facts = {"seconds": 8.0, "killed": False, **facts}
    return TrialOutcome(Attempt(Path(f"/nowhere/000{number}")), code, result=result, events=events, **facts)


def started(step: int = 0) -> dict[str, Any]:
    return {"event": "started", "step": step}


def test_a_run_without_a_break_has_to_train() -> None:
    assert check_reference(trial(started(), *steps(3))).verdict is OK
    assert (
        check_reference(trial(started(), *steps(3))).found == "3 steps without a break in 8.0 s, the longest in 0.50 s"
    )
    for bad in (trial(started()), trial(started(), *steps(3), code=4), trial(started(), *steps(3), killed=True)):
        assert check_reference(bad).verdict is FAIL


def test_a_stop_is_in_time_where_the_run_itself_says_deadline() -> None:
    good = check_stop(trial(started(), *steps(3), state=Ending.DEADLINE, left_s=2.0))
    assert (good.name, good.verdict) == ("attempt 1 stops in time", OK)
    assert good.found == "at step 3, 2.0 s before its deadline of 10.0 s"
    for state in (None, *(state for state in Ending if state is not Ending.DEADLINE)):
        assert check_stop(trial(started(), *steps(3), state=state, left_s=2.0)).verdict is FAIL
    leaving = check_stop(trial(started(), *steps(3), state=Ending.DEADLINE, left_s=-0.1, killed=True, code=-9))
    assert (leaving.verdict, leaving.found) == (
        OK, "at step 3; it had saved, and was leaving at its deadline of 7.9 s",
    )  # fmt: skip
    for state in (None, Ending.STOPPED):
        late = check_stop(trial(started(), *steps(3), state=state, left_s=-0.1, killed=True, code=-9))
        assert (late.verdict, late.found) == (FAIL, "it was still running at its deadline of 7.9 s")
    assert check_stop(trial(started(), *steps(3), state=Ending.DEADLINE, left_s=2.0, code=1)).verdict is FAIL


@pytest.mark.parametrize(("saved", "verdict"), [([3], OK), ([1, 3], OK), ([], FAIL), ([2], FAIL), ([4], FAIL)])
def test_the_step_of_the_stop_has_to_be_saved(saved: list[int], verdict: RehearsalVerdict) -> None:
    assert check_save(trial(started(), *steps(3)), saved).verdict is verdict


@pytest.mark.parametrize(("step", "verdict"), [(3, OK), (2, FAIL), (0, FAIL), (4, FAIL)])
def test_the_next_attempt_has_to_go_on_where_the_last_one_stopped(step: int, verdict: RehearsalVerdict) -> None:
    before = trial(started(), *steps(3))
    assert check_resume(before, trial(started(step), *steps(2, step + 1), number=2)).verdict is verdict
    assert check_resume(before, trial(number=2)).verdict is FAIL


COLUMN = st.sampled_from(["loss", "grad_norm", "lr"])


@settings(max_examples=40)
@given(count=st.integers(1, 9), at=st.integers(1, 9), column=COLUMN, value=st.floats(allow_nan=False) | st.none())
def test_one_number_that_differs_is_found(count: int, at: int, column: str, value: float | None) -> None:
    """Steps that only the run that was cut took do not count."""
    through, cut = steps(count), steps(12)
    assert check_losses(through, cut).verdict is OK
    same = cut[at - 1][column] == value
    cut[at - 1][column] = value
    check = check_losses(through, cut)
    assert (check.verdict is OK) == (same or at > count)
    if check.verdict is FAIL:
        assert check.found.startswith(f"{column} of step {at} is {value!r}, and ")


def test_steps_that_were_not_taken_again_cannot_be_compared() -> None:
    assert check_losses(steps(5), steps(4)).found == "of 5 steps, 4 were taken again"
    assert check_losses([], []).verdict is FAIL


def test_a_command_is_seen_from_outside() -> None:
    assert check_stop_file(trial(asked_s=6.0)).found == "it ended 2.0 s after it was asked to"
    assert check_stop_file(trial(asked_s=6.0, killed=True)).verdict is FAIL
    assert check_stop_file(trial(asked_s=6.0, code=1)).verdict is FAIL
    assert check_stop_file(trial()).verdict is UNKNOWN
    assert check_deadline(trial(left_s=1.5)).verdict is OK
    assert check_deadline(trial(left_s=-0.1, killed=True, code=-15)).verdict is UNKNOWN
    assert check_deadline(trial(left_s=1.5, code=1)).verdict is FAIL
    assert check_second_start(trial()).verdict is OK
    assert check_second_start(trial(code=1)).verdict is FAIL
