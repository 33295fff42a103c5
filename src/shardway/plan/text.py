"""A plan as text and as data: the table that `shardway plan` prints, its explanation, its JSON, numbers in words.

Invariants:
- Numbers in text have three figures, a unit, and the same words wherever a plan is shown; in data they are the result's
  own, not rounded, with units in the names of the keys (`_bytes`, `_seconds`) and shares from 0 to 1.
- Each line of the table starts with its subject, and docs/plan.md explains every line.
- The explanation has the items of the table, each with its meaning, and the factors that were used.
- A model known by its units has the same words and keys as a transformer, where both have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.case import Case
from shardway.plan.economy import DAY, HOUR, RunEstimate
from shardway.plan.machine import Machine, ceilings_of
from shardway.plan.memory import MEMORY_ITEMS, StageMemory
from shardway.plan.planner import JobTerms, PlanResult
from shardway.plan.search import Estimate, ScalingPoint, efficiency
from shardway.plan.time import TIME_ITEMS, StepTime, groups_of
from shardway.units import render_count as count

if TYPE_CHECKING:
    from shardway.plan.data_parallel_estimate import UnitCase, UnitEstimate, UnitPlanResult

# --- numbers and settings in words

GIB, MIB = 2**30, 2**20


def gib(size: float) -> str:
    """ "12.3 GiB", or in MiB if that has more figures."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"


def duration(seconds: float) -> str:
    """Three figures in a suitable unit: "4.71 s", "2.5 h", "3.02 days"."""
    if seconds < 1:
        return f"{_three(seconds * 1000)} ms"
    for unit, size in (("days", DAY), ("h", HOUR), ("min", 60.0)):
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


def percent(share: float) -> str:
    """ "41.2 %"."""
    return f"{share * 100:.1f} %"


def describe_layout(case: Case) -> str:
    """Degrees, and how the batch is split into passes."""
    passes = case.micro_batches
    parts = [case.degrees.render(), f"micro-batch {case.micro_batch}" + (f" x {passes} a step" if passes > 1 else "")]
    if case.degrees.pp > 1:
        stages = f", {case.stages_per_rank} stages a rank" if case.stages_per_rank > 1 else ""
        parts.append(f"schedule {case.schedule}{stages}")
    parts.append(f"recompute {case.recompute}")
    if case.degrees.shards > 1:
        weights = f"weights sharded{' and freed after use' if case.reshard else ', kept gathered within a step'}"
        some = ("states copied", "optimizer states sharded", "optimizer states and gradients sharded")
        parts.append((*some, weights)[case.zero])
    if case.offload:
        parts.append(f"{'all' if case.zero == 3 else 'optimizer'} states in the host's memory")
    return ", ".join(parts)


