"""A scaling study: its points with intervals, what was fitted, a verdict, and its table as text, JSON and CSV.

Invariants:
- Every figure is of runs that were read; what was not measured is "n/a" in text, null in JSON, empty in CSV.
- A sentence of the verdict names its interval; nothing is said of sizes that were not run.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardway.units import UNKNOWN, render_plural
from shardway.version import __version__
from shardway.watch.scaling.fits import (
    AmdahlFit,
    CommunicationFit,
    GustafsonFit,
    PointTimes,
    ScaleEstimate,
    find_efficiency,
    find_speed_up,
    fit_amdahl,
    fit_communication,
    fit_gustafson,
    measure_points,
)
from shardway.watch.scaling.runs import ScaleRun, check_kind, describe_work, render_day
from shardway.watch.words import align_cells, render_total

MUCH_MISFIT = 0.05
"""Root mean square of relative residuals from which a fit is called rough."""

# --- points


@dataclass(frozen=True)
class ScalePoint:
    """One size with its repeats. `rate`: tokens or samples a second of all ranks."""

    size: int
    runs: tuple[ScaleRun, ...]
    times: PointTimes
    rate: ScaleEstimate | None
    speed_up: ScaleEstimate
    ideal: float
    efficiency: ScaleEstimate

    @property
    def world(self) -> int:
        return self.runs[0].work.world

    @property
    def steps(self) -> int:
        return sum(len(run.times) for run in self.runs)

    def mean(self, pick: Callable[[ScaleRun], float | None]) -> float | None:
        """The mean of a figure over its repeats; None where one lacks it."""
        found = [value for run in self.runs if (value := pick(run)) is not None]
        return math.fsum(found) / len(found) if len(found) == len(self.runs) else None

    def total(self, pick: Callable[[ScaleRun], float | None]) -> float | None:
        """The sum of a figure over its repeats; None where one lacks it."""
        found = self.mean(pick)
        return None if found is None else found * len(self.runs)


@dataclass(frozen=True)
class ScaleStudy:
    """Points by rising size, and the fits for which there are enough of them. `unit`: "ranks" or "nodes"; `command`: as
    it can be typed again."""

    name: str
    weak: bool
    unit: str
    points: tuple[ScalePoint, ...]
    amdahl: AmdahlFit | None
    gustafson: GustafsonFit | None
    communication: CommunicationFit | None
    command: str

    @property
    def kind(self) -> str:
        return "weak" if self.weak else "strong"

    @property
    def runs(self) -> list[ScaleRun]:
        return [run for point in self.points for run in point.runs]

    @property
    def rate_unit(self) -> str:
        return "tokens" if self.points[0].runs[0].counts_tokens else "samples"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "study": self.name,
            "kind": self.kind,
            "unit": self.unit,
            "rate_unit": self.rate_unit,
            "verdict": list_verdict(self),
            "points": [_point_facts(point) for point in self.points],
            "amdahl": {**asdict(self.amdahl), "most_speed_up": self.amdahl.most_speed_up} if self.amdahl else None,
            "gustafson": asdict(self.gustafson) if self.gustafson else None,
            "communication": asdict(self.communication) if self.communication else None,
            "command": self.command,
            "shardway": __version__,
        }


def _point_facts(point: ScalePoint) -> dict[str, Any]:
    return {
        "size": point.size,
        "ranks": point.world,
        "steps": point.steps,
        "step_s": asdict(point.times.estimate),
        "per_s": asdict(point.rate) if point.rate else None,
        "speed_up": asdict(point.speed_up),
        "ideal": point.ideal,
        "efficiency": asdict(point.efficiency),
        "planned_s": point.mean(lambda run: run.planned_s),
        "outside_share": point.mean(lambda run: run.outside_share),
        "exposed_share": point.mean(lambda run: run.exposed_share),
        "gpu_hours": point.total(lambda run: run.gpu_hours),
        "rank_hours": point.total(lambda run: run.rank_hours),
        "energy_kwh": point.total(lambda run: run.energy_kwh),
        "runs": [{**asdict(run), "times": None, "steps": len(run.times)} for run in point.runs],
    }


def make_study(name: str, runs: Sequence[ScaleRun], *, weak: bool, unit: str, command: str) -> ScaleStudy:
    """A study of these runs; several of one size are repeats. Raises UserError where they are not the kind of scaling
    that is asked for."""
    ordered = sorted(runs, key=lambda run: (run.size, run.path))
    labels = [render_plural(run.size, unit.removesuffix("s")) for run in ordered]
    check_kind(labels, [run.work for run in ordered], weak=weak)
    groups = [tuple(run for run in ordered if run.size == size) for size in sorted({run.size for run in ordered})]
    times = measure_points({group[0].size: [run.times for run in group] for group in groups})
    works = [group[0].work.world / groups[0][0].work.world if weak else 1.0 for group in groups]
    points = []
    for group, each, work in zip(groups, times, works, strict=True):
        first, step = group[0], each.estimate
        amount = first.work.tokens if first.counts_tokens else first.work.samples
        rate = ScaleEstimate(amount / step.value, amount / step.high, amount / step.low) if amount else None
        up, kept = find_speed_up(times[0], each, work), find_efficiency(times[0], each, work)
        points.append(ScalePoint(first.size, group, each, rate, up, each.size / times[0].size, kept))
    return ScaleStudy(
        name=name,
        weak=weak,
        unit=unit,
        points=tuple(points),
        amdahl=None if weak else fit_amdahl(times),
        gustafson=fit_gustafson(times, works) if weak else None,
        communication=fit_communication(times, weak=weak),
        command=command,
    )


# --- the verdict


def list_verdict(study: ScaleStudy) -> list[str]:
    """Sentences, the most important first."""
    first, last = study.points[0], study.points[-1]
    if last is first:
        return [f"One size was run ({_size(study, first.size)}): a speed-up needs another one."]
    found = [f"{_size(study, last.size)} keep {_percent(last.efficiency)}{_describe_limit(study)}."]
    found += [*_describe_fits(study)]
    if all(len(point.runs) == 1 for point in study.points):
        found.append("Each size has a single run, so what varies between runs is not in the intervals (--repeats).")
    return found


def _describe_limit(study: ScaleStudy) -> str:
    if study.amdahl is not None:
        base = _size(study, study.points[0].size)
        return f": {_percent(study.amdahl.share)} of a step on {base} does not shrink"
    if study.weak:
        longer = study.points[-1].times.seconds / study.points[0].times.seconds
        return f": a step takes {longer:.3g} times as long with the same work a rank"
    return ""


def _describe_fits(study: ScaleStudy) -> Iterator[str]:
    amdahl, growing = study.amdahl, study.communication
    if amdahl is not None and math.isfinite(amdahl.most_speed_up) and amdahl.share.low > 0:
        yield (
            f"By Amdahl's law no number of {study.unit} is more than {amdahl.most_speed_up:.3g} times as fast as "
            f"{study.points[0].size}."
        )
    if amdahl is not None and amdahl.misfit > MUCH_MISFIT:
        yield f"These steps are {amdahl.misfit:.0%} off that law (root mean square), so its share is a rough figure."
    if study.gustafson is not None:
        yield f"By Gustafson's law {_percent(study.gustafson.share)} of the time does not grow with the work."
    if growing is not None and growing.is_seen:
        yield f"Each doubling of {study.unit} adds {_milliseconds(growing.doubling_s)} to a step (communication)."
    elif growing is not None:
        yield f"No part of a step is seen to grow with {study.unit} ({_milliseconds(growing.doubling_s)} a doubling)."


def _size(study: ScaleStudy, size: int) -> str:
    return render_plural(size, study.unit.removesuffix("s"))


def _percent(share: ScaleEstimate) -> str:
    """ "71 % (68 to 74)"; with a decimal where the ends are close."""
    ends = [100 * each for each in (share.value, share.low, share.high)]
    digits = 1 if ends[2] - ends[1] < 2 else 0
    value, low, high = (f"{each:.{digits}f}" for each in ends)
    return f"{value} % ({low} to {high})"


def _milliseconds(time_s: ScaleEstimate) -> str:
    value, low, high = (f"{1000 * each:.3g}" for each in (time_s.value, time_s.low, time_s.high))
    return f"{value} ms ({low} to {high})"


# --- the table

POINT_COLUMNS = ("repeats", "steps", "warm-up", "step, s", "a second", "speed-up", "ideal", "efficiency, %")
COST_COLUMNS = ("outside, %", "exposed, %", "planned, s", "GPU-hours", "rank-hours", "kWh")


def list_rows(study: ScaleStudy) -> Iterator[tuple[str, ...]]:
    """A row for each point, the head first. `outside`: of a step's time, waiting for data and the script; `exposed`:
    communication that nothing hides, where steps were captured."""
    yield (study.unit, *(["ranks"] if study.unit == "nodes" else []), *POINT_COLUMNS, *COST_COLUMNS)
    for point in study.points:
        kept = point.efficiency
        yield (
            str(point.size),
            *([str(point.world)] if study.unit == "nodes" else []),
            str(len(point.runs)),
            str(point.steps),
            "/".join(str(run.dropped) for run in point.runs),
            _interval(point.times.estimate, ".4g"),
            UNKNOWN if point.rate is None else f"{render_total(point.rate.value)} {study.rate_unit}",
            _interval(point.speed_up, ".3g"),
            f"{point.ideal:g}",
            _interval(ScaleEstimate(100 * kept.value, 100 * kept.low, 100 * kept.high), ".1f"),
            _number(point.mean(lambda run: run.outside_share), ".1f", 100),
            _number(point.mean(lambda run: run.exposed_share), ".1f", 100),
            _number(point.mean(lambda run: run.planned_s), ".4g"),
            _number(point.total(lambda run: run.gpu_hours), ".3g"),
            _number(point.total(lambda run: run.rank_hours), ".3g"),
            _number(point.total(lambda run: run.energy_kwh), ".3g"),
        )


def _interval(found: ScaleEstimate, form: str) -> str:
    if found.low == found.high:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else f"{value * scale:{form}}"


def list_fits(study: ScaleStudy) -> list[tuple[str, str, str]]:
    """What was fitted: model, what it gives with its interval, and how far the steps are off it."""
    rows = []
    if study.amdahl is not None:
        share, serial = study.amdahl.share, study.amdahl.serial_s
        given = f"serial share {_percent(share)}, a = {_milliseconds(serial)}"
        rows.append(("Amdahl, step = a + b/n", given, f"{study.amdahl.misfit:.1%}"))
    if study.gustafson is not None:
        given = f"serial share {_percent(study.gustafson.share)}"
        rows.append(("Gustafson, speed-up = s + (1 - s) n", given, f"{study.gustafson.misfit:.1%}"))
    if study.communication is not None:
        found = study.communication
        model = "step = a + c log2(n)" if study.weak else "step = a + b/n + c log2(n)"
        given = f"a = {_milliseconds(found.fixed_s)}, c = {_milliseconds(found.doubling_s)}"
        rows.append((f"communication, {model}", given, f"{found.misfit:.1%}"))
    return rows


def list_provenance(study: ScaleStudy) -> list[tuple[str, str]]:
    """How it was measured: pairs of a label and words; what differs between runs is listed."""

    def each(pick: Callable[[ScaleRun], str]) -> str:
        return ", ".join(dict.fromkeys(filter(None, (pick(run) for run in study.runs)))) or UNKNOWN

    jobs = [f"{job} ({_size(study, run.size)})" for run in study.runs for job in run.jobs]
    first, last = min(run.started for run in study.runs), max(run.started for run in study.runs)
    return [
        ("work", f"{describe_work(study.points[0].runs[0], weak=study.weak)} ({study.kind} scaling)"),
        ("command", study.command),
        ("runs begun", render_day(first) + (f" to {render_day(last)}" if last - first >= 60 else "")),
        ("hosts", each(lambda run: run.machine.get("host", ""))),
        ("accelerators", each(lambda run: run.machine.get("accelerators", run.machine.get("device", "")))),
        ("processor", each(lambda run: run.machine.get("cpu", ""))),
        ("cores", each(lambda run: run.machine.get("cores", ""))),
        ("system", each(lambda run: run.machine.get("os", ""))),
        ("versions", each(lambda run: f"torch {run.machine.get('torch')}, Python {run.machine.get('python')}")),
        ("read by", f"Shardway {__version__}"),
        ("ranks started by", each(lambda run: run.launcher)),
        ("jobs", ", ".join(jobs) or "none (started by hand)"),
        ("step", "median of the end-to-end times after the warm-up, mean over repeats; intervals are of 95 %"),
    ]


def render_study(study: ScaleStudy) -> str:
    """Plain text: the verdict, the table, the fits."""
    fits = list_fits(study)
    head = ("fit", "result", "off by")
    lines = [*list_verdict(study), "", *align_cells([*list_rows(study)], to_the_right=True)]
    return "\n".join([*lines, *(["", *align_cells([head, *fits])] if fits else [])])


# --- CSV

_OF_STUDY = ("study", "kind", "unit", "serial_share", "serial_share_low", "serial_share_high")
_OF_RUNS = ("machine", "accelerators", "processor", "system", "torch", "python", "shardway", "jobs", "runs")


def render_csv(study: ScaleStudy) -> str:
    """A row for each point, with the provenance in columns; what is not known is empty."""
    text = io.StringIO()
    rows = [_csv_row(study, point) for point in study.points]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(study: ScaleStudy, point: ScalePoint) -> dict[str, Any]:
    fitted = study.gustafson or study.amdahl
    share = fitted.share if fitted else None
    of_study = (study.name, study.kind, study.unit, *((share.value, share.low, share.high) if share else ("", "", "")))
    facts = _point_facts(point)
    row: dict[str, Any] = dict(zip(_OF_STUDY, of_study, strict=True))
    row |= {"size": point.size, "ranks": point.world, "nodes": point.runs[0].nodes, "repeats": len(point.runs)}
    row |= {"steps": point.steps, "warm_up_steps": "/".join(str(run.dropped) for run in point.runs)}
    for name in ("step_s", "per_s", "speed_up", "efficiency"):
        found = facts[name] or {}
        row |= {name: found.get("value"), f"{name}_low": found.get("low"), f"{name}_high": found.get("high")}
    row |= {"rate_unit": study.rate_unit, "ideal_speed_up": point.ideal}
    figures = ("planned_s", "outside_share", "exposed_share", "gpu_hours", "rank_hours", "energy_kwh")
    row |= {name: facts[name] for name in figures}
    work = point.runs[0].work
    row |= {"samples_per_step": work.samples, "tokens_per_step": work.tokens}

    def each(pick: Callable[[ScaleRun], str]) -> str:
        return "; ".join(dict.fromkeys(filter(None, (pick(run) for run in point.runs))))

    known = (
        each(lambda run: run.machine.get("host", "")),
        each(lambda run: run.machine.get("accelerators", "")),
        each(lambda run: run.machine.get("cpu", "")),
        each(lambda run: run.machine.get("os", "")),
        each(lambda run: run.machine.get("torch", "")),
        each(lambda run: run.machine.get("python", "")),
        __version__,
        each(lambda run: " ".join(run.jobs)),
        each(lambda run: run.path),
    )
    row |= dict(zip(_OF_RUNS, known, strict=True))
    begun = min(run.started for run in point.runs)
    return {**{k: "" if v is None else v for k, v in row.items()}, "begun": render_day(begun), "command": study.command}
