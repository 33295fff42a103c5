"""What a run measured of itself, as curves over wall time: loss, throughput, data wait, a script's own values.

Invariants:
- A curve has at most about `POINTS` points however long the run was, and no value that strict JSON lacks. Thinning
  never hides an extreme: the minimum and the maximum of every bucket stay.
- Every step that was taken is shown where it was taken; steps that a resume repeats are shown again. Between two
  attempts there is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardway.drawing import colour_of
from shardway.rundir.events import Event
from shardway.watch.facts import measured, number, read_logged, read_validation, seconds, whole
from shardway.watch.progress import RunProgress
from shardway.watch.report.axis import TimeAxis
from shardway.watch.words import render_unit

POINTS = 1000  # maximum points of one curve
FEW_POINTS = 300  # of a mean, and of a script's own value
NAMED = 24  # maximum figures of a script's own values
SAVE_MARKS = 200  # maximum marks of saves


@dataclass(frozen=True)
class CurvePoint:
    """A value after a step at a time (Unix seconds, or 0); `value` may be NaN."""

    step: int
    value: float
    time: float = 0.0


@dataclass(frozen=True)
class Curve:
    """One line of a figure. `dotted`: its points are marked; `faint`: drawn thinly behind the others."""

    name: str
    concept: str
    points: tuple[CurvePoint, ...]
    dotted: bool = False
    faint: bool = False

    @property
    def colour(self) -> str:
        return colour_of(self.concept)


@dataclass(frozen=True)
class Figure:
    """Curves with one scale; `log` offers a logarithmic one, `zero` begins it at 0, `is_main` shows it openly."""

    name: str
    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    log: bool = False
    zero: bool = False
    is_main: bool = True


@dataclass(frozen=True)
class Mark:
    """An event at a time; `kind` is "save", "resume", "fault" or "validation"."""

    kind: str
    step: int
    time: float
    words: str = ""


def make_figures(events: Sequence[Event], progress: RunProgress) -> list[Figure]:
    """Every figure that the events, as written, have data for, with one for each name that a script has logged or
    returned from a validation."""
    unit = render_unit(progress.start)
    validations = [(read_validation(event), _time(event)) for event in events if event["event"] == "validation"]

    def checked(pick: Callable[[Any], float | None]) -> list[Curve]:
        points = [CurvePoint(each.step, value, at) for each, at in validations if (value := pick(each)) is not None]
        return [Curve("validation", "validation", tuple(thin(points, FEW_POINTS)), dotted=True)] if points else []

    loss = _step_curves(events, "loss", "train", "train") + checked(lambda each: each.loss)
    speed = _step_curves(events, unit.replace("/", "_per_"), unit, "speed")
    norm = _step_curves(events, "grad_norm", "gradient norm", "gradients")
    rate = _step_curves(events, "lr", "learning rate", "learning rate", smoothed=False)
    figures = [
        Figure("loss", "Loss", tuple(loss), log=True),
        Figure("speed", "Throughput", tuple(speed), unit, zero=True),
        Figure("wait", "Waiting between steps", tuple(_waits(events, progress)), "% of wall time", zero=True),
        Figure("bits", "Bits per byte", tuple(checked(lambda each: each.bits_per_byte))),
        Figure("accuracy", "Accuracy", tuple(checked(lambda each: _percent(each.accuracy))), "%"),
        Figure("grad", "Gradient norm", tuple(norm), log=True, is_main=False),
        Figure("lr", "Learning rate", tuple(rate), zero=True, is_main=False),
    ]
    logged = [(read_logged(event), _time(event)) for event in events if event["event"] == "logged"]
    names = (
        *(name for each, _ in logged for name in each.values),
        *(n for each, _ in validations for n in each.others),
    )
    for place, name in enumerate(list(dict.fromkeys(names))[:NAMED]):
        points = [CurvePoint(each.step, each.values[name], at) for each, at in logged if name in each.values]
        trained = [Curve("train", "train", tuple(thin(points, FEW_POINTS)))] if points else []
        curves = trained + checked(lambda each, name=name: each.others.get(name))  # type: ignore[misc]
        figures.append(Figure(f"named{place}", name, tuple(curves), is_main=False))
    return [figure for figure in figures if figure.curves]


def find_marks(events: Sequence[Event], progress: RunProgress) -> list[Mark]:
    """Saves (an even selection if there are many), resumes, faults and validations."""
    saves = [event for event in events if event["event"] == "saved"]
    found = [Mark("save", whole(event, "step") or 0, _time(event)) for event in _some(saves)]
    checks = _some([event for event in events if event["event"] == "validation"])
    found += [Mark("validation", whole(event, "step") or 0, _time(event)) for event in checks]
    found += [Mark("resume", attempt.start.step, attempt.start.time) for attempt in progress.attempts[1:]]
    for event in (event for event in events if event["event"] == "restarted"):
        found.append(Mark("fault", whole(event, "step") or 0, _time(event), str(event.get("reason", ""))[:200]))
    for attempt in progress.attempts:
        for fault in attempt.faults:
            step = attempt.step if fault.step is None else fault.step
            found.append(Mark("fault", step, fault.time, f"{fault.kind}: {fault.message}"[:200]))
    return found


def _some(events: Sequence[Event]) -> Sequence[Event]:
    return events[:: -(-len(events) // SAVE_MARKS) or 1]


def _time(event: Event) -> float:
    return seconds(event, "time") or 0.0


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _step_curves(events: Sequence[Event], key: str, name: str, concept: str, *, smoothed: bool = True) -> list[Curve]:
    """The values under `key` (a null is a gap, an absent key no point); if `smoothed`, drawn faintly behind their mean
    where there are enough of them."""
    runs = list(_split_attempts(events, key))  # one by one, so that no mean reaches over a gap
    count = sum(map(len, runs))
    if not any(math.isfinite(point.value) for points in runs for point in points):
        return []
    raw = Curve(name, concept, _join(runs, POINTS))
    half_window = min(100, count // 100)
    if not smoothed or half_window == 0:
        return [raw]
    means = [smooth(points, half_window) for points in runs]
    mean = Curve(f"mean of {2 * half_window + 1} steps", concept, _join(means, FEW_POINTS))
    return [Curve(raw.name, concept, raw.points, faint=True), mean]


def _split_attempts(events: Sequence[Event], key: str) -> Iterator[list[CurvePoint]]:
    """The points of each attempt, or of each part of it where its clock was set back."""
    points: list[CurvePoint] = []
    for event in events:
        if event["event"] in ("started", "rolled_back") and points:
            yield points
            points = []
        elif event["event"] == "step" and key in event and (step := whole(event, "step")) is not None:
            at = _time(event)
            if points and at < points[-1].time:
                yield points
                points = []
            points.append(CurvePoint(step, measured(event, key), at))
    if points:
        yield points


def _join(runs: Sequence[Sequence[CurvePoint]], limit: int) -> tuple[CurvePoint, ...]:
    """Attempts as one line of about `limit` points, each thinned by itself so that the gaps between them stay."""
    count = max(1, sum(map(len, runs)))
    joined: list[CurvePoint] = []
    for points in filter(None, runs):
        if joined:
            joined.append(CurvePoint(points[0].step, math.nan, points[0].time))
        joined += thin(points, max(2, 2 * round(limit * len(points) / count / 2)))
    return tuple(joined if len(joined) <= 2 * limit else thin(joined, limit))


_LEAST_WAIT_S = 1.0


def _waits(events: Sequence[Event], progress: RunProgress) -> list[Curve]:
    """Of each stretch of wall time the share between steps, without saves and validations: waiting for data, recording,
    a script's own work."""
    shares, joined = list[CurvePoint](), list[CurvePoint]()
    total = sum(attempt.wall_s for attempt in progress.attempts)
    least = max(_LEAST_WAIT_S, total / FEW_POINTS)
    begun: float | None = None
    busy = known = 0.0
    for event in events:
        at = _time(event)
        match event["event"]:
            case "started" | "rolled_back":
                begun, busy, known = None, 0.0, 0.0
                if shares:
                    joined += [*shares, CurvePoint(whole(event, "step") or 0, math.nan, at)]
                shares = []
            case "saved" | "validation":
                known += max(0.0, seconds(event, "seconds") or 0.0)
            case "step":
                took = number(event, "seconds")
                if begun is None or at < begun or took is None or not math.isfinite(took):
                    begun, busy, known = at, 0.0, 0.0
                    continue
                busy += max(0.0, took)
                passed = at - begun - known
                if at - begun >= least and passed > 0:
                    share = 100 * min(1.0, max(0.0, 1 - busy / passed))
                    shares.append(CurvePoint(whole(event, "step") or 0, share, at))
                    begun, busy, known = at, 0.0, 0.0
    joined += shares
    return [Curve("waiting for data, and a script's own work", "data", tuple(joined))] if joined else []