def describe_machine(machine: Machine, world: int) -> str:
    """How many nodes and accelerators the plan is for."""
    nodes = -(-world // machine.per_node)
    return f"{nodes:,} {'node' if nodes == 1 else 'nodes'}, {world:,} x {machine.accelerator.name}"


def describe_rates(shown: Estimate) -> str:
    """Rated speeds of an accelerator."""
    machine = shown.machine
    bandwidth = machine.accelerator.memory_bandwidth_bytes_per_s
    memory = f", memory {bandwidth / 1e12:.3g} TB/s" if bandwidth else ""
    return (
        f"{shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}{memory}, link {machine.link / 1e9:,.0f} GB/s, "
        f"network {machine.network / 1e9:,.4g} GB/s"
    )


def rate_of(shown: Estimate) -> tuple[str, float]:
    """What is counted, and how many of it a second."""
    if shown.case.model.patch_features:
        return "images", shown.tokens_per_second / shown.case.seq_len
    return "tokens", shown.tokens_per_second


def describe_jobs(run: RunEstimate, terms: JobTerms, queue: str) -> str:
    """How many jobs of a queue a run takes; "" if their wall-time is not known."""
    if not terms.wall_seconds:
        return ""
    jobs = f" in {run.slots:,} {'job' if run.slots == 1 else 'jobs'} of {duration(terms.wall_seconds)}"
    return f"{jobs} ({queue})" if queue else jobs


# --- the table

LABEL = 13
MOST_OTHERS = 5


def render_plan(result: PlanResult) -> str:
    """The whole table, with a newline at its end."""
    return _render_table(result, _head(result), _lines(result), _others(result), result.request.machine)


def _render_table(
    result: PlanResult | UnitPlanResult, head: str, lines: Iterable[str], others: Iterable[str], machine: Machine
) -> str:
    peak, step = result.shown.peak, result.shown.time
    # Memory of the fullest rank beside the step, largest first
    memory = _column("memory of the fullest rank", peak.device_items, gib)
    width = max(map(len, memory)) + 4
    both = zip_longest(memory, _column("one step", step.items, duration), fillvalue="")
    breakdowns = [f"{left:<{width}}{right}".rstrip() for left, right in both]
    notes = _list_notes(machine, result.assumed, result.warnings)
    return "\n".join([head, "", *lines, "", *breakdowns, *others, *notes]) + "\n"


def render_prediction(result: PlanResult) -> tuple[str, ...]:
    """Header lines for another library's file: what was planned, and its expected cost."""
    shown = result.shown
    return (_head(result), f"memory {_memory_of(shown)}", f"step {_step_of(shown)}", _utilisation(shown))


def _head(result: PlanResult) -> str:
    request = result.request
    machine = request.machine
    return f"{request.case.model.name} on {machine.name}: {describe_machine(machine, request.world)}"


def line(label: str, text: str) -> str:
    """One line of the table."""
    return f"{label:<{LABEL}}{text}"


def _lines(result: PlanResult) -> Iterator[str]:
    shown, case, model = result.shown, result.shown.case, result.shown.case.model
    active = "" if model.active_parameters == model.parameters else f" ({count(model.active_parameters)} for a token)"
    full, causal = (f"{model.flops_per_token(case.seq_len, causal=each) / 1e9:,.4g}" for each in (False, True))
    size = f"{count(model.parameters)} parameters{active}, {model.depth} layers"
    yield line("model", f"{size}; {full} GFLOP a token (causal {causal})")
    if model.patch_features:
        yield line("batch", f"{case.global_batch:,} images of {case.seq_len:,} patches")
    else:
        batch = f"{case.global_batch:,} sequences of {case.seq_len:,} = {count(case.tokens_per_step)} tokens"
        yield line("batch", f"{batch}; {case.precision}")
    yield line("layout", describe_layout(case))
    yield line("memory", _memory_of(shown))
    yield line("step", _step_of(shown))
    yield line("utilisation", _utilisation(shown))
    if result.run:
        yield from _list_run(result.run, result.terms)
    for change in result.changes:
        costs = f"{gib(change.estimate.peak.device)}, {duration(change.estimate.time.seconds)} a step"
        yield line("instead" if result.fits else "to fit", f"{change.what}: {costs}")


def _memory_of(shown: Estimate) -> str:
    where = f" on pipeline rank {shown.peak.rank}" if shown.case.degrees.pp > 1 else ""
    return _memory(shown, where, unsure=shown.may_not_fit)


def _memory(shown: Estimate | UnitEstimate, where: str = "", *, unsure: bool = False) -> str:
    peak = shown.peak
    interval = f"{gib(peak.device * peak.overheads.low)} to {gib(peak.device * peak.overheads.high)}"
    verdict = "does not fit" if not shown.fits else "fits, but may not: try it first" if unsure else "fits"
    return f"{gib(peak.device)} ({interval}) of {gib(shown.usable_bytes)} usable{where}: {verdict}"


def _step_of(shown: Estimate) -> str:
    return _step(shown.time, *rate_of(shown), shown.case.degrees.world)


def _step(time: StepTime, what: str, rate: float, ranks: int) -> str:
    interval = f"({duration(time.low)} to {duration(time.high)})"
    return f"{duration(time.seconds)} {interval}; {count(rate)} {what}/s, {count(rate / ranks)} a GPU"


def _utilisation(shown: Estimate) -> str:
    full, causal = (percent(shown.mfu(causal=causal)) for causal in (False, True))
    peak = f"{shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}"
    return f"MFU {full} (causal {causal}), HFU {percent(shown.hfu(causal=False))}, of {peak}"


def _list_run(run: RunEstimate, terms: JobTerms) -> Iterator[str]:
    """The lines about the whole run."""
    total = f"{duration(run.wall.total_seconds)}{describe_jobs(run, terms, terms.queue)}"
    yield line("run", f"{run.steps:,} steps: {total}; {percent(run.goodput)} of it steps that count")
    interval = duration(run.interval_steps * run.wall.ideal_seconds / run.steps)
    yield line("failures", f"{run.failures:.2g} expected; save every {run.interval_steps:,} steps ({interval})")
    yield line("costs", ", ".join([f"{amount(run.gpu_hours)} GPU-hours", *list_costs(run)]))


def list_costs(run: RunEstimate) -> Iterator[str]:
    """The cost of a run beside GPU-hours, in every known unit."""
    yield f"{amount(run.node_hours)} node-hours"
    if run.charge:
        yield f"{amount(run.charge.value)} {run.charge.unit}"
    if run.energy_kwh:
        yield f"{amount(run.energy_kwh)} kWh"
    if run.cost:
        yield f"{amount(run.cost.value)} {run.cost.unit}"


def _column(title: str, items: Mapping[str, float], write: Callable[[float], str]) -> list[str]:
    total = sum(items.values())
    shown = sorted((each for each in items.items() if each[1] >= 0.0005 * total), key=lambda each: -each[1])
    names = max(len(title) - 2, *(len(name) for name, _ in shown))
    return [
        f"{title:<{names + 2}} {write(total):>10}",
        *(f"  {name:<{names}}{write(size):>11}{percent(size / total):>8}" for name, size in shown),
    ]


def _others(result: PlanResult) -> Iterator[str]:
    others = result.found.candidates[1 : 1 + MOST_OTHERS]
    if not others:
        return
    yield ""
    yield f"other layouts ({result.found.looked_at:,} looked at)"
    names = [_short(each.estimate) for each in others]
    width = max(map(len, names))
    for name, each in zip(names, others, strict=True):
        slower = each.estimate.time.seconds / result.shown.time.seconds - 1
        yield f"  {name:<{width}}  {duration(each.estimate.time.seconds):>8} {slower:>+6.0%}  {each.reason}"


def _short(shown: Estimate) -> str:
    case = shown.case
    schedule = f", {case.schedule} {case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"{case.degrees.render()}, micro-batch {case.micro_batch}{schedule}, {case.recompute}"


def _list_notes(machine: Machine, assumed: Sequence[str], warnings: Sequence[str]) -> Iterator[str]:
    """Sources of the factors, assumptions, warnings."""
    yield ""
    if machine.measured:
        yield line("calibrated", f"with what was measured on this site: {', '.join(sorted(machine.measured))}")
    else:
        yield line("calibrated", "on published runs of this kind of accelerator; nothing was measured on this site")
    for number, note in enumerate(assumed):
        yield line("" if number else "assumed", note)
    for note in warnings:
        yield line("warning", note)


def render_curve(points: Sequence[ScalingPoint]) -> str:
    """The scaling curve as a table."""
    lines = [f"{'nodes':>7} {'GPUs':>8} {'step':>10} {'tokens/s':>10} {'GPU-h per 1e9':>14} {'efficiency':>11}  layout"]
    for point in points:
        best = point.best
        if best is None:
            lines.append(f"{point.nodes:>7,} {'':>8} {'-':>10}  {point.why_not}")
            continue
        speed = f"{duration(best.time.seconds):>10} {count(best.tokens_per_second):>10}"
        hours = point.device_seconds_per_token * 1e9 / 3600
        worth = f"{amount(hours):>14} {percent(efficiency(points, point)):>11}"
        lines.append(f"{point.nodes:>7,} {best.case.degrees.world:>8,} {speed} {worth}  {_short(best)}")
    return "\n".join(lines) + "\n"


# --- the explanation

_MEANINGS: Mapping[str, str] = {
    **MEMORY_ITEMS,
    "fragmentation": "what the caching allocator holds beyond the tensors: gaps that come and go within a step",
    "context": "the driver, libraries and communicators: what nvidia-smi shows and PyTorch does not",
}
_NAME = 16
_MOST_STAGES = 16


def explain(topic: str, result: PlanResult) -> str:
    """A topic of the plan in full. Raises UserError with the known topics."""
    if topic not in TOPICS:
        problem = Problem("--explain", f'"{topic}" is not known', allowed=", ".join(TOPICS))
        raise UserError(render_problems("the plan", [problem]))
    return "\n".join(TOPICS[topic](result)) + "\n"


def _explain_memory(result: PlanResult) -> Iterator[str]:
    shown = result.shown
    peak, case, engine, between = shown.peak, shown.case, shown.case.engine, shown.between_steps
    yield f"memory of pipeline rank {peak.rank}, the fullest of {len(shown.memory)}: {describe_layout(case)}"
    yield ""
    for name, size in peak.device_items.items():
        yield f"  {name:<{_NAME}}{gib(size):>11}   {_MEANINGS[name]}"
    yield f"  {'together':<{_NAME}}{gib(peak.device):>11}   of {gib(shown.usable_bytes)} that a plan may use"
    yield ""
    copied = case.splits_copy and case.zero < 3
    copy = f", a copy of {engine.master_bytes} bytes that the optimizer updates" if copied else ""
    weights = case.value_bytes if copied else case.kept_weight_bytes
    yield (
        f"  a parameter as {engine.name} keeps it: weight {weights} bytes, gradient {case.gradient_bytes}, "
        f"{case.optimizer}{copy}"
    )
    shared = ("nothing", "the optimizer", "optimizer and gradients", "weights, gradients and optimizer")[case.zero]
    yield f"  shared by {case.degrees.shards} ranks: {shared} (ZeRO {case.zero})"
    yield f"  micro-batches whose activations are kept at once: {peak.in_flight:g} ({case.schedule})"
    staged = gib(shown.machine.bytes_of_node(between.copied, case.degrees.world))
    yield f"  at a checkpoint: {gib(between.kept)} of tensors stay; up to {staged} of a node's memory for their copy"
    yield f"  at resume: {gib(between.resuming)}, before a step has taken the rest"
    yield f"  four of five measured peaks lie between {gib(shown.memory_low)} and {gib(shown.memory_high)}"
    if len(shown.memory) > 1:
        yield ""
        yield f"  {'pipeline rank':<{_NAME}}{'device':>11}{'states':>11}{'activations':>13}{'kept':>7}"
        for stage in shown.memory[:_MOST_STAGES]:
            sizes = f"{gib(stage.device):>11}{gib(stage.states):>11}{gib(stage.activations):>13}"
            yield f"  {stage.rank:<{_NAME}}{sizes}{stage.in_flight:>7g}"
        if len(shown.memory) > _MOST_STAGES:
            yield f"  and {len(shown.memory) - _MOST_STAGES} more"


def _explain_time(result: PlanResult) -> Iterator[str]:
    shown = result.shown
    total = shown.time.seconds
    yield f"one step of {duration(total)}, {shown.case.micro_batches} passes: {describe_layout(shown.case)}"
    yield ""
    for name, seconds in shown.time.items.items():
        yield f"  {name:<20}{duration(seconds):>10}{percent(seconds / total):>8}   {TIME_ITEMS[name]}"
    yield ""
    yield f"  four of five measured steps lie between {duration(shown.time.low)} and {duration(shown.time.high)}"
    machine = shown.machine
    yield f"  on paper: {describe_rates(shown)} a GPU"
    yield ""
    yield "  factors of what is reached (src/shardway/plan/machine.py says what each is)"
    for name, value in asdict(ceilings_of(machine)).items():
        origin = "measured on this site" if name in machine.measured else "fitted on published runs"
        yield f"  {name:<20}{value:>10.4g}   {origin}"


def _explain_layout(result: PlanResult) -> Iterator[str]:
    case, machine, found = result.shown.case, result.shown.machine, result.found
    yield describe_layout(case)
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
            yield line(f"{name} {group.ranks}", f"{where}, {_describe_stride(group.stride)}: {does}")
    if case.degrees.pp > 1:
        stride = _describe_stride(groups.stage_stride)
        yield line(f"pp {case.degrees.pp}", f"{stride}: splits the layers; {case.schedule}")
    yield ""
    yield f"{found.looked_at:,} ways were looked at; the best of each set of degrees that fits:"
    for number, each in enumerate(found.candidates, 1):
        shown = each.estimate
        lost = f"\n      loses by {each.reason}" if each.reason else ""
        costs = f"{duration(shown.time.seconds)}, {gib(shown.peak.device)}"
        yield f"  {number:>2}. {costs}: {describe_layout(shown.case)}{lost}"
    if not found.candidates:
        yield "  none"
    if result.request.fixed:
        yield f"kept as you set them: {', '.join(sorted(result.request.fixed))}"


def _describe_stride(stride: int) -> str:
    return "neighbours" if stride == 1 else f"ranks {stride} apart"


TOPICS: Mapping[str, Callable[[PlanResult], Iterator[str]]] = MappingProxyType(
    {"memory": _explain_memory, "time": _explain_time, "layout": _explain_layout}
)
"""The topics that can be explained."""


# --- data

FORMAT = 1


def plan_facts(result: PlanResult, curve: Sequence[ScalingPoint] = ()) -> dict[str, Any]:
    """All data of a plan."""
    request, terms, machine = result.request, result.terms, result.request.machine
    return {
        "format": FORMAT,
        "machine": {
            "name": machine.name,
            "accelerator": machine.accelerator.key,
            "nodes": request.nodes,
            "accelerators": request.world,
            "accelerators_per_node": machine.per_node,
            "memory_bytes": machine.memory_bytes,
            "link_bytes_per_second": machine.link,
            "network_bytes_per_second": machine.network,
            "measured": dict(machine.measured),
        },
        "plan": _estimate_facts(result.shown),
        "run": _run_facts(result.run) if result.run else None,
        "queue": {"name": terms.queue, "wall_seconds": terms.wall_seconds, "most_nodes": terms.most_nodes},
        "others": [
            {**_estimate_facts(each.estimate, brief=True), "lost": each.reason} for each in result.found.candidates[1:]
        ],
        "looked_at": result.found.looked_at,
        "to_fit": [{"change": each.what, **_estimate_facts(each.estimate, brief=True)} for each in result.changes],
        "kept": sorted(request.fixed),
        "curve": [
            {
                "nodes": point.nodes,
                "best": _estimate_facts(point.best, brief=True) if point.best else None,
                "why_not": point.why_not,
                "gpu_seconds_per_token": point.device_seconds_per_token,
                "efficiency": efficiency(curve, point),
            }
            for point in curve
        ],
        "assumed": list(result.assumed),
        "warnings": list(result.warnings),
    }


def _estimate_facts(shown: Estimate, *, brief: bool = False) -> dict[str, Any]:
    """A layout with its costs; `brief` leaves out items and stages."""
    case, model, peak = shown.case, shown.case.model, shown.peak
    facts = {
        "layout": {
            **asdict(case.degrees),
            **{name: case.engine.name if name == "engine" else getattr(case, name) for name in _SETTINGS.split()},
        },
        "fits": shown.fits,
        "peak_bytes": {
            "pipeline_rank": peak.rank,
            "allocated": peak.allocated,
            "reserved": peak.reserved,
            "device": peak.device,
            "device_low": shown.memory_low,
            "device_high": shown.memory_high,
            "usable": shown.usable_bytes,
            "host_per_rank": peak.host,
        },
        **_step_facts(shown.time),
        "tokens_per_second": shown.tokens_per_second,
        "mfu_full": shown.mfu(causal=False),
        "mfu_causal": shown.mfu(causal=True),
        "hfu_full": shown.hfu(causal=False),
        "hfu_causal": shown.hfu(causal=True),
        "peak_flops": shown.peak_flops,
    }
    if brief:
        return facts
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "layers": model.depth,
            "flops_per_token_full": model.flops_per_token(case.seq_len, causal=False),
            "flops_per_token_causal": model.flops_per_token(case.seq_len, causal=True),
        },
        **facts,
        "step_items_seconds": dict(shown.time.items),
        "between_steps_bytes": asdict(shown.between_steps),
        "stages": [_stage_facts(stage) for stage in shown.memory],
    }


