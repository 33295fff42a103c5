"""One attempt of a run: its folder, and the records of its submission, start and end.

    attempts/0001/
      job.sh lib.sh     the job script, as it was submitted, and the functions that it reads; enter.sh, which runs a
                        command on a node of the running job
      order.json        the user's request, in the words of the command; run.toml, the run file of that request;
                        site.toml, the site's profile if it is the user's own
      submission.json   written at submission: scheduler, token, job id
      started.json      written by the job when it starts: job id, nodes, deadline
      result.json       written once: by rank 0, else by the job script, else by the next command that looks
      handover/         of a run that follows another one: it is being handed to the scheduler, by one claimant
      serve.py serve.json  of a job that serves: the program that watches the server, and what it is to do;
                        serving.json, its state; api_key and server_key, readable by their owner alone
      call.py call.json of a job that calls a function: the program, and the pickled call;
                        returned/, what each rank returned or raised
      log/ code/        output of the job and of its ranks; the snapshot of the code
      replaced/         a foreign program's changes in its working directory that newer code replaced
    attempts/in_work    the attempt whose code that folder has

Invariant: `result.json` is written at most once and appears whole, so that two reports of an end are never mixed. JSON
here has one key a line, since job scripts read it with sed. This module does not decide what an ending means.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from shardway.earlier_names import EARLIER_STATES
from shardway.rundir.file_io import PathBelow, read_fields, render_json, write_json, write_new

FORMAT = 1
VARIABLE = "SHARDWAY_ATTEMPT_DIR"  # environment variable by which a job passes the attempt's folder to its ranks
T = TypeVar("T")


SECOND_SIGNAL = "a second signal ended the run at once"  # reason of a stop that the user made immediate
BY_AGENT = "shardway train"  # `by` of a result that the command wrote, not one of its ranks

BY_SIGNAL = "signal"
"""`failure` of an attempt that obeyed a signal: only the scheduler can tell whether it meant a stop, the end of the
wall-time or preemption."""


class Ending(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"  # the work is done
    DEADLINE = "deadline"  # stopped gracefully because the wall-time was about to end
    STOPPED = "stopped"  # stopped on request
    PREEMPTED = "preempted"  # the scheduler took the nodes for another job
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    CRASHED = "crashed"  # the program failed, with an error or a nonzero exit code
    UNKNOWN = "unknown"  # it has ended, and the cause is not known
    NOT_NEEDED = "not_needed"  # a link of a chain that found the work done, or the chain stopped, and ran nothing


FAILURES = frozenset((Ending.OUT_OF_MEMORY, Ending.NODE_FAILURE, Ending.CRASHED, Ending.UNKNOWN))
"""Endings that are failures: neither wanted, nor the end of a time."""


@dataclass(frozen=True)
class Result:
    """How an attempt ended, by the first report of it. `failure` is a signature of what failed, in one line: two
    attempts that failed alike have the same. `step` is the optimizer step at that moment. `ended` is in Unix seconds.
    `by` is "rank 0", "rank 3", "job script", "scheduler"."""

    state: Ending
    reason: str = ""
    step: int = 0
    exit_code: int | None = None
    failure: str = ""
    job: str = ""
    host: str = ""
    by: str = ""
    ended: float = 0.0

    @property
    def ran_nothing(self) -> bool:
        """Whether the attempt was a link of a chain that was not needed: how its run stands follows from another."""
        return self.state is Ending.NOT_NEEDED


@dataclass(frozen=True)
class Submission:
    """A request to a scheduler for one attempt.

    `token` is unique and part of the request, so that a submission whose answer was lost can be found again. `job` is
    empty until the scheduler has answered. `asked` holds the requested resources, for messages (keys of
    `schedulers.records.Asked`); a link of a chain that its job submitted requests the same as the one before it.
    `claim` identifies the process that is submitting, so that others can check whether it still is. `follows` is the
    run directory whose end it waits for; the job that finishes that run submits it. `array` is the name of the array of
    jobs of which this one is the task `task`; "" for a job of its own. `workdir` is the folder of its ranks, "" where a
    job submitted it.
    """

    scheduler: str
    token: str
    job: str = ""
    host: str = ""
    after: str = ""
    submitted: float = 0.0
    asked: Mapping[str, Any] = field(default_factory=dict)
    claim: str = ""
    follows: str = ""
    array: str = ""
    task: int = 0
    workdir: str = ""


@dataclass(frozen=True)
class AttemptStart:
    """The job's record of its start; times are Unix seconds of its first node, `deadline` 0 for none."""

    job: str
    host: str = ""
    nodes: str = ""
    started: float = 0.0
    deadline: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """The folder of one attempt; the object touches the disk only when a method is called."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run_path(self) -> Path:
        return self.path.parents[1]

    job_script = PathBelow("job.sh")
    job_library = PathBelow("lib.sh")
    enter_script = PathBelow("enter.sh")  # a command on a node of the running job
    log_folder = PathBelow("log")
    job_log = PathBelow("log/job.out")  # output of the job script and everything that it started
    code = PathBelow("code")
    snapshot_path = PathBelow("snapshot.json")  # what is in the snapshot of the code and what was left out
    diff_path = PathBelow("code.diff")  # diff of the snapshot's tracked text files against its commit
    result_path = PathBelow("result.json")
    order_path = PathBelow("order.json")
    run_file = PathBelow("run.toml")
    site_file = PathBelow("site.toml")
    submission_path = PathBelow("submission.json")
    started_path = PathBelow("started.json")
    handover = PathBelow("handover")  # a folder: the claim of what hands a follower to the scheduler
    serve_program = PathBelow("serve.py")
    serve_request = PathBelow("serve.json")
    serving_path = PathBelow("serving.json")  # state, port and model of an inference server
    call_program = PathBelow("call.py")
    call_path = PathBelow("call.json")
    returned_folder = PathBelow("returned")
    api_key = PathBelow("api_key")
    server_key = PathBelow("server_key")  # the same key as a file of options of the server
    server_log = PathBelow("log/server.out")
    export_log = PathBelow("log/export.out")

    def node_log_folder(self, node: int) -> Path:
        return self.log_folder / f"node-{node}"

    def returned_path(self, rank: int) -> Path:
        """What a rank of a call returned or raised."""
        return self.returned_folder / f"rank-{rank:05d}.json"

    @property
    def record_paths(self) -> tuple[Path, ...]:
        return (self.submission_path, self.started_path, self.result_path)

    def make(self) -> bool:
        """Make the folder and its subfolders; False where it existed."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        self.log_folder.mkdir()
        return True

    def read_result(self) -> Result | None:
        return parse_result(_read_text(self.result_path))

    def write_result(self, result: Result) -> bool:
        """Write how it ended, unless that is written already; returns whether this result was taken."""
        return write_new(self.result_path, render_result(result))

    def read_submission(self) -> Submission | None:
        return _parse(Submission, _read_text(self.submission_path))

    def write_submission(self, submission: Submission) -> None:
        write_json(self.submission_path, {"format": FORMAT, **asdict(submission)})

    def read_started(self) -> AttemptStart | None:
        return parse_started(_read_text(self.started_path))

    def write_started(self, started: AttemptStart) -> None:
        write_json(self.path / "started.json", {"format": FORMAT, **asdict(started)})

    def note_began(self) -> None:
        """Mark that rank 0 has started, for the job script, which waits for it for a limited time. Errors of the disk
        are ignored; the next write reports them."""
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
    state = EARLIER_STATES.get(found.state, found.state)
    return replace(found, state=next((each for each in Ending if each == state), Ending.UNKNOWN))


def parse_started(text: str) -> AttemptStart | None:
    """The start from the text of `started.json`; None where it is empty or damaged."""
    return _parse(AttemptStart, text)


def parse_submission(text: str) -> Submission | None:
    """The submission from the text of `submission.json`; None where it is empty or damaged."""
    return _parse(Submission, text)


def _parse(kind: type[T], text: str) -> T | None:
    with contextlib.suppress(ValueError, RecursionError):
        return read_fields(kind, json.loads(text))
    return None


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""
