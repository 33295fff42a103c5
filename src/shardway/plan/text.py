"""A plan as text: the table that `shardway plan` prints, its explanation, and numbers in words.

Invariants:
- Numbers have three figures, a unit, and the same words wherever a plan is shown.
- Each line of the table starts with its subject, and docs/plan.md explains every line.
- The explanation has the items of the table, each with its meaning, and the factors that were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Protocol

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.answer import JobTerms, PlanAnswer
from shardway.plan.case import Case
from shardway.plan.economy import RunEstimate
from shardway.plan.estimate import Estimate
from shardway.plan.machine import Machine
from shardway.plan.memory import MEMORY_ITEMS as MEMORY_ITEMS
from shardway.plan.memory import StageMemory
from shardway.plan.search import ScalingPoint, efficiency
from shardway.plan.time.ceilings import ceilings_of
from shardway.plan.time.step import TIME_ITEMS as TIME_ITEMS
from shardway.plan.time.step import StepTime, groups_of
from shardway.units import render_count

# --- numbers and settings in words

GIB, MIB = 2**30, 2**20
_DAY, _HOUR, _MINUTE = 86400.0, 3600.0, 60.0


def gib(size: float) -> str:
    """ "12.3 GiB", or in MiB if that has more figures."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"


def duration(seconds: float) -> str:
    """Three figures in a suitable unit: "4.71 s", "2.5 h", "3.02 days"."""
    if seconds < 1:
        return f"{_three(seconds * 1000)} ms"
    for unit, size in (("days", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= 2 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds)} s"


def amount(value: float) -> str:
    """A number with separators, rounded to meaningful digits: 12345.6 -> "12,300"."""
    if abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{round(value, 3 - len(str(round(abs(value))))):,.0f}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def count(value: float) -> str:
    """A number with a suffix for thousands and more: "8.03B"."""
    return render_count(value)


def percent(share: float) -> str:
    """ "41.2 %"."""
    return f"{share * 100:.1f} %"


def describe_layout(case: Case) -> str:
    """Degrees, and how the batch is split into passes."""
    return ", ".join([case.degrees.render(), *_describe_passes(case)])


def _describe_passes(case: Case) -> Iterator[str]:
    passes = case.micro_batches
    yield f"micro-batch {case.micro_batch}" + (f" x {passes} a step" if passes > 1 else "")
    if case.degrees.pp > 1:
        stages = f", {case.stages_per_rank} stages a rank" if case.stages_per_rank > 1 else ""
        yield f"schedule {case.schedule}{stages}"
    yield f"recompute {case.recompute}"
    if case.degrees.shards > 1:
        yield _describe_sharing(case)
    if case.offload:
        yield f"{'all' if case.zero == 3 else 'optimizer'} states in the host's memory"


def _describe_sharing(case: Case) -> str:
    if case.zero == 3:
        return "weights sharded" + (" and freed after use" if case.reshard else ", kept gathered within a step")
    return {0: "states copied", 1: "optimizer states sharded", 2: "optimizer states and gradients sharded"}[case.zero]


# --- the table

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
    """Header lines for another library's file: what was planned, and its expected cost."""
    shown = answer.shown
    return (_headline(answer), f"memory {_memory(answer)}", f"step {_step(shown)}", f"{_utilisation(shown)}")


def _headline(answer: PlanAnswer) -> str:
    question = answer.question
    return headline(question.case.model.name, question.machine, question.world)


def headline(model: str, machine: Machine, world: int) -> str:
    """The model and the machine of the plan."""
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
    """Whether a layout fits, and how certain that is."""
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
    """The lines about the whole run."""
    total, slot = duration(run.wall.total_seconds), terms.wall_seconds
    jobs = f" in {run.slots:,} {'job' if run.slots == 1 else 'jobs'} of {duration(slot)}" if slot else ""
    queue = f" ({terms.queue})" if slot and terms.queue else ""
    yield line("run", f"{run.steps:,} steps: {total}{jobs}{queue}; {percent(run.goodput)} of it steps that count")
    interval = duration(run.interval_steps * run.wall.ideal_seconds / run.steps)
    yield line("failures", f"{run.failures:.2g} expected; save every {run.interval_steps:,} steps ({interval})")
    yield line("costs", ", ".join([f"{amount(run.gpu_hours)} GPU-hours", *list_costs(run)]))


