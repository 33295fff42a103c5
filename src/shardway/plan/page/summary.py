"""The top of a plan's page: facts, memory of each pipeline rank, the step as one bar.

Invariants:
- Figures are those of the answer, in the words of `plan.text`; utilisation names its convention and its peak.
- Memory items of a bar, and of a column, add up to what nvidia-smi would show.
- Items of the step add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType

from shardway.plan.answer import PlanAnswer
from shardway.plan.economy import RunEstimate, WallTime
from shardway.plan.estimate import Estimate
from shardway.plan.memory import MEMORY_ITEMS, StageMemory
from shardway.plan.page.blocks import (
    MEMORY_ROLES,
    OTHER_ROLE,
    TIME_ROLES,
    FactTile,
    Frame,
    TableBlock,
    line,
    nice_ticks,
    rect,
    render_drawing,
    render_figure,
    render_section,
    render_table,
    render_text,
    render_tiles,
    round_parts,
    text,
)
from shardway.plan.text import GIB, amount, count, describe_layout, duration, gib, list_costs, percent
from shardway.plan.time.step import TIME_ITEMS

# --- the headline: what is planned, whether it fits, what it takes

_DAY = 86400.0
_HOUR = 3600.0


def title_of(answer: PlanAnswer) -> str:
    """What is planned, in one line."""
    return f"{answer.question.case.model.name} on {answer.question.machine.name}"


def render_headline(answer: PlanAnswer) -> str:
    """Title, layout, verdict, and the figures that are asked for most."""
    return "\n".join(
        [
            f"<header>\n<h1>{escape(title_of(answer))}</h1>",
            render_text(f"{_machine(answer)}; {_batch(answer.shown)}", "soft"),
            render_text(describe_layout(answer.shown.case)),
            render_text(describe_fit(answer.shown), f"verdict {_mood(answer.shown)}"),
            render_tiles(_tiles(answer)),
            "</header>",
        ]
    )


def _machine(answer: PlanAnswer) -> str:
    question = answer.question
    nodes = f"{question.nodes:,} {'node' if question.nodes == 1 else 'nodes'}"
    return f"{nodes}, {question.world:,} x {question.machine.accelerator.name}"


def _batch(shown: Estimate) -> str:
    case = shown.case
    what = (
        f"{case.global_batch:,} images of {case.seq_len:,} patches a step"
        if case.model.patch_features
        else f"{case.global_batch:,} sequences of {case.seq_len:,} tokens a step"
    )
    return f"{what}; {case.precision}, {case.optimizer}, {case.engine.name}"


def describe_fit(shown: Estimate) -> str:
    """Whether every device holds what it needs, and by what margin."""
    peak, usable = shown.peak, shown.usable_bytes
    where = f"pipeline rank {peak.rank}" if shown.case.degrees.pp > 1 else "each device"
    if peak.device > usable:
        short = peak.device - usable
        return (
            f"Does not fit: {where} needs {gib(peak.device)}, {gib(short)} ({percent(short / usable)}) more than the "
            f"{gib(usable)} that a plan may use of {gib(shown.machine.memory_bytes)}."
        )
    if not shown.fits:
        needed, there = peak.host * shown.machine.per_node, shown.machine.host_bytes or 0
        return f"Does not fit: the states of a node's ranks take {gib(needed)} of its host's {gib(there)}."
    needs = f"{where} needs {gib(peak.device)} of the {gib(usable)} that a plan may use of"
    told = " It may not all the same: try it first, for measured peaks reach beyond the device's memory."
    unsure = told if _may_not(shown) else ""
    return f"Fits: {needs} {gib(shown.machine.memory_bytes)}; {gib(usable - peak.device)} are left.{unsure}"


def _mood(shown: Estimate) -> str:
    if not shown.fits:
        return "bad"
    return "unsure" if _may_not(shown) else "good"


def _may_not(shown: Estimate) -> bool:
    return shown.memory_high > shown.machine.memory_bytes


def _tiles(answer: PlanAnswer) -> Iterator[FactTile]:
    shown = answer.shown
    parameters, active = shown.case.model.parameters, shown.case.model.active_parameters
    met = (f"{count(active)} for each token",) if active != parameters else ()
    yield FactTile("parameters", count(parameters), (*met, f"{shown.case.model.depth:,} layers"))
    interval = f"{duration(shown.time.low)} to {duration(shown.time.high)}: four of five measured steps"
    yield FactTile("one step", duration(shown.time.seconds), (interval,))
    yield _rate_tile(shown)
    yield from _utilisation_tiles(shown)
    yield FactTile(
        "memory of the fullest rank",
        gib(shown.peak.device),
        (f"{gib(shown.memory_low)} to {gib(shown.memory_high)}", f"of {gib(shown.usable_bytes)} usable"),
    )
    yield from _run_tiles(answer)


def _rate_tile(shown: Estimate) -> FactTile:
    images = bool(shown.case.model.patch_features)
    rate = shown.tokens_per_second / (shown.case.seq_len if images else 1)
    return FactTile(
        "images/s" if images else "tokens/s", count(rate), (f"{count(rate / shown.case.degrees.world)} a GPU",)
    )


def _utilisation_tiles(shown: Estimate) -> Iterator[FactTile]:
    peak = f"of {shown.peak_flops / 1e12:,.0f} TFLOP/s, the dense {shown.case.precision} peak"
    for label, causal in (("MFU, all scores counted", False), ("MFU, causal half counted", True)):
        yield FactTile(label, percent(shown.mfu(causal=causal)), (peak, f"HFU {percent(shown.hfu(causal=causal))}"))


def _run_tiles(answer: PlanAnswer) -> Iterator[FactTile]:
    run = answer.run
    if run is None:
        reason = "its length is not known" if answer.fits else "nothing fits"
        yield FactTile("whole run", "n/a", (reason,))
        return
    yield FactTile("whole run", duration(run.wall.total_seconds), (f"{run.steps:,} steps", _ideal(run)))
    yield FactTile("GPU-hours", amount(run.gpu_hours), tuple(list_costs(run)))


def _ideal(run: RunEstimate) -> str:
    return f"{run.days:,.2f} days, {run.ideal_days:,.2f} without failures and saves"


# --- the whole run


def render_run(answer: PlanAnswer) -> str:
    """The parts of the run's wall time; "" if no run was estimated."""
    run = answer.run
    return render_section("The whole run", render_text(_describe_run(run, answer)), _render_days(run)) if run else ""


