"""Where the runs of a sweep stand, which of them are to be submitted, and which is the best.

Invariants:
- A member that waits, runs or is finished is never submitted again.
- A value that is not a finite number is never the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardway.launch.hosts.base import Host
from shardway.launch.runs.followers import is_finished
from shardway.launch.runs.job_status import JobStatus, Ledger, find_current, read_ledgers, read_standings
from shardway.launch.submission.prepare import SubmitRequest, read_last_request
from shardway.launch.sweep.record import Member, SweepRecord
from shardway.units import Monitor


@dataclass(frozen=True)
class MemberStatus:
    """One member now: its attempts, as they are recorded and as its scheduler has them."""

    member: Member
    ledger: Ledger
    statuses: Sequence[JobStatus]

    @property
    def is_active(self) -> bool:
        """Whether a job of it waits or runs, or may do so."""
        return any(status.is_active for status in self.statuses)

    @property
    def is_new(self) -> bool:
        """Whether no scheduler is known to have taken a job of it."""
        return all(entry.is_unsent for entry in self.ledger.entries) and not self.ledger.status

    @property
    def is_finished(self) -> bool:
        """Whether its work is done."""
        return is_finished(self.ledger)

    @property
    def word(self) -> str:
        """Its state in one word."""
        if self.is_finished:
            return "finished"
        current = find_current(self.statuses)
        return current.word if current is not None else "new"


def read_members(host: Host, folder: Path, record: SweepRecord) -> list[MemberStatus]:
    """The members as they stand now: their files in two exchanges, and one query to the scheduler."""
    ledgers = read_ledgers(host, [folder / member.name for member in record.members])
    statuses = read_standings(host, ledgers)
    return [MemberStatus(*each) for each in zip(record.members, ledgers, statuses, strict=True)]


def list_new(folder: Path, record: SweepRecord, members: Sequence[MemberStatus]) -> list[SubmitRequest]:
    """The requests of members that were not submitted yet."""
    return [record.make_request(folder, each.member) for each in members if each.is_new]


@contextmanager
def read_unfinished(
    host: Host, folder: Path, record: SweepRecord, members: Sequence[MemberStatus], keys: Sequence[str] = ()
) -> Iterator[list[SubmitRequest]]:
    """The requests of members that have no job and are not finished, as their last attempts recorded them; run files
    of another host are there for as long as the context lasts."""
    with ExitStack() as stack:
        requests = []
        for each in members:
            if each.is_active or each.is_finished:
                continue
            if each.is_new:
                request = record.make_request(folder, each.member)
            else:
                request = stack.enter_context(read_last_request(host, folder / each.member.name))
            run_request = replace(request.run_request, overrides=(*request.run_request.overrides, *keys))
            requests.append(replace(request, run_request=run_request))
        yield requests


# --- the best


@dataclass(frozen=True)
class MemberResult:
    """What a member has reached: `value` of the metric that members are compared by, None where there is none yet."""

    name: str
    value: float | None = None
    step: int | None = None


def find_best(results: Sequence[MemberResult], monitor: Monitor) -> MemberResult | None:
    """The best of those with a finite value (the first of equals); None where there is none."""
    numbered = {place: {monitor.metric: each.value} for place, each in enumerate(results) if each.value is not None}
    best = monitor.find_best(numbered)
    return results[best.step] if best is not None else None


def list_cells(
    record: SweepRecord, rows: Mapping[str, Mapping[str, str]], columns: Sequence[str], best: str
) -> list[list[str]]:
    """The table of a sweep: a head, then a line a member: its name (marked where it is the best), its values, and the
    cells of these columns that any member has."""
    shown = [column for column in columns if any(row.get(column) for row in rows.values())]
    short = shorten_keys(record.keys)
    table = [["RUN", *(short[key].upper() for key in record.keys), *(column.upper() for column in shown), ""]]
    for member in record.members:
        row = rows.get(member.name, {})
        cells = [member.values.get(key, "") for key in record.keys]
        table.append([member.name, *cells, *(row.get(column, "") for column in shown), _mark(member.name == best)])
    return table


def _mark(is_best: bool) -> str:
    return "best" if is_best else ""


def shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key where no other key ends so, else the whole key."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if [*last.values()].count(name) == 1 else key for key, name in last.items()}


def describe_members(members: Sequence[MemberStatus]) -> str:
    """How many are in each state: "3 finished, 2 running"."""
    words = [each.word for each in members]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def as_json(each: MemberStatus) -> dict[str, Any]:
    """A member as plain data."""
    return {"run": str(each.ledger.run.path), "name": each.member.name, "values": dict(each.member.values)}
