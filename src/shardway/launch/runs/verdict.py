"""How an attempt ended: by what the job wrote, then by what the scheduler says.

Invariant: `decide` looks at nothing but its two arguments, has an answer for every pair of them, and never overrules a
result that a rank wrote, unless the rank only knew that a signal came or that another rank was gone. This module must
not read a log nor an exit code's meaning out of one.
"""

from __future__ import annotations

from dataclasses import replace

from shardway.launch.schedulers.records import JobPhase, JobRecord, SchedulerEnding
from shardway.rundir.attempts import BY_SIGNAL, Ending, Result

_ENDINGS = {
    SchedulerEnding.COMPLETED: Ending.UNKNOWN,
    SchedulerEnding.FAILED: Ending.CRASHED,
    SchedulerEnding.TIMEOUT: Ending.DEADLINE,
    SchedulerEnding.CANCELLED: Ending.STOPPED,
    SchedulerEnding.PREEMPTED: Ending.PREEMPTED,
    SchedulerEnding.OUT_OF_MEMORY: Ending.OUT_OF_MEMORY,
    SchedulerEnding.NODE_FAILURE: Ending.NODE_FAILURE,
    SchedulerEnding.NEVER_STARTED: Ending.CRASHED,
    SchedulerEnding.UNCLEAR: Ending.UNKNOWN,
}
"""What an ending is where the job wrote nothing. Exit code 0 alone does not say that the work is done: whoever did it
would have written so."""

_REASONS = {
    SchedulerEnding.COMPLETED: "the job ended with exit code 0, but wrote no result",
    SchedulerEnding.FAILED: "the job failed and wrote no result",
    SchedulerEnding.TIMEOUT: "killed when the wall-time was over",
    SchedulerEnding.CANCELLED: "cancelled",
    SchedulerEnding.PREEMPTED: "the scheduler took the nodes for another job",
    SchedulerEnding.OUT_OF_MEMORY: "a node ran out of the memory that was asked for",
    SchedulerEnding.NODE_FAILURE: "a node failed",
    SchedulerEnding.NEVER_STARTED: "the job ended without having run",
    SchedulerEnding.UNCLEAR: "the job is over and nothing says how, as of one that was killed by signal 9, or found no "
    "room to say it",
}

_CAUSES = frozenset(
    (
        SchedulerEnding.TIMEOUT,
        SchedulerEnding.CANCELLED,
        SchedulerEnding.PREEMPTED,
        SchedulerEnding.OUT_OF_MEMORY,
        SchedulerEnding.NODE_FAILURE,
    )
)
"""Endings of which the job script sees only an exit code, and the scheduler knows why."""

_REPEATS = frozenset((Ending.CRASHED, Ending.OUT_OF_MEMORY, Ending.DEADLINE))
"""Endings that come again where nothing is changed, so that they need a signature."""

CONSEQUENCES = (BY_SIGNAL, "LostContact")
"""Failures of a rank that are what something else did to it; the scheduler may know what."""

_LEFT_IN_TIME = "a signal asked for a stop, and nobody cancelled the job: the scheduler wanted its nodes"
"""A job that saves and leaves during the time of grace is one that completed, as far as its scheduler knows."""

_CLOCKS_S = 30.0
"""Schedulers look at wall-times now and then; none ends a job so long before."""

_SCRIPT = "job script"
_UNSURE = frozenset((Ending.CRASHED, Ending.UNKNOWN))


def decide(result: Result | None, record: JobRecord | None, deadline: float = 0.0) -> Result | None:
    """How an attempt ended; None where it is not over, or nobody answered and the job has written nothing.

    `result` is what the job wrote, `record` what the scheduler says now (None: it was not asked, or did not answer).
    A job script that says no more than that its ranks failed is believed less than a scheduler that knows why, and
    waits for it while the job is still there. `deadline` is the end of the wall-time in Unix seconds, 0 for unknown.
    """
    if result is None:
        return _from_scheduler(record)
    signalled = result.failure.startswith(CONSEQUENCES)
    if record is None or not (signalled or (result.by == _SCRIPT and result.state in _UNSURE)):
        return result
    if record.phase in (JobPhase.QUEUED, JobPhase.RUNNING):
        return result if signalled else None
    if result.failure == BY_SIGNAL and _made_room(record, deadline):
        return replace(result, state=Ending.PREEMPTED, reason=_LEFT_IN_TIME, failure="", by="scheduler")
    return _refine(result, record)


def _made_room(record: JobRecord, deadline: float) -> bool:
    """Whether a job that obeyed a signal was preempted: it completed, or reached the end of a time that was none of
    its own (Slurm says TIMEOUT of a job that needed all of the grace)."""
    if record.ending is SchedulerEnding.TIMEOUT:
        return bool(deadline and record.ended) and (record.ended or 0.0) < deadline - _CLOCKS_S
    return record.ending is SchedulerEnding.COMPLETED


def _from_scheduler(record: JobRecord | None) -> Result | None:
    if record is None or record.phase in (JobPhase.QUEUED, JobPhase.RUNNING):
        return None
    if record.phase is JobPhase.UNKNOWN:
        reason = "the scheduler does not know the job (any more), and it wrote no result"
        return Result(Ending.UNKNOWN, reason=reason, job=record.job, by="scheduler")
    ending = record.ending or SchedulerEnding.UNCLEAR
    state = _ENDINGS[ending]
    reason = _describe(ending, record)
    return Result(
        state=state,
        reason=reason,
        exit_code=record.exit_code,
        failure=reason if state in _REPEATS else "",
        job=record.job,
        by="scheduler",
        ended=record.ended or 0.0,
    )


def _refine(result: Result, record: JobRecord) -> Result:
    """The job script's word with the scheduler's reason, where that knows one."""
    if record.ending not in _CAUSES:
        return result
    state, reason = _ENDINGS[record.ending], _describe(record.ending, record)
    failure = reason if state in _REPEATS else ""
    return replace(result, state=state, reason=reason, failure=failure, by="scheduler")


def _describe(ending: SchedulerEnding, record: JobRecord) -> str:
    """A reason without what differs between two jobs that failed alike, such as nodes and times."""
    status = f" (signal {record.signal})" if record.signal else ""
    if record.exit_code:
        status = f" (exit code {record.exit_code})"
    return _REASONS[ending] + (status if ending in (SchedulerEnding.FAILED, SchedulerEnding.UNCLEAR) else "")
