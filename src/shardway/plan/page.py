"""A plan as one HTML file: its summary, memory, step, the pipeline, scaling over nodes, alternatives.

Invariants:
- Figures are those of the result, in the words of `plan.text`; utilisation names its convention and its peak.
- Memory items of a bar, and of a column, add up to what nvidia-smi would show. Items of the step add up to the step.
- The scaling picture has exactly the curve's points; a number of nodes without a layout is marked, with its reason.
- Reasons, assumptions and warnings are the result's own sentences.
- The page is complete: it fetches nothing, runs no script, and is readable in light, in dark and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from shardway.drawing import (
    Frame,
    circle,
    colour_of,
    line,
    nice_ticks,
    polyline,
    rect,
    render_document,
    render_drawing,
    render_figure,
    render_list,
    render_section,
    render_table,
    render_text,
    render_tiles,
    round_parts,
    text,
)
from shardway.plan.case import ceilings_of, has_fitted_runs
from shardway.plan.economy import DAY
from shardway.plan.memory import MEMORY_ITEMS, StageMemory
from shardway.plan.planner import Estimate, PlanResult, ScalingPoint, efficiency
from shardway.plan.schedule import pick_ranks, render_schedule
from shardway.plan.text import (
    GIB,
    amount,
    describe_jobs,
    describe_layout,
    describe_machine,
    describe_rates,
    duration,
    gib,
    list_costs,
    percent,
    rate_of,
)
from shardway.plan.time import TIME_ITEMS
from shardway.units import render_count as count
from shardway.units import render_plural

# --- the headline: what is planned, whether it fits, what it takes


def title_of(result: PlanResult) -> str:
    """What is planned, in one line."""
    return f"{result.request.case.model.name} on {result.request.machine.name}"


def _render_headline(result: PlanResult) -> str:
    """Title, layout, verdict (whether every device holds what it needs, and by what margin), and the figures that are
    asked for most."""
    shown, request, case, peak = result.shown, result.request, result.shown.case, result.shown.peak
    samples = "images of {:,} patches" if case.model.patch_features else "sequences of {:,} tokens"
    batch = f"{case.global_batch:,} {samples.format(case.seq_len)} a step"
    formats = f"{case.precision}, {case.optimizer}, {case.engine.name}"
    usable, physical = shown.usable_bytes, gib(shown.machine.memory_bytes)
    where = f"pipeline rank {peak.rank}" if case.degrees.pp > 1 else "each device"
    mood, left = "unsure" if shown.may_not_fit else "good", usable - peak.device
    fit = (
        f"Fits: {where} needs {gib(peak.device)} of the {gib(usable)} that a plan may use of {physical}; {gib(left)} "
        "are left."
    )
    if shown.may_not_fit:
        fit += " It may not all the same: try it first, for measured peaks reach beyond the device's memory."
    if peak.device > usable:
        mood, short = "bad", f"{gib(-left)} ({percent(-left / usable)}) more than the {gib(usable)}"
        fit = f"Does not fit: {where} needs {gib(peak.device)}, {short} that a plan may use of {physical}."
    elif not shown.fits:
        mood, needed, there = "bad", peak.host * shown.machine.per_node, shown.machine.host_bytes or 0
        fit = f"Does not fit: the states of a node's ranks take {gib(needed)} of its host's {gib(there)}."
    return "\n".join(
        [
            f"<header>\n<h1>{escape(title_of(result))}</h1>",
            render_text(f"{describe_machine(request.machine, request.world)}; {batch}; {formats}", "soft"),
            render_text(describe_layout(case)),
            render_text(fit, f"verdict {mood}"),
            render_tiles(_tiles(result)),
            "</header>",
        ]
    )


def _tiles(result: PlanResult) -> Iterator[tuple[str, ...]]:
    shown, model, time, run = result.shown, result.shown.case.model, result.shown.time, result.run
    met = (f"{count(model.active_parameters)} for each token",) if model.active_parameters != model.parameters else ()
    if model.adapter is not None:
        met = (*met, f"{count(model.trained_parameters)} trained (LoRA)")
    yield ("parameters", count(model.parameters), *met, f"{model.depth:,} layers")
    interval = f"{duration(time.low)} to {duration(time.high)}: four of five measured steps"
    yield "one step", duration(time.seconds), interval
    what, rate = rate_of(shown)
    yield f"{what}/s", count(rate), f"{count(rate / shown.case.degrees.world)} a GPU"
    peak = f"of {shown.peak_flops / 1e12:,.0f} TFLOP/s, the dense {shown.case.precision} peak"
    for label, causal in (("MFU, all scores counted", False), ("MFU, causal half counted", True)):
        yield label, percent(shown.mfu(causal=causal)), peak, f"HFU {percent(shown.hfu(causal=causal))}"
    between, usable = f"{gib(shown.memory_low)} to {gib(shown.memory_high)}", f"of {gib(shown.usable_bytes)} usable"
    yield "memory of the fullest rank", gib(shown.peak.device), between, usable
    if run is None:
        yield "whole run", "n/a", "its length is not known" if result.fits else "nothing fits"
        return
    ideal = f"{run.days:,.2f} days, {run.ideal_days:,.2f} without failures and saves"
    yield "whole run", duration(run.wall.total_seconds), render_plural(run.steps, "step", ","), ideal
    yield ("GPU-hours", amount(run.gpu_hours), *list_costs(run))


def _render_run(result: PlanResult) -> str:
    """The parts of the run's wall time; "" if no run was estimated."""
    run = result.run
    if run is None:
        return ""
    queue = result.terms.queue
    jobs = describe_jobs(run, result.terms, f"queue {queue}" if queue else "")
    interval = duration(run.interval_steps * result.shown.time.seconds)
    intro = (
        f"{render_plural(run.steps, 'step', ',')}{jobs}; "
        f"{amount(run.failures)} failures are expected, and a checkpoint every "
        f"{render_plural(run.interval_steps, 'step', ',')} ({interval}) costs least. "
        f"{percent(run.goodput)} of the time goes into steps that count."
    )
    wall = run.wall
    parts = [
        ("steps", wall.ideal_seconds, "each once"),
        ("saves", wall.save_seconds, "checkpoints that training waits for"),
        ("lost work", wall.lost_seconds, "steps and saves that a failure undoes"),
        ("restarts", wall.restart_seconds, "from a failure to the next step"),
        ("jobs", wall.slot_seconds, "their start, resume and margin"),
    ]
    parts = [part for part in parts if part[1] > 0]
    total = ("together", "for which the nodes are held")
    table = _table_of_parts("Wall time", ("part", "days"), parts, (DAY, 3), wall.total_seconds, total)
    return render_section("The whole run", render_text(intro), table)


