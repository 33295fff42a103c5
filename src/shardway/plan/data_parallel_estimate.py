"""Memory, time and the whole run of a model that is known by its units, copied or sharded over ranks; and its table.

Invariants:
- Items are those of `plan.memory` and `plan.time`, and add up as theirs do. A unit is a black box: its products run at
  the rate of large ones, and everything that it saves passes through memory.
- Words and keys are those of a transformer's plan, where both have them.

Sources: states: Rajbhandari et al., arXiv:1910.02054, section 5; what FSDP gathers: Zhao et al., arXiv:2304.11277,
section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from shardway.batch_ramp import BatchRamp
from shardway.errors import Problem, check_no_problems
from shardway.plan import text, time
from shardway.plan.case import Machine, Precision, ceilings_of
from shardway.plan.economy import JobTerms, RunEstimate, list_warnings, price_run
from shardway.plan.memory import StageMemory, checkpoint_bytes, load_overheads, optimizer_bytes
from shardway.plan.planner import (
    MOST_MICRO_BATCH,
    NEAR,
    PlanOptions,
    assume_nodes,
    assume_samples,
    assume_sequences,
    assume_tokens_of,
    count_ranks,
    find_problems,
    holds,
    refuse,
)
from shardway.plan.shapes import Measured
from shardway.plan.time import CollectiveGroup, StepTime, Wires
from shardway.units import Scale, Span
from shardway.units import render_count as count

# --- memory and time of a step

STATE_BYTES = 4  # bytes of a weight and of a gradient, which are kept in fp32
FORWARD_MOVES, BACKWARD_MOVES = 2, 3
"""How often saved tensors pass through memory: forward written and read; backward read, gradient written, read."""


@dataclass(frozen=True, kw_only=True)
class UnitCase:
    """A step to be priced; batches count samples. Raises UserError that names everything that does not divide."""

    model: Measured
    global_batch: int
    micro_batch: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    precision: Precision = "bf16"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        unit = self.world * self.micro_batch
        if self.global_batch % unit:
            what = f"{self.global_batch} samples do not split over {self.world} ranks in micro-batches of"
            problem = Problem("global_batch", f"{what} {self.micro_batch}", allowed=f"a multiple of {unit}")
            check_no_problems(f"the plan of {self.model.name}", [problem])

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.world * self.micro_batch)

    @property
    def value_bytes(self) -> int:  # bytes of an activation and of a gathered weight
        return 4 if self.precision in ("fp32", "tf32") else 2


@dataclass(frozen=True)
class UnitEstimate:
    """A case on a machine; every rank needs the same."""

    case: UnitCase
    machine: Machine
    peak: StageMemory
    time: StepTime

    @property
    def fits(self) -> bool:
        return holds(self.machine, self.peak, self.case.world)

    @property
    def samples_per_second(self) -> float:
        return self.case.global_batch / self.time.seconds

    @property
    def mfu(self) -> float:  # model FLOPs utilisation, 0 to 1
        flops = self.case.model.flops_per_sample * self.samples_per_second
        return flops / self.case.world / self.machine.peak(self.case.precision)


def estimate_units(case: UnitCase, machine: Machine) -> UnitEstimate:
    """Price a case. Raises UserError if the machine has no rate for the precision."""
    model, size, elements = case.model, case.value_bytes, case.model.parameters / case.dp_shard
    # Bytes that one part of each unit keeps of a micro-batch
    scale = size / model.value_bytes
    kept = [case.micro_batch * (u.fixed_bytes + (u.saved_bytes - u.fixed_bytes) * scale) for u in model.units]
    saved = sum(unit.count * each for unit, each in zip(model.units, kept, strict=True))
    # The unit in use and the next one, and one gradient that is summed in fp32
    largest = max(unit.parameters for unit in model.units)
    memory = StageMemory(
        rank=0,
        weights=elements * STATE_BYTES,
        gradients=elements * STATE_BYTES,
        optimizer=elements * optimizer_bytes(case.optimizer),
        activations=saved,
        working=max(kept),
        gathered=largest * (3 * size + STATE_BYTES) if case.dp_shard > 1 else 0.0,
        messages=0.0,
        in_flight=1.0,
        host=0.0,
        overheads=load_overheads(),
    )
    # One micro-batch, forward and backward; a unit, as a black box, counts as in 16 bits where products have fewer
    ceilings = ceilings_of(machine)
    wires, bandwidth = Wires(machine, ceilings), time.machine_bandwidth(machine) * ceilings.memory
    rate = machine.peak("bf16" if case.precision in ("fp8", "mxfp8", "fp4") else case.precision) * ceilings.matmul
    once = {
        time.PRODUCTS: model.flops_per_sample * case.micro_batch / rate,
        time.MOVES: (FORWARD_MOVES + BACKWARD_MOVES) * saved / bandwidth,
    }
    if case.dp_shard > 1:
        group = CollectiveGroup(case.dp_shard)
        messages = 2 * wires.seconds("all_gather", model.parameters * size, group)
        messages += wires.seconds("reduce_scatter", model.parameters * STATE_BYTES, group)
        once[time.SHARDS] = time.exposed(messages, wires.cover(group) * sum(once.values()))
    # Once a step
    copies = CollectiveGroup(case.dp_replicate, case.dp_shard)
    gradients = wires.seconds("all_reduce", elements * STATE_BYTES, copies)
    items = {name: case.micro_batches * seconds for name, seconds in once.items()}
    items[time.GRADIENTS] = time.exposed(gradients, wires.cover(copies) * (time.BACKWARD_SHARE * sum(once.values())))
    items[time.OPTIMIZER] = ceilings.optimizer_passes * elements * time.UPDATE_BYTES / bandwidth
    return UnitEstimate(case, machine, memory, time.total_time(items, ceilings))


# --- the plan, as a table and as data


@dataclass(frozen=True)
class UnitPlanResult:
    """A case with its costs, and its whole run if its length is known and it fits."""

    shown: UnitEstimate
    terms: JobTerms
    run: RunEstimate | None
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_units(
    case: UnitCase,
    machine: Machine,
    world: int,
    terms: JobTerms,
    *,
    length: Span | None = None,
    tokens_per_sample: int = 1,
    assumed: tuple[str, ...] = (),
) -> UnitPlanResult:
    """Price a case on `world` ranks and its whole run. Raises UserError if the batch does not split."""
    case = replace(case, dp_replicate=world // case.dp_shard)
    shown, run = estimate_units(case, machine), None
    if shown.fits and length:
        scale = Scale(BatchRamp.of(case.global_batch), tokens_per_sample, 1)
        saved = checkpoint_bytes(case.model.parameters, STATE_BYTES, case.optimizer)
        run, note = price_run(length, scale, shown.time.seconds, saved, world, machine, terms)
        assumed = (*assumed, note)
    return UnitPlanResult(shown, terms, run, assumed, list_warnings(terms, -(-world // machine.per_node)))


_OTHERS = ("engine", "recompute", "schedule", "zero", "attention", "compiled", "offload")
"""Options about what happens inside of layers, or between stages of a pipeline."""


def find_plan_of_units(
    options: PlanOptions, model: Measured, machine: Machine, terms: JobTerms, *, seq_len: int, assumed: Sequence[str]
) -> UnitPlanResult:
    """The fastest copies or shards of a model that fit, with its whole run; `seq_len` tokens of a sample, 0 for samples
    that are no text. Raises UserError with all problems of the options."""
    problems = list(find_problems(options, machine))
    for name in (each for each in _OTHERS if getattr(options, each) not in (None, "", False)):
        what = f"has no effect on {model.name}, of which the planner knows the parts alone"
        problems.append(Problem(f"--{name}", what, remedy="leave it out"))
    if others := [axis for axis in options.layout if axis not in ("dp_replicate", "dp_shard")]:
        what = f"{', '.join(others)}: {model.name} is known by its parts alone, which no other axis can split"
        problems.append(Problem("--layout", what, allowed="dp_replicate, dp_shard"))
    if len(options.precisions) > 1:
        problems.append(Problem("--precision", "several formats are named", allowed="one of them"))
    check_no_problems("the plan", problems)
    ranks, notes = count_ranks(options, machine), [*machine.assumed, *assume_nodes(options), *assumed]
    active = model.estimate_active(seq_len)
    each = ranks * (options.micro_batch or 1)
    batch = assume_sequences(active, seq_len, each, shared=False) if seq_len else assume_samples(each)
    if options.global_batch and options.global_batch % each:
        where = f"{ranks:,} ranks in micro-batches of {options.micro_batch or 1}"
        what, allowed = f"{options.global_batch:,} samples do not split over {where}", f"a multiple of {each:,}"
        raise refuse("--global-batch", what, allowed)
    length = options.length
    notes += [] if options.global_batch else [batch.note]
    if length is None and seq_len:
        tokens = assume_tokens_of(active)
        length = Span(float(tokens.value), "tokens")
        notes.append(tokens.note)
    usual: Precision = "bf16" if machine.accelerator.peak("bf16") else "fp16"
    copies = options.layout.get("dp_replicate", 0)
    shards = [options.layout.get("dp_shard") or (ranks // copies if copies else 0)]
    base = UnitCase(
        model=model,
        global_batch=options.global_batch or batch.value,
        micro_batch=options.micro_batch or 1,
        dp_replicate=ranks,
        precision=cast(Precision, options.precisions[0]) if options.precisions else usual,
        optimizer=options.optimizer or "adamw",
    )
    share = base.global_batch // ranks
    sizes = [options.micro_batch or 2**power for power in range(MOST_MICRO_BATCH.bit_length())]
    found = [
        estimate_units(replace(base, dp_replicate=ranks // shard, dp_shard=shard, micro_batch=size), machine)
        for shard in (shards if shards[0] else sorted({1, min(ranks, machine.domain), ranks}))
        for size in dict.fromkeys(sizes)
        if ranks % shard == 0 and share % size == 0
    ]
    fitting = [one for one in found if one.fits]
    if fitting:
        best = min(one.time.seconds for one in fitting)
        # Of those that are as fast, the one with fewest shards and passes
        near = [one for one in fitting if one.time.seconds <= best * (1 + NEAR)]
        shown = min(near, key=lambda one: (one.case.dp_shard, one.case.micro_batches))
    else:
        shown = min(found, key=lambda one: one.peak.device)
    per_sample = max(1, seq_len)
    return plan_units(
        shown.case, machine, ranks, terms, length=length, tokens_per_sample=per_sample, assumed=tuple(notes)
    )


def render_units(result: UnitPlanResult) -> str:
    """The whole table, with a newline at its end."""
    shown, case, model, machine = result.shown, result.shown.case, result.shown.case.model, result.shown.machine
    flops = f"{model.flops_per_sample / 1e9:,.4g} GFLOP a sample"
    sizes = (("dp_replicate", case.dp_replicate), ("dp_shard", case.dp_shard))
    degrees = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
    passes = f" x {case.micro_batches} a step" if case.micro_batches > 1 else ""
    usable = machine.memory_bytes * shown.peak.overheads.usable
    peak = f"{machine.peak(case.precision) / 1e12:,.0f} TFLOP/s {case.precision}"
    lines = [
        f"{model.name} on {machine.name}: {text.describe_machine(machine, case.world)}",
        "",
        text.line(
            "model", f"{count(model.parameters)} parameters in {sum(u.count for u in model.units)} units; {flops}"
        ),
        text.line("batch", f"{case.global_batch:,} samples; {case.precision}"),
        text.line("layout", f"{degrees}, micro-batch {case.micro_batch}{passes}"),
        text.line("memory", text.describe_memory(shown.peak, usable, shown.fits)),
        text.line("step", text.describe_step(shown.time, "samples", shown.samples_per_second, case.world)),
        text.line("utilisation", f"MFU {text.percent(shown.mfu)} of {peak}"),
        *text.list_run(result.run, result.terms),
    ]
    return text.render_table_of_plan(lines, (), shown.peak, shown.time, machine, result.assumed, result.warnings)


def unit_plan_facts(result: UnitPlanResult) -> dict[str, Any]:
    """All data of a plan; units are in the names of the keys."""
    shown, case, machine = result.shown, result.shown.case, result.shown.machine
    names = ("dp_replicate", "dp_shard", "micro_batch", "micro_batches", "global_batch", "precision", "optimizer")
    return {
        "format": text.FORMAT,
        "machine": {"name": machine.name, "accelerator": machine.accelerator.key, "accelerators": case.world},
        "plan": {
            "model": {"name": case.model.name, "parameters": case.model.parameters, "source": case.model.source},
            "layout": {name: getattr(case, name) for name in names},
            "fits": shown.fits,
            "stages": [text.stage_facts(shown.peak)],
            **text.step_facts(shown.time),
            "step_items_seconds": dict(shown.time.items),
            "samples_per_second": shown.samples_per_second,
            "mfu_full": shown.mfu,
        },
        "run": text.run_facts(result.run),
        "others": [],
        "assumed": list(result.assumed),
        "warnings": list(result.warnings),
    }
