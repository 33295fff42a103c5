"""The memory of each pipeline rank: bars of items beside what a device has, and the tables that say the same.

Invariant: items of a bar, and of a column, add up to what nvidia-smi would show. This module must not price anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from shardway.plan.estimate import Estimate
from shardway.plan.memory.breakdown import ITEMS, StageMemory
from shardway.plan.page.blocks import TableBlock, render_figure, render_section, render_table, render_text
from shardway.plan.page.rounding import round_parts
from shardway.plan.page.style import MEMORY_ROLES, OTHER_ROLE
from shardway.plan.page.svg import Frame, line, nice_ticks, rect, render_drawing, text
from shardway.plan.render.words import GIB, gib, percent

MOST_RANKS = 16
"""Bars that are drawn."""

BEYOND: Mapping[str, str] = MappingProxyType(
    {
        "fragmentation": "gaps that the caching allocator keeps beyond the tensors",
        "context": "driver, libraries, communicators: outside of PyTorch's allocator",
    }
)
_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 86.0, 96.0, 44.0


def render_memory(shown: Estimate) -> str:
    """Bars, the fullest rank item by item, and all ranks of a pipeline."""
    drawn = pick_ranks(len(shown.memory), shown.peak.rank)
    left_out = len(shown.memory) - len(drawn)
    note = f"{len(drawn)} of {len(shown.memory)} pipeline ranks are drawn." if left_out else ""
    picture = render_figure(_draw(shown, [shown.memory[rank] for rank in drawn]), _key(shown), note)
    told = (
        f"What one device holds at the peak of a step. Four of five measured peaks lie between {gib(shown.memory_low)} "
        f"and {gib(shown.memory_high)} for the fullest rank."
    )
    ranks = render_table(_table_of_ranks(shown)) if len(shown.memory) > 1 else ""
    return render_section(
        "Memory", render_text(told), picture, render_table(_table_of_peak(shown)), ranks, _host(shown)
    )


def pick_ranks(ranks: int, always: int = 0, most: int = MOST_RANKS) -> list[int]:
    """At most `most` ranks from the first to the last, evenly, one of them `always`."""
    if ranks <= most:
        return list(range(ranks))
    chosen = [round(number * (ranks - 1) / (most - 1)) for number in range(most)]
    nearest = min(range(1, most - 1), key=lambda place: abs(chosen[place] - always))
    if always not in chosen:
        chosen[nearest] = always
    return chosen


def _host(shown: Estimate) -> str:
    if not shown.peak.host:
        return ""
    return render_text(f"Beside this each rank keeps {gib(shown.peak.host)} of states in the host's memory.")


def _key(shown: Estimate) -> dict[str, str]:
    used = {name for stage in shown.memory for name, size in stage.device_items.items() if size > 0}
    return {name: MEMORY_ROLES.get(name, OTHER_ROLE) for name in shown.peak.device_items if name in used}


# --- the picture


def _draw(shown: Estimate, stages: Sequence[StageMemory]) -> str:
    height = 34.0 if len(stages) == 1 else 22.0
    bottom = _TOP + len(stages) * (height + 6)
    top = max(shown.machine.memory_bytes, shown.peak.device)
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    parts = [*_axis(top, scale, bottom)]
    for row, stage in enumerate(stages):
        parts += _bar(stage, Frame(_LEFT, _TOP + row * (height + 6), scale, height), stage is shown.peak)
    parts += _limit(_LEFT + shown.usable_bytes * scale, bottom, f"usable {gib(shown.usable_bytes)}", "usable")
    parts += _limit(_LEFT + shown.machine.memory_bytes * scale, bottom, _physical(shown), "physical")
    label = f"Memory of {len(stages)} ranks by item; the fullest needs {gib(shown.peak.device)} of {_physical(shown)}"
    return render_drawing((_WIDTH, bottom + 26), label, parts, least=860)


def _physical(shown: Estimate) -> str:
    return f"physical {gib(shown.machine.memory_bytes)}"


def _axis(top: float, scale: float, bottom: float) -> Iterator[str]:
    for tick in nice_ticks(top / GIB, 8):
        x = _LEFT + tick * GIB * scale
        yield line((x, _TOP - 4), (x, bottom), "grid")
        yield text((x, bottom + 16), f"{tick:g}", "soft", "middle")
    yield text((_WIDTH - _RIGHT + 8, bottom + 16), "GiB", "soft")


def _bar(stage: StageMemory, row: Frame, fullest: bool) -> Iterator[str]:
    """One rank; `row.width` is pixels for a byte."""
    middle = row.y + row.height / 2 + 4
    yield text((_LEFT - 10, middle), f"rank {stage.rank}", "bold" if fullest else "", "end")
    x = row.x
    for name, size in stage.device_items.items():
        if size > 0:
            told = f"rank {stage.rank}, {name}: {gib(size)}"
            yield rect(Frame(x, row.y, size * row.width, row.height), MEMORY_ROLES.get(name, OTHER_ROLE), told)
            x += size * row.width
    yield text((_WIDTH - 4, middle), gib(stage.device), "bold" if fullest else "", "end")


def _limit(x: float, bottom: float, told: str, kind: str) -> Iterator[str]:
    """A line across all bars, with its words above them on the side where there is room."""
    left = x > _WIDTH / 2
    yield line((x, _TOP - 8), (x, bottom), kind)
    yield text((x - 4 if left else x + 4, 14 if kind == "physical" else 30), told, "", "end" if left else "start")
    yield line((x, 4 if kind == "physical" else 20), (x, _TOP - 8), kind)


# --- the tables


def _table_of_peak(shown: Estimate) -> TableBlock:
    """Items of the fullest rank with three sums, each of all that is above it."""
    peak = shown.peak
    sizes = _rounded(peak)
    rows, total = [], 0.0
    for name, size in sizes.items():
        if name == "fragmentation":
            rows.append(_sum_row("allocated", total, "what torch.cuda.max_memory_allocated reports", peak))
        total += size
        if size > 0 or name in BEYOND:
            told = ITEMS.get(name) or BEYOND.get(name, "")
            rows.append((name, f"{size:,.2f}", percent(peak.device_items[name] / peak.device), told))
        if name == "fragmentation":
            rows.append(_sum_row("reserved", total, "what torch.cuda.max_memory_reserved reports", peak))
    rows.append(_sum_row("device", total, "what nvidia-smi shows", peak))
    return TableBlock(
        f"Pipeline rank {peak.rank}, the fullest" if len(shown.memory) > 1 else "One rank",
        ("item", "GiB", "share", "what it is"),
        tuple(rows),
        words=frozenset({3}),
        sums=frozenset({"allocated", "reserved", "device"}),
    )


def _sum_row(name: str, total: float, told: str, peak: StageMemory) -> tuple[str, ...]:
    return (name, f"{total:,.2f}", percent(total * GIB / peak.device), told)


def _table_of_ranks(shown: Estimate) -> TableBlock:
    names = [name for name in shown.peak.device_items if any(each.device_items[name] > 0 for each in shown.memory)]
    rows = tuple(_row_of_rank(stage, names) for stage in shown.memory)
    columns = ("pipeline rank", *names, "device", "micro-batches kept")
    return TableBlock("All pipeline ranks, GiB", columns, rows, chosen=frozenset({str(shown.peak.rank)}))


def _row_of_rank(stage: StageMemory, names: Sequence[str]) -> tuple[str, ...]:
    sizes = _rounded(stage)
    total = f"{sum(sizes.values()):,.2f}"
    return (str(stage.rank), *(f"{sizes[name]:,.2f}" for name in names), total, f"{stage.in_flight:.3g}")


def _rounded(stage: StageMemory) -> dict[str, float]:
    """Items in GiB that add up as they are shown."""
    items = stage.device_items
    return dict(zip(items, round_parts([size / GIB for size in items.values()], 2), strict=True))
