"""A rehearsal on this machine: attempts cut by a deadline, compared with one without a break.

Invariants:
- When `run_trial` returns or raises, none of its processes is alive: what outlives the deadline gets SIGTERM and then
  SIGKILL, as from a scheduler.
- Both runs start from nothing in their own folders, with the same command.
- Numbers of two runs are compared bit for bit. What cannot be observed is reported as unknown, never as passed.
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
from enum import StrEnum
from pathlib import Path

import psutil

from shardway.rundir.attempts import VARIABLE, Attempt, AttemptStart, Ending, Result
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event

# --- one attempt on this machine, with or without a deadline

POLL_S = 0.1
KILL_AFTER_S = 10.0
"""Seconds between SIGTERM and SIGKILL under schedulers (OpenPBS: kill_delay 10 s; Slurm: KillWait 30 s)."""


@dataclass(frozen=True)
class Limits:
    """What ends an attempt: seconds until its deadline (None: none), and the condition on which a stop is requested.

    `stop_when` gets the events of rank 0 in this attempt so far, and the seconds since its start. `patience_s`: seconds
    that a requested stop may take."""

    deadline_s: float | None = None
    stop_when: Callable[[Sequence[Event], float], bool] = lambda events, seconds: False
    patience_s: float = 60.0


@dataclass(frozen=True)
class TrialOutcome:
    """The result of one attempt.

    `code`: exit code of its command, negative for a signal. Times are in seconds. `killed`: it did not end by itself in
    time. `asked_s`: when a stop was requested, None if none was. `events`: those of rank 0 in this attempt. `left_s`:
    time left until the deadline when the command ended."""

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
        """The steps that it took."""
        return [int(event["step"]) for event in self.named("step")]

    @property
    def first_step(self) -> int:
        """The step that it resumed from; 0 for the start."""
        started = self.named("started")
        return int(started[-1].get("step", 0)) if started else 0

    @property
    def last_step(self) -> int:
        """The last completed step."""
        return self.steps[-1] if self.steps else self.first_step

    @property
    def says_deadline(self) -> bool:
        """Whether it reported, before its end, that the deadline stopped it; all was saved by then."""
        return self.result is not None and self.result.state is Ending.DEADLINE

    def describe_end(self) -> str:
        """How it ended, in a sentence, and the end of its output."""
        how = f"it ended with exit code {self.code} after {self.seconds:.1f} s"
        if self.killed:
            how = "it did not end by itself"
        elif self.result:
            how += f", and said: {self.result.state}, {self.result.reason}"
        return f"{how}\n{self.last_words()}".rstrip()

    def last_words(self) -> str:
        """The end of its output."""
        try:
            said = self.attempt.job_log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(said.rstrip().splitlines()[-5:])


def run_trial(words: Sequence[str], run: RunDir, limits: Limits, where: Path | None = None) -> TrialOutcome:
    """Run a command as the next attempt of `run`, in the folder `where`, until it ends.

    Raises OSError if it cannot be started."""
    attempt = run.attempt(len(run.attempts()) + 1)
    attempt.make()
    follower = run.follow_events(0, from_end=True)
    now, limit_s = time.time(), limits.deadline_s
    deadline = now + limit_s if limit_s is not None else 0.0
    attempt.write_started(
        AttemptStart(f"rehearsal-{attempt.number}", socket.gethostname(), started=now, deadline=deadline)
    )
    events: list[Event] = []
    asked, killed, began = None, False, time.monotonic()
    stop = RunDir(attempt.run_path.resolve()).stop_path
    environ = {**os.environ, VARIABLE: str(attempt.path.resolve()), "SHARDWAY_STOP_FILE": str(stop)}
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
        while process.poll() is None:
            time.sleep(POLL_S)
            events += follower.new_events()
            seconds = time.monotonic() - began
            if asked is None and limits.stop_when(events, seconds):
                run.request_stop("the rehearsal asked for a stop")
                asked = seconds
            late = limit_s is not None and seconds > limit_s
            if late or (asked is not None and seconds - asked > limits.patience_s):
                killed = True
                _end(process, KILL_AFTER_S)
        seconds = time.monotonic() - began
    finally:
        _end(process)
    events += follower.new_events()
    left = limit_s - seconds if limit_s is not None else None
    return TrialOutcome(attempt, process.returncode, seconds, killed, attempt.read_result(), tuple(events), asked, left)


def _end(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """End all processes of an attempt as a scheduler does: SIGTERM, and SIGKILL after a while; at once without a grace
    time. Descendants may outlive their parent, and ranks of torch's agent have sessions of their own."""
    descendants: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *descendants) if grace_s else ():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            each.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in descendants:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


