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
JOB = "rehearsal"
STOP_VARIABLE = "SHARDWAY_STOP_FILE"
"""Environment variable with the path of the file that asks a program to save and leave."""
LAST_LINES = 5


@dataclass(frozen=True)
class Limits:
    """What ends an attempt: seconds until its deadline (None: none), and the condition on which a stop is requested.

    `stop_when` gets the events of rank 0 in this attempt so far, and the seconds since its start."""

    deadline_s: float | None = None
    stop_when: Callable[[Sequence[Event], float], bool] = lambda events, seconds: False
    patience_s: float = 60.0
    """Seconds that a requested stop may take."""


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

    def last_words(self) -> str:
        """The end of its output."""
        try:
            said = self.attempt.job_log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(said.rstrip().splitlines()[-LAST_LINES:])


def run_trial(words: Sequence[str], run: RunDir, limits: Limits, where: Path | None = None) -> TrialOutcome:
    """Run a command as the next attempt of `run`, in the folder `where`, until it ends.

    Raises OSError if it cannot be started."""
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
    """End all processes of an attempt as a scheduler does: SIGTERM, and SIGKILL after a while."""
    all_of_it = _descendants(process)
    for each in (process, *all_of_it):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            each.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_AFTER_S)
    _kill(process, all_of_it)


def _kill(process: subprocess.Popen[bytes], descendants: Sequence[psutil.Process]) -> None:
    """Also kills descendants that outlive their parent; ranks of torch's agent have sessions of their own."""
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


# --- checks as pure functions of the attempts

COLUMNS = ("loss", "grad_norm", "lr")
"""Columns of a step that must be equal."""


class RehearsalVerdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


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
        return RehearsalCheck(
            "trains", RehearsalVerdict.FAIL, f"{_how(trial)}\n{trial.last_words()}", "make it train here first"
        )
    steps = len(trial.steps)
    seconds = [float(event["seconds"]) for event in trial.named("step")]
    found = f"{steps} steps without a break in {trial.seconds:.1f} s, the longest in {max(seconds):.2f} s"
    return RehearsalCheck("trains", RehearsalVerdict.OK, found)


def check_stop(trial: TrialOutcome) -> RehearsalCheck:
    """Whether an attempt stopped by itself before its deadline, and reported so; its processes may end a little
    later."""
    name = f"attempt {trial.attempt.number} stops in time"
    if trial.killed and not trial.says_deadline:
        return RehearsalCheck(
            name, RehearsalVerdict.FAIL, f"it was still running at its deadline{_describe(trial)}", LONGER
        )
    if not trial.says_deadline or (trial.code and not trial.killed):
        remedy = "" if trial.code else LONGER
        return RehearsalCheck(name, RehearsalVerdict.FAIL, f"{_how(trial)}\n{trial.last_words()}".rstrip(), remedy)
    if trial.killed:
        found = f"at step {trial.last_step}; it had saved, and was leaving at its deadline{_describe(trial)}"
    else:
        found = f"at step {trial.last_step}, {trial.left_s or 0.0:.1f} s before its deadline{_describe(trial)}"
    return RehearsalCheck(name, RehearsalVerdict.OK, found)


LONGER = "choose a longer --deadline, or set run.stop_margin"


def check_save(trial: TrialOutcome, saved: Sequence[int]) -> RehearsalCheck:
    """Whether the step at which an attempt stopped is in a checkpoint."""
    name, step = f"attempt {trial.attempt.number} saves", trial.last_step
    if step not in saved:
        return RehearsalCheck(
            name, RehearsalVerdict.FAIL, f"it stopped at step {step}, and there are checkpoints of {list(saved)}"
        )
    took = [float(event["seconds"]) for event in trial.named("saved")]
    return RehearsalCheck(name, RehearsalVerdict.OK, f"step {step}" + (f", in {took[-1]:.2f} s" if took else ""))


def check_resume(before: TrialOutcome, trial: TrialOutcome) -> RehearsalCheck:
    """Whether an attempt resumes where the one before it stopped."""
    name = f"attempt {trial.attempt.number} resumes"
    if not trial.named("started"):
        return RehearsalCheck(name, RehearsalVerdict.FAIL, f"{_how(trial)}\n{trial.last_words()}".rstrip())
    if trial.first_step != before.last_step:
        what = f"the one before stopped at step {before.last_step}, it began at step {trial.first_step}"
        return RehearsalCheck(name, RehearsalVerdict.FAIL, what)
    return RehearsalCheck(name, RehearsalVerdict.OK, f"from step {trial.first_step} to step {trial.last_step}")


