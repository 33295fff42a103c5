"""The same work on more and on fewer nodes: two curves, and the table that says the same.

Invariant: each point is one of the curve's; a number of nodes without a layout is marked and its reason told. This
module must not search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import TableBlock, render_figure, render_section, render_table, render_text
from shardway.plan.page.svg import Frame, circle, line, nice_ticks, polyline, render_drawing, text
from shardway.plan.render.words import amount, count, duration, percent
from shardway.plan.search.curve import ScalingPoint, efficiency

_PLOT = Frame(62, 34, 446, 212)
_SIZE = (520.0, 290.0)
_APART = 36.0
"""Pixels between two labels of nodes."""
_GIGA = 1e9


def hours_per_giga(point: ScalingPoint) -> float:
    """GPU-hours for 1e9 tokens; 0 where nothing runs."""
    return point.device_seconds_per_token * _GIGA / 3600


def ideal_rate(curve: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """Tokens per second if a token cost here what it costs where it is cheapest; 0 where nothing runs."""
    return point.best.tokens_per_second / efficiency(curve, point) if point.best else 0.0


def render_scaling(curve: Sequence[ScalingPoint], nodes: int) -> str:
    """Throughput and cost over nodes; `nodes` are those that were asked for. "" for a curve without points."""
    if not curve:
        return ""
    batch = next((point.best.case.global_batch for point in curve if point.best), None)
    told = f"The global batch stays at {batch:,}, so every point trains the same model" if batch else "Nothing fits"
    table = render_table(_table_of_points(curve, nodes))
    if not batch:
        return render_section("More and fewer nodes", render_text(f"{told} on any of these numbers of nodes."), table)
    key = (
        "The filled dots are layouts, the open one is what was asked for, a cross is a number of nodes without a layout"
    )
    pictures = f'<div class="two">{_draw_rates(curve, nodes)}{_draw_costs(curve, nodes)}</div>'
    return render_section("More and fewer nodes", render_text(f"{told}. {key}."), pictures, table)


# --- the pictures


@dataclass(frozen=True)
class _Plot:
    """Points of a curve with the scales of a picture: nodes on a logarithmic axis, values by `height` (0 to 1)."""

    curve: Sequence[ScalingPoint]
    nodes: int
    height: Callable[[float], float]

    def x(self, nodes: int) -> float:
        """Where a number of nodes stands."""
        low, high = math.log2(self.curve[0].nodes), math.log2(self.curve[-1].nodes)
        return _PLOT.x + _PLOT.width * (0.5 if high == low else (math.log2(nodes) - low) / (high - low))

    def y(self, value: float) -> float:
        """Where a value stands."""
        return _PLOT.bottom - _PLOT.height * self.height(value)

    def frame(self, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
        """Grid, axes, labels, and crosses for nodes without a layout."""
        for value, name in ticks:
            yield line((_PLOT.x, self.y(value)), (_PLOT.right, self.y(value)), "grid")
            yield text((_PLOT.x - 6, self.y(value) + 4), name, "soft", "end")
        yield line((_PLOT.x, _PLOT.bottom), (_PLOT.right, _PLOT.bottom), "axis")
        labelled = -_APART
        for point in self.curve:
            x = self.x(point.nodes)
            if x - labelled >= _APART:
                yield text((x, _PLOT.bottom + 18), f"{point.nodes:,}", "soft", "middle")
                labelled = x
            if point.best is None:
                yield from _cross(x, _PLOT.bottom - 8)
        yield text((_PLOT.x + _PLOT.width / 2, _PLOT.bottom + 38), "nodes", "soft", "middle")

    def line_of(self, value_of: Callable[[ScalingPoint], float], kind: str) -> str:
        """A curve through all points that have a layout."""
        return polyline([(self.x(each.nodes), self.y(value_of(each))) for each in self.curve if each.best], kind)

    def dots(self, value_of: Callable[[ScalingPoint], float], unit: str) -> Iterator[str]:
        """A dot for each layout, open for what was asked for."""
        for point in self.curve:
            if point.best:
                value = value_of(point)
                told = f"{point.nodes:,} nodes: {count(value)} {unit}"
                asked = point.nodes == self.nodes
                at = (self.x(point.nodes), self.y(value))
                yield circle(at, 5.5 if asked else 4, "asked" if asked else "dot", told)


def _cross(x: float, y: float) -> Iterator[str]:
    yield line((x - 4, y - 4), (x + 4, y + 4), "cross")
    yield line((x - 4, y + 4), (x + 4, y - 4), "cross")


def _draw_rates(curve: Sequence[ScalingPoint], nodes: int) -> str:
    """Tokens per second against the ideal, both axes logarithmic."""
    working = [point for point in curve if point.best]
    low = math.log10(min(map(_rate, working))) - 0.1
    high = math.log10(max(ideal_rate(curve, point) for point in working)) + 0.05
    plot = _Plot(curve, nodes, lambda value: (math.log10(value) - low) / (high - low))
    ticks = [(value, count(value)) for value in _log_ticks(low, high)]
    parts = [
        *plot.frame(ticks),
        text((8, 14), "tokens/s; dashed: if a token cost as little as at the cheapest point", "bold"),
        plot.line_of(lambda point: ideal_rate(curve, point), "ideal"),
        plot.line_of(_rate, "curve"),
        *plot.dots(_rate, "tokens/s"),
    ]
    drawing = render_drawing(_SIZE, "Tokens per second over nodes, and ideal scaling", parts, least=400)
    return render_figure(drawing, {})


def _draw_costs(curve: Sequence[ScalingPoint], nodes: int) -> str:
    top = 1.08 * max(map(hours_per_giga, curve))
    plot = _Plot(curve, nodes, lambda value: value / top)
    parts = [
        *plot.frame([(value, f"{value:,g}") for value in nice_ticks(top)]),
        text((8, 14), "GPU-hours for 1e9 tokens", "bold"),
        plot.line_of(hours_per_giga, "curve"),
        *plot.dots(hours_per_giga, "GPU-hours for 1e9 tokens"),
    ]
    return render_figure(render_drawing(_SIZE, "GPU-hours for 1e9 tokens over nodes", parts, least=400), {})


def _rate(point: ScalingPoint) -> float:
    return point.best.tokens_per_second if point.best else 0.0


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms, with 2 and 5 times these where there are few."""
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    values = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]