_SETTINGS = (
    "global_batch seq_len micro_batch micro_batches precision optimizer engine zero reshard sequence recompute "
    "attention compiled schedule stages_per_rank offload"
)


def _step_facts(time: StepTime) -> dict[str, float]:
    return {"step_seconds": time.seconds, "step_seconds_low": time.low, "step_seconds_high": time.high}


def _stage_facts(stage: StageMemory) -> dict[str, Any]:
    """Memory of a pipeline rank, in bytes."""
    facts = {"pipeline_rank": stage.rank, "items": dict(stage.items), "micro_batches_kept": stage.in_flight}
    return {**facts, "allocated": stage.allocated, "reserved": stage.reserved, "device": stage.device}


def _run_facts(run: RunEstimate) -> dict[str, Any]:
    return {
        "steps": run.steps,
        "days": run.days,
        "wall_seconds": {**asdict(run.wall), "total_seconds": run.wall.total_seconds},
        "jobs": run.slots,
        "failures": run.failures,
        "goodput": run.goodput,
        "save_interval_steps": run.interval_steps,
        "gpu_hours": run.gpu_hours,
        "node_hours": run.node_hours,
        "energy_kwh": run.energy_kwh,
        "cost": asdict(run.cost) if run.cost else None,
        "charge": asdict(run.charge) if run.charge else None,
    }


