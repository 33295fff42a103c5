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
import shlex
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
    attempts = []
    for run, done in zip(directories, listed, strict=True):
        numbers = [int(name) for name in done.out.split() if name.isdecimal() and len(name) >= 4]
        attempts.append([run.attempt(number) for number in sorted(numbers) if number])
    wanted = [path for known in attempts for attempt in known for path in attempt.record_paths]
    wanted += [run.status_path for run in directories]
    texts = host.read_files([PurePosixPath(path) for path in wanted])
    ledgers = []
    for run, known in zip(directories, attempts, strict=True):
        try:
            status = json.loads(texts.get(PurePosixPath(run.status_path), ""))
        except (ValueError, RecursionError):
            status = {}
        entries = tuple(_read_entry(attempt, texts) for attempt in known)
        ledgers.append(Ledger(run, entries, status if isinstance(status, dict) else {}))
    return ledgers


def read_again(host: Host, entry: LedgerEntry) -> LedgerEntry:
    """The same attempt as it stands now. Raises HostUnreachable."""
    return _read_entry(entry.attempt, host.read_files([PurePosixPath(path) for path in entry.attempt.record_paths]))


def _read_entry(attempt: Attempt, texts: Mapping[PurePosixPath, str]) -> LedgerEntry:
    submission, started, result = (texts.get(PurePosixPath(path), "") for path in attempt.record_paths)
    return LedgerEntry(attempt, parse_submission(submission), parse_started(started), parse_result(result))


def write_submission(host: Host, attempt: Attempt, submission: Submission) -> None:
    """Record how an attempt was submitted. Raises UserError if the file system refuses it."""
    host.write_files({PurePosixPath(attempt.submission_path): render_submission(submission)})


def render_submission(submission: Submission) -> str:
    """The text of `submission.json`."""
    return json.dumps({"format": FORMAT, **asdict(submission)}, indent=1) + "\n"


# --- how an attempt ended

_ENDINGS = {
    SchedulerEnding.COMPLETED: (Ending.UNKNOWN, "the job ended with exit code 0, but wrote no result"),
    SchedulerEnding.FAILED: (Ending.CRASHED, "the job failed and wrote no result"),
    SchedulerEnding.TIMEOUT: (Ending.DEADLINE, "killed when the wall-time was over"),
    SchedulerEnding.CANCELLED: (Ending.STOPPED, "cancelled"),
    SchedulerEnding.PREEMPTED: (Ending.PREEMPTED, "the scheduler took the nodes for another job"),
    SchedulerEnding.OUT_OF_MEMORY: (Ending.OUT_OF_MEMORY, "a node ran out of the memory that was asked for"),
    SchedulerEnding.NODE_FAILURE: (Ending.NODE_FAILURE, "a node failed"),
    SchedulerEnding.NEVER_STARTED: (Ending.CRASHED, "the job ended without having run"),
    SchedulerEnding.UNCLEAR: (
        Ending.UNKNOWN,
        "the job is over and nothing says how, as of one that was killed by signal 9, or found no room to say it",
    ),
}
"""Scheduler ending -> ending and reason, if the job wrote nothing. Exit code 0 alone does not mean that the work is
done: a run that is done records it."""

_UNEXPLAINED = (
    *(SchedulerEnding.COMPLETED, SchedulerEnding.FAILED),
    *(SchedulerEnding.NEVER_STARTED, SchedulerEnding.UNCLEAR, None),
)
"""Endings of which the scheduler knows no more than the job script; for the others it has the reason."""

CONSEQUENCES = (BY_SIGNAL, "LostContact")
"""Failures of a rank that something else caused; the scheduler may have the reason."""

_CLOCKS_S = 30.0
"""Schedulers check wall-times at intervals; none ends a job this long before its limit."""

_SCRIPT = "job script"
_UNSURE = frozenset((Ending.CRASHED, Ending.UNKNOWN))


