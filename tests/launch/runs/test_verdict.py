from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.launch.runs.job_status import JobStatus, LedgerEntry, decide, find_current
from shardway.launch.schedulers.base import JobPhase, JobRecord, SchedulerEnding
from shardway.rundir.attempts import BY_SIGNAL, Attempt, Ending, Result, Submission


def ended(ending: SchedulerEnding, code: int | None = None, signal: int = 0) -> JobRecord:
    return JobRecord("7", JobPhase.ENDED, ending=ending, exit_code=code, signal=signal, ended=50.0)


RUNNING, QUEUED = JobRecord("7", JobPhase.RUNNING), JobRecord("7", JobPhase.QUEUED)
UNKNOWN = JobRecord("7", JobPhase.UNKNOWN)
SCRIPT = Result(Ending.CRASHED, exit_code=137, failure="exit code 137", step=12, job="7", by="job script", ended=40.0)


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (SchedulerEnding.COMPLETED, Ending.UNKNOWN),
        (SchedulerEnding.FAILED, Ending.CRASHED),
        (SchedulerEnding.TIMEOUT, Ending.DEADLINE),
        (SchedulerEnding.CANCELLED, Ending.STOPPED),
        (SchedulerEnding.PREEMPTED, Ending.PREEMPTED),
        (SchedulerEnding.OUT_OF_MEMORY, Ending.OUT_OF_MEMORY),
        (SchedulerEnding.NODE_FAILURE, Ending.NODE_FAILURE),
        (SchedulerEnding.NEVER_STARTED, Ending.CRASHED),
        (SchedulerEnding.UNCLEAR, Ending.UNKNOWN),
    ],
)
def test_the_scheduler_is_believed_where_the_job_wrote_nothing(ending: SchedulerEnding, state: Ending) -> None:
    result = decide(None, ended(ending, 3))
    assert result is not None
    assert (result.state, result.exit_code, result.job, result.by, result.ended) == (state, 3, "7", "scheduler", 50.0)
    assert result.reason


@pytest.mark.parametrize("record", [None, RUNNING, QUEUED])
def test_a_job_that_is_there_or_of_which_nobody_tells_is_not_over(record: JobRecord | None) -> None:
    assert decide(None, record) is None


def test_a_job_that_nobody_knows_is_lost() -> None:
    result = decide(None, UNKNOWN)
    assert result is not None
    assert result.state is Ending.UNKNOWN


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (SchedulerEnding.OUT_OF_MEMORY, Ending.OUT_OF_MEMORY),
        (SchedulerEnding.PREEMPTED, Ending.PREEMPTED),
        (SchedulerEnding.NODE_FAILURE, Ending.NODE_FAILURE),
        (SchedulerEnding.TIMEOUT, Ending.DEADLINE),
        (SchedulerEnding.CANCELLED, Ending.STOPPED),
    ],
)
def test_a_job_script_that_saw_an_exit_code_is_told_why(ending: SchedulerEnding, state: Ending) -> None:
    result = decide(SCRIPT, ended(ending))
    assert result is not None
    assert (result.state, result.by) == (state, "scheduler")
    assert (result.step, result.exit_code, result.ended) == (12, 137, 40.0)


@pytest.mark.parametrize("ending", [SchedulerEnding.FAILED, SchedulerEnding.COMPLETED, SchedulerEnding.UNCLEAR])
def test_a_scheduler_that_knows_no_more_than_the_job_script_changes_nothing(ending: SchedulerEnding) -> None:
    assert decide(SCRIPT, ended(ending, 137)) is SCRIPT
    assert decide(SCRIPT, UNKNOWN) is SCRIPT
    assert decide(SCRIPT, None) is SCRIPT


@pytest.mark.parametrize("record", [RUNNING, QUEUED])
def test_a_failure_that_the_job_script_saw_waits_for_the_schedulers_reason(record: JobRecord) -> None:
    assert decide(SCRIPT, record) is None
    assert decide(replace(SCRIPT, state=Ending.DEADLINE), record) is not None