# --- models known by their units


def render_units(result: UnitPlanResult) -> str:
    """The whole table, with a newline at its end."""
    head = f"{result.shown.case.model.name} on {result.machine.name}: {describe_machine(result.machine, result.world)}"
    return _render_table(result, head, _unit_lines(result), _other_units(result), result.machine)


def _unit_lines(result: UnitPlanResult) -> Iterator[str]:
    shown, case = result.shown, result.shown.case
    model = case.model
    flops = f"{model.flops_per_sample / 1e9:,.4g} GFLOP a sample"
    yield line("model", f"{count(model.parameters)} parameters in {sum(u.count for u in model.units)} units; {flops}")
    yield line("batch", f"{case.global_batch:,} samples; {case.precision}")
    yield line("layout", _unit_layout(case))
    yield line("memory", _memory(shown))
    yield line("step", _step(shown.time, "samples", shown.samples_per_second, case.world))
    yield line("utilisation", f"MFU {percent(shown.mfu)} of {shown.peak_flops / 1e12:,.0f} TFLOP/s {case.precision}")
    if result.run:
        yield from _list_run(result.run, result.terms)


def _unit_layout(case: UnitCase) -> str:
    sizes = (("dp_replicate", case.dp_replicate), ("dp_shard", case.dp_shard))
    degrees = " x ".join(f"{name} {size}" for name, size in sizes if size > 1)
    passes = f" x {case.micro_batches} a step" if case.micro_batches > 1 else ""
    return f"{degrees or 'one rank'}, micro-batch {case.micro_batch}{passes}"


