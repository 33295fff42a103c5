"""One attempt of a run: its folder, and what is written there of how it was submitted, started and ended.

    attempts/0001/
      job.sh            the job script, as it was submitted
      order.json        what was asked for, by the words of a person; run.toml, the run file of that order; site.toml,
                        the site's profile where it is the person's own
      submission.json   written by whoever submits: scheduler, token, job id
      started.json      written by the job when it starts: job id, nodes, deadline
      result.json       written once: by rank 0, else by the job script, else by whoever looks later
      log/ code/        output of the job and of its ranks; the snapshot of the code
      replaced/         what a program had changed where it works, and newer code took the place of
    attempts/in_work    the attempt whose code that folder has

Invariant: `result.json` is written at most once and appears whole, so that two who know how an attempt ended never
mix their words. JSON here has one key a line: job scripts read it with sed. This module must not decide what an
ending means.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from shardway.earlier_names import EARLIER_STATES
from shardway.rundir.file_io import read_fields, render_json, write_json, write_new

FORMAT = 1

VARIABLE = "SHARDWAY_ATTEMPT_DIR"
"""Environment variable in which a job tells its ranks the folder of its attempt."""

T = TypeVar("T")


SECOND_SIGNAL = "a second signal ended the run at once"
"""Why a run was stopped whose person did not want to wait."""

BY_AGENT = "shardway train"
"""`by` of a result that the command wrote, not one of its ranks."""

BY_SIGNAL = "signal"
"""`failure` of an attempt that obeyed a signal: only the scheduler knows whether that meant a stop, the end of the
wall-time, or that it wanted the nodes for another job."""


class Ending(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    """The work is done."""
    DEADLINE = "deadline"
    """Stopped gracefully because the wall-time was about to end."""
    STOPPED = "stopped"
    """Stopped because somebody asked for it."""
    PREEMPTED = "preempted"
    """The scheduler took the nodes for another job."""
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    CRASHED = "crashed"
    """The program failed, and said so or ended with an exit code."""
    UNKNOWN = "unknown"
    """It is over, and what ended it is not known."""
    NOT_NEEDED = "not_needed"
    """A link of a chain that found the work done, or the chain stopped, and ran nothing."""


FAILURES = frozenset((Ending.OUT_OF_MEMORY, Ending.NODE_FAILURE, Ending.CRASHED, Ending.UNKNOWN))
"""Endings that nobody wanted, and that were no end of a time."""


@dataclass(frozen=True)
class Result:
    """How an attempt ended, in the words of whoever knew first.

    `failure` is a signature of what failed, in one line: two attempts that failed alike have the same. `step` is the
    optimizer step at that moment. `ended` is in Unix seconds. `by` is "rank 0", "rank 3", "job script", "scheduler".
    """

    state: Ending
    reason: str = ""
    step: int = 0
    exit_code: int | None = None
    failure: str = ""
    job: str = ""
    host: str = ""
    by: str = ""
    ended: float = 0.0


@dataclass(frozen=True)
class Submission:
    """What was asked of a scheduler for one attempt.

    `token` is unique and is part of what the scheduler is told, so that a submission whose answer was lost is found
    again. `job` is empty until the scheduler has answered. `asked` is what the job asks for, for sentences about it
    (keys of `schedulers.records.Asked`); a link of a chain that its job submitted asks for what the one before it did.
    `claim` is a line that names the process which is at it, so that others see whether it still is.
    """

    scheduler: str
    token: str
    job: str = ""
    host: str = ""
    after: str = ""
    submitted: float = 0.0
    asked: Mapping[str, Any] = field(default_factory=dict)
    claim: str = ""


@dataclass(frozen=True)
class AttemptStart:
    """What the job said when it started; times are Unix seconds of its first node, `deadline` 0 for none."""

    job: str
    host: str = ""
    nodes: str = ""
    started: float = 0.0
    deadline: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """The folder of one attempt; the object itself touches the disk only when a method is called."""

    path: Path

    @property
    def number(self) -> int:
        """Its number, from 1 on."""
        return int(self.path.name)

    @property
    def run_path(self) -> Path:
        """The run directory that it is an attempt of."""
        return self.path.parents[1]

    @property
    def job_script(self) -> Path:
        """The job script."""
        return self.path / "job.sh"

    @property
    def log_folder(self) -> Path:
        """Output of the job and of its ranks."""
        return self.path / "log"

    @property
    def job_log(self) -> Path:
        """What the job script and everything that it started printed."""
        return self.log_folder / "job.out"

    def node_log_folder(self, node: int) -> Path:
        """What the ranks of one node printed, where an agent started them."""
        return self.log_folder / f"node-{node}"

    @property
    def code(self) -> Path:
        """The snapshot of the code that this attempt runs."""
        return self.path / "code"

    @property
    def snapshot_path(self) -> Path:
        """What the snapshot consists of and what was left out."""
        return self.path / "snapshot.json"

    @property
    def diff_path(self) -> Path:
        """How tracked text of the snapshot differs from its commit."""
        return self.path / "code.diff"

    @property
    def result_path(self) -> Path:
        """How it ended."""
        return self.path / "result.json"

    @property
    def order_path(self) -> Path:
        """What the person asked for when this attempt was submitted."""
        return self.path / "order.json"

    @property
    def run_file(self) -> Path:
        """The run file that this attempt trains."""
        return self.path / "run.toml"

    @property
    def site_file(self) -> Path:
        """The profile of the site, where it is the person's own."""
        return self.path / "site.toml"

    @property
    def submission_path(self) -> Path:
        """How it was submitted."""
        return self.path / "submission.json"

    @property
    def started_path(self) -> Path:
        """What the job said when it started."""
        return self.path / "started.json"

    @property
    def record_paths(self) -> tuple[Path, ...]:
        """The files that tell of its life."""
        return (self.submission_path, self.started_path, self.result_path)

    def make(self) -> bool:
        """Make the folder and those in it; False where it was there before."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        self.log_folder.mkdir()
        return True

    def read_result(self) -> Result | None:
        """How it ended; None where nobody has written it, or it is damaged."""
        return parse_result(_read_text(self.result_path))

    def write_result(self, result: Result) -> bool:
        """Say how it ended, unless somebody has; whether these words were taken."""
        return write_new(self.result_path, render_result(result))

    def read_submission(self) -> Submission | None:
        """How it was submitted; None where it was not, or the file is damaged."""
        return _parse(Submission, _read_text(self.submission_path))

    def write_submission(self, submission: Submission) -> None:
        """Replace what is known of the submission."""
        write_json(self.submission_path, {"format": FORMAT, **asdict(submission)})

    def read_started(self) -> AttemptStart | None:
        """What the job said when it started; None where it has not."""
        return parse_started(_read_text(self.started_path))

    def write_started(self, started: AttemptStart) -> None:
        """Say that it starts, for a job without a script."""
        write_json(self.path / "started.json", {"format": FORMAT, **asdict(started)})

    def note_began(self) -> None:
        """Say that rank 0 is there, for the job script, which waits for it no longer than it may. A disk that refuses
        is for what comes next to tell."""
        with contextlib.suppress(OSError):
            (self.path / "began").touch()


def render_result(result: Result) -> str:
    """The text of `result.json`."""
    return render_json({"format": FORMAT, **asdict(result)}, indent=1) + "\n"


def parse_result(text: str) -> Result | None:
    """A result from the text of `result.json`; None where it is empty or damaged."""
    found = _parse(Result, text)
    if found is None:
        return None
    try:
        state = Ending(EARLIER_STATES.get(found.state, found.state))
    except ValueError:
        state = Ending.UNKNOWN
    return Result(**{**asdict(found), "state": state})


def parse_started(text: str) -> AttemptStart | None:
    """The start from the text of `started.json`; None where it is empty or damaged."""
    return _parse(AttemptStart, text)


def parse_submission(text: str) -> Submission | None:
    """The submission from the text of `submission.json`; None where it is empty or damaged."""
    return _parse(Submission, text)


def _parse(kind: type[T], text: str) -> T | None:
    """The dataclass in a JSON text; None where that is damaged or says too little."""
    with contextlib.suppress(ValueError, RecursionError):
        return read_fields(kind, json.loads(text))
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