def _table_of_parts(
    caption: str,
    columns: tuple[str, str],
    parts: Sequence[tuple[str, float, str]],
    form: tuple[float, int],
    whole: float,
    total: tuple[str, str],
) -> str:
    """Parts (name, seconds, what it is) with their shares of the `whole`, in a unit of seconds with some decimals, and
    their total (name, what it is)."""
    unit, decimals = form
    rounded = round_parts([seconds / unit for _, seconds, _ in parts], decimals)
    rows = [
        (name, f"{each:,.{decimals}f}", percent(seconds / whole), what)
        for each, (name, seconds, what) in zip(rounded, parts, strict=True)
    ]
    rows.append((total[0], f"{sum(rounded):,.{decimals}f}", percent(1.0), total[1]))
    return render_table(caption, (*columns, "share", "what it is"), rows, words={3}, sums={total[0]})


# --- the memory of each pipeline rank

BEYOND: Mapping[str, str] = {
    "fragmentation": "gaps that the caching allocator keeps beyond the tensors",
    "context": "driver, libraries, communicators: outside of PyTorch's allocator",
}
_WIDTH, _LEFT, _RIGHT, _TOP = 1000.0, 86.0, 96.0, 44.0


def _render_memory(shown: Estimate) -> str:
    """Bars, the fullest rank item by item with three running sums, and all ranks of a pipeline."""
    stages, peak = shown.memory, shown.peak
    drawn = pick_ranks(len(stages), peak.rank)
    note = f"{len(drawn)} of {len(stages)} pipeline ranks are drawn." if len(drawn) < len(stages) else ""
    intro = (
        f"What one device holds at the peak of a step. Four of five measured peaks lie between {gib(shown.memory_low)} "
        f"and {gib(shown.memory_high)} for the fullest rank."
    )
    used = [name for name in peak.device_items if any(each.device_items[name] > 0 for each in stages)]
    # Items in GiB, rounded so that they add up
    rounded = [round_parts([size / GIB for size in each.device_items.values()], 2) for each in stages]
    table = [dict(zip(peak.device_items, sizes, strict=True)) for sizes in rounded]
    rows, total = [], 0.0

    def add_sum(name: str, what: str) -> None:
        rows.append((name, f"{total:,.2f}", percent(total * GIB / peak.device), what))

    for name, size in table[stages.index(peak)].items():
        if name == "fragmentation":
            add_sum("allocated", "what torch.cuda.max_memory_allocated reports")
        total += size
        if size > 0 or name in BEYOND:
            what = MEMORY_ITEMS.get(name) or BEYOND.get(name, "")
            rows.append((name, f"{size:,.2f}", percent(peak.device_items[name] / peak.device), what))
        if name == "fragmentation":
            add_sum("reserved", "what torch.cuda.max_memory_reserved reports")
    add_sum("device", "what nvidia-smi shows")
    caption = f"Pipeline rank {peak.rank}, the fullest" if len(stages) > 1 else "One rank"
    columns, sums = ("item", "GiB", "share", "what it is"), {"allocated", "reserved", "device"}
    ranks = ""
    if len(stages) > 1:
        lines = [
            (
                str(stage.rank),
                *(f"{sizes[name]:,.2f}" for name in used),
                f"{sum(sizes.values()):,.2f}",
                f"{stage.in_flight:.3g}",
            )
            for stage, sizes in zip(stages, table, strict=True)
        ]
        names = ("pipeline rank", *used, "device", "micro-batches kept")
        ranks = render_table("All pipeline ranks, GiB", names, lines, chosen={str(peak.rank)})
    host = f"Beside this each rank keeps {gib(peak.host)} of states in the host's memory."
    picture = _draw_memory(shown, [stages[rank] for rank in drawn])
    return render_section(
        "Memory",
        render_text(intro),
        render_figure(picture, {name: colour_of(name) for name in used}, note),
        render_table(caption, columns, rows, words={3}, sums=sums),
        ranks,
        render_text(host if peak.host else ""),
    )


