"""What a run measured of itself, as curves over wall time: loss, throughput, data wait, a script's own values.

Invariants:
- A curve has at most about `POINTS` points however long the run was, and no value that strict JSON lacks. Thinning
  never hides an extreme: the minimum and the maximum of every bucket stay.
- Every step that was taken is shown where it was taken; steps that a resume repeats are shown again. Between two
  attempts there is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.drawing import colour_of
from shardway.plain_arrays import find_arrays
from shardway.rundir.events import Event
from shardway.watch.facts import read_logged, read_validation, seconds, whole
from shardway.watch.progress import RunProgress
from shardway.watch.report.axis import TimeAxis
from shardway.watch.report.event_log import EventLog, StepSeries
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


def make_figures(log: EventLog, progress: RunProgress) -> list[Figure]:
    """Every figure that the events, as written, have data for, with one for each name that a script has logged or
    returned from a validation."""
    unit, events = render_unit(progress.start), log.others
    validations = [(read_validation(event), _time(event)) for event in events if event["event"] == "validation"]

    def checked(pick: Callable[[Any], float | None]) -> list[Curve]:
        points = [CurvePoint(each.step, value, at) for each, at in validations if (value := pick(each)) is not None]
        return [Curve("validation", "validation", tuple(thin(points, FEW_POINTS)), dotted=True)] if points else []

    loss = _step_curves(log, "loss", "train", "train") + checked(lambda each: each.loss)
    speed = _step_curves(log, unit.replace("/", "_per_"), unit, "speed")
    norm = _step_curves(log, "grad_norm", "gradient norm", "gradients")
    rate = _step_curves(log, "lr", "learning rate", "learning rate", smoothed=False)
    figures = [
        Figure("loss", "Loss", tuple(loss), log=True),
        Figure("speed", "Throughput", tuple(speed), unit, zero=True),
        Figure("wait", "Waiting between steps", tuple(_waits(log, progress)), "% of wall time", zero=True),
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


def _step_curves(log: EventLog, key: str, name: str, concept: str, *, smoothed: bool = True) -> list[Curve]:
    """The values under `key` (a null is a gap, an absent key no point); if `smoothed`, drawn faintly behind their mean
    where there are enough of them."""
    np = find_arrays()

    runs = log.list_series(key)  # one by one, so that no mean reaches over a gap
    count = sum(map(len, runs))
    if not any(np.isfinite(series.value).any() for series in runs):
        return []
    raw = Curve(name, concept, _join(runs, POINTS))
    half_window = min(100, count // 100)
    if not smoothed or half_window == 0:
        return [raw]
    means = [smooth(series, half_window) for series in runs]
    mean = Curve(f"mean of {2 * half_window + 1} steps", concept, _join(means, FEW_POINTS))
    return [Curve(raw.name, concept, raw.points, faint=True), mean]


def _join(runs: Sequence[StepSeries], limit: int) -> tuple[CurvePoint, ...]:
    """Parts as one line of about `limit` points, each thinned by itself so that the gaps between them stay."""
    count = max(1, sum(map(len, runs)))
    joined: list[CurvePoint] = []
    for series in filter(len, runs):
        if joined:
            joined.append(CurvePoint(int(series.step[0]), math.nan, float(series.time[0])))
        joined += _list_points(series, max(2, 2 * round(limit * len(series) / count / 2)))
    return tuple(joined if len(joined) <= 2 * limit else thin(joined, limit))


def _list_points(series: StepSeries, limit: int) -> list[CurvePoint]:
    """A series, thinned."""
    some = series.select(_choose(series.value, limit))
    columns = some.step.tolist(), some.value.tolist(), some.time.tolist()
    return [CurvePoint(int(step), value, time) for step, value, time in zip(*columns, strict=True)]


_LEAST_WAIT_S = 1.0


def _waits(log: EventLog, progress: RunProgress) -> list[Curve]:
    """Of each stretch of wall time the share between steps, without saves and validations: waiting for data, recording,
    a script's own work."""
    shares, joined = list[CurvePoint](), list[CurvePoint]()
    total = sum(attempt.wall_s for attempt in progress.attempts)
    least = max(_LEAST_WAIT_S, total / FEW_POINTS)
    begun: float | None = None
    busy = known = 0.0
    for before, number, at, took in log.walk():
        for event in before:
            match event["event"]:
                case "started" | "rolled_back":
                    begun, busy, known = None, 0.0, 0.0
                    if shares:
                        joined += [*shares, CurvePoint(whole(event, "step") or 0, math.nan, _time(event))]
                    shares = []
                case "saved" | "validation":
                    known += max(0.0, seconds(event, "seconds") or 0.0)
        if begun is None or at < begun or not math.isfinite(took):
            begun, busy, known = at, 0.0, 0.0
            continue
        busy += max(0.0, took)
        passed = at - begun - known
        if at - begun >= least and passed > 0:
            share = 100 * min(1.0, max(0.0, 1 - busy / passed))
            shares.append(CurvePoint(int(number) if math.isfinite(number) else 0, share, at))
            begun, busy, known = at, 0.0, 0.0
    joined += shares
    return [Curve("waiting for data, and a script's own work", "data", tuple(joined))] if joined else []


def thin(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """At most `limit` + 2 points (limit even): first, last, and the extremes of limit/2 buckets. A bucket without a
    finite value leaves one NaN, so that a gap stays a gap."""
    np = find_arrays()

    return [points[place] for place in _choose(np.array([point.value for point in points]), limit)]


def _choose(values: Any, limit: int) -> list[int]:
    """The places of what `thin` keeps."""
    np = find_arrays()

    count, parts, kept = len(values), limit // 2, list[int]()
    if count <= limit:
        return list(range(count))
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    for part in range(parts):
        first, last = count * part // parts, count * (part + 1) // parts
        extremes = {first + int(low[first:last].argmin()), first + int(high[first:last].argmax())}
        kept += sorted(extremes) if finite[first:last].any() else [first]
    return [*([0] if kept[0] != 0 else []), *kept, *([count - 1] if kept[-1] != count - 1 else [])]


def smooth(series: StepSeries, half_window: int) -> StepSeries:
    """At each finite value the mean of it and of `half_window` finite ones on either side. Near the beginning both
    sides shrink equally, so that the mean does not lag behind a slope; the end is the straight line through the last
    window, so that the newest value, which is read most, is not that of one step. Values that are not finite are left
    out."""
    np = find_arrays()

    finite = series.select(np.isfinite(series.value))
    sums = np.concatenate([[0.0], np.cumsum(finite.value)])
    at = np.arange(len(finite))
    reach = np.minimum(half_window, np.minimum(at, at[::-1]))
    means = (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
    last = finite.value[-(2 * half_window + 1) :].tolist()
    ends = min(half_window, len(last) // 2)
    if ends and len(last) > 2:
        middle, mean = (len(last) - 1) / 2, math.fsum(last) / len(last)
        squares = math.fsum((place - middle) ** 2 for place in range(len(last)))
        slope = math.fsum((place - middle) * value for place, value in enumerate(last)) / squares
        line = [mean + slope * (place - middle) for place in range(len(last) - ends, len(last))]
        means = np.concatenate([means[: len(finite) - ends], line])
    return StepSeries(finite.step, means, finite.time)


def place_points(curve: Curve, axis: TimeAxis) -> list[float]:
    """The places of a curve's points on the time axis."""
    places = axis.place([point.time for point in curve.points])
    return [round(float(place), 5) for place in places]