def _describe_run(run: RunEstimate, answer: PlanAnswer) -> str:
    slot = answer.terms.wall_seconds
    jobs = f" in {run.slots:,} {'job' if run.slots == 1 else 'jobs'} of {duration(slot)}" if slot else ""
    queue = f" (queue {answer.terms.queue})" if slot and answer.terms.queue else ""
    interval = duration(run.interval_steps * answer.shown.time.seconds)
    return (
        f"{run.steps:,} steps{jobs}{queue}; {amount(run.failures)} failures are expected, and a checkpoint every "
        f"{run.interval_steps:,} steps ({interval}) costs least. {percent(run.goodput)} of the time goes into "
        "steps that count."
    )


def _render_days(run: RunEstimate) -> str:
    wall: WallTime = run.wall
    parts = {
        "steps": (wall.ideal_seconds, "each once"),
        "saves": (wall.save_seconds, "checkpoints that training waits for"),
        "lost work": (wall.lost_seconds, "steps and saves that a failure undoes"),
        "restarts": (wall.restart_seconds, "from a failure to the next step"),
        "jobs": (wall.slot_seconds, "their start, resume and margin"),
    }
    parts = {name: part for name, part in parts.items() if part[0] > 0}
    days = round_parts([seconds / _DAY for seconds, _ in parts.values()], 3)
    rows = tuple(
        (name, f"{each:,.3f}", percent(seconds / wall.total_seconds), told)
        for each, (name, (seconds, told)) in zip(days, parts.items(), strict=True)
    )
    total = ("together", f"{sum(days):,.3f}", percent(1.0), "for which the nodes are held")
    columns = ("part", "days", "share", "what it is")
    return render_table(
        TableBlock("Wall time", columns, (*rows, total), words=frozenset({3}), sums=frozenset({"together"}))
    )


# --- the memory of each pipeline rank

MOST_RANKS = 16
"""Most bars that are drawn."""

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
    picture = render_figure(_draw_memory(shown, [shown.memory[rank] for rank in drawn]), _key(shown), note)
    told = (
        f"What one device holds at the peak of a step. Four of five measured peaks lie between {gib(shown.memory_low)} "
        f"and {gib(shown.memory_high)} for the fullest rank."
    )
    ranks = render_table(_table_of_ranks(shown)) if len(shown.memory) > 1 else ""
    return render_section(
        "Memory", render_text(told), picture, render_table(_table_of_peak(shown)), ranks, _host(shown)
    )