def check_losses(reference: Sequence[Event], cut: Sequence[Event]) -> RehearsalCheck:
    """Whether two runs have the same numbers in every step that both took. Arguments: their step events that are
    valid."""
    theirs = {int(event["step"]): event for event in cut}
    shared = [(event, theirs[int(event["step"])]) for event in reference if int(event["step"]) in theirs]
    if len(shared) < len(reference) or not shared:
        return RehearsalCheck(
            "same losses", RehearsalVerdict.FAIL, f"of {len(reference)} steps, {len(shared)} were taken again"
        )
    for through, again in shared:
        for column in COLUMNS:
            if through.get(column) != again.get(column):
                found = (
                    f"{column} of step {through['step']} is {again.get(column)!r}, and {through.get(column)!r} without "
                    "a stop"
                )
                return RehearsalCheck("same losses", RehearsalVerdict.FAIL, found, DIFFERENT)
    return RehearsalCheck(
        "same losses", RehearsalVerdict.OK, f"{', '.join(COLUMNS)} of {len(shared)} steps are the same bit for bit"
    )


DIFFERENT = (
    "look for state that no checkpoint holds: a random generator of your own, data that depend on the time, or kernels "
    "that are not deterministic (train.deterministic)"
)


def _describe(trial: TrialOutcome) -> str:
    """The deadline, with the margin as the run states it: " of 20.0 s (it stopped with ...)"."""
    whole = f" of {trial.seconds + trial.left_s:.1f} s" if trial.left_s is not None else ""
    told = [str(event.get("reason", "")) for event in trial.named("stopped") or trial.named("deadline")]
    return whole + (f" ({told[-1]})" if told else "")


def _how(trial: TrialOutcome) -> str:
    """How an attempt ended, in a sentence."""
    if trial.killed:
        return "it did not end by itself"
    said = f", and said: {trial.result.state}, {trial.result.reason}" if trial.result else ""
    return f"it ended with exit code {trial.code} after {trial.seconds:.1f} s{said}"


# --- the rehearsal of a command without events

OBEY = (
    "look between steps whether the file `stop` of the run directory is there (two folders above that which "
    "SHARDWAY_ATTEMPT_DIR names), save and end; `with shardway.start()` does that"
)
ON_TIME = (
    'compare the time with "deadline" in started.json of SHARDWAY_ATTEMPT_DIR; without that, a job script asks for '
    "the stop through the stop file"
)


def rehearse_foreign(
    words: Callable[[Path], Sequence[str]],
    place: Callable[[Path], Path | None],
    deadline_s: float,
    folder: Path,
    first: TrialOutcome,
) -> Iterator[RehearsalCheck]:
    """The checks of a command whose attempt `first` was asked to stop after `deadline_s` seconds."""
    obeyed = check_stop_file(first)
    yield obeyed
    if obeyed.verdict is RehearsalVerdict.FAIL:
        return
    run = RunDir(folder / "cut")
    where = place(run.path)
    yield check_deadline(run_trial(words(run.path), run, Limits(deadline_s), where))
    limits = Limits(stop_when=lambda events, seconds: seconds >= deadline_s)
    again = run_trial(words(run.path), run, limits, where)
    yield check_second_start(again)
    yield RehearsalCheck(
        "same losses",
        RehearsalVerdict.UNKNOWN,
        "the command writes no events that Shardway reads: where it went on and with which losses is for you to "
        "compare",
    )


def check_stop_file(trial: TrialOutcome) -> RehearsalCheck:
    """Whether a command ends after the stop file appears."""
    if trial.asked_s is None:
        found = f"it ended by itself after {trial.seconds:.1f} s, before it was asked to"
        return RehearsalCheck("obeys the stop file", RehearsalVerdict.UNKNOWN, found)
    took = trial.seconds - trial.asked_s
    if trial.killed or trial.code:
        how = "it went on" if trial.killed else f"it ended with exit code {trial.code}"
        found = f"{how} after it was asked to stop {took:.1f} s before"
        return RehearsalCheck("obeys the stop file", RehearsalVerdict.FAIL, found, OBEY)
    return RehearsalCheck("obeys the stop file", RehearsalVerdict.OK, f"it ended {took:.1f} s after it was asked to")


def check_deadline(trial: TrialOutcome) -> RehearsalCheck:
    """Whether a command ends by itself before its deadline; one that obeys the stop file need not."""
    name = "ends before its deadline"
    if trial.killed:
        return RehearsalCheck(
            name, RehearsalVerdict.UNKNOWN, "it does not look at the deadline and was ended there", ON_TIME
        )
    if trial.code:
        return RehearsalCheck(
            name, RehearsalVerdict.FAIL, f"it ended with exit code {trial.code}\n{trial.last_words()}".rstrip()
        )
    return RehearsalCheck(name, RehearsalVerdict.OK, f"{trial.left_s or 0.0:.1f} s before")


def check_second_start(trial: TrialOutcome) -> RehearsalCheck:
    """Whether a stopped command can be started again in the same folder."""
    if trial.code or trial.killed:
        found = f"it ended with exit code {trial.code}\n{trial.last_words()}".rstrip()
        return RehearsalCheck("starts again", RehearsalVerdict.FAIL, found)
    return RehearsalCheck("starts again", RehearsalVerdict.OK, f"it ran for {trial.seconds:.1f} s")


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
    take `patience_s` seconds."""

    words: Callable[[Path], Sequence[str]]
    deadline_s: float
    whole: bool = False
    patience_s: float = 60.0
    place: Callable[[Path], Path | None] = lambda run: None
    """The working folder of a run directory's attempts; None for the current folder."""