def _draw_memory(shown: Estimate, stages: Sequence[StageMemory]) -> str:
    height = 34.0 if len(stages) == 1 else 22.0
    bottom = _TOP + len(stages) * (height + 6)
    top = max(shown.machine.memory_bytes, shown.peak.device)
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    physical = f"physical {gib(shown.machine.memory_bytes)}"
    parts = []
    for tick in nice_ticks(top / GIB, 8):
        x = _LEFT + tick * GIB * scale
        parts += [line((x, _TOP - 4), (x, bottom), "grid"), text((x, bottom + 16), f"{tick:g}", "soft", "middle")]
    parts.append(text((_WIDTH - _RIGHT + 8, bottom + 16), "GiB", "soft"))
    for row, stage in enumerate(stages):
        y, weight = _TOP + row * (height + 6), "bold" if stage is shown.peak else ""
        middle, x = y + height / 2 + 4, _LEFT
        parts.append(text((_LEFT - 10, middle), f"rank {stage.rank}", weight, "end"))
        for name, size in stage.device_items.items():
            if size > 0:
                tip = f"rank {stage.rank}, {name}: {gib(size)}"
                parts.append(rect(Frame(x, y, size * scale, height), colour_of(name), tip))
                x += size * scale
        parts.append(text((_WIDTH - 4, middle), gib(stage.device), weight, "end"))
    # Lines across all bars, labelled above them on the side with room
    usable = f"usable {gib(shown.usable_bytes)}"
    for kind, size, label, over in (
        ("usable", shown.usable_bytes, usable, 30),
        ("physical", shown.machine.memory_bytes, physical, 14),
    ):
        x = _LEFT + size * scale
        left = x > _WIDTH / 2
        parts.append(line((x, _TOP - 8), (x, bottom), kind))
        parts.append(text((x - 4 if left else x + 4, over), label, "", "end" if left else "start"))
        parts.append(line((x, over - 10), (x, _TOP - 8), kind))
    label = f"Memory of {len(stages)} ranks by item; the fullest needs {gib(shown.peak.device)} of {physical}"
    return render_drawing((_WIDTH, bottom + 26), label, parts, least=860)


