"""The attempts of a run as its directory tells them, on this machine or on a login node.

Invariant: what is read is what stands in the files; a file that is missing or torn is None, never a guess. This module
must not ask a scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.launch.hosts.base import Host
from shardway.rundir.attempts import (
    FORMAT,
    Attempt,
    AttemptStart,
    Result,
    Submission,
    parse_result,
    parse_started,
    parse_submission,
)
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class LedgerEntry:
    """One attempt: how it was submitted, what its job said when it started, how it ended."""

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
        """The scheduler's id of the job; empty where it has none yet."""
        return (self.submission.job if self.submission else "") or (self.started.job if self.started else "")

    @property
    def is_unsent(self) -> bool:
        """Whether it was prepared and no scheduler is known to have taken it."""
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
        """The number of the attempt that is submitted next: of the newest again where no scheduler is known to have
        taken it."""
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
    """Say how an attempt was submitted. Raises UserError where the file system refuses it."""
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
