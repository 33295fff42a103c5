"""The curves of a report, as the plain data that plotly.js draws.

Invariant: a curve has at most about 2000 points however long the run was, and no value that strict JSON lacks. This
module must not import plotly (its Python side builds the same dicts, slowly) nor choose colours: a trace names a
colour of the page by its role.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.rundir.events import Event
from shardway.watch.curve import CurvePoint, smooth, thin
from shardway.watch.facts import ValidatedEvent, measured, read_logged, whole
from shardway.watch.progress import RunProgress
from shardway.watch.words import render_unit

POINTS = 2000
"""Points that are drawn of one curve."""

SAVE_MARKS = 200
"""Marks of saves that are drawn at most."""
NAMED = 24
"""Pictures of a script's own values that are drawn at most."""

Trace = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: `kind` is "save", "resume" or "fault"."""

    kind: str
    step: int


@dataclass(frozen=True)
class Figure:
    """One picture: `wide` takes the whole row, `log` offers a logarithmic axis."""

    name: str
    title: str
    traces: list[Trace]
    wide: bool = False
    log: bool = False
    percent: bool = False


def make_figures(events: Sequence[Event], progress: RunProgress) -> list[Figure]:
    """Every picture that the events have data for."""
    steps = [event for event in events if event["event"] == "step"]
    unit = render_unit(progress.start)
    candidates = [
        Figure("loss", "Loss", _loss_traces(steps, progress.validations), wide=True, log=True),
        Figure("bits", "Bits per byte", _validation_traces(progress, lambda each: each.bits_per_byte)),
        Figure("accuracy", "Accuracy", _validation_traces(progress, lambda each: each.accuracy), percent=True),
        Figure("speed", f"Throughput ({unit})", _noisy_traces(steps, unit.replace("/", "_per_"), unit, "speed")),
        Figure("lr", "Learning rate", _step_traces(steps, "lr", "learning rate", "rate")),
        Figure("grad", "Gradient norm", _noisy_traces(steps, "grad_norm", "gradient norm", "norm"), log=True),
    ]
    return [figure for figure in (*candidates, *_named_figures(events, progress)) if figure.traces]


def _named_figures(events: Sequence[Event], progress: RunProgress) -> list[Figure]:
    """One for each name under which a script has logged values or returned them from a validation."""
    logged = [read_logged(event) for event in events if event["event"] == "logged"]
    values = (*(each.values for each in logged), *(each.others for each in progress.validations))
    figures = []
    for number, name in enumerate(list(dict.fromkeys(name for each in values for name in each))[:NAMED]):
        trained = [CurvePoint(each.step, each.values[name]) for each in logged if name in each.values]
        held_out = [CurvePoint(each.step, each.others[name]) for each in progress.validations if name in each.others]
        traces = [_line("train", trained, "train")] if trained else []
        dots = [_dots("validation", held_out)] if held_out else []
        figures.append(Figure(f"named{number}", name, [*traces, *dots]))
    return figures


def find_marks(progress: RunProgress) -> list[Mark]:
    """Saves (evenly chosen where they are many), resumes and faults."""
    stride = -(-len(progress.saves) // SAVE_MARKS) or 1
    saves = [Mark("save", save.step) for save in progress.saves[::stride]]
    resumes = [Mark("resume", attempt.start.step) for attempt in progress.attempts[1:]]
    faults = [
        Mark("fault", attempt.step if fault.step is None else fault.step)
        for attempt in progress.attempts
        for fault in attempt.faults
    ]
    return saves + resumes + faults


def count_broken_losses(events: Sequence[Event]) -> int:
    """Steps whose loss was not a finite number."""
    return sum(1 for event in events if event["event"] == "step" and not math.isfinite(measured(event, "loss")))


def _loss_traces(steps: Sequence[Event], validations: Sequence[ValidatedEvent]) -> list[Trace]:
    traces = _noisy_traces(steps, "loss", "train", "train")
    dots = _dots("validation", [CurvePoint(each.step, each.loss) for each in validations])
    return [*traces, dots] if dots["x"] else traces


def _noisy_traces(steps: Sequence[Event], key: str, name: str, colour: str) -> list[Trace]:
    """The values as they are, faint behind their mean where there are enough of them."""
    half_window = min(100, len(steps) // 100)
    raw = _step_traces(steps, key, name, colour)
    if not raw or half_window == 0:
        return raw
    mean = _line(f"mean of {2 * half_window + 1} steps", smooth(_points(steps, key), half_window), colour)
    return [{**raw[0], "faint": True}, mean]


def _step_traces(steps: Sequence[Event], key: str, name: str, colour: str) -> list[Trace]:
    points = _points(steps, key)
    return [_line(name, points, colour)] if points else []


def _validation_traces(progress: RunProgress, pick: Callable[[ValidatedEvent], float | None]) -> list[Trace]:
    picked = [(each.step, pick(each)) for each in progress.validations]
    points = [CurvePoint(step, value) for step, value in picked if value is not None]
    return [_dots("validation", points)] if points else []


def _points(steps: Sequence[Event], key: str) -> list[CurvePoint]:
    """The values under `key`; a null is a gap, an absent key no point."""
    found = ((whole(event, "step"), event) for event in steps if key in event)
    points = [CurvePoint(step, measured(event, key)) for step, event in found if step is not None]
    return points if any(math.isfinite(point.value) for point in points) else []


def _line(name: str, points: Sequence[CurvePoint], colour: str) -> Trace:
    return {"name": name, "colour": colour, "mode": "lines", **_coordinates(points)}


def _dots(name: str, points: Sequence[CurvePoint]) -> Trace:
    return {"name": name, "colour": "validation", "mode": "lines+markers", **_coordinates(points)}


def _coordinates(points: Sequence[CurvePoint]) -> Trace:
    drawn = thin(points, POINTS)
    values = [point.value if math.isfinite(point.value) else None for point in drawn]
    return {"x": [point.step for point in drawn], "y": values}