def list_costs(run: RunEstimate) -> Iterator[str]:
    """The cost of a run beside GPU-hours, in every known unit."""
    yield f"{amount(run.nodes * run.wall.total_seconds / 3600)} node-hours"
    if run.charge:
        yield f"{amount(run.charge.value)} {run.charge.unit}"
    if run.energy_kwh:
        yield f"{amount(run.energy_kwh)} kWh"
    if run.cost:
        yield f"{amount(run.cost.value)} {run.cost.unit}"


class Costs(Protocol):
    """Anything with a peak of memory and a time of a step."""

    @property
    def peak(self) -> StageMemory:
        """The memory of the fullest rank."""
        ...

    @property
    def time(self) -> StepTime:
        """The time of a step, over all ranks."""
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
    """Sources of the factors, assumptions, warnings."""
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


# --- the explanation

_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        **MEMORY_ITEMS,
        "fragmentation": "what the caching allocator holds beyond the tensors: gaps that come and go within a step",
        "context": "the driver, libraries and communicators: what nvidia-smi shows and PyTorch does not",
    }
)
_NAME = 16
_MOST_STAGES = 16


def explain(topic: str, answer: PlanAnswer) -> str:
    """A topic of the plan in full. Raises UserError with the known topics."""
    if topic not in TOPICS:
        problem = Problem("--explain", f'"{topic}" is not known', allowed=", ".join(TOPICS))
        raise UserError(render_problems("the plan", [problem]))
    return "\n".join(TOPICS[topic](answer)) + "\n"


def _explain_memory(answer: PlanAnswer) -> Iterator[str]:
    shown = answer.shown
    peak, case = shown.peak, shown.case
    yield f"memory of pipeline rank {peak.rank}, the fullest of {len(shown.memory)}: {describe_layout(case)}"
    yield ""
    for name, size in peak.device_items.items():
        yield f"  {name:<{_NAME}}{gib(size):>11}   {_MEANINGS[name]}"
    yield f"  {'together':<{_NAME}}{gib(peak.device):>11}   of {gib(shown.usable_bytes)} that a plan may use"
    yield ""
    yield from _states(case)
    yield f"  micro-batches whose activations are kept at once: {peak.in_flight:g} ({case.schedule})"
    yield from _moments(shown)
    yield f"  four of five measured peaks lie between {gib(shown.memory_low)} and {gib(shown.memory_high)}"
    if len(shown.memory) > 1:
        yield ""
        yield from _stages(shown)


def _states(case: Case) -> Iterator[str]:
    engine, copied = case.engine, case.splits_copy and case.zero < 3
    copy = f", a copy of {engine.master_bytes} bytes that the optimizer updates" if copied else ""
    weights = case.value_bytes if copied else case.kept_weight_bytes
    yield (
        f"  a parameter as {engine.name} keeps it: weight {weights} bytes, gradient {case.gradient_bytes}, "
        f"{case.optimizer}{copy}"
    )
    shared = {0: "nothing", 1: "the optimizer", 2: "optimizer and gradients", 3: "weights, gradients and optimizer"}
    yield f"  shared by {case.degrees.shards} ranks: {shared[case.zero]} (ZeRO {case.zero})"


def _moments(shown: Estimate) -> Iterator[str]:
    moments = shown.moments
    staged = gib(shown.machine.bytes_of_node(moments.copied, shown.case.degrees.world))
    yield f"  at a checkpoint: {gib(moments.kept)} of tensors stay; up to {staged} of a node's memory for their copy"
    yield f"  at resume: {gib(moments.resuming)}, before a step has taken the rest"


