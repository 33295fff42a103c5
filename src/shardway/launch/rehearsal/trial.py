"""One attempt on this machine, started as a job script would start it, with a deadline or without.

Invariant: when `run_trial` returns or raises, nothing that it started is alive: what outlives its deadline is ended as
a scheduler ends it, by SIGTERM and then SIGKILL. This module must not judge what it saw.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardway.rundir.attempts import VARIABLE, Attempt, AttemptStart, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event

POLL_S = 0.1
KILL_AFTER_S = 10.0
"""What schedulers leave between SIGTERM and SIGKILL (OpenPBS: kill_delay 10 s; Slurm: KillWait 30 s)."""
JOB = "rehearsal"
STOP_VARIABLE = "SHARDWAY_STOP_FILE"
"""Environment variable in which a job tells a program which file asks it to save and leave."""
LAST_LINES = 5


@dataclass(frozen=True)
class Limits:
    """What ends an attempt: seconds until its deadline (None: none), and what has to come for a stop to be asked for.

    `stop_when` is told the events that rank 0 has written in this attempt so far, and the seconds since its start.
    """

    deadline_s: float | None = None
    stop_when: Callable[[Sequence[Event], float], bool] = lambda events, seconds: False
    patience_s: float = 60.0
    """Seconds that a stop that was asked for may take."""


@dataclass(frozen=True)
class TrialOutcome:
    """What came of one attempt.

    `code` is the exit code of its command, negative for a signal; times are in seconds. `killed`: it did not end by
    itself in time. `asked_s` is when a stop was asked for, None where none was; `events` are those of rank 0 in this
    attempt, and `left_s` what was left until the deadline when the command ended.
    """

    attempt: Attempt
    code: int
    seconds: float
    killed: bool
    result: Result | None
    events: tuple[Event, ...]
    asked_s: float | None = None
    left_s: float | None = None

    def named(self, name: str) -> list[Event]:
        """Its events of one name."""
        return [event for event in self.events if event["event"] == name]

    @property
    def steps(self) -> list[int]:
        """Steps that it took."""
        return [int(event["step"]) for event in self.named("step")]

    @property
    def first_step(self) -> int:
        """The step that it went on from; 0 for the start."""
        started = self.named("started")
        return int(started[-1].get("step", 0)) if started else 0

    @property
    def last_step(self) -> int:
        """The last step that is done after it."""
        return self.steps[-1] if self.steps else self.first_step

    @property
    def says_deadline(self) -> bool:
        """Whether it has said, while it could, that the deadline stopped it; then all was saved before."""
        return self.result is not None and self.result.state is Ending.DEADLINE

    def last_words(self) -> str:
        """The end of what it printed."""
        try:
            said = self.attempt.job_log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(said.rstrip().splitlines()[-LAST_LINES:])


def run_trial(words: Sequence[str], run: RunDir, limits: Limits, where: Path | None = None) -> TrialOutcome:
    """Run a command as the next attempt of `run`, in the folder `where`, until it ends.

    Raises OSError where it cannot be started.
    """
    attempt = run.attempt(len(run.attempts()) + 1)
    attempt.make()
    follower = run.follow_events(0, from_end=True)
    now = time.time()
    deadline = now + limits.deadline_s if limits.deadline_s is not None else 0.0
    attempt.write_started(AttemptStart(f"{JOB}-{attempt.number}", socket.gethostname(), started=now, deadline=deadline))
    events: list[Event] = []
    asked, killed, began = None, False, time.monotonic()
    with _started(words, attempt, where) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            events += follower.new_events()
            seconds = time.monotonic() - began
            if asked is None and limits.stop_when(events, seconds):
                run.request_stop("the rehearsal asked for a stop")
                asked = seconds
            if _is_overdue(limits, seconds, asked):
                killed = True
                _end(process)
        seconds = time.monotonic() - began
    events += follower.new_events()
    left = limits.deadline_s - seconds if limits.deadline_s is not None else None
    return TrialOutcome(attempt, process.returncode, seconds, killed, attempt.read_result(), tuple(events), asked, left)


def _is_overdue(limits: Limits, seconds: float, asked: float | None) -> bool:
    late = limits.deadline_s is not None and seconds > limits.deadline_s
    return late or (asked is not None and seconds - asked > limits.patience_s)


@contextlib.contextmanager
def _started(words: Sequence[str], attempt: Attempt, where: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    stop = RunDir(attempt.run_path.resolve()).stop_path
    environ = {**os.environ, VARIABLE: str(attempt.path.resolve()), STOP_VARIABLE: str(stop)}
    with open(attempt.job_log, "wb") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=where,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _kill(process, _descendants(process))


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a scheduler ends a job: all of it is asked, and after a while killed."""
    all_of_it = _descendants(process)
    for each in (process, *all_of_it):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            each.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_AFTER_S)
    _kill(process, all_of_it)


def _kill(process: subprocess.Popen[bytes], descendants: Sequence[psutil.Process]) -> None:
    """Also what outlives the one that started it; ranks of torch's agent are in sessions of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in descendants:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.Error:
        return []
