"""The top of a plan's page: what is planned, whether it fits, what it takes.

Invariant: figures are those of the answer in the words of `plan.render.words`; utilisation names its convention and its
peak. This module must not draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shardway.plan.answer.answer import PlanAnswer
from shardway.plan.economy import RunEstimate, WallTime
from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import FactTile, TableBlock, render_section, render_table, render_text, render_tiles
from shardway.plan.page.rounding import round_parts
from shardway.plan.render.text import list_costs
from shardway.plan.render.words import amount, count, describe_layout, duration, gib, percent

_DAY = 86400.0
_HOUR = 3600.0


def title_of(answer: PlanAnswer) -> str:
    """What is planned, in one line."""
    return f"{answer.question.case.model.name} on {answer.question.machine.name}"


def render_headline(answer: PlanAnswer) -> str:
    """Title, layout, verdict, the figures that people ask for first."""
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
    """Whether every device holds what it needs, and by how much it does or does not."""
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
    """Where the days go; "" where no run was estimated."""
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