def _stages(shown: Estimate) -> Iterator[str]:
    yield f"  {'pipeline rank':<{_NAME}}{'device':>11}{'states':>11}{'activations':>13}{'kept':>7}"
    for stage in shown.memory[:_MOST_STAGES]:
        yield _stage(stage)
    if len(shown.memory) > _MOST_STAGES:
        yield f"  and {len(shown.memory) - _MOST_STAGES} more"


def _stage(stage: StageMemory) -> str:
    sizes = f"{gib(stage.device):>11}{gib(stage.states):>11}{gib(stage.activations):>13}"
    return f"  {stage.rank:<{_NAME}}{sizes}{stage.in_flight:>7g}"


def _time(answer: PlanAnswer) -> Iterator[str]:
    shown = answer.shown
    total = shown.time.seconds
    yield f"one step of {duration(total)}, {shown.case.micro_batches} passes: {describe_layout(shown.case)}"
    yield ""
    for name, seconds in shown.time.items.items():
        yield f"  {name:<20}{duration(seconds):>10}{percent(seconds / total):>8}   {TIME_ITEMS[name]}"
    yield ""
    yield f"  four of five measured steps lie between {duration(shown.time.low)} and {duration(shown.time.high)}"
    machine = shown.machine
    memory = (machine.accelerator.memory_bandwidth_bytes_per_s or 0) / 1e12
    yield (
        f"  on paper: {shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}, memory {memory:.3g} TB/s, "
        f"link {machine.link / 1e9:,.0f} GB/s, network {machine.network / 1e9:,.4g} GB/s a GPU"
    )
    yield ""
    yield "  factors of what is reached (src/shardway/plan/time/ceilings.py says what each is)"
    for name, value in asdict(ceilings_of(machine)).items():
        origin = "measured on this site" if name in machine.measured else "fitted on published runs"
        yield f"  {name:<20}{value:>10.4g}   {origin}"


def _layout(answer: PlanAnswer) -> Iterator[str]:
    case, machine = answer.shown.case, answer.shown.machine
    yield f"{describe_layout(case)}"
    link = f"{machine.domain} of them share the fast link of {machine.link / 1e9:,.0f} GB/s"
    yield f"{case.degrees.world:,} ranks; {link}"
    yield ""
    groups = groups_of(case)
    for name, group, does in (
        ("tp", groups.tp, "splits matrices; activations travel several times in every layer"),
        ("cp", groups.cp, "splits the sequence; keys and values travel in every layer"),
        ("dp_shard", groups.shards, "shares states; weights and gradients travel"),
        ("ep", groups.experts, "splits experts; tokens travel in every layer that has them"),
        ("dp_replicate", groups.copies, "copies the model; gradients travel once a step"),
    ):
        if group.ranks > 1:
            where = "between nodes" if machine.spans_nodes(group.ranks, group.stride) else "inside the fast link"
            yield line(f"{name} {group.ranks}", f"{where}, {_step_of(group.stride)}: {does}")
    if case.degrees.pp > 1:
        yield line(f"pp {case.degrees.pp}", f"{_step_of(groups.stage_stride)}: splits the layers; {case.schedule}")
    yield ""
    yield from _candidates(answer)


def _step_of(stride: int) -> str:
    return "neighbours" if stride == 1 else f"ranks {stride} apart"


def _candidates(answer: PlanAnswer) -> Iterator[str]:
    yield f"{answer.found.looked_at:,} ways were looked at; the best of each set of degrees that fits:"
    for number, each in enumerate(answer.found.candidates, 1):
        shown = each.estimate
        lost = f"\n      loses by {each.reason}" if each.reason else ""
        costs = f"{duration(shown.time.seconds)}, {gib(shown.peak.device)}"
        yield f"  {number:>2}. {costs}: {describe_layout(shown.case)}{lost}"
    if not answer.found.candidates:
        yield "  none"
    if answer.question.fixed:
        yield f"kept as you set them: {', '.join(sorted(answer.question.fixed))}"


TOPICS: Mapping[str, Callable[[PlanAnswer], Iterator[str]]] = MappingProxyType(
    {"memory": _explain_memory, "time": _time, "layout": _layout}
)
"""The topics that can be explained."""