def thin(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """At most `limit` + 2 points (limit even): first, last, and the extremes of limit/2 buckets. A bucket without a
    finite value leaves one NaN, so that a gap stays a gap."""
    if len(points) <= limit:
        return list(points)
    kept: list[int] = []
    parts = limit // 2
    for part in range(parts):
        bucket = range(len(points) * part // parts, len(points) * (part + 1) // parts)
        finite = [at for at in bucket if math.isfinite(points[at].value)]
        extremes = {pick(finite, key=lambda at: points[at].value) for pick in (min, max)} if finite else ()
        kept += sorted(extremes) or [bucket[0]]
    first = [0] if kept[0] != 0 else []
    last = [len(points) - 1] if kept[-1] != len(points) - 1 else []
    return [points[at] for at in (*first, *kept, *last)]


def smooth(points: Sequence[CurvePoint], half_window: int) -> list[CurvePoint]:
    """At each finite point the mean of it and of `half_window` finite points on either side. Near the ends both sides
    shrink equally, so that the mean does not lag behind a slope. Points that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point.value)]
    sums = list(accumulate((point.value for point in finite), initial=0.0))
    means = []
    for index, point in enumerate(finite):
        reach = min(half_window, index, len(finite) - 1 - index)
        mean = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
        means.append(CurvePoint(point.step, mean, point.time))
    return means


def place_points(curve: Curve, axis: TimeAxis) -> list[float]:
    """The places of a curve's points on the time axis."""
    places = axis.place([point.time for point in curve.points])
    return [round(float(place), 5) for place in places]