def rehearse(piece: RehearsedProgram, folder: Path) -> Iterator[RehearsalCheck]:
    """Rehearse in an existing, empty folder. Yields each check as soon as it is known; the first failure is the last.

    Raises OSError if the command cannot be started."""
    through = RunDir(folder / "through")
    stop_when = _never if piece.whole else _trained_for(piece.deadline_s)
    limits = Limits(stop_when=stop_when, patience_s=piece.patience_s)
    reference = run_trial(piece.words(through.path), through, limits, piece.place(through.path))
    if not reference.named("started") and (reference.asked_s is not None or not reference.code):
        yield from rehearse_foreign(piece.words, piece.place, piece.deadline_s, folder, reference)
        return
    for check in _rehearse(piece, folder, reference):
        yield check
        if check.verdict is RehearsalVerdict.FAIL:
            return


def _rehearse(piece: RehearsedProgram, folder: Path, reference: TrialOutcome) -> Iterator[RehearsalCheck]:
    checked = check_reference(reference)
    yield checked
    if checked.verdict is RehearsalVerdict.FAIL:
        return  # no measured time to set a deadline by
    last = reference.last_step
    cut, before, deadline = _cut_once(piece, folder, reference)
    yield check_stop(before)
    yield check_save(before, cut.checkpoint_steps())
    for limit in (deadline, None):
        trial = run_trial(piece.words(cut.path), cut, Limits(limit, stop_when=_reached(last)), piece.place(cut.path))
        yield check_resume(before, trial)
        if trial.last_step >= last:
            break
        if limit is not None:
            yield check_stop(trial)
            yield check_save(trial, cut.checkpoint_steps())
        before = trial
    yield check_losses(_steps(RunDir(folder / "through")), _steps(cut))


def _cut_once(piece: RehearsedProgram, folder: Path, reference: TrialOutcome) -> tuple[RunDir, TrialOutcome, float]:
    """A first attempt that a deadline cuts, its run, and the deadline in seconds.

    The start of ranks varies in time, so a deadline may fall before or after a short run: it is then moved."""
    last, timing = reference.last_step, _read_timing(reference)
    deadline = min(max(piece.deadline_s, timing.least_s), timing.middle_s)
    for number in range(1, TRIES + 1):
        cut = RunDir(folder / f"cut-{number}")
        limits = Limits(deadline, stop_when=_reached(last))
        trial = run_trial(piece.words(cut.path), cut, limits, piece.place(cut.path))
        if trial.says_deadline:
            break
        if trial.killed:
            next_s = LATER * deadline
        elif trial.steps and trial.last_step >= last:
            next_s = min(EARLIER * deadline, _read_timing(trial).middle_s)
        else:
            break
        if number < TRIES:
            deadline = next_s
    return cut, trial, deadline


@dataclass(frozen=True)
class _Timing:
    """Deadlines in seconds from the start, as measured on one run: the shortest one that leaves time for steps after a
    start, and one in the middle of its steps."""

    least_s: float
    middle_s: float


def _read_timing(trial: TrialOutcome) -> _Timing:
    """The deadlines from an attempt that took steps."""
    steps, started = trial.named("step"), trial.attempt.read_started()
    begun = started.started if started is not None else 0.0
    first, last = float(steps[0]["time"]) - float(steps[0]["seconds"]), float(steps[-1]["time"])
    start, training = first - begun, last - first
    reserve = RESERVE_S + 2 * _longest(trial, "saved") + 2 * _longest(trial, "step") + _longest(trial, "validation")
    needed = [start * SLOWER + reserve, start + training / 2 + reserve]
    return _Timing(*(seconds / (1 - RESERVE_PART) for seconds in needed))


def _longest(trial: TrialOutcome, name: str) -> float:
    return max((float(event.get("seconds", 0.0)) for event in trial.named(name)), default=0.0)


def _steps(run: RunDir) -> list[Event]:
    return [event for event in run.events() if event["event"] == "step"]


def _never(events: Sequence[Event], seconds: float) -> bool:
    return False


def _reached(step: int) -> Callable[[Sequence[Event], float], bool]:
    """A condition: a step is done."""
    return lambda events, seconds: any(event["event"] == "step" and event["step"] >= step for event in events)


def _trained_for(limit_s: float) -> Callable[[Sequence[Event], float], bool]:
    """A condition: steps were taken for `limit_s` seconds; a program without events is stopped as long after its
    start."""

    def look(events: Sequence[Event], seconds: float) -> bool:
        first = next((event for event in events if event["event"] == "step"), None)
        if first is not None:
            return time.time() - float(first["time"]) >= limit_s
        return not events and seconds >= limit_s

    return look
