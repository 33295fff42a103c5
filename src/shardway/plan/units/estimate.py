"""Memory and time of a step of a model that is known by its units, on ranks that share or copy its states.

Invariant: items are those of `plan.memory` and `plan.time`, and add up as theirs do. A unit is a black box: its
products run at the rate of large ones, and what it saves is all that passes through memory. This module must not choose
a layout.

Sources: states: Rajbhandari et al., arXiv:1910.02054, section 5; what FSDP gathers: Zhao et al., arXiv:2304.11277,
section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

from shardway.errors import Problem, check_no_problems
from shardway.plan.case import Optimizer, Precision
from shardway.plan.estimate import holds
from shardway.plan.machine import Machine
from shardway.plan.memory.breakdown import OPTIMIZER_BYTES, StageMemory
from shardway.plan.memory.overheads import Overheads, load_overheads
from shardway.plan.shapes.measured import Measured
from shardway.plan.time.ceilings import Ceilings, ceilings_of
from shardway.plan.time.collectives import CollectiveGroup, Wires
from shardway.plan.time.operators import machine_bandwidth
from shardway.plan.time.passes import MOVES, PRODUCTS, SHARDS
from shardway.plan.time.step import (
    BACKWARD_SHARE,
    GRADIENTS,
    ITEMS,
    LEAST_EXPOSED,
    OPTIMIZER,
    REST,
    UPDATE_BYTES,
    StepTime,
)

STATE_BYTES = 4
"""Of a weight and of a gradient, which are kept in fp32."""
FORWARD_MOVES, BACKWARD_MOVES = 2, 3
"""How often what a unit saves passes through memory: written and read; read, its gradient written and read."""


@dataclass(frozen=True, kw_only=True)
class UnitCase:
    """A step to be priced; batches count samples. Raises UserError that names everything that does not divide."""

    model: Measured
    global_batch: int
    micro_batch: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        check_no_problems(f"the plan of {self.model.name}", list(_find_problems(self)))

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> int:
        """Passes of one rank in a step."""
        return self.global_batch // (self.world * self.micro_batch)

    @property
    def low_bits(self) -> bool:
        """Whether products are in eight bits or less: those of a unit that is a black box count as in 16."""
        return self.precision in ("fp8", "mxfp8", "fp4")

    @property
    def value_bytes(self) -> int:
        """Of an activation and of a gathered weight."""
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
        """What a plan may use of a device."""
        return self.machine.memory_bytes * self.peak.overheads.usable

    @property
    def fits(self) -> bool:
        """Whether a device holds what a rank needs."""
        return holds(self.machine, self.peak, self.case.world)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        return self.case.global_batch / self.time.seconds

    @property
    def peak_flops(self) -> float:
        """The rate on paper that utilisation is measured by."""
        return self.machine.peak(self.case.precision)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1."""
        flops = self.case.model.flops_per_sample * self.samples_per_second
        return flops / self.case.world / self.peak_flops


def estimate_units(case: UnitCase, machine: Machine) -> UnitEstimate:
    """Price a case. Raises UserError where the machine has no rate for the precision."""
    return UnitEstimate(
        case, machine, _memory(case, load_overheads()), _Step(case, machine, ceilings_of(machine)).time()
    )


def _memory(case: UnitCase, overheads: Overheads) -> StageMemory:
    model, share = case.model, case.model.parameters / case.dp_shard
    saved = [_saved(case, index) for index in range(len(model.units))]
    largest = max(unit.parameters for unit in model.units)
    # The unit in use and the next, and one gradient that is summed in fp32.
    gathered = largest * (3 * case.value_bytes + STATE_BYTES) if case.dp_shard > 1 else 0.0
    return StageMemory(
        rank=0,
        weights=share * STATE_BYTES,
        gradients=share * STATE_BYTES,
        optimizer=share * OPTIMIZER_BYTES[case.optimizer],
        activations=sum(unit.count * size for unit, size in zip(model.units, saved, strict=True)),
        working=max(saved),
        gathered=gathered,
        messages=0.0,
        in_flight=1.0,
        host=0.0,
        overheads=overheads,
    )


def _saved(case: UnitCase, index: int) -> float:
    """Bytes that one of a unit's copies keeps of a micro-batch."""
    unit = case.model.units[index]
    scale = case.value_bytes / case.model.value_bytes
    return case.micro_batch * (unit.fixed_bytes + (unit.saved_bytes - unit.fixed_bytes) * scale)


class _Step:
    def __init__(self, case: UnitCase, machine: Machine, ceilings: Ceilings) -> None:
        self.case, self.machine, self.ceilings = case, machine, ceilings
        self.wires = Wires(machine, ceilings)

    @cached_property
    def bandwidth(self) -> float:
        return machine_bandwidth(self.machine) * self.ceilings.memory

    def time(self) -> StepTime:
        once = self._pass()
        items = {name: self.case.micro_batches * seconds for name, seconds in once.items()}
        items |= self._once(sum(once.values()))
        items[REST] = self.ceilings.step_s
        seconds = sum(items.values())
        ordered = {name: items[name] for name in ITEMS if items.get(name)}
        return StepTime(MappingProxyType(ordered), seconds * self.ceilings.low, seconds * self.ceilings.high)

    def _pass(self) -> Mapping[str, float]:
        """One micro-batch, forward and backward."""
        case = self.case
        rate = self.machine.peak("bf16" if case.low_bits else case.precision) * self.ceilings.matmul
        saved = sum(unit.count * _saved(case, index) for index, unit in enumerate(case.model.units))
        items = {
            PRODUCTS: case.model.flops_per_sample * case.micro_batch / rate,
            MOVES: (FORWARD_MOVES + BACKWARD_MOVES) * saved / self.bandwidth,
        }
        if case.dp_shard > 1:
            size, group = case.model.parameters, CollectiveGroup(case.dp_shard)
            messages = 2 * self.wires.seconds("all_gather", size * case.value_bytes, group)
            messages += self.wires.seconds("reduce_scatter", size * STATE_BYTES, group)
            items[SHARDS] = self._exposed(messages, sum(items.values()))
        return items

    def _once(self, pass_seconds: float) -> Mapping[str, float]:
        case = self.case
        elements = case.model.parameters / case.dp_shard
        group = CollectiveGroup(case.dp_replicate, case.dp_shard)
        gradients = self.wires.seconds("all_reduce", elements * STATE_BYTES, group)
        update = self.ceilings.optimizer_passes * elements * UPDATE_BYTES / self.bandwidth
        return {GRADIENTS: self._exposed(gradients, BACKWARD_SHARE * pass_seconds), OPTIMIZER: update}

    def _exposed(self, messages: float, cover: float) -> float:
        return max(messages - self.ceilings.overlap * cover, LEAST_EXPOSED * messages)
