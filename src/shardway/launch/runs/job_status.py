"""The attempts of a run: their records, their state at the scheduler, how each ended; as values, lines and JSON.

Invariants:
- Records are read as they are in the files; a missing or torn file is None, never a guess.
- `decide` depends on its arguments alone and has an answer for every combination. It never overrules a result that a
  rank wrote, unless the rank only saw a signal or a lost peer.
- If a scheduler does not answer, the state of the attempt is unknown, never ended.
- A refused start names the job or process that holds the run. A silent scheduler does not prevent training by hand: the
  lease of the run directory decides.
- Output: what is unknown is left out or marked as unknown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.errors import UserError
from shardway.launch.hosts.base import Host, HostUnreachable
from shardway.launch.runs.find import Known, render_known
from shardway.launch.schedulers.base import (
    Explanation,
    JobPhase,
    JobRecord,
    RequestedResources,
    SchedulerEnding,
    SchedulerSilent,
    explain_result,
    find_scheduler,
    is_job_id,
)
from shardway.rundir.attempts import (
    BY_AGENT,
    BY_SIGNAL,
    FORMAT,
    Attempt,
    AttemptStart,
    Ending,
    Result,
    Submission,
    parse_result,
    parse_started,
    parse_submission,
)
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import read_fields
from shardway.units import render_clock

# --- the attempts as recorded in the run directory


@dataclass(frozen=True)
class LedgerEntry:
    """One attempt: how it was submitted, what its job recorded at its start, how it ended."""

    attempt: Attempt
    submission: Submission | None = None
    started: AttemptStart | None = None
    result: Result | None = None

    @property
    def number(self) -> int:
        """The attempt's number."""
        return self.attempt.number

    @property
    def job(self) -> str:
        """The scheduler's job id; empty before it has one."""
        return (self.submission.job if self.submission else "") or (self.started.job if self.started else "")

    @property
    def is_unsent(self) -> bool:
        """Whether it was prepared and is not known to be at a scheduler."""
        return not self.job and self.result is None