# --- checks as pure functions of the attempts

COLUMNS = ("loss", "grad_norm", "lr")
"""Columns of a step that must be equal."""


class RehearsalVerdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


OK, FAIL, UNKNOWN = RehearsalVerdict


@dataclass(frozen=True)
class RehearsalCheck:
    """One check: what was tested, what was found and, if it failed, what to do."""

    name: str
    verdict: RehearsalVerdict
    found: str
    remedy: str = ""


def check_reference(trial: TrialOutcome) -> RehearsalCheck:
    """Whether the run without a deadline trains at all."""
    if trial.code or trial.killed or not trial.steps:
        return RehearsalCheck("trains", FAIL, trial.describe_end(), "make it train here first")
    longest = max(float(event["seconds"]) for event in trial.named("step"))
    found = f"{len(trial.steps)} steps without a break in {trial.seconds:.1f} s, the longest in {longest:.2f} s"
    return RehearsalCheck("trains", OK, found)


LONGER = "choose a longer --deadline, or set run.stop_margin"


def check_stop(trial: TrialOutcome) -> RehearsalCheck:
    """Whether an attempt stopped by itself before its deadline, and reported so; its processes may end a little
    later."""
    name = f"attempt {trial.attempt.number} stops in time"
    deadline = f" of {trial.seconds + trial.left_s:.1f} s" if trial.left_s is not None else ""
    told = [str(event.get("reason", "")) for event in trial.named("stopped") or trial.named("deadline")]
    deadline += f" ({told[-1]})" if told else ""  # with the margin as the run states it: "(it stopped with ...)"
    if trial.killed and not trial.says_deadline:
        return RehearsalCheck(name, FAIL, f"it was still running at its deadline{deadline}", LONGER)
    if not trial.says_deadline or (trial.code and not trial.killed):
        return RehearsalCheck(name, FAIL, trial.describe_end(), "" if trial.code else LONGER)
    how = "it had saved, and was leaving at" if trial.killed else f"{trial.left_s or 0.0:.1f} s before"
    mark = ";" if trial.killed else ","
    return RehearsalCheck(name, OK, f"at step {trial.last_step}{mark} {how} its deadline{deadline}")


def check_save(trial: TrialOutcome, saved: Sequence[int]) -> RehearsalCheck:
    """Whether the step at which an attempt stopped is in a checkpoint."""
    name, step = f"attempt {trial.attempt.number} saves", trial.last_step
    if step not in saved:
        return RehearsalCheck(name, FAIL, f"it stopped at step {step}, and there are checkpoints of {list(saved)}")
    took = [float(event["seconds"]) for event in trial.named("saved")]
    return RehearsalCheck(name, OK, f"step {step}" + (f", in {took[-1]:.2f} s" if took else ""))


def check_resume(before: TrialOutcome, trial: TrialOutcome) -> RehearsalCheck:
    """Whether an attempt resumes where the one before it stopped."""
    name = f"attempt {trial.attempt.number} resumes"
    if not trial.named("started"):
        return RehearsalCheck(name, FAIL, trial.describe_end())
    if trial.first_step != before.last_step:
        what = f"the one before stopped at step {before.last_step}, it began at step {trial.first_step}"
        return RehearsalCheck(name, FAIL, what)
    return RehearsalCheck(name, OK, f"from step {trial.first_step} to step {trial.last_step}")


DIFFERENT = (
    "look for state that no checkpoint holds: a random generator of your own, data that depend on the time, or kernels "
    "that are not deterministic (train.deterministic)"
)