def decide(result: Result | None, record: JobRecord | None, deadline: float = 0.0) -> Result | None:
    """How an attempt ended; None if it is still active, or if there is neither a result nor an answer.

    `result`: what the job wrote. `record`: the scheduler's answer (None: not asked, or silent). `deadline`: end of the
    wall-time in Unix seconds, 0 for unknown. If the job script only recorded that its ranks failed, the scheduler's
    reason takes precedence, and is waited for while the job is still there."""
    signalled = result is not None and result.failure.startswith(CONSEQUENCES)
    if result is not None and not signalled and not (result.by == _SCRIPT and result.state in _UNSURE):
        return result
    if record is None:
        return result
    if record.phase in (JobPhase.QUEUED, JobPhase.RUNNING):
        return result if signalled else None
    if result is None and record.phase is JobPhase.UNKNOWN:
        reason = "the scheduler does not know the job (any more), and it wrote no result"
        return Result(Ending.UNKNOWN, reason=reason, job=record.job, by="scheduler")
    if result is not None and result.failure == BY_SIGNAL:
        # A job that saves and leaves during the grace time is completed for its scheduler, or has reached the end of a
        # time that was not its own (Slurm reports TIMEOUT for a job that used all of its grace time).
        early = bool(deadline and record.ended) and (record.ended or 0.0) < deadline - _CLOCKS_S
        if record.ending is SchedulerEnding.COMPLETED or (record.ending is SchedulerEnding.TIMEOUT and early):
            reason = "a signal asked for a stop, and no person cancelled the job: the scheduler wanted its nodes"
            return replace(result, state=Ending.PREEMPTED, reason=reason, failure="", by="scheduler")
    if result is not None and record.ending in _UNEXPLAINED:
        return result
    ending = record.ending or SchedulerEnding.UNCLEAR
    state, reason = _ENDINGS[ending]
    if ending in (SchedulerEnding.FAILED, SchedulerEnding.UNCLEAR):
        status = f" (signal {record.signal})" if record.signal else ""
        reason += f" (exit code {record.exit_code})" if record.exit_code else status
    # Endings that repeat if nothing is changed need a signature: without what differs between two equal failures.
    failure = reason if state in (Ending.CRASHED, Ending.OUT_OF_MEMORY, Ending.DEADLINE) else ""
    if result is not None:
        return replace(result, state=state, reason=reason, failure=failure, by="scheduler")
    ended, code = record.ended or 0.0, record.exit_code
    return Result(state, reason, exit_code=code, failure=failure, job=record.job, by="scheduler", ended=ended)


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
        """In one word: prepared, waits (for another run), queued, running, an ending, or unknown."""
        if self.result is not None:
            return str(self.result.state)
        if self.entry.is_unsent:
            return "waits" if self.entry.submission is not None and self.entry.submission.follows else "prepared"
        if self.record is None or self.record.phase is JobPhase.UNKNOWN:
            return "unknown"
        return str(self.record.phase)

    @property
    def is_active(self) -> bool:
        """Whether its job waits or runs, or may do so."""
        return self.result is None and not self.entry.is_unsent

    @property
    def ran_nothing(self) -> bool:
        """Whether it has ended and had nothing to do."""
        return self.result is not None and self.result.ran_nothing


def read_standing(host: Host, ledger: Ledger) -> list[JobStatus]:
    """The attempts of one run, oldest first; one query to the scheduler, for open attempts only."""
    return read_standings(host, [ledger])[0]


def read_standings(host: Host, ledgers: Sequence[Ledger]) -> list[list[JobStatus]]:
    """The attempts of several runs on one host; one query to each scheduler."""
    wanted: dict[str, list[str]] = {}
    for ledger in ledgers:
        for entry in ledger.entries:
            if entry.submission and is_job_id(entry.job) and _is_open(entry.result):
                wanted.setdefault(entry.submission.scheduler, []).append(entry.job)
    records: dict[str, dict[str, JobRecord]] = {}
    silences: dict[str, str] = {}
    for scheduler, jobs in wanted.items():
        try:
            known = find_scheduler(scheduler)
            records[scheduler] = known.parse_records(jobs, host.run_many(known.query(jobs)))
        except (SchedulerSilent, HostUnreachable) as error:
            silences[scheduler] = str(error).splitlines()[0]
    standings = []
    for ledger in ledgers:
        run, row = render_known(Known(str(ledger.run.path), host.name)), list[JobStatus]()
        asked = RequestedResources(run=run)
        for entry in ledger.entries:
            scheduler = entry.submission.scheduler if entry.submission else ""
            if entry.submission and entry.submission.asked:  # a link that a job submitted requests what its job did
                asked = replace(read_fields(RequestedResources, entry.submission.asked) or asked, run=run)
            record = records.get(scheduler, {}).get(entry.job)
            silence = silences.get(scheduler, "") if record is None else ""
            row.append(_judge(entry, record, silence, asked))
        standings.append(row)
    return standings


def find_current(standings: Sequence[JobStatus]) -> JobStatus | None:
    """The attempt that a run is known by: of a chain the one that runs, or waits to; else the last that had work to do,
    else the last. None where there is no attempt."""
    active = [standing for standing in standings if standing.is_active]
    running = [standing for standing in active if standing.word == JobPhase.RUNNING]
    worked = [standing for standing in standings if not standing.ran_nothing]
    return next(iter(running or active or worked[-1:] or standings[-1:]), None)