@dataclass(frozen=True)
class Ledger:
    """All attempts of a run, oldest first, and its status.json."""

    run: RunDir
    entries: tuple[LedgerEntry, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> LedgerEntry | None:
        """The newest attempt."""
        return self.entries[-1] if self.entries else None

    @property
    def next_number(self) -> int:
        """The number of the next attempt: the newest one again if no scheduler is known to have taken it."""
        if self.last is None:
            return 1
        return self.last.number if self.last.is_unsent else self.last.number + 1


def read_ledger(host: Host, run: Path) -> Ledger:
    """Read the attempts of a run in two exchanges with its host. Raises HostUnreachable."""
    return read_ledgers(host, [run])[0]


def read_ledgers(host: Host, runs: Sequence[Path]) -> list[Ledger]:
    """Read the attempts of several runs on one host in two exchanges."""
    directories = [RunDir(run) for run in runs]
    listed = host.run_many([("ls", "-1", str(run.attempts_folder)) for run in directories])
    attempts = {
        run.path: [run.attempt(int(name)) for name in sorted(done.out.split(), key=_number) if _number(name) > 0]
        for run, done in zip(directories, listed, strict=True)
    }
    wanted = [path for run in directories for attempt in attempts[run.path] for path in attempt.record_paths]
    wanted += [run.status_path for run in directories]
    texts = host.read_files([PurePosixPath(path) for path in wanted])
    return [
        Ledger(run, tuple(_entry(attempt, texts) for attempt in attempts[run.path]), _read_json(texts, run.status_path))
        for run in directories
    ]


def read_again(host: Host, entry: LedgerEntry) -> LedgerEntry:
    """The same attempt as it stands now. Raises HostUnreachable."""
    return _entry(entry.attempt, host.read_files([PurePosixPath(path) for path in entry.attempt.record_paths]))


def write_submission(host: Host, attempt: Attempt, submission: Submission) -> None:
    """Record how an attempt was submitted. Raises UserError if the file system refuses it."""
    host.write_files({PurePosixPath(attempt.submission_path): render_submission(submission)})


def render_submission(submission: Submission) -> str:
    """The text of `submission.json`."""
    return json.dumps({"format": FORMAT, **asdict(submission)}, indent=1) + "\n"


def _entry(attempt: Attempt, texts: Mapping[Any, str]) -> LedgerEntry:
    return LedgerEntry(
        attempt,
        parse_submission(texts.get(attempt.submission_path, "")),
        parse_started(texts.get(attempt.started_path, "")),
        parse_result(texts.get(attempt.result_path, "")),
    )


def _number(name: str) -> int:
    return int(name) if name.isdecimal() and len(name) >= 4 else 0


def _read_json(texts: Mapping[Any, str], path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(texts.get(path, ""))
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


# --- how an attempt ended

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
"""Scheduler ending -> ending, if the job wrote nothing. Exit code 0 alone does not mean that the work is done: a run
that is done records it."""

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
"""Endings for which the job script sees only an exit code, and the scheduler has the reason."""

_REPEATS = frozenset((Ending.CRASHED, Ending.OUT_OF_MEMORY, Ending.DEADLINE))
"""Endings that repeat if nothing is changed, and therefore need a signature."""

CONSEQUENCES = (BY_SIGNAL, "LostContact")
"""Failures of a rank that something else caused; the scheduler may have the reason."""

_LEFT_IN_TIME = "a signal asked for a stop, and no person cancelled the job: the scheduler wanted its nodes"
"""A job that saves and leaves during the grace time is completed for its scheduler."""

_CLOCKS_S = 30.0
"""Schedulers check wall-times at intervals; none ends a job this long before its limit."""

_SCRIPT = "job script"
_UNSURE = frozenset((Ending.CRASHED, Ending.UNKNOWN))


def decide(result: Result | None, record: JobRecord | None, deadline: float = 0.0) -> Result | None:
    """How an attempt ended; None if it is still active, or if there is neither a result nor an answer.

    `result`: what the job wrote. `record`: the scheduler's answer (None: not asked, or silent). `deadline`: end of the
    wall-time in Unix seconds, 0 for unknown. If the job script only recorded that its ranks failed, the scheduler's
    reason takes precedence, and is waited for while the job is still there."""
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
    """Whether a job that obeyed a signal was preempted: it completed, or reached the end of a time that was not its own
    (Slurm reports TIMEOUT for a job that used all of its grace time)."""
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
    """The job script's result with the scheduler's reason, if there is one."""
    if record.ending not in _CAUSES:
        return result
    state, reason = _ENDINGS[record.ending], _describe(record.ending, record)
    failure = reason if state in _REPEATS else ""
    return replace(result, state=state, reason=reason, failure=failure, by="scheduler")


def _describe(ending: SchedulerEnding, record: JobRecord) -> str:
    """A reason without what differs between two equal failures, such as nodes and times."""
    status = f" (signal {record.signal})" if record.signal else ""
    if record.exit_code:
        status = f" (exit code {record.exit_code})"
    return _REASONS[ending] + (status if ending in (SchedulerEnding.FAILED, SchedulerEnding.UNCLEAR) else "")


# --- the state of each attempt now


@dataclass(frozen=True)
class JobStatus:
    """One attempt now. `record`: None if the scheduler was not asked or did not answer (`silence` has the reason).
    `result`: how it ended, None if it has not. `why`: the reason that it waits or ended."""

    entry: LedgerEntry
    record: JobRecord | None = None
    result: Result | None = None
    why: Explanation | None = None
    silence: str = ""

    @property
    def word(self) -> str:
        """In one word: prepared, queued, running, an ending, or unknown."""
        if self.result is not None:
            return str(self.result.state)
        if self.entry.is_unsent:
            return "prepared"
        if self.record is None or self.record.phase is JobPhase.UNKNOWN:
            return "unknown"
        return str(self.record.phase)

    @property
    def is_active(self) -> bool:
        """Whether its job waits or runs, or may do so."""
        return self.result is None and not self.entry.is_unsent


def read_standing(host: Host, ledger: Ledger) -> list[JobStatus]:
    """The attempts of one run, oldest first; one query to the scheduler, for open attempts only."""
    return read_standings(host, [ledger])[0]


def read_standings(host: Host, ledgers: Sequence[Ledger]) -> list[list[JobStatus]]:
    """The attempts of several runs on one host; one query to each scheduler."""
    wanted: dict[str, list[str]] = {}
    for ledger in ledgers:
        for entry in ledger.entries:
            if entry.submission and is_job_id(entry.job) and _is_open(entry):
                wanted.setdefault(entry.submission.scheduler, []).append(entry.job)
    answers = {scheduler: _ask(host, scheduler, jobs) for scheduler, jobs in wanted.items()}
    return [[_stand(entry, answers, _asked(host, ledger, entry)) for entry in ledger.entries] for ledger in ledgers]


def describe_active(standings: Sequence[JobStatus]) -> str:
    """The attempts that wait or run: "attempt 2 queued as job 17"; empty for none."""
    active = [standing for standing in standings if standing.is_active]
    return ", ".join(f"attempt {entry.entry.number} {entry.word} as job {entry.entry.job}" for entry in active)


def _is_open(entry: LedgerEntry) -> bool:
    """Whether the scheduler may add something: there is no result, or its writer could not see the reason."""
    result = entry.result
    if result is None or result.failure.startswith(CONSEQUENCES):
        return True
    return result.by == "job script" and result.exit_code not in (0, None)


@dataclass(frozen=True)
class _Answer:
    records: dict[str, JobRecord]
    silence: str = ""


def _ask(host: Host, scheduler: str, jobs: Sequence[str]) -> _Answer:
    try:
        known = find_scheduler(scheduler)
        return _Answer(known.parse_records(jobs, host.run_many(known.query(jobs))))
    except (SchedulerSilent, HostUnreachable) as error:
        return _Answer({}, str(error).splitlines()[0])


def _asked(host: Host, ledger: Ledger, entry: LedgerEntry) -> RequestedResources:
    """What an attempt requested; for a link that a job submitted, what the attempt before it requested."""
    run = render_known(Known(str(ledger.run.path), host.name))
    for earlier in reversed(ledger.entries):
        asked = earlier.submission.asked if earlier.submission else None
        if asked and earlier.number <= entry.number:
            return replace(read_fields(RequestedResources, asked) or RequestedResources(), run=run)
    return RequestedResources(run=run)


def _stand(entry: LedgerEntry, answers: dict[str, _Answer], asked: RequestedResources) -> JobStatus:
    scheduler = entry.submission.scheduler if entry.submission else ""
    answer = answers.get(scheduler, _Answer({}))
    record = answer.records.get(entry.job)
    deadline = entry.started.deadline if entry.started else 0.0
    result = decide(entry.result, record, deadline) if entry.job or entry.result else None
    why = None
    if record is not None and scheduler:
        known = find_scheduler(scheduler)
        ending = known.explain_ending(record, asked) if result is None or result.by != "rank 0" else None
        why = known.explain_pending(record, asked) or ending
    if why is None and result is not None and _leaves_open(result):
        why = explain_result(result.state, result.exit_code, asked, result.reason)
    return JobStatus(entry, record, result, why, answer.silence if record is None else "")


def _leaves_open(result: Result) -> bool:
    """Whether the scheduler may have more than the result. A rank and its agent record the reason of an end, but an
    agent does not know how much memory the job requested."""
    if result.by == BY_AGENT:
        return result.state is Ending.OUT_OF_MEMORY
    return result.state in _UNSURE and not result.by.startswith("rank")


# --- whether a run is free for another start


def check_free_for_job(host: Host, ledger: Ledger, tell: Callable[[str], None]) -> None:
    """Raise UserError if a job of this run waits or runs, or may do so, or if a process trains it by hand, as far as
    its directory is visible from this machine.

    `tell` gets a sentence if the lock's holder must be watched: a process that was killed on another host looks alive
    for a while."""
    run = ledger.run
    if active := describe_active(read_standing(host, ledger)):
        raise _refuse_for_jobs(run.path, active)
    writer = None if host.name else run.find_writer(by_hand=True)
    if writer is None:
        return
    try:
        run.writer_lock().await_free(tell)
    except UserError as error:
        raise UserError(
            f"{run.path} is trained by hand now, by {writer}.\n"
            "  A job would find it taken when it starts. To do: let it come to its end, or end it first with "
            f"`shardway stop {run.path} --wait 600`."
        ) from error


def check_free_for_hand(host: Host, run: Path, tell: Callable[[str], None]) -> None:
    """Raise UserError if a job of this run waits or runs; `tell` gets a sentence about jobs whose state is unknown."""
    active = [standing for standing in read_standing(host, read_ledger(host, run)) if standing.is_active]
    known = [standing for standing in active if not _is_unknown(standing)]
    if known:
        raise _refuse_for_jobs(run, describe_active(known))
    if active:
        tell(f"whether {_list_jobs(active)} of {run} still waits or runs is not known here; it is trained all the same")


def _is_unknown(standing: JobStatus) -> bool:
    return standing.word == "unknown"


def _list_jobs(standings: Sequence[JobStatus]) -> str:
    return ", ".join(f"job {standing.entry.job}" for standing in standings)


def _refuse_for_jobs(run: Path, active: str) -> UserError:
    return UserError(
        f"{run} has {active}.\n"
        "  Two at one run would be in each other's way. To do: let it go on (`shardway status` shows it), or end it "
        f"first with `shardway stop {run}`."
    )


# --- attempts as lines and as JSON


def render_attempts(standings: Sequence[JobStatus]) -> list[str]:
    """One line per attempt, oldest first, with why it waits or how it ended below it."""
    lines = []
    for standing in standings:
        lines.append(f"  attempt {standing.entry.number:<3} {standing.word:<13} {_render_facts(standing)}".rstrip())
        lines += [f"      {line}" for line in _render_why(standing)]
    return lines


def _render_facts(standing: JobStatus) -> str:
    entry, result = standing.entry, standing.result
    facts = [f"job {entry.job}" if entry.job else ""]
    if result is None and entry.started is not None:
        facts.append(f"on {entry.started.nodes}" if entry.started.nodes else "")
        left = entry.started.deadline - time.time()
        facts.append(f"{render_clock(left)} of wall-time left" if entry.started.deadline and left > 0 else "")
    if result is not None:
        facts.append(f"step {result.step}" if result.step else "")
        began = entry.started.started if entry.started else 0.0
        facts.append(f"after {render_clock(result.ended - began)}" if began and result.ended > began else "")
    return "  ".join(fact for fact in facts if fact)


def _render_why(standing: JobStatus) -> list[str]:
    lines = []
    if standing.result is not None and standing.result.reason:
        lines.append(standing.result.reason)
    if standing.why is not None and (standing.result is None or standing.why.code != "completed"):
        lines += [standing.why.sentence] if standing.why.sentence not in lines else []
        lines.append(f"to do: {standing.why.remedy}")
    if standing.silence:
        lines.append(f"the scheduler did not answer: {standing.silence}")
    return lines


def attempts_as_json(standings: Sequence[JobStatus]) -> list[dict[str, Any]]:
    """The attempts as plain data, with stable keys."""
    return [_as_json(standing) for standing in standings]


def _as_json(standing: JobStatus) -> dict[str, Any]:
    entry, result, record = standing.entry, standing.result, standing.record
    return {
        "attempt": entry.number,
        "state": standing.word,
        "job": entry.job,
        "scheduler": entry.submission.scheduler if entry.submission else "",
        "nodes": entry.started.nodes if entry.started else "",
        "started": entry.started.started if entry.started else None,
        "deadline": entry.started.deadline if entry.started else None,
        "ended": result.ended if result else None,
        "step": result.step if result else None,
        "reason": result.reason if result else "",
        "exit_code": result.exit_code if result else None,
        "failure": result.failure if result else "",
        "scheduler_state": record.state if record else "",
        "scheduler_reason": record.reason if record else "",
        "explanation": standing.why.sentence if standing.why else "",
        "remedy": standing.why.remedy if standing.why else "",
        "silence": standing.silence,
    }
