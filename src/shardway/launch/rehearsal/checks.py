"""What a rehearsal has shown, as checks that are pure functions of the attempts.

Invariant: numbers of two runs are compared bit for bit, and what cannot be known is told as unknown, never as
passed. This module must not start anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardway.launch.rehearsal.trial import TrialOutcome
from shardway.rundir.events import Event

COLUMNS = ("loss", "grad_norm", "lr")
"""Numbers of a step that have to be the same."""


class RehearsalVerdict(StrEnum):
    """What a check says."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RehearsalCheck:
    """One thing that was looked at, what was found, and where it failed what to do."""

    name: str
    verdict: RehearsalVerdict
    found: str
    remedy: str = ""


def check_reference(trial: TrialOutcome) -> RehearsalCheck:
    """Whether the run that nothing cuts trains at all."""
    if trial.code or trial.killed or not trial.steps:
        return RehearsalCheck(
            "trains", RehearsalVerdict.FAIL, f"{_how(trial)}\n{trial.last_words()}", "make it train here first"
        )
    steps = len(trial.steps)
    seconds = [float(event["seconds"]) for event in trial.named("step")]
    found = f"{steps} steps without a break in {trial.seconds:.1f} s, the longest in {max(seconds):.2f} s"
    return RehearsalCheck("trains", RehearsalVerdict.OK, found)


def check_stop(trial: TrialOutcome) -> RehearsalCheck:
    """Whether an attempt stopped by itself before its deadline, and said so; its processes may end a bit later."""
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
    """Whether an attempt goes on where the one before it has stopped."""
    name = f"attempt {trial.attempt.number} resumes"
    if not trial.named("started"):
        return RehearsalCheck(name, RehearsalVerdict.FAIL, f"{_how(trial)}\n{trial.last_words()}".rstrip())
    if trial.first_step != before.last_step:
        what = f"the one before stopped at step {before.last_step}, it began at step {trial.first_step}"
        return RehearsalCheck(name, RehearsalVerdict.FAIL, what)
    return RehearsalCheck(name, RehearsalVerdict.OK, f"from step {trial.first_step} to step {trial.last_step}")


def check_losses(reference: Sequence[Event], cut: Sequence[Event]) -> RehearsalCheck:
    """Whether two runs have the same numbers in every step that both took; these are their step events that hold."""
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
    """The deadline, and the margin in the words of the run: " of 20.0 s (it stopped with ...)"."""
    whole = f" of {trial.seconds + trial.left_s:.1f} s" if trial.left_s is not None else ""
    told = [str(event.get("reason", "")) for event in trial.named("stopped") or trial.named("deadline")]
    return whole + (f" ({told[-1]})" if told else "")


def _how(trial: TrialOutcome) -> str:
    """How an attempt ended, in a sentence."""
    if trial.killed:
        return "it did not end by itself"
    said = f", and said: {trial.result.state}, {trial.result.reason}" if trial.result else ""
    return f"it ended with exit code {trial.code} after {trial.seconds:.1f} s{said}"