def _other_units(result: UnitPlanResult) -> Iterator[str]:
    others = result.fitting[1 : 1 + MOST_OTHERS]
    if others:
        yield ""
        yield "other layouts"
    for each in others:
        slower = each.time.seconds / result.shown.time.seconds - 1
        yield f"  {_unit_layout(each.case):<48}{duration(each.time.seconds):>10} {slower:>+6.0%}"


def unit_plan_facts(result: UnitPlanResult) -> dict[str, Any]:
    """All data of a plan; units are in the names of the keys."""
    machine = result.machine
    return {
        "format": FORMAT,
        "machine": {"name": machine.name, "accelerator": machine.accelerator.key, "accelerators": result.world},
        "plan": _unit_estimate_facts(result.shown),
        "run": _run_facts(result.run) if result.run else None,
        "others": [_unit_estimate_facts(each) for each in result.fitting[1:]],
        "assumed": list(result.assumed),
        "warnings": list(result.warnings),
    }


def _unit_estimate_facts(shown: UnitEstimate) -> dict[str, Any]:
    case = shown.case
    names = ("dp_replicate", "dp_shard", "micro_batch", "micro_batches", "global_batch", "precision", "optimizer")
    return {
        "model": {"name": case.model.name, "parameters": case.model.parameters, "source": case.model.source},
        "layout": {name: getattr(case, name) for name in names},
        "fits": shown.fits,
        "stages": [_stage_facts(shown.peak)],
        **_step_facts(shown.time),
        "step_items_seconds": dict(shown.time.items),
        "samples_per_second": shown.samples_per_second,
        "mfu_full": shown.mfu,
    }
