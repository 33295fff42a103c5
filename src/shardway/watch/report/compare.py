"""Runs beside one another: their keys, results and pace, with a verdict that has an interval.

Invariants:
- The interval of a mean comes from a block bootstrap over steps, since steps that follow each other are alike; the
  first steps of each attempt, which compile and warm up, are left out. The same runs give the same interval.
- If the interval of a ratio includes 1, no difference is claimed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from shardway.drawing import render_document, render_section, render_table, render_text
from shardway.plain_arrays import find_arrays
from shardway.units import UNKNOWN
from shardway.watch.report.axis import TimeAxis
from shardway.watch.report.content import ReportContent
from shardway.watch.report.curves import Curve, CurvePoint, Figure, thin
from shardway.watch.report.event_log import EventLog
from shardway.watch.report.lanes import render_curves, script_data
from shardway.watch.report.page import render_report_style, render_script, render_setting
from shardway.watch.words import align_cells, render_loss, render_time, render_total

WARM_UP = 10  # first steps of an attempt that are left out, or a fifth of few
DRAWS = 1000
_LEVEL = 0.95
_COLOURS = ("train", "validation", "save", "resume", "fault", "speed", "learning rate", "gradients")


@dataclass(frozen=True)
class StepPace:
    """Mean seconds of a step with its 95 % interval; `steps` that were counted."""

    mean_s: float
    low_s: float
    high_s: float
    steps: int


@dataclass(frozen=True)
class PaceRatio:
    """How many times faster than the first run, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_seen(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low > 1 or self.high < 1


def list_step_times(log: EventLog) -> list[float]:
    """Seconds of the steps after the warm-up of each attempt, in order."""
    np = find_arrays()

    found: list[float] = []
    took, attempts = log.column("seconds"), log.list_parts("started")
    for attempt in np.unique(attempts):
        sound = took[(attempts == attempt) & np.isfinite(took) & (took > 0)]
        found += sound[min(WARM_UP, len(sound) // 5) :].tolist()
    return found


def draw_means(times: Sequence[float], seed: int) -> Any:
    """Means of DRAWS samples with replacement of blocks of consecutive steps; the blocks are about the cube root of
    their number times two long (Hall, Horowitz and Jing 1995)."""
    np = find_arrays()

    values = np.asarray(times)
    count = len(values)
    block = max(1, min(count // 4 or 1, round(2 * count ** (1 / 3))))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    starts = np.random.default_rng(seed).integers(0, count - block + 1, (DRAWS, -(-count // block)))
    return (sums[starts + block] - sums[starts]).mean(axis=1) / block


def find_pace(times: Sequence[float], seed: int = 1) -> StepPace | None:
    """The pace; None for fewer than 8 steps."""
    np = find_arrays()

    if len(times) < 8:
        return None
    low, high = np.quantile(draw_means(times, seed), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return StepPace(math.fsum(times) / len(times), float(low), float(high), len(times))


def find_ratio(base: Sequence[float], other: Sequence[float]) -> PaceRatio | None:
    """How many times faster the other run's steps are; None for fewer than 8 steps of either."""
    np = find_arrays()

    if len(base) < 8 or len(other) < 8:
        return None
    ratios = draw_means(base, 1) / draw_means(other, 2)
    low, high = np.quantile(ratios, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    mean = (math.fsum(base) / len(base)) / (math.fsum(other) / len(other))
    return PaceRatio(mean, float(low), float(high))


@dataclass(frozen=True)
class Comparison:
    """Several runs; `labels` names them, `ratios` are against the first one."""

    contents: Sequence[ReportContent]
    labels: tuple[str, ...]
    keys: dict[str, list[str]]
    paces: list[StepPace | None]
    ratios: list[PaceRatio | None]

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each run but the first."""
        return [
            f"{label} and {self.labels[0]}: the steps of a command are not recorded, so no pace is compared"
            if self.contents[0].is_foreign or content.is_foreign
            else render_verdict(label, self.labels[0], ratio)
            for label, content, ratio in zip(self.labels[1:], self.contents[1:], self.ratios[1:], strict=True)
        ]

    @property
    def keyless(self) -> str:
        """The runs whose keys are not known, in a sentence; "" where all are."""
        rows = zip(self.labels, self.contents, strict=True)
        without = [(label, each.settings.problem) for label, each in rows if not _has_keys(each)]
        reason = next((problem.splitlines()[0] for _, problem in without if problem), "the run has no record of them")
        return (
            f"Keys are not known of {', '.join(label for label, _ in without)}: {reason.rstrip('.')}."
            if without
            else ""
        )

    def as_json(self) -> dict[str, Any]:
        rows = []
        for label, content, pace, ratio in zip(self.labels, self.contents, self.paces, self.ratios, strict=True):
            summary = content.summary.as_json()
            rows.append(
                {
                    "run": str(content.run.path),
                    "label": label,
                    "state": summary["state"],
                    "step": summary["step"],
                    "loss": summary["smooth_loss"],
                    "best_validation": summary["best_validation"],
                    "wall_s": content.wall_s,
                    "energy_kwh": content.energy_kwh,
                    "step_s": asdict(pace) if pace else None,
                    "times_faster": {**asdict(ratio), "is_seen": ratio.is_seen} if ratio else None,
                }
            )
        return {"runs": rows, "differing_keys": self.keys, "verdicts": self.verdicts}


def compare(contents: Sequence[ReportContent]) -> Comparison:
    """Compare runs with the first of them."""
    times = [list_step_times(content.log) for content in contents]
    ratios: list[PaceRatio | None] = [None, *(find_ratio(times[0], each) for each in times[1:])]
    return Comparison(contents, _name(contents), _find_keys(contents), [find_pace(each) for each in times], ratios)


def _name(contents: Sequence[ReportContent]) -> tuple[str, ...]:
    names = tuple(content.summary.name for content in contents)
    return names if len(set(names)) == len(names) else tuple(str(content.run.path) for content in contents)


def _find_keys(contents: Sequence[ReportContent]) -> dict[str, list[str]]:
    """Keys whose values differ, of the runs whose keys are known: a value for each run, "" where it has none."""
    flat: list[dict[str, str] | None] = []
    for content in contents:
        if content.is_foreign:
            flat.append({"command": shlex.join(content.jobs[-1].command)})
            continue
        if not _has_keys(content):
            flat.append(None)
            continue
        both = (content.settings.defaults, content.settings.chosen)
        flat.append(
            {
                f"{name}.{key}": render_setting(value)
                for part in both
                for name, keys in part.items()
                for key, value in keys.items()
            }
        )
    known = [each for each in flat if each is not None]
    names = sorted({name for each in known for name in each if len({every.get(name, "") for every in known}) > 1})
    return {name: [UNKNOWN if each is None else each.get(name, "") for each in flat] for name in names}


def _has_keys(content: ReportContent) -> bool:
    return content.is_foreign or bool(content.settings.chosen or content.settings.defaults)


def render_verdict(label: str, base: str, ratio: PaceRatio | None) -> str:
    """ "b is 12 % (10 to 14 %) faster a step than a", "no difference a step can be seen between ..."."""
    if ratio is None:
        return f"{label} and {base}: fewer than 8 steps after the warm-up, so no pace is compared"
    if not ratio.is_seen:
        ends = f"{100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %"
        return f"no difference a step can be seen between {label} and {base} (95 % interval {ends})"
    word, turned = (
        ("faster", ratio) if ratio.ratio > 1 else ("slower", PaceRatio(1 / ratio.ratio, 1 / ratio.high, 1 / ratio.low))
    )
    shares = [100 * (each - 1) for each in (turned.ratio, turned.low, turned.high)]
    digits = 0 if min(shares) >= 3 else 1
    mean, low, high = (f"{each:.{digits}f}" for each in shares)
    return f"{label} is {mean} % ({low} to {high} %) {word} a step than {base}"


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    """What was measured, a column a run."""

    def each(label: str, pick: Any) -> tuple[str, ...]:
        return (label, *(pick(at, content) for at, content in enumerate(found.contents)))

    def pace(at: int, content: ReportContent) -> str:
        known = found.paces[at]
        return f"{known.mean_s:.4g} s ({known.low_s:.4g} to {known.high_s:.4g})" if known else UNKNOWN

    def rate(at: int, content: ReportContent) -> str:
        known, start = found.paces[at], content.progress.start
        size = (start.tokens_per_step if start.counts_tokens else start.samples_per_step) if start else None
        if known is None or not size:
            return UNKNOWN
        ends = f"{render_total(size / known.high_s)} to {render_total(size / known.low_s)}"
        return f"{render_total(size / known.mean_s)} ({ends}) {content.summary.unit}/s"

    return [
        each("state", lambda at, content: content.summary.state),
        each("steps", lambda at, content: f"{content.summary.step:,}"),
        each("loss, recent mean", lambda at, content: render_loss(content.summary.smooth_loss)),
        each("best validation loss", lambda at, content: _best(content)),
        each("a step", pace),
        each("throughput in steps", rate),
        each("wall time", lambda at, content: render_time(content.wall_s)),
        each("energy", lambda at, content: UNKNOWN if content.energy_kwh is None else f"{content.energy_kwh:.3g} kWh"),
    ]


def _best(content: ReportContent) -> str:
    best = content.summary.best_validation
    return f"{render_loss(best.loss)} at step {best.step}" if best else UNKNOWN


def render_comparison(found: Comparison) -> str:
    """Plain text: verdicts, results, keys that differ."""
    keys = [(name, *values) for name, values in found.keys.items()]
    results = align_cells([("", *found.labels), *_rows(found)])
    return "\n".join(
        [
            *(f"{each}." for each in found.verdicts),
            "",
            *results,
            "",
            *(align_cells([("keys that differ", *found.labels), *keys]) if keys else []),
            *([found.keyless or "No key differs."] if found.keyless or not keys else []),
        ]
    )


def render_comparison_page(found: Comparison) -> str:
    """The comparison as HTML: curves over each other, by step."""
    last = max(
        (
            point.step
            for each in found.contents
            for figure in each.figures
            for curve in figure.curves
            for point in curve.points
        ),
        default=1,
    )
    axis = TimeAxis(((0.0, float(max(1, last))),))  # steps in place of seconds
    figures = []
    for name in ("loss", "speed", "grad"):
        curves = []
        for at, (label, content) in enumerate(zip(found.labels, found.contents, strict=True)):
            known = next((figure for figure in content.figures if figure.name == name), None)
            if known is not None:
                points = [
                    replace(point, time=float(point.step))
                    for point in known.curves[
                        -1
                        if known.curves[0].faint and not known.curves[-1].dotted
                        else min(1, len(known.curves) - 1)
                        if known.curves[0].faint
                        else 0
                    ].points
                ]
                curves.append(Curve(label, _COLOURS[at % len(_COLOURS)], tuple(thin(_rising(points), 600))))
        if curves:
            example = next(figure for content in found.contents for figure in content.figures if figure.name == name)
            figures.append(Figure(name, example.title, tuple(curves), example.unit, example.log, example.zero))
    columns = ("", *found.labels)
    words = set(range(1, len(columns)))
    keys = [(name, *values) for name, values in found.keys.items()]
    parts = [
        f"<header><h1>{escape(' and '.join(found.labels))}</h1>",
        *(render_text(f"{each}.", "verdict") for each in found.verdicts),
        "</header>",
        render_section("Results", render_table("", columns, _rows(found), words=words)),
        render_section("Over steps", *(render_curves(figure, axis, (), over_steps=True) for figure in figures))
        if figures
        else "",
        render_section(
            "Keys that differ",
            render_table("", columns, keys, words=words) if keys else "",
            render_text(found.keyless or "None.") if found.keyless or not keys else "",
        ),
    ]
    scripts = render_script({**script_data(axis, figures, ()), "unit": "steps"}) if figures else ""
    return render_document("Comparison - Shardway", "\n".join(parts), style=render_report_style(), scripts=scripts)


def _rising(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Only the last visit of each step, in the order of steps."""
    return sorted({point.step: point for point in points}.values(), key=lambda point: point.step)
