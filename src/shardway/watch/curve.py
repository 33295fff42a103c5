"""Curves that are cheap to draw, and the data that plotly.js draws in a report.

Invariants:
- Thinning never hides an extreme: the minimum and the maximum of every bucket stay.
- A curve has at most about 2000 points however long the run was, and no value that strict JSON lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from shardway.drawing import colour_of
from shardway.rundir.events import Event
from shardway.watch.facts import ValidatedEvent, measured, read_logged, whole
from shardway.watch.progress import RunProgress
from shardway.watch.words import render_unit

T = TypeVar("T")


@dataclass(frozen=True)
class CurvePoint:
    """A value at a step; `value` may be NaN."""

    step: int
    value: float


class GrowingCurve:
    """Means of equally many consecutive values, at most `capacity` (even); when full, neighbours are joined."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._stride = 1
        self._means: list[CurvePoint] = []
        self._pending: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Append a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._means.append(CurvePoint(step, _mean(self._pending)))
            self._pending.clear()
        if len(self._means) == self._capacity:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [CurvePoint(right.step, _mean([left.value, right.value])) for left, right in pairs]
            self._stride *= 2

    def undo_after(self, step: int) -> None:
        """Drop the values after `step`."""
        self._means = [point for point in self._means if point.step <= step]
        self._pending.clear()

    def columns(self, width: int) -> list[float]:
        """The curve as at most `width` means of equal parts, oldest first."""
        values = [point.value for point in self._means]
        return [_mean(part) for part in _split(values, min(width, len(values)))]


def thin(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """At most `limit` + 2 points (limit even): first, last, and the extremes of limit/2 buckets.

    A bucket without a finite value leaves one NaN, so that a gap stays a gap.
    """
    if len(points) <= limit:
        return list(points)
    kept = [point for bucket in _split(points, limit // 2) for point in _extremes(bucket)]
    first = [points[0]] if kept[0].step != points[0].step else []
    last = [points[-1]] if kept[-1].step != points[-1].step else []
    return first + kept + last


def smooth(points: Sequence[CurvePoint], half_window: int) -> list[CurvePoint]:
    """At each finite point the mean of it and of `half_window` finite points on either side.

    Near the ends both sides shrink equally, so that the mean does not lag behind a slope. Points that are not finite
    are left out.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    sums = list(accumulate((point.value for point in finite), initial=0.0))
    means = []
    for index, point in enumerate(finite):
        reach = min(half_window, index, len(finite) - 1 - index)
        means.append(CurvePoint(point.step, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return means


def _extremes(bucket: Sequence[CurvePoint]) -> list[CurvePoint]:
    finite = [point for point in bucket if math.isfinite(point.value)]
    if not finite:
        return [CurvePoint(bucket[0].step, math.nan)]
    low, high = min(finite, key=lambda point: point.value), max(finite, key=lambda point: point.value)
    return sorted({low, high}, key=lambda point: point.step)


def _split(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """`values` cut into parts of nearly equal length."""
    return [values[len(values) * part // parts : len(values) * (part + 1) // parts] for part in range(parts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- plotly data for a report

POINTS = 2000
"""Maximum points of one curve."""

SAVE_MARKS = 200
"""Maximum marks of saves."""
NAMED = 24
"""Maximum figures of a script's own values."""

Trace = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """An event marked at a step: `kind` is "save", "resume" or "fault"."""

    kind: str
    step: int


@dataclass(frozen=True)
class Figure:
    """One figure: `wide` takes the whole row, `log` offers a logarithmic axis."""

    name: str
    title: str
    traces: list[Trace]
    wide: bool = False
    log: bool = False
    percent: bool = False


def make_figures(events: Sequence[Event], progress: RunProgress) -> list[Figure]:
    """Every figure that the events have data for."""
    steps = [event for event in events if event["event"] == "step"]
    unit = render_unit(progress.start)
    candidates = [
        Figure("loss", "Loss", _loss_traces(steps, progress.validations), wide=True, log=True),
        Figure("bits", "Bits per byte", _validation_traces(progress, lambda each: each.bits_per_byte)),
        Figure("accuracy", "Accuracy", _validation_traces(progress, lambda each: each.accuracy), percent=True),
        Figure("speed", f"Throughput ({unit})", _noisy_traces(steps, unit.replace("/", "_per_"), unit, "speed")),
        Figure("lr", "Learning rate", _step_traces(steps, "lr", "learning rate", "learning rate")),
        Figure("grad", "Gradient norm", _noisy_traces(steps, "grad_norm", "gradient norm", "gradients"), log=True),
    ]
    return [figure for figure in (*candidates, *_named_figures(events, progress)) if figure.traces]


def _named_figures(events: Sequence[Event], progress: RunProgress) -> list[Figure]:
    """One figure for each name that a script has logged or returned from a validation."""
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
    """Saves (an even selection if there are many), resumes and faults."""
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


def _noisy_traces(steps: Sequence[Event], key: str, name: str, concept: str) -> list[Trace]:
    """The values, drawn faintly behind their mean where there are enough of them."""
    half_window = min(100, len(steps) // 100)
    raw = _step_traces(steps, key, name, concept)
    if not raw or half_window == 0:
        return raw
    mean = _line(f"mean of {2 * half_window + 1} steps", smooth(_points(steps, key), half_window), concept)
    return [{**raw[0], "faint": True}, mean]


def _step_traces(steps: Sequence[Event], key: str, name: str, concept: str) -> list[Trace]:
    points = _points(steps, key)
    return [_line(name, points, concept)] if points else []


def _validation_traces(progress: RunProgress, pick: Callable[[ValidatedEvent], float | None]) -> list[Trace]:
    picked = [(each.step, pick(each)) for each in progress.validations]
    points = [CurvePoint(step, value) for step, value in picked if value is not None]
    return [_dots("validation", points)] if points else []


def _points(steps: Sequence[Event], key: str) -> list[CurvePoint]:
    """The values under `key`; a null is a gap, an absent key no point."""
    found = ((whole(event, "step"), event) for event in steps if key in event)
    points = [CurvePoint(step, measured(event, key)) for step, event in found if step is not None]
    return points if any(math.isfinite(point.value) for point in points) else []


def _line(name: str, points: Sequence[CurvePoint], concept: str) -> Trace:
    return {"name": name, "colour": colour_of(concept), "mode": "lines", **_coordinates(points)}


def _dots(name: str, points: Sequence[CurvePoint]) -> Trace:
    return {"name": name, "colour": colour_of("validation"), "mode": "lines+markers", **_coordinates(points)}


def _coordinates(points: Sequence[CurvePoint]) -> Trace:
    drawn = thin(points, POINTS)
    values = [point.value if math.isfinite(point.value) else None for point in drawn]
    return {"x": [point.step for point in drawn], "y": values}
