"""Memory, time and the whole run of a model that is known by its units, copied or sharded over ranks.

Invariants:
- Items are those of `plan.memory` and `plan.time`, and add up as theirs do. A unit is a black box: its products run at
  the rate of large ones, and everything that it saves passes through memory.
- Of the cases that fit the fastest step wins; copies if they are as fast as shards.

Sources: states: Rajbhandari et al., arXiv:1910.02054, section 5; what FSDP gathers: Zhao et al., arXiv:2304.11277,
section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from shardway.errors import Problem, check_no_problems
from shardway.plan.case import Precision, divisors
from shardway.plan.economy import RunEstimate
from shardway.plan.machine import Ceilings, CollectiveGroup, Machine, Wires, ceilings_of
from shardway.plan.memory import StageMemory, load_overheads, optimizer_bytes
from shardway.plan.planner import JobTerms, list_warnings, price_run
from shardway.plan.search import NEAR, holds
from shardway.plan.shapes.measured import Measured
from shardway.plan.time import (
    BACKWARD_SHARE,
    GRADIENTS,
    MOVES,
    OPTIMIZER,
    PRODUCTS,
    SHARDS,
    UPDATE_BYTES,
    StepTime,
    exposed,
    machine_bandwidth,
    total_time,
)
from shardway.units import Scale, Span

# --- memory and time of a step

STATE_BYTES = 4
"""Bytes of a weight and of a gradient, which are kept in fp32."""
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
        check_no_problems(f"the plan of {self.model.name}", list(_find_problems(self)))

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.world * self.micro_batch)

    @property
    def low_bits(self) -> bool:
        """Whether products are in eight bits or less; a unit, as a black box, then counts as in 16."""
        return self.precision in ("fp8", "mxfp8", "fp4")

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation and of a gathered weight."""
        return 4 if self.precision in ("fp32", "tf32") else 2


def _find_problems(case: UnitCase) -> Iterator[Problem]:
    for each in fields(case):
        size = getattr(case, each.name)
        if isinstance(size, int) and size < 1:
            yield Problem(each.name, f"{size} is no size", allowed="1 or more")
            return
    unit = case.world * case.micro_batch
    if case.global_batch % unit:
        what = (
            f"{case.global_batch} samples do not split over {case.world} ranks in micro-batches of {case.micro_batch}"
        )
        yield Problem("global_batch", what, allowed=f"a multiple of {unit}")