def check_losses(reference: Sequence[Event], cut: Sequence[Event]) -> RehearsalCheck:
    """Whether two runs have the same numbers in every step that both took. Arguments: their step events that are
    valid."""
    name, theirs = "same losses", {int(event["step"]): event for event in cut}
    shared = [(event, theirs[int(event["step"])]) for event in reference if int(event["step"]) in theirs]
    if len(shared) < len(reference) or not shared:
        return RehearsalCheck(name, FAIL, f"of {len(reference)} steps, {len(shared)} were taken again")
    for through, again in shared:
        for column in COLUMNS:
            if through.get(column) != again.get(column):
                values = f"{again.get(column)!r}, and {through.get(column)!r} without a stop"
                return RehearsalCheck(name, FAIL, f"{column} of step {through['step']} is {values}", DIFFERENT)
    return RehearsalCheck(name, OK, f"{', '.join(COLUMNS)} of {len(shared)} steps are the same bit for bit")


# --- checks of a command without events

OBEY = (
    "look between steps whether the file `stop` of the run directory is there (two folders above that which "
    "SHARDWAY_ATTEMPT_DIR names), save and end; `with shardway.start()` does that"
)
ON_TIME = (
    'compare the time with "deadline" in started.json of SHARDWAY_ATTEMPT_DIR; without that, a job script asks for '
    "the stop through the stop file"
)
UNSEEN = (
    "the command writes no events that Shardway reads: where it went on and with which losses is for you to compare"
)


def check_stop_file(trial: TrialOutcome) -> RehearsalCheck:
    """Whether a command ends after the stop file appears."""
    name = "obeys the stop file"
    if trial.asked_s is None:
        return RehearsalCheck(name, UNKNOWN, f"it ended by itself after {trial.seconds:.1f} s, before it was asked to")
    took = trial.seconds - trial.asked_s
    if trial.killed or trial.code:
        how = "it went on" if trial.killed else f"it ended with exit code {trial.code}"
        return RehearsalCheck(name, FAIL, f"{how} after it was asked to stop {took:.1f} s before", OBEY)
    return RehearsalCheck(name, OK, f"it ended {took:.1f} s after it was asked to")


def check_deadline(trial: TrialOutcome) -> RehearsalCheck:
    """Whether a command ends by itself before its deadline; one that obeys the stop file need not."""
    name = "ends before its deadline"
    if trial.killed:
        return RehearsalCheck(name, UNKNOWN, "it does not look at the deadline and was ended there", ON_TIME)
    if trial.code:
        found = f"it ended with exit code {trial.code}\n{trial.last_words()}".rstrip()
        return RehearsalCheck(name, FAIL, found)
    return RehearsalCheck(name, OK, f"{trial.left_s or 0.0:.1f} s before")


def check_second_start(trial: TrialOutcome) -> RehearsalCheck:
    """Whether a stopped command can be started again in the same folder."""
    if trial.code or trial.killed:
        found = f"it ended with exit code {trial.code}\n{trial.last_words()}".rstrip()
        return RehearsalCheck("starts again", FAIL, found)
    return RehearsalCheck("starts again", OK, f"it ran for {trial.seconds:.1f} s")


# --- the whole rehearsal

TRIES = 3
LATER, EARLIER = 1.5, 0.8
"""Factors that move a deadline that came before the first step, or after the last."""
SLOWER = 1.5
"""Factor by which a start may be slower than the measured one."""
RESERVE_S, RESERVE_PART = 4.0, 0.1
"""Of a short wall-time, what a run reserves for two saves before it has measured one, and for its end."""


@dataclass(frozen=True)
class RehearsedProgram:
    """What is rehearsed: the words that start it in a run directory, and the deadline of an attempt in seconds.

    `whole`: the run without a break trains to its own end; else it is stopped after the time of the deadline, which may
    take `patience_s` seconds. `place`: the working folder of a run directory's attempts; None for the current one."""

    words: Callable[[Path], Sequence[str]]
    deadline_s: float
    whole: bool = False
    patience_s: float = 60.0
    place: Callable[[Path], Path | None] = lambda run: None

    def run(self, run: RunDir, limits: Limits) -> TrialOutcome:
        """Its next attempt in a run directory."""
        return run_trial(self.words(run.path), run, limits, self.place(run.path))


