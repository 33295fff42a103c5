"""Figures as HTML: lanes below one another that share the time axis of a report.

Invariants:
- A lane is complete without a script: curves are paths, colour maps are pictures, labels are text beside them at any
  width. The script adds values under the pointer and the logarithmic scale.
- Every text passes `html.escape`; a lane has a label in words.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from shardway.drawing import colour_of
from shardway.units import render_count
from shardway.watch.report.axis import TimeAxis
from shardway.watch.report.colour_map import find_levels, render_gradient, render_png
from shardway.watch.report.curves import Curve, Figure, Mark, place_points
from shardway.watch.report.hardware import Panel
from shardway.watch.words import render_time

# --- numbers


def render_value(value: float) -> str:
    """About three significant digits: "0.00123", "4.57", "98.6", "1,240", "1.28M", "5.1e+20"."""
    if not math.isfinite(value):
        return "n/a"
    size = abs(value)
    if 1e5 <= size < 1e13:
        return render_count(value)
    if size != 0 and (size >= 1e13 or size < 1e-4):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"


def find_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next((power * each for each in (1, 2, 2.5, 5, 10) if (high - low) / (power * each) <= count), power * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [0.0 if number == 0 else number * step for number in range(first, last + 1)]


# --- the frame of a lane


def render_marks(axis: TimeAxis, marks: Iterable[Mark]) -> str:
    """Waits between spans, and lines of resumes and faults, over a plot."""
    parts = [
        f'<i class="gap" style="left:{100 * start:.2f}%;width:{100 * (end - start):.2f}%"></i>'
        for start, end, wait in axis.breaks()
    ]
    for mark in marks:
        if mark.kind in ("resume", "fault") and mark.time > 0:
            parts.append(f'<i class="mark {mark.kind}" style="left:{100 * float(axis.place(mark.time)):.2f}%"></i>')
    return "".join(parts)


def render_axis(axis: TimeAxis) -> str:
    """The labels of the time axis."""
    return "".join(
        f'<span style="left:{100 * tick.place:.2f}%"{_side(tick.place)}>{escape(tick.label)}</span>'
        for tick in axis.ticks()
    )


def _side(place: float) -> str:
    return ' class="first"' if place < 0.03 else ' class="last"' if place > 0.97 else ""


def _frame(name: str, title: str, note: str, rows: Sequence[str], below: str = "", button: str = "") -> str:
    """A lane of rows, each of three cells: labels, plot, values."""
    soft = f'<span class="soft">{escape(note)}</span>' if note else ""
    return (
        f'<figure class="card lane" id="lane-{escape(name)}"><figcaption><h3>{escape(title)}</h3>{soft}{button}'
        f'</figcaption><div class="lane-rows">{"".join(rows)}</div>{below}</figure>'
    )


def _axis_row(axis: TimeAxis, *, over_steps: bool = False) -> str:
    labels = render_axis(axis)
    if over_steps:
        steps = [(each / axis.end, f"{each:,.0f}") for each in find_ticks(0, axis.end, 6)]
        labels = "".join(f'<span style="left:{100 * at:.2f}%"{_side(at)}>{label}</span>' for at, label in steps)
    return f'<div></div><div class="times">{labels}</div><div></div>'


def _labels(ticks: Iterable[tuple[float, str]]) -> str:
    """Labels at heights from 0 (bottom) to 1."""
    return "".join(f'<span style="bottom:{100 * at:.1f}%">{escape(label)}</span>' for at, label in ticks)


# --- events


def render_events(axis: TimeAxis, marks: Sequence[Mark]) -> str:
    """The lane of attempts: when the run was alive, its saves, validations, resumes and faults."""
    bars = [
        f'<i class="alive" style="left:{100 * first:.2f}%;width:{max(0.15, 100 * (last - first)):.2f}%"></i>'
        for first, last in zip(axis.knots[1][::2], axis.knots[1][1::2], strict=True)
    ]
    parts = [render_marks(axis, ()), *bars]
    for mark in marks:
        if mark.time > 0:
            tip = f"{mark.kind} at step {mark.step}" + (f": {mark.words}" if mark.words else "")
            place = f"left:{100 * float(axis.place(mark.time)):.2f}%"
            parts.append(f'<i class="event {mark.kind}" style="{place}" title="{escape(tip)}"></i>')
    for start, end, wait in axis.breaks():
        words = f"nothing ran for {render_time(wait)}"
        parts.append(
            f'<i class="wait" style="left:{100 * start:.2f}%;width:{100 * (end - start):.2f}%" title="{escape(words)}">'
            "</i>"
        )
    kinds = [kind for kind in ("save", "validation", "resume", "fault") if any(mark.kind == kind for mark in marks)]
    key = "".join(f'<li><i style="background:var(--{colour_of(kind)})"></i>{kind}</li>' for kind in kinds)
    key += '<li><i class="hatched"></i>wait, shortened</li>' if axis.breaks() else ""
    whole = render_time(axis.end - axis.start)
    note = f"{render_time(axis.alive_s)} alive, from the first sign of life to the last {whole}"
    row = f'<div class="labels"></div><div class="plot events">{"".join(parts)}{_CURSOR}</div><div></div>'
    below = f'<ul class="key marks">{key}</ul>' if key else ""
    return _frame("events", "Attempts", note, [row, _axis_row(axis)], below)


_CURSOR = '<i class="cursor"></i>'

# --- curves


def render_curves(figure: Figure, axis: TimeAxis, marks: Sequence[Mark], *, over_steps: bool = False) -> str:
    """A lane of curves, with the last value of each at its right; `over_steps`: the axis has steps, not seconds."""
    low, high = find_range(figure)
    ticks = find_ticks(low, high)
    grid = "".join(f'<path class="grid" d="M0 {_height(tick, low, high):.0f}H1000"/>' for tick in ticks)
    paths = "".join(_draw(curve, place_points(curve, axis), low, high) for curve in figure.curves)
    label = f"{figure.title} over {'steps' if over_steps else 'wall time'}"
    svg = (
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'<g class="lines">{grid}</g><g class="curves">{paths}</g></svg>'
    )
    ends = []
    for curve in figure.curves:
        last = next((point.value for point in reversed(curve.points) if math.isfinite(point.value)), None)
        if last is not None and not curve.faint:
            # "12,345" would be cut on a phone
            value = render_count(last) if 1e4 <= abs(last) < 1e5 else render_value(last)
            ends.append(f'<b style="border-bottom:3px solid var(--{curve.colour})">{escape(value)}</b>')
    named = len(figure.curves) > 1 or figure.curves[0].name not in (figure.title.lower(), figure.unit, "train")
    key = "".join(
        f'<li><i style="background:var(--{curve.colour});opacity:{0.45 if curve.faint else 1}"></i>'
        f"{escape(curve.name)}</li>"
        for curve in figure.curves
    )
    button = (
        f'<button type="button" data-log="{escape(figure.name)}" aria-pressed="false">log axis</button>'
        if figure.log and _can_be_logarithmic(figure)
        else ""
    )
    labels = _labels(((tick - low) / (high - low) if high > low else 0.5, render_value(tick)) for tick in ticks)
    row = (
        f'<div class="labels">{labels}</div><div class="plot lines" data-figure="{escape(figure.name)}">{svg}'
        f'{render_marks(axis, marks)}{_CURSOR}</div><div class="ends">{"".join(ends[:2])}</div>'
    )
    below = f'<ul class="key">{key}</ul>' if named else ""
    return _frame(figure.name, figure.title, figure.unit, [row, _axis_row(axis, over_steps=over_steps)], below, button)


def find_range(figure: Figure) -> tuple[float, float]:
    """The ends of the scale, with all finite values inside."""
    values = [point.value for curve in figure.curves for point in curve.points if math.isfinite(point.value)]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    low = min(0.0, low) if figure.zero else low
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    if not math.isfinite(room) or not math.isfinite(high + room - low):
        return low / 2 - 1, high / 2 + 1  # no scale holds values of both ends of double precision
    return (low if figure.zero and low >= 0 else low - room), high + room


def _can_be_logarithmic(figure: Figure) -> bool:
    return any(point.value > 0 for curve in figure.curves for point in curve.points)


def _height(value: float, low: float, high: float) -> float:
    """From 1000 (bottom) to 0, as a picture counts."""
    return 1000 - 1000 * min(1.0, max(0.0, (value - low) / (high - low)))


def _draw(curve: Curve, places: Sequence[float], low: float, high: float) -> str:
    path, pen_down, before = [], False, (-1.0, -1.0)
    for point, place in zip(curve.points, places, strict=True):
        if not math.isfinite(point.value):
            pen_down = False
            continue
        at = round(1000 * place, 1), round(_height(point.value, low, high))
        if pen_down and at == before:
            continue
        alone = "h.01" if not pen_down else ""  # a point by itself is a dot
        path.append(f"{'L' if pen_down else 'M'}{at[0]:g} {at[1]:g}{alone}")
        pen_down, before = True, at
    kind = "curve faint" if curve.faint else "curve"
    drawn = f'<path class="{kind}" style="stroke:var(--{curve.colour})" d="{"".join(path)}"/>'
    if curve.dotted:
        dots = "".join(
            f"M{1000 * place:.1f} {_height(point.value, low, high):.0f}h.01"
            for point, place in zip(curve.points, places, strict=True)
            if math.isfinite(point.value)
        )
        drawn += f'<path class="dots" style="stroke:var(--{curve.colour})" d="{dots}"/>'
    return drawn


def figure_data(figure: Figure, axis: TimeAxis) -> dict[str, Any]:
    """What the script needs of a figure."""
    low, high = find_range(figure)
    return {
        "name": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "range": [low, high],
        "traces": [
            {
                "name": curve.name,
                "colour": curve.colour,
                "faint": curve.faint,
                "dotted": curve.dotted,
                "x": place_points(curve, axis),
                "step": [point.step for point in curve.points],
                "y": [float(f"{point.value:.6g}") if math.isfinite(point.value) else None for point in curve.points],
            }
            for curve in figure.curves
        ],
    }


# --- colour maps

_TALLEST, _LOWEST, _ROOM = 18, 3, 260  # pixels of a row, and of all rows
_LABELLED = 11  # rows at least this high have labels


def render_panel(panel: Panel, axis: TimeAxis, marks: Sequence[Mark]) -> str:
    """A lane of a colour map: over it the smallest, mean and largest value at each time, at its right each row's
    mean."""
    rows = len(panel.rows)
    height = max(_LOWEST, min(_TALLEST, _ROOM // rows))
    top, strip_top = panel.top, 1.04 * panel.strip_top  # a line at the end of the scale stays whole
    strip = (
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(panel.title)}: '
        'smallest, mean and largest over time">'
        f'<path class="band" d="{_band(panel, strip_top)}"/><path class="curve" style="stroke:var(--teal)" '
        f'd="{_steps(panel.middle, strip_top)}"/></svg>'
    )
    shown = max(1, math.ceil(_LABELLED / height))
    labels = "".join(
        f'<span style="top:{100 * (at + 0.5) / rows:.2f}%">{escape(label)}</span>'
        for at, label in enumerate(panel.rows)
        if at % shown == 0
    )
    bars = "".join(_bar(float(value), top, at / rows, rows, height) for at, value in enumerate(panel.row_means))
    hosts = [label.partition(":")[0] for label in panel.rows]
    splits = "".join(
        f'<i class="split" style="top:{100 * at / rows:.2f}%"></i>'
        for at in range(1, rows)
        if hosts[at] != hosts[at - 1] and len(set(hosts)) < rows
    )
    picture = render_png(find_levels(panel.means, top))
    words = f"{panel.title} of {rows} rows over wall time, mean {render_value(panel.mean)} {panel.unit}"
    name = escape(panel.name)
    lines = [
        f'<div class="labels"><span style="bottom:86%">{render_value(panel.strip_top)}</span></div>'
        f'<div class="plot strip" data-strip="{name}">{strip}{render_marks(axis, marks)}{_CURSOR}</div>'
        '<div class="ends soft">mean</div>',
        f'<div class="labels rows">{labels}</div><div class="plot map" data-map="{name}" '
        f'style="height:{rows * height}px"><img alt="{escape(words)}" src="{picture}">{splits}'
        f'{render_marks(axis, marks)}{_CURSOR}</div><div class="bars" style="height:{rows * height}px">{bars}</div>',
        _axis_row(axis),
    ]
    scale = (
        f'<p class="scale soft"><span>0</span><i style="background:{render_gradient()}"></i>'
        f"<span>{render_value(top)} {escape(panel.unit)}</span>"
        f'<span class="note">{escape(panel.note)}</span></p>'
    )
    note = f"mean {render_value(panel.mean)} {panel.unit}"
    return _frame(panel.name, panel.title, note, lines, scale)


def _bar(value: float, top: float, at: float, rows: int, height: int) -> str:
    if not math.isfinite(value):
        return ""
    number = f"<b>{render_value(value)}</b>" if height >= _LABELLED else ""
    width = 100 * min(1.0, max(0.0, value / top))
    return (
        f'<span style="top:{100 * at:.2f}%;height:{100 / rows:.3f}%"><i style="width:{width:.1f}%"></i>{number}</span>'
    )


def _steps(values: Any, top: float) -> str:
    """A line through the middle of each bin, with gaps."""
    path, pen_down, count = [], False, len(values)
    for at, value in enumerate(values):
        if not math.isfinite(value):
            pen_down = False
            continue
        x, y = 1000 * (at + 0.5) / count, _height(float(value), 0, top)
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.0f}" + ("" if pen_down else "h.01"))
        pen_down = True
    return "".join(path)


def _band(panel: Panel, top: float) -> str:
    """The area between the smallest and the largest value, one piece for each stretch without gaps."""
    pieces, stretch = [], list[tuple[str, str]]()
    count = len(panel.least)
    for at in range(count + 1):
        low, high = (panel.least[at], panel.most[at]) if at < count else (math.nan, math.nan)
        if math.isfinite(low) and math.isfinite(high):
            x = f"{1000 * (at + 0.5) / count:.1f}"
            stretch.append((f"{x} {_height(float(high), 0, top):.0f}", f"{x} {_height(float(low), 0, top):.0f}"))
        elif stretch:
            over, under = [pair[0] for pair in stretch], [pair[1] for pair in reversed(stretch)]
            pieces.append(f"M{'L'.join((*over, *under))}Z")
            stretch = []
    return "".join(pieces)


def panel_data(panel: Panel) -> dict[str, Any]:
    """What the script needs of a colour map: a byte for each cell, row after row."""
    levels = find_levels(panel.means, panel.top)
    return {
        "name": panel.name,
        "title": panel.title,
        "unit": panel.unit,
        "rows": list(panel.rows),
        "bins": levels.shape[1],
        "top": panel.top,
        "cells": base64.b64encode(levels.tobytes()).decode(),
    }


def script_data(axis: TimeAxis, figures: Sequence[Figure], panels: Sequence[Panel]) -> dict[str, Any]:
    """All that the script of a page reads."""
    times, places = axis.knots
    return {
        "axis": {"times": [round(each, 3) for each in times], "places": [round(each, 7) for each in places]},
        "figures": [figure_data(figure, axis) for figure in figures],
        "maps": [panel_data(panel) for panel in panels],
    }
