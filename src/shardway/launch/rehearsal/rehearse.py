"""The course of a rehearsal: once without a break, then cut by a deadline and gone on with, then compared.

Invariant: both runs start from nothing in folders of their own and are given the same words. This module must not
judge (`checks`) nor print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardway.launch.rehearsal.checks import (
    RehearsalCheck,
    RehearsalVerdict,
    check_losses,
    check_reference,
    check_resume,
    check_save,
    check_stop,
)
from shardway.launch.rehearsal.script import rehearse_foreign
from shardway.launch.rehearsal.trial import Limits, TrialOutcome, run_trial
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event

TRIES = 3
LATER, EARLIER = 1.5, 0.8
"""Factors by which a deadline that came before the first step, or after the last, is moved."""
SLOWER = 1.5
"""A start may take so much longer than the one that was measured."""
RESERVE_S, RESERVE_PART = 4.0, 0.1
"""Of a short wall-time, what a run keeps for two saves before it has measured one, and for its end."""


@dataclass(frozen=True)
class RehearsedProgram:
    """What is rehearsed: the words that start it in a run directory, the deadline of an attempt in seconds.

    `whole`: the run without a break goes on to its own end; else it is stopped after as long as the deadline, which
    may take `patience_s` seconds.
    """

    words: Callable[[Path], Sequence[str]]
    deadline_s: float
    whole: bool = False
    patience_s: float = 60.0
    place: Callable[[Path], Path | None] = lambda run: None
    """The folder in which a run directory's attempts work; None for the one that rehearses."""


def rehearse(piece: RehearsedProgram, folder: Path) -> Iterator[RehearsalCheck]:
    """Rehearse in a folder that is there and empty; each check as soon as it is known, the first failure the last.

    Raises OSError where the command cannot be started.
    """
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
        return  # there is nothing to time a deadline by
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

    How fast a machine starts ranks varies, so that a deadline may fall before or after a short run: it is moved then.
    """
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
    """Deadlines in seconds from the start, as one run suggests them: the shortest after which a start like this one
    leaves time for steps, and one in the middle of its steps."""

    least_s: float
    middle_s: float


def _read_timing(trial: TrialOutcome) -> _Timing:
    """From an attempt that took steps."""
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
    """Once a step is done."""
    return lambda events, seconds: any(event["event"] == "step" and event["step"] >= step for event in events)


def _trained_for(limit_s: float) -> Callable[[Sequence[Event], float], bool]:
    """Once steps were taken for so long; what says nothing of itself is stopped as long after its start."""

    def look(events: Sequence[Event], seconds: float) -> bool:
        first = next((event for event in events if event["event"] == "step"), None)
        if first is not None:
            return time.time() - float(first["time"]) >= limit_s
        return not events and seconds >= limit_s

    return look