def rehearse(piece: RehearsedProgram, folder: Path) -> Iterator[RehearsalCheck]:
    """Rehearse in an existing, empty folder. Yields each check as soon as it is known; the first failure is the last.

    Raises OSError if the command cannot be started."""

    def has_trained(events: Sequence[Event], seconds: float) -> bool:
        """Steps were taken for the time of the deadline; a program without events has run as long."""
        first = next((event for event in events if event["event"] == "step"), None)
        if first is not None:
            return time.time() - float(first["time"]) >= piece.deadline_s
        return not events and seconds >= piece.deadline_s

    limits = Limits(patience_s=piece.patience_s) if piece.whole else Limits(None, has_trained, piece.patience_s)
    reference = piece.run(RunDir(folder / "through"), limits)
    if not reference.named("started") and (reference.asked_s is not None or not reference.code):
        obeyed = check_stop_file(reference)
        yield obeyed
        if obeyed.verdict is FAIL:
            return
        cut = RunDir(folder / "cut")
        yield check_deadline(piece.run(cut, Limits(piece.deadline_s)))
        yield check_second_start(piece.run(cut, Limits(stop_when=lambda events, seconds: seconds >= piece.deadline_s)))
        yield RehearsalCheck("same losses", UNKNOWN, UNSEEN)
        return
    for check in _rehearse(piece, folder, reference):
        yield check
        if check.verdict is FAIL:
            return


def _rehearse(piece: RehearsedProgram, folder: Path, reference: TrialOutcome) -> Iterator[RehearsalCheck]:
    yield check_reference(reference)
    last = reference.last_step

    def reached(events: Sequence[Event], seconds: float) -> bool:
        return any(event["event"] == "step" and event["step"] >= last for event in events)

    # A first attempt that a deadline cuts. The start of ranks varies in time, so a deadline may fall before or after a
    # short run: it is then moved.
    least_s, middle_s = _find_deadlines(reference)
    deadline = min(max(piece.deadline_s, least_s), middle_s)
    for number in range(1, TRIES + 1):
        cut = RunDir(folder / f"cut-{number}")
        before = piece.run(cut, Limits(deadline, reached))
        ended = before.steps and before.last_step >= last
        if before.says_deadline or not (before.killed or ended) or number == TRIES:
            break
        deadline = LATER * deadline if before.killed else min(EARLIER * deadline, _find_deadlines(before)[1])
    yield check_stop(before)
    yield check_save(before, cut.checkpoint_steps())
    for limit in (deadline, None):
        trial = piece.run(cut, Limits(limit, reached))
        yield check_resume(before, trial)
        if trial.last_step >= last:
            break
        if limit is not None:
            yield check_stop(trial)
            yield check_save(trial, cut.checkpoint_steps())
        before = trial
    through = RunDir(folder / "through")
    yield check_losses(*([event for event in run.events() if event["event"] == "step"] for run in (through, cut)))


def _find_deadlines(trial: TrialOutcome) -> tuple[float, float]:
    """Deadlines in seconds from the start, as measured on an attempt that took steps: the shortest one that leaves time
    for steps after a start, and one in the middle of its steps."""

    def longest(name: str) -> float:
        return max((float(event.get("seconds", 0.0)) for event in trial.named(name)), default=0.0)

    steps, started = trial.named("step"), trial.attempt.read_started()
    begun = started.started if started is not None else 0.0
    first, last = float(steps[0]["time"]) - float(steps[0]["seconds"]), float(steps[-1]["time"])
    start, training = first - begun, last - first
    reserve = RESERVE_S + 2 * longest("saved") + 2 * longest("step") + longest("validation")
    kept = 1 - RESERVE_PART
    return (start * SLOWER + reserve) / kept, (start + training / 2 + reserve) / kept