def describe_active(standings: Sequence[JobStatus]) -> str:
    """The attempts that wait or run: "attempt 2 queued as job 17"; empty for none."""
    active = [standing for standing in standings if standing.is_active]
    return ", ".join(f"attempt {entry.entry.number} {entry.word} as job {entry.entry.job}" for entry in active)


def _is_open(result: Result | None) -> bool:
    """Whether the scheduler may add something: there is no result, or its writer could not see the reason."""
    if result is None or result.failure.startswith(CONSEQUENCES):
        return True
    return result.by == _SCRIPT and result.exit_code not in (0, None)


def _judge(entry: LedgerEntry, record: JobRecord | None, silence: str, asked: RequestedResources) -> JobStatus:
    deadline = entry.started.deadline if entry.started else 0.0
    result = decide(entry.result, record, deadline) if entry.job or entry.result else None
    why = None
    if record is not None and entry.submission:
        known = find_scheduler(entry.submission.scheduler)
        ending = known.explain_ending(record, asked) if result is None or result.by != "rank 0" else None
        why = known.explain_pending(record, asked) or ending
    if why is None and result is not None:
        # A rank and its agent record why it ended, but an agent does not know how much memory the job requested.
        by_agent = result.by == BY_AGENT
        unsure = result.state in _UNSURE and not by_agent and not result.by.startswith("rank")
        if unsure or (by_agent and result.state is Ending.OUT_OF_MEMORY):
            why = explain_result(result.state, result.exit_code, asked, result.reason)
    return JobStatus(entry, record, result, why, silence)


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
            f"`shardway stop {shlex.quote(str(run.path))} --wait 600`."
        ) from error


def check_free_for_hand(host: Host, run: Path, tell: Callable[[str], None]) -> None:
    """Raise UserError if a job of this run waits or runs; `tell` gets a sentence about jobs whose state is unknown."""
    active = [standing for standing in read_standing(host, read_ledger(host, run)) if standing.is_active]
    known = [standing for standing in active if standing.word != "unknown"]
    if known:
        raise _refuse_for_jobs(run, describe_active(known))
    if active:
        jobs = ", ".join(f"job {standing.entry.job}" for standing in active)
        tell(f"whether {jobs} of {run} still waits or runs is not known here; it is trained all the same")


def _refuse_for_jobs(run: Path, active: str) -> UserError:
    return UserError(
        f"{run} has {active}.\n"
        "  Two at one run would be in each other's way. To do: let it go on (`shardway status` shows it), or end it "
        f"first with `shardway stop {shlex.quote(str(run))}`."
    )


# --- attempts as lines and as JSON


def render_attempts(standings: Sequence[JobStatus]) -> list[str]:
    """One line per attempt, oldest first, with why it waits or how it ended below it."""
    lines = []
    for standing in standings:
        entry, started, result, why = standing.entry, standing.entry.started, standing.result, standing.why
        facts = [f"job {entry.job}" if entry.job else ""]
        if standing.word == "waits" and entry.submission is not None:
            facts.append(f"for {entry.submission.follows}")
        below = []
        if result is None and started is not None:
            facts.append(f"on {started.nodes}" if started.nodes else "")
            left = started.deadline - time.time()
            facts.append(f"{render_clock(left)} of wall-time left" if started.deadline and left > 0 else "")
        if result is not None:
            facts.append(f"step {result.step}" if result.step else "")
            began = started.started if started else 0.0
            facts.append(f"after {render_clock(result.ended - began)}" if began and result.ended > began else "")
            below += [result.reason] if result.reason else []
        if why is not None and (result is None or why.code != "completed"):
            below += [why.sentence] if why.sentence not in below else []
            below.append(f"to do: {why.remedy}")
        if standing.silence:
            below.append(f"the scheduler did not answer: {standing.silence}")
        lines.append(f"  attempt {entry.number:<3} {standing.word:<13} {'  '.join(filter(None, facts))}".rstrip())
        lines += [f"      {line}" for line in below]
    return lines


def attempts_as_json(standings: Sequence[JobStatus]) -> list[dict[str, Any]]:
    """The attempts as plain data, with stable keys."""
    rows = []
    for standing in standings:
        entry, started, result, record = standing.entry, standing.entry.started, standing.result, standing.record
        rows.append(
            {
                "attempt": entry.number,
                "state": standing.word,
                "job": entry.job,
                "follows": entry.submission.follows if entry.submission else "",
                "scheduler": entry.submission.scheduler if entry.submission else "",
                "nodes": started.nodes if started else "",
                "started": started.started if started else None,
                "deadline": started.deadline if started else None,
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
        )
    return rows
