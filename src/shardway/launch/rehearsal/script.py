"""The rehearsal of a command that writes no events: whether it stops when it is told, and starts again.

Invariant: what cannot be seen from outside (losses, where it goes on) is told as unknown. This module must not print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardway.launch.rehearsal.checks import RehearsalCheck, RehearsalVerdict
from shardway.launch.rehearsal.trial import Limits, TrialOutcome, run_trial
from shardway.rundir.directory import RunDir

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
    """The checks of a command of which `first` is an attempt that was asked to stop after `deadline_s` seconds."""
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
    """Whether a command ends by itself before its deadline; one that obeys the stop file need not know it."""
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
    """Whether a command that was stopped can be started again in the same place."""
    if trial.code or trial.killed:
        found = f"it ended with exit code {trial.code}\n{trial.last_words()}".rstrip()
        return RehearsalCheck("starts again", RehearsalVerdict.FAIL, found)
    return RehearsalCheck("starts again", RehearsalVerdict.OK, f"it ran for {trial.seconds:.1f} s")
