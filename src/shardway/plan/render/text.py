"""A plan as the table that `shardway plan` prints.

Invariant: each line starts with what it is about, and docs/plan.md explains every one of them. This module must not
compute a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from shardway.plan.answer.answer import PlanAnswer
from shardway.plan.answer.terms import JobTerms
from shardway.plan.economy import RunEstimate
from shardway.plan.estimate import Estimate
from shardway.plan.machine import Machine
from shardway.plan.memory.breakdown import StageMemory
from shardway.plan.render.words import amount, count, describe_layout, duration, gib, percent
from shardway.plan.search.curve import ScalingPoint, efficiency
from shardway.plan.time.step import StepTime

LABEL = 13
MOST_OTHERS = 5


def render_answer(answer: PlanAnswer) -> str:
    """The whole table, with a newline at its end."""
    parts = [
        _headline(answer),
        "",
        *_lines(answer),
        "",
        *list_breakdowns(answer.shown),
        *_others(answer),
        *list_notes(answer.question.machine, answer.assumed, answer.warnings),
    ]
    return "\n".join(parts) + "\n"


def render_prediction(answer: PlanAnswer) -> tuple[str, ...]:
    """Lines for the head of another library's file: what was planned, and what it is expected to cost."""
    shown = answer.shown
    return (_headline(answer), f"memory {_memory(answer)}", f"step {_step(shown)}", f"{_utilisation(shown)}")


def _headline(answer: PlanAnswer) -> str:
    question = answer.question
    return headline(question.case.model.name, question.machine, question.world)