# --- the step

_SIDE, _BAR = 14.0, 44.0


def _render_step(shown: Estimate) -> str:
    """The bar with its interval, and every item in seconds."""
    passes, time = shown.case.micro_batches, shown.time
    where = "the slowest pipeline rank" if shown.case.degrees.pp > 1 else "one rank"
    intro = (
        f"What one step of {duration(time.seconds)} goes to on {where}, over {passes:,} "
        f"{'micro-batch' if passes == 1 else 'micro-batches'}; messages count where nothing hides them. The bracket is "
        "the interval that holds four of five measured steps."
    )
    unit, decimals = (1e-3, 1) if time.seconds < 10 else (1.0, 2)
    parts = [(name, seconds, TIME_ITEMS.get(name, "")) for name, seconds in time.items.items()]
    columns, total = ("item", "ms" if unit < 1 else "s"), ("one step", f"{duration(time.low)} to {duration(time.high)}")
    return render_section(
        "One step",
        render_text(intro),
        render_figure(_draw_step(shown), {name: colour_of(name) for name in time.items}),
        _table_of_parts("One step, item by item", columns, parts, (unit, decimals), time.seconds, total),
    )


def _draw_step(shown: Estimate) -> str:
    time = shown.time
    top = max(time.high, time.seconds)
    scale = (_WIDTH - 2 * _SIDE) / top
    unit, name = (1e-3, "ms") if top < 1 else (1.0, "s")
    parts = []
    for tick in nice_ticks(top / unit, 8):
        x = _SIDE + tick * unit * scale
        label = text((x, 90), f"{tick:,g} {name}", "soft", "start" if tick == 0 else "middle")
        parts += [line((x, 8), (x, 74), "grid"), label]
    x = _SIDE
    for name, seconds in time.items.items():
        tip = f"{name}: {duration(seconds)}, {percent(seconds / time.seconds)}"
        parts.append(rect(Frame(x, 8, seconds * scale, _BAR), colour_of(name), tip))
        x += seconds * scale
    low, high, y = _SIDE + time.low * scale, _SIDE + time.high * scale, _BAR + 16
    parts.append(line((low, y), (high, y), "whisker"))
    parts += [line((x, y - 5), (x, y + 5), "whisker") for x in (low, high)]
    return render_drawing((_WIDTH, 96), f"One step of {duration(time.seconds)} by item", parts, least=700)


# --- scaling over nodes

_PLOT = Frame(62, 34, 446, 212)
_APART = 36.0  # least pixels between two labels of nodes
_GIGA = 1e9


def hours_per_giga(point: ScalingPoint) -> float:
    """GPU-hours for 1e9 tokens; 0 if nothing runs."""
    return point.device_seconds_per_token * _GIGA / 3600


def ideal_rate(curve: Sequence[ScalingPoint], point: ScalingPoint) -> float:
    """Tokens per second if a token had the cost of the cheapest point; 0 if nothing runs."""
    return point.best.tokens_per_second / efficiency(curve, point) if point.best else 0.0


