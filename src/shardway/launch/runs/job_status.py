"""Where the attempts of a run stand: what they wrote, and what the scheduler says of those that wrote no end.

Invariant: a scheduler that does not answer makes an attempt's standing unknown, never ended. This module must not
change anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardway.launch.hosts.base import Host, HostUnreachable
from shardway.launch.runs.find import render_known
from shardway.launch.runs.ledger import Ledger, LedgerEntry
from shardway.launch.runs.registry import Known
from shardway.launch.runs.verdict import CONSEQUENCES, decide
from shardway.launch.schedulers.clients import CLIENTS, find_client, is_job_id
from shardway.launch.schedulers.explain import explain_result
from shardway.launch.schedulers.records import Explanation, JobPhase, JobRecord, RequestedResources, SchedulerSilent
from shardway.rundir.attempts import BY_AGENT, Ending, Result
from shardway.rundir.fields import read_fields

_TOLD_BY_CODE = frozenset((Ending.CRASHED, Ending.UNKNOWN))


@dataclass(frozen=True)
class JobStatus:
    """One attempt now. `record` is None where the scheduler was not asked or did not answer (`silence` says why);
    `result` is how it ended, None while it has not; `why` explains its waiting or its end."""

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
        """Whether its job waits, runs, or may do so for all that is known."""
        return self.result is None and not self.entry.is_unsent


def read_standing(host: Host, ledger: Ledger) -> list[JobStatus]:
    """The attempts of one run, oldest first; the scheduler is asked once, and only of those that are open."""
    return read_standings(host, [ledger])[0]


def read_standings(host: Host, ledgers: Sequence[Ledger]) -> list[list[JobStatus]]:
    """The attempts of several runs on one host; each scheduler is asked once."""
    wanted: dict[str, list[str]] = {}
    for ledger in ledgers:
        for entry in ledger.entries:
            if entry.submission and is_job_id(entry.job) and _is_open(entry):
                wanted.setdefault(entry.submission.scheduler, []).append(entry.job)
    answers = {scheduler: _ask(host, scheduler, jobs) for scheduler, jobs in wanted.items()}
    return [[_stand(entry, answers, _asked(host, ledger, entry)) for entry in ledger.entries] for ledger in ledgers]


def describe_active(standings: Sequence[JobStatus]) -> str:
    """What still waits or runs: "attempt 2 queued as job 17"; empty for nothing."""
    active = [standing for standing in standings if standing.is_active]
    return ", ".join(f"attempt {entry.entry.number} {entry.word} as job {entry.entry.job}" for entry in active)


def _is_open(entry: LedgerEntry) -> bool:
    """Whether the scheduler has something to add: nobody wrote how it ended, or who did could not know why."""
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
        client = find_client(scheduler)
        return _Answer(client.read_records(jobs, host.run_many(client.query(jobs))))
    except (SchedulerSilent, HostUnreachable) as error:
        return _Answer({}, str(error).splitlines()[0])


def _asked(host: Host, ledger: Ledger, entry: LedgerEntry) -> RequestedResources:
    """What an attempt asked for; of a link that a job submitted, what the one before it did."""
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
        client = CLIENTS[scheduler]
        ending = client.explain_ending(record, asked) if result is None or result.by != "rank 0" else None
        why = client.explain_pending(record, asked) or ending
    if why is None and result is not None and _leaves_open(result):
        why = explain_result(result.state, result.exit_code, asked, result.reason)
    return JobStatus(entry, record, result, why, answer.silence if record is None else "")


def _leaves_open(result: Result) -> bool:
    """Whether there is more to tell than whoever wrote it could: a rank and its agent know why, but an agent does not
    know how much memory the job asked for."""
    if result.by == BY_AGENT:
        return result.state is Ending.OUT_OF_MEMORY
    return result.state in _TOLD_BY_CODE and not result.by.startswith("rank")