def headline(model: str, machine: Machine, world: int) -> str:
    """What is planned for which machine."""
    nodes = -(-world // machine.per_node)
    there = f"{nodes:,} {'node' if nodes == 1 else 'nodes'}, {world:,} x {machine.accelerator.name}"
    return f"{model} on {machine.name}: {there}"


def line(label: str, text: str) -> str:
    """One line of the table."""
    return f"{label:<{LABEL}}{text}"


def _lines(answer: PlanAnswer) -> Iterator[str]:
    shown = answer.shown
    yield line("model", _model(shown))
    yield line("batch", _batch(shown))
    yield line("layout", describe_layout(shown.case))
    yield line("memory", _memory(answer))
    yield line("step", _step(shown))
    yield line("utilisation", _utilisation(shown))
    if answer.run:
        yield from list_run(answer.run, answer.terms)
    for change in answer.changes:
        peak = gib(change.estimate.peak.device)
        yield line(
            "instead" if answer.fits else "to fit",
            f"{change.what}: {peak}, {duration(change.estimate.time.seconds)} a step",
        )


def _model(shown: Estimate) -> str:
    model, seq = shown.case.model, shown.case.seq_len
    active = "" if model.active_parameters == model.parameters else f" ({count(model.active_parameters)} for a token)"
    flops = [f"{model.flops_per_token(seq, causal=causal) / 1e9:,.4g}" for causal in (False, True)]
    size = f"{count(model.parameters)} parameters{active}, {model.depth} layers"
    return f"{size}; {flops[0]} GFLOP a token (causal {flops[1]})"


def _batch(shown: Estimate) -> str:
    case = shown.case
    if case.model.patch_features:
        return f"{case.global_batch:,} images of {case.seq_len:,} patches"
    return (
        f"{case.global_batch:,} sequences of {case.seq_len:,} = {count(case.tokens_per_step)} tokens; {case.precision}"
    )


def _memory(answer: PlanAnswer) -> str:
    shown = answer.shown
    peak, low, high = shown.peak, shown.memory_low, shown.memory_high
    where = f" on pipeline rank {peak.rank}" if shown.case.degrees.pp > 1 else ""
    return (
        f"{gib(peak.device)} ({gib(low)} to {gib(high)}) of {gib(shown.usable_bytes)} usable{where}: {verdict(shown)}"
    )


def verdict(shown: Estimate) -> str:
    """Whether a layout fits, and whether that is sure."""
    if not shown.fits:
        return "does not fit"
    return "fits, but may not: try it first" if shown.memory_high > shown.machine.memory_bytes else "fits"


def _step(shown: Estimate) -> str:
    time, world = shown.time, shown.case.degrees.world
    interval = f"{duration(time.seconds)} ({duration(time.low)} to {duration(time.high)})"
    rate = shown.tokens_per_second / (shown.case.seq_len if shown.case.model.patch_features else 1)
    what = "images" if shown.case.model.patch_features else "tokens"
    return f"{interval}; {count(rate)} {what}/s, {count(rate / world)} a GPU"


def _utilisation(shown: Estimate) -> str:
    full, causal = (percent(shown.mfu(causal=causal)) for causal in (False, True))
    hardware = percent(shown.hfu(causal=False))
    peak = f"{shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}"
    return f"MFU {full} (causal {causal}), HFU {hardware}, of {peak}"


def list_run(run: RunEstimate, terms: JobTerms) -> Iterator[str]:
    """The lines of the whole run."""
    total, slot = duration(run.wall.total_seconds), terms.wall_seconds
    jobs = f" in {run.slots:,} {'job' if run.slots == 1 else 'jobs'} of {duration(slot)}" if slot else ""
    queue = f" ({terms.queue})" if slot and terms.queue else ""
    yield line("run", f"{run.steps:,} steps: {total}{jobs}{queue}; {percent(run.goodput)} of it steps that count")
    interval = duration(run.interval_steps * run.wall.ideal_seconds / run.steps)
    yield line("failures", f"{run.failures:.2g} expected; save every {run.interval_steps:,} steps ({interval})")
    yield line("costs", ", ".join([f"{amount(run.gpu_hours)} GPU-hours", *list_costs(run)]))


def list_costs(run: RunEstimate) -> Iterator[str]:
    """What a run takes beside GPU-hours, in every unit that is known."""
    yield f"{amount(run.nodes * run.wall.total_seconds / 3600)} node-hours"
    if run.charge:
        yield f"{amount(run.charge.value)} {run.charge.unit}"
    if run.energy_kwh:
        yield f"{amount(run.energy_kwh)} kWh"
    if run.cost:
        yield f"{amount(run.cost.value)} {run.cost.unit}"


class Costs(Protocol):
    """What has a peak of memory and a time of a step."""

    @property
    def peak(self) -> StageMemory:
        """Of the fullest rank."""
        ...

    @property
    def time(self) -> StepTime:
        """Of all ranks."""
        ...


def list_breakdowns(shown: Costs) -> Iterator[str]:
    """Memory of the fullest rank beside the step, largest first."""
    memory = _column("memory of the fullest rank", shown.peak.device_items, gib)
    time = _column("one step", shown.time.items, duration)
    width = max(map(len, memory)) + 4
    for number in range(max(len(memory), len(time))):
        left = memory[number] if number < len(memory) else ""
        right = time[number] if number < len(time) else ""
        yield f"{left:<{width}}{right}".rstrip()


def _column(title: str, items: Mapping[str, float], render: object) -> list[str]:
    total = sum(items.values())
    shown = [(name, size) for name, size in items.items() if size >= 0.0005 * total]
    shown.sort(key=lambda each: -each[1])
    write = render if callable(render) else str
    names = max(len(title) - 2, *(len(name) for name, _ in shown))
    return [
        f"{title:<{names + 2}} {write(total):>10}",
        *(f"  {name:<{names}}{write(size):>11}{percent(size / total):>8}" for name, size in shown),
    ]


def _others(answer: PlanAnswer) -> Iterator[str]:
    others = answer.found.candidates[1 : 1 + MOST_OTHERS]
    if not others:
        return
    best = answer.shown.time.seconds
    yield ""
    yield f"other layouts ({answer.found.looked_at:,} looked at)"
    names = [_short(each.estimate) for each in others]
    width = max(map(len, names))
    for name, each in zip(names, others, strict=True):
        slower = each.estimate.time.seconds / best - 1
        yield f"  {name:<{width}}  {duration(each.estimate.time.seconds):>8} {slower:>+6.0%}  {each.reason}"


def _short(shown: Estimate) -> str:
    case = shown.case
    schedule = f", {case.schedule} {case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"{case.degrees.render()}, micro-batch {case.micro_batch}{schedule}, {case.recompute}"


def list_notes(machine: Machine, assumed: Sequence[str], warnings: Sequence[str]) -> Iterator[str]:
    """Where the factors come from, what was assumed, what to look out for."""
    measured = machine.measured
    yield ""
    if measured:
        yield line("calibrated", f"with what was measured on this site: {', '.join(sorted(measured))}")
    else:
        yield line("calibrated", "on published runs of this kind of accelerator; nothing was measured on this site")
    for number, told in enumerate(assumed):
        yield line("" if number else "assumed", told)
    for told in warnings:
        yield line("warning", told)


def render_curve(points: Sequence[ScalingPoint]) -> str:
    """The scaling curve as a table."""
    head = f"{'nodes':>7} {'GPUs':>8} {'step':>10} {'tokens/s':>10} {'GPU-h per 1e9':>14} {'efficiency':>11}  layout"
    return "\n".join([head, *(_curve_line(points, point) for point in points)]) + "\n"


def _curve_line(points: Sequence[ScalingPoint], point: ScalingPoint) -> str:
    best = point.best
    if best is None:
        return f"{point.nodes:>7,} {'':>8} {'-':>10}  {point.why_not}"
    hours = point.device_seconds_per_token * 1e9 / 3600
    speed = f"{duration(best.time.seconds):>10} {count(best.tokens_per_second):>10}"
    worth = f"{amount(hours):>14} {percent(efficiency(points, point)):>11}"
    return f"{point.nodes:>7,} {best.case.degrees.world:>8,} {speed} {worth}  {_short(best)}"