# --- the table


def _table_of_points(curve: Sequence[ScalingPoint], nodes: int) -> TableBlock:
    columns = ("nodes", "GPUs", "step", "tokens/s", "ideal", "efficiency", "GPU-hours for 1e9 tokens", "layout")
    rows = tuple(_row(curve, point, point.best) for point in curve)
    return TableBlock(
        "The curve in numbers", columns, rows, words=frozenset({len(columns) - 1}), chosen=frozenset({f"{nodes:,}"})
    )


def _row(curve: Sequence[ScalingPoint], point: ScalingPoint, best: Estimate | None) -> tuple[str, ...]:
    if best is None:
        return (f"{point.nodes:,}", "", "", "", "", "", "", f"none: {point.why_not}")
    return (
        f"{point.nodes:,}",
        f"{best.case.degrees.world:,}",
        duration(best.time.seconds),
        count(best.tokens_per_second),
        count(ideal_rate(curve, point)),
        percent(efficiency(curve, point)),
        amount(hours_per_giga(point)),
        describe_short(best),
    )


def describe_short(shown: Estimate) -> str:
    """Degrees and what else decides between layouts."""
    case = shown.case
    schedule = f", {case.schedule}" if case.degrees.pp > 1 else ""
    stages = f" with {case.stages_per_rank} stages a rank" if case.stages_per_rank > 1 else ""
    return f"{case.degrees.render()}, micro-batch {case.micro_batch}{schedule}{stages}, recompute {case.recompute}"
