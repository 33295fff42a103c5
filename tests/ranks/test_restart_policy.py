"""Whether ranks start again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.failure import FROM_NODES, WITHOUT_PROGRESS, RepeatedFailure, RestartDecision, decide

KILLED, LOST = "rank # was killed", "a file is gone"


def test_a_first_failure_starts_again() -> None:
    assert decide([RepeatedFailure(KILLED, 0)]) == RestartDecision(True)


def test_what_a_person_has_to_change_does_not() -> None:
    assert decide([RepeatedFailure(KILLED, 0, hopeless=True)]) == RestartDecision(False)


def test_the_same_failure_twice_at_one_checkpoint_ends_the_run() -> None:
    assert decide([RepeatedFailure(KILLED, 40), RepeatedFailure(KILLED, 40)]) == RestartDecision(
        False, "the same failure came twice with step 40 as the last that was saved"
    )
    assert (
        decide([RepeatedFailure(KILLED, 0), RepeatedFailure(KILLED, 0)]).reason
        == "the same failure came twice with nothing saved"
    )


def test_the_same_failure_after_progress_does_not() -> None:
    assert decide([RepeatedFailure(KILLED, 40), RepeatedFailure(KILLED, 80)]).restart


def test_different_failures_without_progress_end_the_run_in_time() -> None:
    failures = [RepeatedFailure(KILLED, 40), RepeatedFailure(LOST, 40), RepeatedFailure("something else", 40)]
    assert decide(failures[:2]).restart
    assert decide(failures) == RestartDecision(
        False, "3 failures came one after another with step 40 as the last that was saved"
    )


def at(step: int, signature: str = KILLED) -> RepeatedFailure:
    return RepeatedFailure(signature, step)


def from_nodes(step: int, signature: str = KILLED) -> RepeatedFailure:
    return RepeatedFailure(signature, step, from_nodes=True)


def test_a_checkpoint_on_the_nodes_is_blamed_before_the_run_ends() -> None:
    """It was saved in the first start; two began from it; one more begins from the run directory, and is the last."""
    failures = [at(50), from_nodes(50), from_nodes(50), at(50)]
    assert [decide(failures[:count]).restart for count in (1, 2, 3, 4)] == [True, True, True, False]
    assert decide(failures).reason == "the same failure came twice with step 50 as the last that was saved"
    assert not decide([from_nodes(50), from_nodes(50), at(50)]).restart
    assert decide([from_nodes(50), from_nodes(50), at(60)]).restart


def test_different_failures_from_the_nodes_end_in_time() -> None:
    failures = [at(50, "a"), from_nodes(50, "b"), from_nodes(50, "c"), at(50, "d"), at(50, "e")]
    assert [decide(failures[:count]).restart for count in (2, 3, 4, 5)] == [True, True, True, False]


def test_a_start_that_gets_less_far_is_no_progress() -> None:
    assert not decide([at(50), from_nodes(50), from_nodes(50), at(40)]).restart


def test_a_limit_is_kept_even_with_progress() -> None:
    failures = [RepeatedFailure(KILLED, step) for step in (10, 20, 30)]
    assert decide(failures[:2], most=2).restart
    assert decide(failures, most=2) == RestartDecision(False, "run.max_restarts allows 2")
    assert decide(failures[:1], most=0) == RestartDecision(False)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.data())
def test_every_run_ends_or_makes_progress(signatures: list[str], data: st.DataObject) -> None:
    """However it fails, there are fewer than WITHOUT_PROGRESS restarts between two checkpoints."""
    failures: list[RepeatedFailure] = []
    step = restarts = 0
    for signature in signatures:
        if data.draw(st.booleans()):
            step, restarts = step + 1, 0
        failures.append(RepeatedFailure(signature, step))
        if not decide(failures).restart:
            return
        restarts += 1
        assert restarts < WITHOUT_PROGRESS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), min_size=8, max_size=40))
def test_a_run_ends_that_never_gets_further(drawn: list[tuple[str, bool, int]]) -> None:
    """Whichever checkpoint it begins from, and however far back that is."""
    failures = [
        RepeatedFailure("first", 9),
        *(RepeatedFailure(name, 9 - back, from_nodes=where) for name, where, back in drawn),
    ]
    at_the_top = [failure for failure in failures if failure.saved_step == 9]
    ends = [not decide(failures[:count]).restart for count in range(1, len(failures) + 1)]
    assert any(ends) or len(at_the_top) < WITHOUT_PROGRESS + FROM_NODES


FAILURES = st.builds(
    RepeatedFailure,
    st.sampled_from("abc"),
    st.integers(min_value=0, max_value=5),
    st.sampled_from((False, False, False, True)),
    st.booleans(),
)


@given(st.lists(FAILURES, max_size=12), st.sampled_from("abc"), st.none() | st.integers(min_value=0, max_value=15))
def test_progress_starts_again_unless_a_person_has_to_act_or_has_set_a_limit(
    before: list[RepeatedFailure], signature: str, most: int | None
) -> None:
    newer = RepeatedFailure(signature, max((failure.saved_step for failure in before), default=0) + 1)
    assert decide([*before, newer], most).restart == (most is None or len(before) < most)
    assert not decide([*before, RepeatedFailure(signature, newer.saved_step, hopeless=True)], most).restart


@given(st.lists(FAILURES, min_size=1, max_size=12), st.permutations(range(12)))
def test_only_what_failed_since_the_last_checkpoint_counts(failures: list[RepeatedFailure], order: list[int]) -> None:
    newest = failures[-1]
    since = [failure for failure in failures if failure.saved_step >= newest.saved_step]
    assert decide(failures) == decide(since)
    others = sorted(failures[:-1], key=lambda failure: order[failures.index(failure)])
    assert decide([*others, newest]) == decide(failures)