def _render_scaling(curve: Sequence[ScalingPoint], nodes: int) -> str:
    """Throughput and cost over nodes; `nodes` is the requested number. "" for a curve without points."""
    if not curve:
        return ""
    working = [point for point in curve if point.best]
    title, table = "More and fewer nodes", _table_of_points(curve, nodes)
    if not working:
        return render_section(title, render_text("Nothing fits on any of these numbers of nodes."), table)

    def rate(point: ScalingPoint) -> float:
        return point.best.tokens_per_second if point.best else 0.0

    # Tokens per second against the ideal, both axes logarithmic; ticks are powers of ten, with their 2- and 5-fold if
    # there are few.
    low = math.log10(min(map(rate, working))) - 0.1
    high = math.log10(max(ideal_rate(curve, point) for point in working)) + 0.05
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [value for power in powers for step in steps if low <= math.log10(value := step * 10.0**power) <= high]
    rates = _draw_curve(
        curve,
        nodes,
        "Tokens per second over nodes, and ideal scaling",
        "tokens/s; dashed: if a token cost as little as at the cheapest point",
        "tokens/s",
        [(rate, "curve"), (lambda point: ideal_rate(curve, point), "ideal")],
        lambda value: (math.log10(value) - low) / (high - low),
        [(value, count(value)) for value in values],
    )
    top, unit = 1.08 * max(map(hours_per_giga, curve)), "GPU-hours for 1e9 tokens"
    ticks = [(value, f"{value:,g}") for value in nice_ticks(top)]
    lines: list[tuple[Callable[[ScalingPoint], float], str]] = [(hours_per_giga, "curve")]
    costs = _draw_curve(curve, nodes, f"{unit} over nodes", unit, unit, lines, lambda value: value / top, ticks)
    batch = working[0].best.case.global_batch if working[0].best else 0
    intro = (
        f"The global batch stays at {batch:,}, so every point trains the same model. The filled dots are layouts, the "
        "open one is what was asked for, a cross is a number of nodes without a layout."
    )
    return render_section(title, render_text(intro), f'<div class="two">{rates}{costs}</div>', table)


def _draw_curve(
    curve: Sequence[ScalingPoint],
    nodes: int,
    label: str,
    title: str,
    unit: str,
    lines: Sequence[tuple[Callable[[ScalingPoint], float], str]],
    height: Callable[[float], float],
    ticks: Sequence[tuple[float, str]],
) -> str:
    """Lines of values over nodes (on a logarithmic axis), the first with a dot for each layout, an open one for the
    requested number of nodes; `height` of a value is from 0 to 1. Nodes without a layout have a cross."""
    low, high = math.log2(curve[0].nodes), math.log2(curve[-1].nodes)

    def x_of(point: ScalingPoint) -> float:
        return _PLOT.x + _PLOT.width * (0.5 if high == low else (math.log2(point.nodes) - low) / (high - low))

    def y_of(value: float) -> float:
        return _PLOT.bottom - _PLOT.height * height(value)

    parts = []
    for value, name in ticks:
        parts.append(line((_PLOT.x, y_of(value)), (_PLOT.right, y_of(value)), "grid"))
        parts.append(text((_PLOT.x - 6, y_of(value) + 4), name, "soft", "end"))
    parts.append(line((_PLOT.x, _PLOT.bottom), (_PLOT.right, _PLOT.bottom), "axis"))
    labelled = -_APART
    for point in curve:
        x, y = x_of(point), _PLOT.bottom - 8
        if x - labelled >= _APART:
            parts.append(text((x, _PLOT.bottom + 18), f"{point.nodes:,}", "soft", "middle"))
            labelled = x
        if point.best is None:
            parts.append(line((x - 4, y - 4), (x + 4, y + 4), "cross"))
            parts.append(line((x - 4, y + 4), (x + 4, y - 4), "cross"))
    parts.append(text((_PLOT.x + _PLOT.width / 2, _PLOT.bottom + 38), "nodes", "soft", "middle"))
    parts.append(text((8, 14), title, "bold"))
    working = [point for point in curve if point.best]
    for value_of, kind in reversed(lines):
        parts.append(polyline([(x_of(point), y_of(value_of(point))) for point in working], kind))
    for point in working:
        value, asked = lines[0][0](point), point.nodes == nodes
        tip = f"{point.nodes:,} nodes: {count(value)} {unit}"
        at = (x_of(point), y_of(value))
        parts.append(circle(at, 5.5 if asked else 4, "asked" if asked else "dot", tip))
    return render_figure(render_drawing((520.0, 290.0), label, parts, least=400), {})


def _table_of_points(curve: Sequence[ScalingPoint], nodes: int) -> str:
    columns = ("nodes", "GPUs", "step", "tokens/s", "ideal", "efficiency", "GPU-hours for 1e9 tokens", "layout")
    rows = []
    for point in curve:
        best, blank = point.best, ("",) * 6
        cells = (*blank, f"none: {point.why_not}")
        if best:
            cells = (
                f"{best.case.degrees.world:,}",
                duration(best.time.seconds),
                count(best.tokens_per_second),
                count(ideal_rate(curve, point)),
                percent(efficiency(curve, point)),
                amount(hours_per_giga(point)),
                describe_short(best),
            )
        rows.append((f"{point.nodes:,}", *cells))
    return render_table("The curve in numbers", columns, rows, words={len(columns) - 1}, chosen={f"{nodes:,}"})


