"""A plan as text and as data: the table that `shardway plan` prints, its explanation, its JSON, numbers in words.

Invariants:
- Numbers in text have three figures, a unit, and the same words wherever a plan is shown; in data they are the result's
  own, not rounded, with units in the names of the keys (`_bytes`, `_seconds`) and shares from 0 to 1.
- Each line of the table starts with its subject, and docs/plan.md explains every line.
- The explanation has the items of the table, each with its meaning, and the factors that were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem, UserError, render_problems
from shardway.plan.case import Case, Machine, ceilings_of, has_fitted_runs, list_fitted
from shardway.plan.economy import DAY, HOUR, JobTerms, RunEstimate
from shardway.plan.memory import MEMORY_ITEMS, StageMemory
from shardway.plan.planner import Estimate, PlanResult, ScalingPoint, efficiency
from shardway.plan.time import TIME_ITEMS, StepTime, groups_of
from shardway.units import render_count as count
from shardway.units import render_plural

# --- numbers and settings in words

GIB, MIB = 2**30, 2**20
_LONG = {"days": DAY, "h": HOUR, "min": 60.0}


def gib(size: float) -> str:
    """ "12.3 GiB", or in MiB if that has more figures."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"


def duration(seconds: float) -> str:
    """Three figures in a suitable unit: "4.71 s", "2.5 h", "3.02 days"."""
    unit, size = "s", 1.0
    if seconds < 1:
        unit, size = "ms", 1e-3
    elif seconds >= 120:
        unit, size = next((name, size) for name, size in _LONG.items() if seconds >= 2 * size)
    value = seconds * 1000 if seconds < 1 else seconds / size
    return (f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")) + f" {unit}"


def amount(value: float) -> str:
    """A number with separators, rounded to meaningful digits: 12345.6 -> "12,300"."""
    if abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{round(value, 3 - len(str(round(abs(value))))):,.0f}"


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
    jobs = f" in {render_plural(run.slots, 'job', ',')} of {duration(terms.wall_seconds)}"
    return f"{jobs} ({queue})" if queue else jobs


# --- the table

LABEL = 13
MOST_OTHERS = 5


def line(label: str, text: str) -> str:
    """One line of the table."""
    return f"{label:<{LABEL}}{text}"


def render_plan(result: PlanResult) -> str:
    """The whole table, with a newline at its end."""
    shown, case, model = result.shown, result.shown.case, result.shown.case.model
    head, memory, step, utilisation = _list_figures(result)
    active = "" if model.active_parameters == model.parameters else f" ({count(model.active_parameters)} for a token)"
    full, causal = (f"{model.flops_per_token(case.seq_len, causal=each) / 1e9:,.4g}" for each in (False, True))
    size = f"{count(model.parameters)} parameters{active}, {model.depth} layers"
    if model.adapter is not None:
        size += f"; {count(model.trained_parameters)} of them are trained (LoRA of rank {model.adapter.rank})"
    batch = f"{case.global_batch:,} sequences of {case.seq_len:,} = {count(case.tokens_per_step)} tokens"
    batch = f"{batch}; {case.precision}"
    if model.patch_features:
        batch = f"{case.global_batch:,} images of {case.seq_len:,} patches"
    lines = [
        line("model", f"{size}; {full} GFLOP a token (causal {causal})"),
        line("batch", batch),
        line("layout", describe_layout(case)),
        line("memory", memory),
        line("step", step),
        line("utilisation", utilisation),
        *list_run(result.run, result.terms),
    ]
    for change in result.changes:
        costs = f"{gib(change.estimate.peak.device)}, {duration(change.estimate.time.seconds)} a step"
        lines.append(line("instead" if result.fits else "to fit", f"{change.what}: {costs}"))
    others = result.found.candidates[1 : 1 + MOST_OTHERS]
    names = [_short(each.estimate) for each in others]
    below = ["", f"other layouts ({result.found.looked_at:,} looked at)"] if others else []
    for name, each in zip(names, others, strict=True):
        seconds = each.estimate.time.seconds
        slower = f"{duration(seconds):>8} {seconds / shown.time.seconds - 1:>+6.0%}"
        below.append(f"  {name:<{max(map(len, names))}}  {slower}  {each.reason}")
    lists = (shown.peak, shown.time, result.request.machine, result.assumed, result.warnings)
    return render_table_of_plan([head, "", *lines], below, *lists)


def render_table_of_plan(
    lines: Iterable[str],
    others: Iterable[str],
    peak: StageMemory,
    step: StepTime,
    machine: Machine,
    assumed: Sequence[str],
    warnings: Sequence[str],
) -> str:
    """Lines, the items of memory beside those of a step, largest first, other layouts, and what the plan rests on."""
    memory = _column("memory of the fullest rank", peak.device_items, gib)
    width = max(map(len, memory)) + 4
    both = zip_longest(memory, _column("one step", step.items, duration), fillvalue="")
    kind = "this kind of accelerator" if has_fitted_runs(machine.accelerator) else "other accelerators"
    basis = f"on published runs of {kind}; nothing was measured on this site"
    if machine.measured:
        basis = f"with what was measured on this site: {', '.join(sorted(machine.measured))}"
    notes = [line("" if number else "assumed", note) for number, note in enumerate(assumed)]
    notes += [line("warning", note) for note in warnings]
    items = [f"{left:<{width}}{right}".rstrip() for left, right in both]
    return "\n".join([*lines, "", *items, *others, "", line("calibrated", basis), *notes]) + "\n"


def _column(title: str, items: Mapping[str, float], write: Callable[[float], str]) -> list[str]:
    total = sum(items.values())
    shown = sorted((each for each in items.items() if each[1] >= 0.0005 * total), key=lambda each: -each[1])
    names = max(len(title) - 2, *(len(name) for name, _ in shown))
    return [
        f"{title:<{names + 2}} {write(total):>10}",
        *(f"  {name:<{names}}{write(size):>11}{percent(size / total):>8}" for name, size in shown),
    ]


def render_prediction(result: PlanResult) -> tuple[str, ...]:
    """Header lines for another library's file: what was planned, and its expected cost."""
    head, memory, step, utilisation = _list_figures(result)
    return (head, f"memory {memory}", f"step {step}", utilisation)


def _list_figures(result: PlanResult) -> tuple[str, str, str, str]:
    shown, request = result.shown, result.request
    where = f" on pipeline rank {shown.peak.rank}" if shown.case.degrees.pp > 1 else ""
    full, causal = (percent(shown.mfu(causal=causal)) for causal in (False, True))
    peak = f"{shown.peak_flops / 1e12:,.0f} TFLOP/s {shown.case.precision}"
    return (
        f"{request.case.model.name} on {request.machine.name}: {describe_machine(request.machine, request.world)}",
        describe_memory(shown.peak, shown.usable_bytes, shown.fits, where, unsure=shown.may_not_fit),
        describe_step(shown.time, *rate_of(shown), shown.case.degrees.world),
        f"MFU {full} (causal {causal}), HFU {percent(shown.hfu(causal=False))}, of {peak}",
    )


def describe_memory(peak: StageMemory, usable: float, fits: bool, where: str = "", *, unsure: bool = False) -> str:
    """The fullest rank's memory with its interval, and whether it fits."""
    interval = f"{gib(peak.device * peak.overheads.low)} to {gib(peak.device * peak.overheads.high)}"
    verdict = "does not fit" if not fits else "fits, but may not: try it first" if unsure else "fits"
    return f"{gib(peak.device)} ({interval}) of {gib(usable)} usable{where}: {verdict}"


def describe_step(time: StepTime, what: str, rate: float, ranks: int) -> str:
    """The seconds of a step with their interval, and what it does a second."""
    interval = f"({duration(time.low)} to {duration(time.high)})"
    return f"{duration(time.seconds)} {interval}; {count(rate)} {what}/s, {count(rate / ranks)} a GPU"


def list_run(run: RunEstimate | None, terms: JobTerms) -> Iterator[str]:
    """The lines about the whole run, if one was estimated."""
    if run is None:
        return
    total = f"{duration(run.wall.total_seconds)}{describe_jobs(run, terms, terms.queue)}"
    yield line(
        "run", f"{render_plural(run.steps, 'step', ',')}: {total}; {percent(run.goodput)} of it steps that count"
    )
    interval = duration(run.interval_steps * run.wall.ideal_seconds / run.steps)
    yield line(
        "failures",
        f"{run.failures:.2g} expected; save every {render_plural(run.interval_steps, 'step', ',')} ({interval})",
    )
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


def _short(shown: Estimate) -> str:
    case = shown.case
    schedule = f", {case.schedule} {case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"{case.degrees.render()}, micro-batch {case.micro_batch}{schedule}, {case.recompute}"


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
    if case.model.adapter is not None:
        yield f"  of a frozen matrix {case.value_bytes} bytes alone: it has neither gradient nor optimizer state"
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
    yield "  factors of what is reached (src/shardway/plan/case.py says what each is)"
    fitted = list_fitted(machine.accelerator)
    for name, value in asdict(ceilings_of(machine)).items():
        origin = "fitted on published runs" if name in fitted else "not fitted"
        origin = "measured on this site" if name in machine.measured else origin
        yield f"  {name:<20}{value:>10.4g}   {origin}"


_SPLITS: Mapping[str, str] = {
    "tp": "splits matrices; activations travel several times in every layer",
    "cp": "splits the sequence; keys and values travel in every layer",
    "dp_shard": "shares states; weights and gradients travel",
    "ep": "splits experts; tokens travel in every layer that has them",
    "dp_replicate": "copies the model; gradients travel once a step",
    "pp": "splits the layers; ",
}
"""What the ranks of an axis do."""


def _explain_layout(result: PlanResult) -> Iterator[str]:
    case, machine, found = result.shown.case, result.shown.machine, result.found
    yield describe_layout(case)
    link = f"{machine.domain} of them share the fast link of {machine.link / 1e9:,.0f} GB/s"
    yield f"{case.degrees.world:,} ranks; {link}"
    yield ""
    for name, does in _SPLITS.items():
        group = groups_of(case)[name]
        if group.ranks > 1:
            apart = "neighbours" if group.stride == 1 else f"ranks {group.stride} apart"
            where = "between nodes" if machine.spans_nodes(group.ranks, group.stride) else "inside the fast link"
            where = "" if name == "pp" else f"{where}, "
            does += case.schedule if name == "pp" else ""
            yield line(f"{name} {group.ranks}", f"{where}{apart}: {does}")
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
        "run": run_facts(result.run),
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
        **step_facts(shown.time),
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
            "trained_parameters": model.trained_parameters,
            "layers": model.depth,
            "flops_per_token_full": model.flops_per_token(case.seq_len, causal=False),
            "flops_per_token_causal": model.flops_per_token(case.seq_len, causal=True),
        },
        **facts,
        "step_items_seconds": dict(shown.time.items),
        "between_steps_bytes": asdict(shown.between_steps),
        "stages": [stage_facts(stage) for stage in shown.memory],
    }


_SETTINGS = (
    "global_batch seq_len micro_batch micro_batches precision optimizer engine zero reshard sequence recompute "
    "attention compiled schedule stages_per_rank offload"
)


def run_facts(run: RunEstimate | None) -> dict[str, Any] | None:
    """All data of a whole run."""
    if run is None:
        return None
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


def step_facts(time: StepTime) -> dict[str, float]:
    """Seconds of a step."""
    return {"step_seconds": time.seconds, "step_seconds_low": time.low, "step_seconds_high": time.high}


def stage_facts(stage: StageMemory) -> dict[str, Any]:
    """Memory of a pipeline rank, in bytes."""
    facts = {"pipeline_rank": stage.rank, "items": dict(stage.items), "micro_batches_kept": stage.in_flight}
    return {**facts, "allocated": stage.allocated, "reserved": stage.reserved, "device": stage.device}
