from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.errors import JobError, LostContact, NodeLost, SiteError, UserError
from shardway.ranks.failure import RankFault, describe_error, find_attempt, report_end, report_fault, sign_failure
from shardway.rundir.attempts import VARIABLE, Attempt, AttemptStart, Ending, Result


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = Attempt(tmp_path / "runs/a/attempts/0003")
    attempt.make()
    attempt.write_started(AttemptStart("4711", started=1.0))
    return attempt


def test_the_attempt_is_the_one_that_the_job_names(attempt: Attempt) -> None:
    assert find_attempt({}) is None
    assert find_attempt({VARIABLE: ""}) is None
    found = find_attempt({VARIABLE: str(attempt.path)})
    assert found == attempt
    assert (found.number, found.run_path.name) == (3, "a")


def test_a_folder_that_cannot_be_seen_is_told(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as told:
        find_attempt({VARIABLE: f"{tmp_path}/none"})
    assert str(told.value) == (
        f"SHARDWAY_ATTEMPT_DIR names {tmp_path}/none, and there is no such folder on {socket.gethostname()}.\n"
        "  It is where a job says how it went. To do: make the run directory visible on every node and in the "
        "container, or unset the variable where no job is meant."
    )


# --- signatures

SAME = [
    ("JobError", "the loss of step 17 is nan", "the loss of step 9 is nan"),
    ("JobError", "the checkpoint /scratch/a/step-000000010 is damaged: x", "the checkpoint runs/b is damaged: x"),
    ("RuntimeError", "expected 0x7f3a10 at n[01-03]", "expected 0xdeadbeef at n[2-4]"),
    ("JobError", "run 3f2a91bc04 took 1.5e-3 s", "run a81f00b2c9d3 took 12 s"),
    ("LostContact", "rank 0 lost contact during a step: Connection closed by peer [10.0.0.1]:4711",
     "rank 3 lost contact during a step: Broken pipe"),
    ("UserError", "2 problems\n  a: b", "3 problems\n  c: d"),
]  # fmt: skip
OTHER = [
    ("the loss of step 17 is nan", "the gradient of step 17 has the norm nan"),
    ("KeyError: 'a'", "KeyError: 'b'"),
    ("a disk is full", "a disc is full"),
]


@pytest.mark.parametrize(("kind", "one", "other"), SAME)
def test_the_same_failure_signs_alike(kind: str, one: str, other: str) -> None:
    signed = sign_failure(RankFault(kind, one, 4))
    assert signed == sign_failure(RankFault(kind, other, 4))
    assert signed.startswith(f"{kind}: ")
    assert "\n" not in signed


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_another_failure_signs_otherwise(one: str, other: str) -> None:
    assert sign_failure(RankFault("JobError", one, 4)) != sign_failure(RankFault("JobError", other, 4))
    assert sign_failure(RankFault("JobError", one, 4)) != sign_failure(RankFault("UserError", one, 4))


@settings(max_examples=60)
@given(st.text(max_size=80), st.integers(0, 10**9), st.integers(0, 10**9))
def test_numbers_never_count(words: str, one: int, other: int) -> None:
    def sign(number: int) -> str:
        return sign_failure(RankFault("JobError", f"step {number} of {words}", 4))

    assert sign(one) == sign(other)
    assert len(sign(one)) <= 200
    assert len(sign(one).splitlines()) == 1


def test_an_error_of_another_library_is_named_as_it_is() -> None:
    fault = describe_error(KeyError(3))
    assert fault == RankFault("KeyError", "KeyError: 3", 70)
    assert sign_failure(fault) == "KeyError: #"
    assert describe_error(UserError("a\nb")) == RankFault("UserError", "a\nb", 2)


# --- who tells


def test_what_ended_a_rank_is_the_result(attempt: Attempt) -> None:
    assert report_fault(attempt, "rank 1", describe_error(JobError("step 5 broke\n  To do: x")), step=5)
    result = attempt.read_result()
    assert result is not None
    assert abs(result.ended - time.time()) < 60
    host = socket.gethostname()
    assert result == Result(
        Ending.CRASHED, "step 5 broke", 5, 4, "JobError: step # broke", "4711", host, "rank 1", result.ended
    )


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (describe_error(JobError("rank 0 ran out of memory"), out_of_memory=True), Ending.OUT_OF_MEMORY),
        (describe_error(NodeLost("node 1 (n2) does not answer any more")), Ending.NODE_FAILURE),
        (describe_error(LostContact("rank 0 lost contact: closed")), Ending.CRASHED),
    ],
)
def test_what_is_no_crash_has_a_state_of_its_own(attempt: Attempt, fault: RankFault, state: Ending) -> None:
    assert report_fault(attempt, "rank 0", fault, wait_s=0.0)
    result = attempt.read_result()
    assert result is not None
    assert result.state is state


def test_the_first_words_stand(attempt: Attempt) -> None:
    assert report_end(attempt, Result(Ending.FINISHED, step=9, by="rank 0"))
    assert not report_fault(attempt, "rank 1", describe_error(JobError("late")))
    result = attempt.read_result()
    assert result is not None
    assert (result.state, result.step, result.job) == (Ending.FINISHED, 9, "4711")


def test_lost_contact_waits_for_the_cause(attempt: Attempt) -> None:
    """The rank with the cause comes a moment later."""
    cause = threading.Timer(0.1, lambda: report_fault(attempt, "rank 1", describe_error(JobError("its disk is gone"))))
    cause.start()
    assert not report_fault(attempt, "rank 0", describe_error(LostContact("rank 0 lost contact: closed")), wait_s=30)
    cause.join()
    result = attempt.read_result()
    assert result is not None
    assert (result.by, result.failure) == ("rank 1", "JobError: its disk is gone")


def test_lost_contact_speaks_where_nobody_else_does(attempt: Attempt) -> None:
    """The rank with the cause was killed."""
    assert report_fault(attempt, "rank 0", describe_error(LostContact("rank 0 lost contact: closed")), wait_s=0.06)
    result = attempt.read_result()
    assert result is not None
    assert (result.by, result.failure) == ("rank 0", "LostContact: rank # lost contact")


def test_a_folder_that_is_gone_does_not_hide_the_error(tmp_path: Path) -> None:
    assert not report_fault(Attempt(tmp_path / "0001"), "rank 0", describe_error(JobError("what")))
    assert not report_fault(None, "rank 0", describe_error(JobError("what")))