def describe_short(shown: Estimate) -> str:
    """Degrees and the other settings that distinguish layouts."""
    case = shown.case
    schedule = f", {case.schedule}" if case.degrees.pp > 1 else ""
    stages = f" with {case.stages_per_rank} stages a rank" if case.stages_per_rank > 1 else ""
    return f"{case.degrees.render()}, micro-batch {case.micro_batch}{schedule}{stages}, recompute {case.recompute}"


# --- alternatives, assumptions


def _figures(shown: Estimate) -> tuple[str, str, str]:
    return duration(shown.time.seconds), count(shown.tokens_per_second), gib(shown.peak.device)


def _render_changes(result: PlanResult) -> str:
    """What to change if nothing fits; "" if something does."""
    if result.fits:
        return ""
    title = "What would make it fit"
    if not result.changes:
        return render_section(title, render_text("No single change that was tried does."))
    rows = [(each.what, *_figures(each.estimate), describe_short(each.estimate)) for each in result.changes]
    table = render_table(title, ("change", "step", "tokens/s", "memory", "layout with it"), rows, words={4})
    return render_section(title, render_text("Each change alone, the smallest first."), table)


def _render_others(result: PlanResult) -> str:
    """Runners-up with the items that take more time."""
    candidates = result.found.candidates
    looked_at = f"{result.found.looked_at:,} ways were looked at"
    fixed = f"; kept as they were set: {', '.join(sorted(result.request.fixed))}" if result.request.fixed else ""
    if not candidates:
        return render_section("Other layouts", render_text(f"{looked_at}, and none fits{fixed}."))
    best = candidates[0].estimate
    rows = [
        (
            str(number),
            *_figures(each.estimate),
            f"{each.estimate.time.seconds / best.time.seconds - 1:+.1%}" if each.reason else "",
            describe_short(each.estimate),
            each.reason or "the layout of this page",
        )
        for number, each in enumerate(candidates, 1)
    ]
    columns = ("", "step", "tokens/s", "memory", "slower", "layout", "why it lost")
    table = render_table("The best of each set of degrees", columns, rows, words={5, 6}, chosen={"1"})
    return render_section("Other layouts", render_text(f"{looked_at}{fixed}."), table)


def _render_grounds(result: PlanResult) -> str:
    """The assumptions, and the sources of the rates."""
    machine = result.request.machine
    ceilings = ceilings_of(machine)
    runs = "published measurements" + ("" if has_fitted_runs(machine.accelerator) else " of other accelerators")
    reached = f"What part of these is reached was fitted on {runs}; nothing was measured on this site."
    if machine.measured:
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(machine.measured.items()))
        reached = f"Measured on this site: {values}. Other factors were fitted on {runs}."
    taken = (
        f"Of these rates the plan takes {percent(ceilings.matmul)} for large products, {percent(ceilings.memory)} for "
        f"memory, {percent(ceilings.link)} for the link and {percent(ceilings.network)} for the network."
    )
    rates = (f"On paper, for each accelerator: {describe_rates(result.shown)} (one direction).", reached, taken)
    assumed = render_list(result.assumed) if result.assumed else render_text("Nothing had to be assumed.")
    return render_section("What the plan rests on", "<h3>Assumed</h3>", assumed, "<h3>Rates</h3>", render_list(rates))


# --- the whole page


def render_page(result: PlanResult, curve: tuple[ScalingPoint, ...]) -> str:
    """The page of a plan with the scaling curve around it (which may be empty)."""
    shown = result.shown
    sections = [
        _render_headline(result),
        render_section("Warnings", render_list(result.warnings)) if result.warnings else "",
        _render_changes(result),
        _render_memory(shown),
        _render_step(shown),
        render_schedule(shown),
        _render_run(result),
        _render_scaling(curve, result.request.nodes),
        _render_others(result),
        _render_grounds(result),
        "<footer>Made by shardway plan. Estimates, not measurements: docs/plan.md says how good they are.</footer>",
    ]
    return render_document(f"{title_of(result)} - Shardway plan", "\n".join(part for part in sections if part))