@pytest.mark.parametrize(
    ("ending", "deadline", "state"),
    [
        (SchedulerEnding.COMPLETED, 0.0, Ending.PREEMPTED),
        (SchedulerEnding.PREEMPTED, 0.0, Ending.PREEMPTED),
        (SchedulerEnding.TIMEOUT, 500.0, Ending.PREEMPTED),
        (SchedulerEnding.TIMEOUT, 60.0, Ending.DEADLINE),
        (SchedulerEnding.TIMEOUT, 0.0, Ending.DEADLINE),
        (SchedulerEnding.CANCELLED, 500.0, Ending.STOPPED),
        (SchedulerEnding.FAILED, 500.0, Ending.STOPPED),
    ],
)
def test_what_a_signal_meant_is_for_the_scheduler_to_say(
    ending: SchedulerEnding, deadline: float, state: Ending
) -> None:
    """Slurm calls a job that it preempted completed where that left in the time of grace, and timed out where not."""
    obeyed = Result(Ending.STOPPED, failure=BY_SIGNAL, step=12, by="rank 0")
    result = decide(obeyed, ended(ending), deadline)
    assert result is not None
    assert (result.state, result.step) == (state, 12)


def test_two_that_failed_alike_have_the_same_signature_and_a_lost_node_has_none() -> None:
    first, second = (decide(None, replace(ended(SchedulerEnding.FAILED, 1), job=job)) for job in ("7", "8"))
    other = decide(None, ended(SchedulerEnding.FAILED, 2))
    node = decide(None, ended(SchedulerEnding.NODE_FAILURE))
    assert first is not None
    assert second is not None
    assert other is not None
    assert node is not None
    assert first.failure == second.failure != ""
    assert other.failure != first.failure
    assert node.failure == ""


RECORDS = st.none() | st.builds(
    JobRecord,
    job=st.just("7"),
    phase=st.sampled_from(JobPhase),
    ending=st.none() | st.sampled_from(SchedulerEnding),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.integers(0, 31),
    ended=st.none() | st.floats(0, 1e9),
)
WRITERS = st.sampled_from(["rank 0", "rank 17", "job script", "scheduler", ""])
RESULTS = st.none() | st.builds(Result, state=st.sampled_from(Ending), by=WRITERS, exit_code=st.integers(0, 255))


@settings(max_examples=60)
@given(RESULTS, RECORDS)
def test_every_pair_has_one_answer(result: Result | None, record: JobRecord | None) -> None:
    decided = decide(result, record)
    assert decided == decide(result, record)
    if result is not None and result.by.startswith("rank"):
        assert decided is result
    if decided is None:
        assert record is None or record.phase in (JobPhase.QUEUED, JobPhase.RUNNING)
    else:
        assert decide(decided, record) is not None or decided.by == "job script"
    if result is None and decided is not None:
        assert decided.state not in (Ending.FINISHED, Ending.NOT_NEEDED)


def standing(number: int, result: Result | None = None, record: JobRecord | None = None) -> JobStatus:
    return JobStatus(
        LedgerEntry(Attempt(Path("run/attempts", str(number))), Submission("slurm", "", str(number))), record, result
    )


FAILED, IDLE = Result(Ending.CRASHED), Result(Ending.NOT_NEEDED)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], None),
        ([(FAILED, None)], 1),
        ([(FAILED, None), (None, RUNNING), (None, QUEUED)], 2),
        ([(FAILED, None), (None, QUEUED), (None, QUEUED)], 2),
        ([(None, UNKNOWN), (None, RUNNING)], 2),
        ([(FAILED, None), (SCRIPT, None), (IDLE, None), (IDLE, None)], 2),
        ([(IDLE, None), (IDLE, None)], 2),
    ],
)
def test_a_chain_is_known_by_what_runs_or_what_had_work(
    attempts: list[tuple[Result | None, JobRecord | None]], expected: int | None
) -> None:
    current = find_current([standing(number, *each) for number, each in enumerate(attempts, 1)])
    assert (current.entry.number if current is not None else None) == expected
