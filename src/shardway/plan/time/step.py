"""The time of one optimizer step, item by item.

Invariant: items add up to the step. This module must not price an operator.

Sources: bubbles: Narayanan et al., arXiv:2104.04473, section 2.2; zero bubble: Qi et al., arXiv:2401.10241, section 2
and 6; what is sent once a step: Rajbhandari et al., arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardway.plan.case import Case
from shardway.plan.machine import Machine
from shardway.plan.memory.parameters import LocalParameters, count_local
from shardway.plan.stages import StageLayers, list_stages
from shardway.plan.time.ceilings import Ceilings
from shardway.plan.time.collectives import CollectiveGroup
from shardway.plan.time.passes import (
    ATTENTION,
    CONTEXT,
    EXPERTS,
    HOST,
    MOVES,
    PRODUCTS,
    SHARDS,
    TENSOR,
    Items,
    Passer,
    add_items,
)

STAGES, BUBBLE = "stage messages", "bubble"
GRADIENTS, WEIGHTS = "gradient messages", "weight messages"
OPTIMIZER, REST = "optimizer", "rest of the step"

ITEMS: Mapping[str, str] = MappingProxyType(
    {
        PRODUCTS: "matrix products, forward and backward, and again where they are recomputed",
        ATTENTION: "scores and sums of values",
        MOVES: "norms, activations, residuals, casts, the loss: bound by memory",
        HOST: "the device waits while the host starts operators",
        TENSOR: "activations between ranks of the tensor axis",
        CONTEXT: "keys and values between ranks of the context axis that attention does not hide",
        EXPERTS: "tokens to experts and back",
        SHARDS: "shared weights and gradients that computation does not hide, and what they slow down",
        STAGES: "activations between pipeline stages",
        BUBBLE: "pipeline ranks wait for the first and the last micro-batch",
        GRADIENTS: "gradients between ranks with the same weights, beyond what the backward pass hides",
        WEIGHTS: "updated weights back to all ranks, beyond what is hidden",
        OPTIMIZER: "the update",
        REST: "reading data, logging, starting the step",
    }
)
"""What a step consists of."""

UPDATE_BYTES = 34
"""Bytes that AdamW moves per parameter: reads and writes weight and two moments in fp32, reads the gradient, writes 16
bits, and clips."""
HOST_LINK = 20e9
"""Bytes per second between a device and its host, one direction: an assumption, what PCIe 4.0 with 16 lanes reaches."""
HOST_MEMORY = 25e9
"""Bytes per second of the host's memory for each rank: an assumption, an eighth of a node with two sockets."""
LEAST_EXPOSED = 0.1
"""Part of a hidden message that is seen all the same: the last bucket has nothing to hide behind."""
BACKWARD_SHARE = 2 / 3
"""Of a pass."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they go to; the interval holds four of five measured steps."""

    items: Mapping[str, float]
    low: float
    high: float

    @property
    def seconds(self) -> float:
        """All items."""
        return sum(self.items.values())


def estimate_step(case: Case, machine: Machine, ceilings: Ceilings) -> StepTime:
    """Price a step. Raises UserError where the machine has no rate for the precision."""
    stages = list_stages(case)
    passer = Passer(case, machine, ceilings)
    priced = passer.stages(stages)
    totals = [sum(items.values()) for items in priced]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    items = add_items(
        (priced[slowest], float(case.micro_batches)),
        (_pipeline(case, passer, totals, slowest), 1.0),
        (_Once(passer, stages[slowest]).items(totals[slowest]), 1.0),
    )
    items[REST] = ceilings.step_s
    seconds = sum(items.values())
    ordered = {name: items[name] for name in ITEMS if items.get(name)}
    return StepTime(MappingProxyType(ordered), seconds * ceilings.low, seconds * ceilings.high)


def _pipeline(case: Case, passer: Passer, totals: list[float], slowest: int) -> Items:
    """What the pipeline adds to the slowest stage's own work."""
    ranks = case.degrees.pp
    if ranks == 1:
        return {}
    others = (sum(totals) - totals[slowest]) / (ranks - 1)
    bubble = others * _bubble_passes(case)
    send = _send_seconds(case, passer)
    # One of the two messages of a micro-batch is on its way while the other is computed with.
    return {BUBBLE: bubble, STAGES: (case.micro_batches * case.stages_per_rank + 2 * (ranks - 1)) * send}