@dataclass(frozen=True)
class UnitEstimate:
    """A case on a machine; every rank needs the same."""

    case: UnitCase
    machine: Machine
    peak: StageMemory
    time: StepTime

    @property
    def usable_bytes(self) -> float:
        """The part of a device's memory that a plan may use."""
        return self.machine.memory_bytes * self.peak.overheads.usable

    @property
    def fits(self) -> bool:
        """Whether a device holds what a rank needs."""
        return holds(self.machine, self.peak, self.case.world)

    @property
    def samples_per_second(self) -> float:
        return self.case.global_batch / self.time.seconds

    @property
    def peak_flops(self) -> float:
        """The rated FLOP/s by which utilisation is measured."""
        return self.machine.peak(self.case.precision)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1."""
        flops = self.case.model.flops_per_sample * self.samples_per_second
        return flops / self.case.world / self.peak_flops


def estimate_units(case: UnitCase, machine: Machine) -> UnitEstimate:
    """Price a case. Raises UserError if the machine has no rate for the precision."""
    return UnitEstimate(case, machine, _memory(case), _time(case, machine, ceilings_of(machine)))


def _memory(case: UnitCase) -> StageMemory:
    model, share = case.model, case.model.parameters / case.dp_shard
    saved = [_saved(case, index) for index in range(len(model.units))]
    largest = max(unit.parameters for unit in model.units)
    # The unit in use and the next one, and one gradient that is summed in fp32.
    gathered = largest * (3 * case.value_bytes + STATE_BYTES) if case.dp_shard > 1 else 0.0
    return StageMemory(
        rank=0,
        weights=share * STATE_BYTES,
        gradients=share * STATE_BYTES,
        optimizer=share * optimizer_bytes(case.optimizer),
        activations=sum(unit.count * size for unit, size in zip(model.units, saved, strict=True)),
        working=max(saved),
        gathered=gathered,
        messages=0.0,
        in_flight=1.0,
        host=0.0,
        overheads=load_overheads(),
    )


def _saved(case: UnitCase, index: int) -> float:
    """Bytes that one part of a unit keeps of a micro-batch."""
    unit = case.model.units[index]
    scale = case.value_bytes / case.model.value_bytes
    return case.micro_batch * (unit.fixed_bytes + (unit.saved_bytes - unit.fixed_bytes) * scale)


def _time(case: UnitCase, machine: Machine, ceilings: Ceilings) -> StepTime:
    model, wires, bandwidth = case.model, Wires(machine, ceilings), machine_bandwidth(machine) * ceilings.memory
    # One micro-batch, forward and backward
    rate = machine.peak("bf16" if case.low_bits else case.precision) * ceilings.matmul
    saved = sum(unit.count * _saved(case, index) for index, unit in enumerate(model.units))
    once = {
        PRODUCTS: model.flops_per_sample * case.micro_batch / rate,
        MOVES: (FORWARD_MOVES + BACKWARD_MOVES) * saved / bandwidth,
    }
    if case.dp_shard > 1:
        size, group = model.parameters, CollectiveGroup(case.dp_shard)
        messages = 2 * wires.seconds("all_gather", size * case.value_bytes, group)
        messages += wires.seconds("reduce_scatter", size * STATE_BYTES, group)
        once[SHARDS] = exposed(messages, ceilings.overlap * sum(once.values()))
    # Once a step
    elements = model.parameters / case.dp_shard
    gradients = wires.seconds("all_reduce", elements * STATE_BYTES, CollectiveGroup(case.dp_replicate, case.dp_shard))
    items = {name: case.micro_batches * seconds for name, seconds in once.items()}
    items[GRADIENTS] = exposed(gradients, ceilings.overlap * (BACKWARD_SHARE * sum(once.values())))
    items[OPTIMIZER] = ceilings.optimizer_passes * elements * UPDATE_BYTES / bandwidth
    return total_time(items, ceilings)


# --- the plan: copies or shards, the micro-batch, the whole run


@dataclass(frozen=True)
class UnitPlanResult:
    """The cases that fit, best first; `shown` is the best, or the one with least memory if nothing fits."""

    machine: Machine
    world: int
    terms: JobTerms
    fitting: tuple[UnitEstimate, ...]
    shown: UnitEstimate
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
    laid_out: bool = False,
) -> UnitPlanResult:
    """Price every micro-batch, with copies and with shards; only those of the case if it is `laid_out`.

    Raises UserError if the batch does not split.
    """
    shards = [case.dp_shard] if laid_out else [1, world] if world > 1 else [1]
    # If the batch does not split over the ranks, the case itself raises with what is allowed.
    sizes = divisors(case.global_batch // world) if case.global_batch % world == 0 else [1]
    priced = [
        estimate_units(replace(case, dp_replicate=world // shard, dp_shard=shard, micro_batch=size), machine)
        for shard in shards
        for size in ([case.micro_batch] if laid_out else sizes)
    ]
    # Fastest first; among those as fast as the fastest, copies before shards and large passes before small.
    fitting = sorted((each for each in priced if each.fits), key=lambda each: each.time.seconds)
    near = fitting[0].time.seconds * (1 + NEAR) if fitting else 0.0
    fitting.sort(
        key=lambda each: (each.case.dp_shard > 1, -each.case.micro_batch) if each.time.seconds <= near else (2, 0)
    )
    shown = fitting[0] if fitting else min(priced, key=lambda each: each.peak.device)
    run = None
    if fitting and length:
        scale = Scale(case.global_batch, tokens_per_sample, 1)
        run, note = price_run(length, scale, shown.time.seconds, case.model.parameters, world, machine, terms)
        assumed = (*assumed, note)
    return UnitPlanResult(
        machine, world, terms, tuple(fitting), shown, run, assumed, list_warnings(terms, -(-world // machine.per_node))
    )
