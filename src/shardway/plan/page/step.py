"""The step as one bar of its items, and the table that says the same.

Invariant: items add up to the step. This module must not price anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import TableBlock, render_figure, render_section, render_table, render_text
from shardway.plan.page.rounding import round_parts
from shardway.plan.page.style import OTHER_ROLE, TIME_ROLES
from shardway.plan.page.svg import Frame, line, nice_ticks, rect, render_drawing, text
from shardway.plan.render.words import duration, percent
from shardway.plan.time.step import ITEMS

_WIDTH, _SIDE, _BAR = 1000.0, 14.0, 44.0


def render_step(shown: Estimate) -> str:
    """The bar with its interval, and every item in seconds."""
    passes = shown.case.micro_batches
    where = "the slowest pipeline rank" if shown.case.degrees.pp > 1 else "one rank"
    told = (
        f"What one step of {duration(shown.time.seconds)} goes to on {where}, over {passes:,} "
        f"{'micro-batch' if passes == 1 else 'micro-batches'}; messages count where nothing hides them. The bracket is "
        "the interval that holds four of five measured steps."
    )
    key = {name: TIME_ROLES.get(name, OTHER_ROLE) for name in shown.time.items}
    return render_section(
        "One step", render_text(told), render_figure(_draw(shown), key), render_table(_table_of_items(shown))
    )


def _draw(shown: Estimate) -> str:
    time = shown.time
    top = max(time.high, time.seconds)
    scale = (_WIDTH - 2 * _SIDE) / top
    parts = [*_axis(top, scale)]
    x = _SIDE
    for name, seconds in time.items.items():
        told = f"{name}: {duration(seconds)}, {percent(seconds / time.seconds)}"
        parts.append(rect(Frame(x, 8, seconds * scale, _BAR), TIME_ROLES.get(name, OTHER_ROLE), told))
        x += seconds * scale
    parts += _bracket(_SIDE + time.low * scale, _SIDE + time.high * scale)
    return render_drawing((_WIDTH, 96), f"One step of {duration(time.seconds)} by item", parts, least=700)


def _axis(top: float, scale: float) -> Iterator[str]:
    unit, name = (1e-3, "ms") if top < 1 else (1.0, "s")
    for tick in nice_ticks(top / unit, 8):
        x = _SIDE + tick * unit * scale
        yield line((x, 8), (x, 74), "grid")
        yield text((x, 90), f"{tick:,g} {name}", "soft", "start" if tick == 0 else "middle")


def _bracket(low: float, high: float) -> Iterator[str]:
    y = _BAR + 16
    yield line((low, y), (high, y), "whisker")
    for x in (low, high):
        yield line((x, y - 5), (x, y + 5), "whisker")


def _table_of_items(shown: Estimate) -> TableBlock:
    time = shown.time
    unit, decimals = (1e-3, 1) if time.seconds < 10 else (1.0, 2)
    rounded = round_parts([seconds / unit for seconds in time.items.values()], decimals)
    rows = tuple(
        (name, f"{each:,.{decimals}f}", percent(seconds / time.seconds), ITEMS.get(name, ""))
        for each, (name, seconds) in zip(rounded, time.items.items(), strict=True)
    )
    interval = f"{duration(time.low)} to {duration(time.high)}"
    total = ("one step", f"{sum(rounded):,.{decimals}f}", percent(1.0), interval)
    return TableBlock(
        "One step, item by item",
        ("item", "ms" if unit < 1 else "s", "share", "what it is"),
        (*rows, total),
        words=frozenset({3}),
        sums=frozenset({"one step"}),
    )