def _bubble_passes(case: Case) -> float:
    """What a rank waits in a step, in passes of a micro-batch through another rank.

    One stage of each other rank, there and back; with fewer micro-batches than ranks an interleaved pipeline runs dry
    once more for each further stage of a rank. Zero-bubble schedules fill all but a third with gradients of weights,
    the V all but a forward pass.
    """
    ranks, per_rank = case.degrees.pp, case.stages_per_rank
    stages = ranks - 1 + (per_rank - 1) * max(0, ranks - case.micro_batches)
    filled = {"zero_bubble": 1 / 3, "zbv": 1 / 3}.get(case.schedule, 1.0)
    return stages * filled / per_rank


def _send_seconds(case: Case, passer: Passer) -> float:
    stream = case.tokens * case.model.hidden * case.value_bytes
    gathers = case.degrees.tp > 1 and not case.sequence and case.engine.splits_sends
    split = case.degrees.tp if gathers else case.stream_split
    send = passer.wires.send(stream / split, passer.groups.stage_stride)
    return send + (passer.wires.seconds("all_gather", stream, passer.groups.tp) if gathers else 0.0)


class _Once:
    """What happens once a step on a rank of the slowest stage."""

    def __init__(self, passer: Passer, stage: StageLayers) -> None:
        self.passer, self.case, self.stage = passer, passer.case, stage
        self.local: LocalParameters = count_local(self.case, stage)

    def items(self, pass_seconds: float) -> Items:
        """`pass_seconds`: one micro-batch through the stage, behind whose backward pass messages may hide."""
        cover = self.passer.ceilings.overlap * BACKWARD_SHARE * pass_seconds / self.case.stages_per_rank
        engine = self.case.engine
        gradients = _exposed(self._gradients(), cover if engine.overlaps_gradients else 0.0)
        weights = _exposed(self._weights(), cover / 2 if engine.overlaps_parameters else 0.0)
        return {GRADIENTS: gradients, WEIGHTS: weights, OPTIMIZER: self._update()}

    def _gradients(self) -> float:
        """Summed over the ranks that share states, then over copies."""
        case, groups, size = self.case, self.passer.groups, self.case.gradient_bytes
        total = 0.0
        if case.zero < 3:
            kind: str = "reduce_scatter" if case.zero else "all_reduce"
            total += self._exchange(kind, size)
        shared = case.degrees.shards if case.zero >= 2 else 1
        return total + self.passer.wires.seconds("all_reduce", self.local.total * size / shared, groups.copies)

    def _weights(self) -> float:
        return self._exchange("all_gather", self.case.value_bytes) if self.case.zero in (1, 2) else 0.0

    def _exchange(self, kind: str, size: int) -> float:
        """Of all elements with the ranks that share their states; by parameter each message starts anew."""
        local, groups = self.local, self.passer.groups
        total = self._seconds(kind, (local.dense + local.ends) * size, groups.shards)
        total += self._seconds(kind, local.experts * size, groups.expert_shards)
        if self.case.engine.by_parameter and self.case.zero:
            messages = sum(run.count * (len(run.layer.matrices) + run.layer.norms) for run in self.stage.layers)
            total += messages * self.passer.wires.start(groups.shards)
        return total

    def _seconds(self, kind: str, size: float, group: CollectiveGroup) -> float:
        return self.passer.wires.seconds(kind, size, group)  # type: ignore[arg-type]

    def _update(self) -> float:
        local, degrees, zero = self.local, self.case.degrees, self.case.zero
        elements = local.total
        if zero:
            elements = (local.dense + local.ends) / degrees.shards + local.experts / degrees.expert_shards
        if self.case.offload:
            return self._update_on_host(elements)
        passes = self.passer.ceilings.optimizer_passes
        return passes * elements * UPDATE_BYTES / self.passer.operators.bandwidth

    def _update_on_host(self, elements: float) -> float:
        """Gradients go to the host, which updates (Ren et al., arXiv:2101.06840, section 4), and weights come back:
        once a step, or, where weights themselves are kept there, each time that they are gathered."""
        case = self.case
        gathers = case.micro_batches * (2 if case.reshard else 1) if case.zero == 3 else 1
        moved = elements * (case.gradient_bytes + gathers * case.value_bytes)
        return moved / HOST_LINK + elements * UPDATE_BYTES / HOST_MEMORY


def _exposed(messages: float, cover: float) -> float:
    """What of messages nothing hides."""
    return max(messages - cover, LEAST_EXPOSED * messages)
