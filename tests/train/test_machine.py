"""Every transition of the loop's machine, and that each walk ends."""

from __future__ import annotations

import itertools

import pytest

from shardway.train.loop_state import Facts, LoopPhase, next_phase

R, T, V, S, STOP, FINISH, END = (
    LoopPhase.RESTORE,
    LoopPhase.STEP,
    LoopPhase.VALIDATE,
    LoopPhase.SAVE,
    LoopPhase.STOP,
    LoopPhase.FINISH,
    LoopPhase.END,
)

# (done, stop, validate_due, save_due) -> the phases after RESTORE, STEP, VALIDATE, SAVE
TABLE = {
    (False, False, False, False): (T, T, T, T),
    (False, False, False, True): (T, S, T, T),
    (False, False, True, False): (V, V, T, V),
    (False, False, True, True): (V, S, T, V),
    (False, True, False, False): (STOP, STOP, STOP, STOP),
    (False, True, False, True): (STOP, S, S, STOP),
    (False, True, True, False): (STOP, STOP, STOP, STOP),
    (False, True, True, True): (STOP, S, S, STOP),
    (True, False, False, False): (FINISH, FINISH, FINISH, FINISH),
    (True, False, False, True): (FINISH, S, FINISH, FINISH),
    (True, False, True, False): (V, V, FINISH, V),
    (True, False, True, True): (V, S, FINISH, V),
    (True, True, False, False): (FINISH, FINISH, FINISH, FINISH),
    (True, True, False, True): (FINISH, S, S, FINISH),
    (True, True, True, False): (STOP, STOP, STOP, STOP),
    (True, True, True, True): (STOP, S, S, STOP),
}
ALL = list(itertools.product((False, True), repeat=4))


@pytest.mark.parametrize("facts", ALL, ids=str)
def test_the_table_is_whole_and_true(facts: tuple[bool, bool, bool, bool]) -> None:
    assert len(TABLE) == 16
    for phase, expected in zip((R, T, V, S), TABLE[facts], strict=True):
        assert next_phase(phase, Facts(*facts)) is expected, phase
    for phase in (STOP, FINISH, END):
        assert next_phase(phase, Facts(*facts)) is END


@pytest.mark.parametrize("facts", ALL, ids=str)
def test_every_walk_comes_to_a_step_or_an_end(facts: tuple[bool, bool, bool, bool]) -> None:
    """What is due happens at most once between two steps, the saving before the validation."""
    phase, walked = T, []
    while (phase := next_phase(phase, Facts(*facts))) not in (T, END):
        walked.append(phase)
    assert len(walked) == len(set(walked)) <= 3
    assert walked == sorted(walked, key=[S, V, STOP, FINISH].index)


@pytest.mark.parametrize("facts", ALL, ids=str)
def test_a_run_goes_back_before_anything_else_and_then_is_as_after_a_restore(
    facts: tuple[bool, bool, bool, bool],
) -> None:
    for phase in (R, T):
        assert next_phase(phase, Facts(*facts, goes_back=True)) is LoopPhase.GO_BACK
    for phase in (V, S, STOP, FINISH, LoopPhase.GO_BACK):
        assert next_phase(phase, Facts(*facts, goes_back=True)) is not LoopPhase.GO_BACK
    assert next_phase(LoopPhase.GO_BACK, Facts(*facts, goes_back=True)) is next_phase(R, Facts(*facts))


@pytest.mark.parametrize("facts", ALL, ids=str)
def test_a_run_that_ends_where_it_went_on_from_saves_what_its_directory_lacks(
    facts: tuple[bool, bool, bool, bool],
) -> None:
    done, stop, validate_due, _ = facts
    owed, after = Facts(*facts, save_owed=True), next_phase(R, Facts(*facts))
    assert next_phase(R, owed) is (S if done or stop else after)
    for phase in (T, V, S, STOP, FINISH):
        assert next_phase(phase, owed) is next_phase(phase, Facts(*facts))
    assert validate_due or after is not V


@pytest.mark.parametrize("facts", ALL, ids=str)
def test_a_result_that_asks_for_a_checkpoint_is_saved_next(facts: tuple[bool, bool, bool, bool]) -> None:
    """After its validation, or where a run that goes on finds that it is missing; a save asks for no second one."""
    asked = Facts(*facts, result_save_due=True)
    for phase in (R, LoopPhase.GO_BACK, V):
        assert next_phase(phase, asked) is S
    for phase in (T, S, STOP, FINISH):
        assert next_phase(phase, asked) is next_phase(phase, Facts(*facts))
