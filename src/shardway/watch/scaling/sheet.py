"""The sheet of a scaling study for a proposal: one HTML file with pictures, tables and how it was measured.

Invariants: the file fetches nothing and runs no script; figures are those of `study.ScaleStudy`. Every point has its
interval, and both pictures the ideal line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from shardway.drawing import (
    Frame,
    circle,
    line,
    nice_ticks,
    polyline,
    render_document,
    render_drawing,
    render_figure,
    render_section,
    render_table,
    render_text,
    render_tiles,
    text,
)
from shardway.units import UNKNOWN, render_plural
from shardway.watch.scaling.fits import ScaleEstimate
from shardway.watch.scaling.study import (
    COST_COLUMNS,
    ScalePoint,
    ScaleStudy,
    list_fits,
    list_provenance,
    list_rows,
    list_verdict,
)

_SIZE = (540.0, 330.0)
_FRAME = Frame(64, 30, 456, 240)
_CAP = 5.0  # half the width of the end of an error bar
_CURVE_POINTS = 40

_TABLE_NOTE = (
    "Outside: of a step's time, waiting for data and what the script does between steps. Exposed: communication that "
    "nothing hides, from captured steps. Hours and energy are of whole runs with their start, of all repeats; energy "
    "is that of the accelerators."
)


def render_sheet(study: ScaleStudy) -> str:
    """The HTML file."""
    sentences = list_verdict(study)
    title = f"{study.kind.capitalize()} scaling of {study.name}"
    rows = list(list_rows(study))
    head = [
        f"<header>\n<h1>{escape(title)}</h1>",
        render_text(sentences[0], "verdict"),
        *(render_text(each) for each in sentences[1:]),
        render_tiles(_list_tiles(study)),
        "</header>",
    ]
    pictures = [_draw_speed_up(study), _draw_efficiency(study)]
    fits, costs = list_fits(study), len(COST_COLUMNS)
    points = render_table("", rows[0][:-costs], [row[:-costs] for row in rows[1:]])
    taken = render_table("", (rows[0][0], *COST_COLUMNS), [(row[0], *row[-costs:]) for row in rows[1:]])
    body = [
        "\n".join(head),
        f'<div class="two">{"".join(pictures)}</div>',
        render_section("Points", points),
        render_section("Where the time goes, and what it took", taken, render_text(_TABLE_NOTE, "soft")),
        render_section("Fits", render_table("", ("model", "result", "off by"), fits, words=(1,))) if fits else "",
        render_section(
            "How it was measured", render_table("", ("", ""), list_provenance(study), words=(1,)), _describe_runs(study)
        ),
    ]
    return render_document(f"{title} - Shardway", "\n".join(part for part in body if part))


def _list_tiles(study: ScaleStudy) -> list[tuple[str, ...]]:
    last, unit = study.points[-1], study.unit.removesuffix("s")
    tiles: list[tuple[str, ...]] = [
        ("largest", render_plural(last.size, unit), f"{last.world} ranks"),
        ("efficiency there", f"{last.efficiency.value:.0%}", _ends(last.efficiency, 100, ".1f", " %")),
        ("speed-up there", f"{last.speed_up.value:.3g}", f"{_ends(last.speed_up)}, ideal {last.ideal:g}"),
    ]
    fitted = study.amdahl or study.gustafson
    if fitted is not None:
        tiles.append(("serial share", f"{fitted.share.value:.1%}", _ends(fitted.share, 100, ".1f", " %")))
    hours = [point.total(lambda run: run.gpu_hours) for point in study.points]
    if None not in hours:
        tiles.append(("this study took", f"{sum(each or 0.0 for each in hours):.3g} GPU-hours"))
    return tiles


def _ends(found: ScaleEstimate, scale: float = 1.0, form: str = ".3g", unit: str = "") -> str:
    return f"{scale * found.low:{form}} to {scale * found.high:{form}}{unit}"


# --- pictures: sizes on a logarithmic axis


def _draw_speed_up(study: ScaleStudy) -> str:
    top = max(max(point.ideal, point.speed_up.high) for point in study.points)
    fitted: Callable[[float], float] | None = None
    if study.amdahl is not None:
        amdahl = study.amdahl
        fitted = lambda n: amdahl.estimate_s(1.0) / amdahl.estimate_s(n)  # noqa: E731
    elif study.gustafson is not None:
        fitted = study.gustafson.estimate_speed_up
    law = "Amdahl's law" if study.amdahl is not None else "Gustafson's law"
    note = f"Dashed: ideal. Curve: {law}, fitted." if fitted is not None else "Dashed: ideal."
    values = [point.speed_up for point in study.points]
    low = min(1.0, *(each.low for each in values))
    axis = _SheetAxis(math.log2(max(low, 1e-3)), math.log2(top), lambda value: math.log2(max(value, 1e-3)), is_log=True)
    return _draw(study, "Speed-up", axis, values, lambda n: n, fitted, note)


def _draw_efficiency(study: ScaleStudy) -> str:
    shares = [point.efficiency for point in study.points]
    scaled = [ScaleEstimate(100 * each.value, 100 * each.low, 100 * each.high) for each in shares]
    top = max(100.0, *(each.high for each in scaled))
    fitted: Callable[[float], float] | None = None
    if study.communication is not None:
        found, work = study.communication, (lambda n: 1.0) if study.weak else (lambda n: 1 / n)
        fitted = lambda n: 100 * work(n) * found.estimate_s(1.0) / found.estimate_s(n)  # noqa: E731
    note = "Dashed: ideal."
    note += " Curve: with communication that grows with log2, fitted." if fitted is not None else ""
    return _draw(
        study, "Efficiency, %", _SheetAxis(0.0, 1.05 * top, lambda value: value), scaled, lambda n: 100.0, fitted, note
    )


@dataclass(frozen=True)
class _SheetAxis:
    """The vertical axis, from `low` to `high` as `place` has them: values, or their logarithms."""

    low: float
    high: float
    place: Callable[[float], float]
    is_log: bool = False

    def y(self, value: float) -> float:
        part = (self.place(value) - self.low) / ((self.high - self.low) or 1.0)
        return _FRAME.bottom - min(max(part, 0.0), 1.02) * _FRAME.height

    def list_ticks(self) -> list[float]:
        if self.is_log:
            return [2.0**power for power in range(math.floor(self.low), math.ceil(self.high) + 1)]
        return nice_ticks(self.high)


def _draw(
    study: ScaleStudy,
    title: str,
    axis: _SheetAxis,
    values: Sequence[ScaleEstimate],
    ideal: Callable[[float], float],
    fitted: Callable[[float], float] | None,
    note: str,
) -> str:
    """A figure over sizes: points with error bars, the ideal line, and what was fitted, by n relative to the smallest
    size."""
    first, last = study.points[0].size, study.points[-1].size
    span = math.log2(last / first) or 1.0

    def x(size: float) -> float:
        return _FRAME.x + 22 + math.log2(size / first) / span * (_FRAME.width - 44)

    y = axis.y
    parts = []
    for tick in (tick for tick in axis.list_ticks() if axis.low <= axis.place(tick) <= axis.high):
        parts += [line((_FRAME.x, y(tick)), (_FRAME.right, y(tick)), "grid")]
        parts += [text((_FRAME.x - 8, y(tick) + 4), f"{tick:g}", "soft", "end")]
    parts += [text((x(point.size), _FRAME.bottom + 20), str(point.size), "soft", "middle") for point in study.points]
    parts += [text((_FRAME.x + _FRAME.width / 2, _FRAME.bottom + 44), study.unit, "", "middle")]
    parts += [line((_FRAME.x, _FRAME.bottom), (_FRAME.right, _FRAME.bottom), "axis")]
    sizes = [first * 2 ** (span * place / _CURVE_POINTS) for place in range(_CURVE_POINTS + 1)]
    if len(study.points) > 1:
        parts.append(polyline([(x(size), y(ideal(size / first))) for size in sizes], "ideal"))
        if fitted is not None:
            parts.append(polyline([(x(size), y(fitted(size / first))) for size in sizes], "curve"))
    for point, value in zip(study.points, values, strict=True):
        parts += _draw_point(x(point.size), y, point, value, study.unit, title)
    shown = "; ".join(f"{point.size}: {value.value:.3g}" for point, value in zip(study.points, values, strict=True))
    label = f"{title} over {study.unit}: {shown}"
    figure = render_drawing(_SIZE, label, [text((_FRAME.x, 12), title, "bold"), *parts], least=420)
    return render_figure(figure, {}, f"{note} Bars: 95 % intervals.")


def _draw_point(
    at: float, y: Callable[[float], float], point: ScalePoint, value: ScaleEstimate, unit: str, title: str
) -> list[str]:
    low, high = y(value.low), y(value.high)
    size = render_plural(point.size, unit.removesuffix("s"))
    tip = f"{size}: {title} {value.value:.3g} ({value.low:.3g} to {value.high:.3g})"
    bars = [line((at, low), (at, high), "whisker")]
    bars += [line((at - _CAP, end), (at + _CAP, end), "whisker") for end in (low, high)]
    return [*bars, circle((at, y(value.value)), 4, "dot", tip)]


# --- runs


def _describe_runs(study: ScaleStudy) -> str:
    rows = [
        (str(run.size), run.path, ", ".join(run.jobs) or UNKNOWN, str(len(run.times)), str(run.dropped))
        for run in study.runs
    ]
    return render_table("Runs", (study.unit, "run directory", "jobs", "steps", "warm-up"), rows, words=(1, 2))
