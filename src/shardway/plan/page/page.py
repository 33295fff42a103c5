"""A plan as one HTML file: its summary, the pipeline, scaling over nodes, alternatives.

Invariants:
- The scaling picture has exactly the curve's points; a number of nodes without a layout is marked, with its reason.
- Reasons, assumptions and warnings are the answer's own sentences.
- The page is complete: it fetches nothing, runs no script, and is readable in light, in dark and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardway.plan.answer import PlanAnswer
from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import (
    Frame,
    TableBlock,
    circle,
    line,
    nice_ticks,
    polyline,
    render_document,
    render_drawing,
    render_figure,
    render_list,
    render_section,
    render_table,
    render_text,
    text,
)
from shardway.plan.page.pipeline import render_schedule
from shardway.plan.page.summary import render_headline, render_memory, render_run, render_step, title_of
from shardway.plan.search import ScalingPoint, efficiency
from shardway.plan.text import amount, count, duration, gib, percent
from shardway.plan.time.ceilings import ceilings_of

# --- scaling over nodes

_PLOT = Frame(62, 34, 446, 212)
_SIZE = (520.0, 290.0)
_APART = 36.0
"""Least pixels between two labels of nodes."""
_GIGA = 1e9


def hours_per_giga(point: ScalingPoint) -> float:
    """GPU-hours for 1e9 tokens; 0 if nothing runs."""
    return point.device_seconds_per_token * _GIGA / 3600


def ideal_rate(curve: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """Tokens per second if a token had the cost of the cheapest point; 0 if nothing runs."""
    return point.best.tokens_per_second / efficiency(curve, point) if point.best else 0.0


def render_scaling(curve: Sequence[ScalingPoint], nodes: int) -> str:
    """Throughput and cost over nodes; `nodes` is the requested number. "" for a curve without points."""
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


# --- scaling: the pictures


@dataclass(frozen=True)
class _Plot:
    """Points of a curve with the scales of a picture: nodes on a logarithmic axis, values by `height` (0 to 1)."""

    curve: Sequence[ScalingPoint]
    nodes: int
    height: Callable[[float], float]

    def x(self, nodes: int) -> float:
        """The horizontal position of a number of nodes."""
        low, high = math.log2(self.curve[0].nodes), math.log2(self.curve[-1].nodes)
        return _PLOT.x + _PLOT.width * (0.5 if high == low else (math.log2(nodes) - low) / (high - low))

    def y(self, value: float) -> float:
        """The vertical position of a value."""
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
        """A dot for each layout, an open one for the requested number of nodes."""
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
    """Powers of ten between two logarithms, with their 2- and 5-fold if there are few."""
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    values = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]


# --- scaling: the table


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
    """Degrees and the other settings that distinguish layouts."""
    case = shown.case
    schedule = f", {case.schedule}" if case.degrees.pp > 1 else ""
    stages = f" with {case.stages_per_rank} stages a rank" if case.stages_per_rank > 1 else ""
    return f"{case.degrees.render()}, micro-batch {case.micro_batch}{schedule}{stages}, recompute {case.recompute}"


# --- warnings, alternatives, assumptions


def render_warnings(answer: PlanAnswer) -> str:
    """What the user must read first; "" if there is nothing."""
    return render_section("Warnings", render_list(answer.warnings)) if answer.warnings else ""


def render_changes(answer: PlanAnswer) -> str:
    """What to change if nothing fits; "" if something does."""
    if answer.fits:
        return ""
    if not answer.changes:
        return render_section("What would make it fit", render_text("No single change that was tried does."))
    rows = tuple(
        (change.what, *_figures(change.estimate), describe_short(change.estimate)) for change in answer.changes
    )
    columns = ("change", "step", "tokens/s", "memory", "layout with it")
    told = "Each change alone, the smallest first."
    table = TableBlock("What would make it fit", columns, rows, words=frozenset({4}))
    return render_section("What would make it fit", render_text(told), render_table(table))


def _figures(shown: Estimate) -> tuple[str, str, str]:
    return duration(shown.time.seconds), count(shown.tokens_per_second), gib(shown.peak.device)


def render_others(answer: PlanAnswer) -> str:
    """Runners-up with the items that take more time."""
    candidates = answer.found.candidates
    looked_at = f"{answer.found.looked_at:,} ways were looked at"
    fixed = f"; kept as they were set: {', '.join(sorted(answer.question.fixed))}" if answer.question.fixed else ""
    if not candidates:
        return render_section("Other layouts", render_text(f"{looked_at}, and none fits{fixed}."))
    best = candidates[0].estimate
    rows = tuple(
        (
            str(number),
            *_figures(each.estimate),
            f"{each.estimate.time.seconds / best.time.seconds - 1:+.1%}" if each.reason else "",
            describe_short(each.estimate),
            each.reason or "the layout of this page",
        )
        for number, each in enumerate(candidates, 1)
    )
    columns = ("", "step", "tokens/s", "memory", "slower", "layout", "why it lost")
    table = TableBlock(
        "The best of each set of degrees", columns, rows, words=frozenset({5, 6}), chosen=frozenset({"1"})
    )
    return render_section("Other layouts", render_text(f"{looked_at}{fixed}."), render_table(table))


def render_grounds(answer: PlanAnswer) -> str:
    """The assumptions, and the sources of the rates."""
    assumed = render_list(answer.assumed) if answer.assumed else render_text("Nothing had to be assumed.")
    return render_section(
        "What the plan rests on", "<h3>Assumed</h3>", assumed, "<h3>Rates</h3>", render_list(_rates(answer))
    )


def _rates(answer: PlanAnswer) -> Iterator[str]:
    machine, shown = answer.question.machine, answer.shown
    bandwidth = machine.accelerator.memory_bandwidth_bytes_per_s
    memory = f", memory {bandwidth / 1e12:.3g} TB/s" if bandwidth else ""
    yield (
        f"On paper, for each accelerator: {shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}{memory}, link "
        f"{machine.link / 1e9:,.0f} GB/s, network {machine.network / 1e9:,.4g} GB/s (one direction)."
    )
    if not machine.measured:
        yield "What part of these is reached was fitted on published measurements; nothing was measured on this site."
    else:
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(machine.measured.items()))
        yield f"Measured on this site: {values}. Other factors were fitted on published measurements."
    ceilings = ceilings_of(machine)
    yield (
        f"Of these rates the plan takes {percent(ceilings.matmul)} for large products, {percent(ceilings.memory)} for "
        f"memory, {percent(ceilings.link)} for the link and {percent(ceilings.network)} for the network."
    )


# --- the whole page


def render_page(answer: PlanAnswer, curve: tuple[ScalingPoint, ...]) -> str:
    """The page of an answer with the scaling curve around it (which may be empty)."""
    shown = answer.shown
    sections = [
        render_headline(answer),
        render_warnings(answer),
        render_changes(answer),
        render_memory(shown),
        render_step(shown),
        render_schedule(shown),
        render_run(answer),
        render_scaling(curve, answer.question.nodes),
        render_others(answer),
        render_grounds(answer),
        "<footer>Made by shardway plan. Estimates, not measurements: docs/plan.md says how good they are.</footer>",
    ]
    return render_document(f"{title_of(answer)} - Shardway plan", "\n".join(part for part in sections if part))