def pick_ranks(ranks: int, always: int = 0, most: int = MOST_RANKS) -> list[int]:
    """At most `most` ranks from the first to the last, evenly spaced, including rank `always`."""
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


# --- memory: the picture


def _draw_memory(shown: Estimate, stages: Sequence[StageMemory]) -> str:
    height = 34.0 if len(stages) == 1 else 22.0
    bottom = _TOP + len(stages) * (height + 6)
    top = max(shown.machine.memory_bytes, shown.peak.device)
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    parts = [*_memory_axis(top, scale, bottom)]
    for row, stage in enumerate(stages):
        parts += _bar(stage, Frame(_LEFT, _TOP + row * (height + 6), scale, height), stage is shown.peak)
    parts += _limit(_LEFT + shown.usable_bytes * scale, bottom, f"usable {gib(shown.usable_bytes)}", "usable")
    parts += _limit(_LEFT + shown.machine.memory_bytes * scale, bottom, _physical(shown), "physical")
    label = f"Memory of {len(stages)} ranks by item; the fullest needs {gib(shown.peak.device)} of {_physical(shown)}"
    return render_drawing((_WIDTH, bottom + 26), label, parts, least=860)


def _physical(shown: Estimate) -> str:
    return f"physical {gib(shown.machine.memory_bytes)}"


def _memory_axis(top: float, scale: float, bottom: float) -> Iterator[str]:
    for tick in nice_ticks(top / GIB, 8):
        x = _LEFT + tick * GIB * scale
        yield line((x, _TOP - 4), (x, bottom), "grid")
        yield text((x, bottom + 16), f"{tick:g}", "soft", "middle")
    yield text((_WIDTH - _RIGHT + 8, bottom + 16), "GiB", "soft")


def _bar(stage: StageMemory, row: Frame, fullest: bool) -> Iterator[str]:
    """One rank; `row.width` is pixels per byte."""
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
    """A line across all bars, labelled above them on the side with room."""
    left = x > _WIDTH / 2
    yield line((x, _TOP - 8), (x, bottom), kind)
    yield text((x - 4 if left else x + 4, 14 if kind == "physical" else 30), told, "", "end" if left else "start")
    yield line((x, 4 if kind == "physical" else 20), (x, _TOP - 8), kind)


# --- memory: the tables


def _table_of_peak(shown: Estimate) -> TableBlock:
    """Items of the fullest rank, with three running sums."""
    peak = shown.peak
    sizes = _rounded(peak)
    rows, total = [], 0.0
    for name, size in sizes.items():
        if name == "fragmentation":
            rows.append(_sum_row("allocated", total, "what torch.cuda.max_memory_allocated reports", peak))
        total += size
        if size > 0 or name in BEYOND:
            told = MEMORY_ITEMS.get(name) or BEYOND.get(name, "")
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
    """Items in GiB, rounded so that they add up."""
    items = stage.device_items
    return dict(zip(items, round_parts([size / GIB for size in items.values()], 2), strict=True))


# --- the step

_STEP_WIDTH, _SIDE, _BAR = 1000.0, 14.0, 44.0


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
        "One step", render_text(told), render_figure(_draw_step(shown), key), render_table(_table_of_items(shown))
    )


def _draw_step(shown: Estimate) -> str:
    time = shown.time
    top = max(time.high, time.seconds)
    scale = (_STEP_WIDTH - 2 * _SIDE) / top
    parts = [*_step_axis(top, scale)]
    x = _SIDE
    for name, seconds in time.items.items():
        told = f"{name}: {duration(seconds)}, {percent(seconds / time.seconds)}"
        parts.append(rect(Frame(x, 8, seconds * scale, _BAR), TIME_ROLES.get(name, OTHER_ROLE), told))
        x += seconds * scale
    parts += _bracket(_SIDE + time.low * scale, _SIDE + time.high * scale)
    return render_drawing((_STEP_WIDTH, 96), f"One step of {duration(time.seconds)} by item", parts, least=700)


def _step_axis(top: float, scale: float) -> Iterator[str]:
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
        (name, f"{each:,.{decimals}f}", percent(seconds / time.seconds), TIME_ITEMS.get(name, ""))
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
