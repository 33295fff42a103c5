"""Whether ranks start again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardway.ranks.agent.policy import WITHOUT_PROGRESS, Failure, Verdict, decide

KILLED, LOST = "rank # was killed", "a file is gone"


def test_a_first_failure_starts_again() -> None:
    assert decide([Failure(KILLED, 0)]) == Verdict(True)


def test_what_a_person_has_to_change_does_not() -> None:
    assert decide([Failure(KILLED, 0, hopeless=True)]) == Verdict(False)


def test_the_same_failure_twice_at_one_checkpoint_ends_the_run() -> None:
    assert decide([Failure(KILLED, 40), Failure(KILLED, 40)]) == Verdict(
        False, "the same failure came twice with step 40 as the last that was saved"
    )
    assert decide([Failure(KILLED, 0), Failure(KILLED, 0)]).reason == "the same failure came twice with nothing saved"


def test_the_same_failure_after_progress_does_not() -> None:
    assert decide([Failure(KILLED, 40), Failure(KILLED, 80)]).restart


def test_different_failures_without_progress_end_the_run_in_time() -> None:
    failures = [Failure(KILLED, 40), Failure(LOST, 40), Failure("something else", 40)]
    assert decide(failures[:2]).restart
    assert decide(failures) == Verdict(
        False, "3 failures came one after another with step 40 as the last that was saved"
    )


def test_a_limit_is_kept_even_with_progress() -> None:
    failures = [Failure(KILLED, step) for step in (10, 20, 30)]
    assert decide(failures[:2], most=2).restart
    assert decide(failures, most=2) == Verdict(False, "run.restarts allows 2")
    assert decide(failures[:1], most=0) == Verdict(False)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.data())
def test_every_run_ends_or_makes_progress(signatures: list[str], data: st.DataObject) -> None:
    """However it fails, there are fewer than WITHOUT_PROGRESS restarts between two checkpoints."""
    failures: list[Failure] = []
    step = restarts = 0
    for signature in signatures:
        if data.draw(st.booleans()):
            step, restarts = step + 1, 0
        failures.append(Failure(signature, step))
        if not decide(failures).restart:
            return
        restarts += 1
        assert restarts < WITHOUT_PROGRESS


FAILURES = st.builds(
    Failure, st.sampled_from("abc"), st.integers(min_value=0, max_value=5), st.sampled_from((False, False, False, True))
)


@given(st.lists(FAILURES, max_size=12), st.sampled_from("abc"), st.none() | st.integers(min_value=0, max_value=15))
def test_progress_starts_again_unless_a_person_has_to_act_or_has_set_a_limit(
    before: list[Failure], signature: str, most: int | None
) -> None:
    newer = Failure(signature, max((failure.saved_step for failure in before), default=0) + 1)
    assert decide([*before, newer], most).restart == (most is None or len(before) < most)
    assert not decide([*before, Failure(signature, newer.saved_step, hopeless=True)], most).restart


@given(st.lists(FAILURES, min_size=1, max_size=12), st.permutations(range(12)))
def test_only_what_failed_since_the_last_checkpoint_counts(failures: list[Failure], order: list[int]) -> None:
    newest = failures[-1]
    since = [failure for failure in failures if failure.saved_step == newest.saved_step]
    assert decide(failures) == decide(since)
    others = sorted(failures[:-1], key=lambda failure: order[failures.index(failure)])
    assert decide([*others, newest]) == decide(failures)
