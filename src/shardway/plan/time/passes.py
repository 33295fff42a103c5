"""Seconds of one micro-batch through one layer and through one pipeline stage, by what they go to.

Invariant: items of a stage are sums of items of its layers and ends. This module must not know of schedules or of what
happens once a step.

Sources: the tensor axis' messages: Shoeybi et al., arXiv:1909.08053, section 3, and Korthikanti et al.,
arXiv:2205.05198, section 4.2.2; shards: Zhao et al., arXiv:2304.11277, section 3.3; context: Liu et al.,
arXiv:2310.01889; experts: Lepikhin et al., arXiv:2006.16668, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardway.plan.case import Case
from shardway.plan.machine import Machine
from shardway.plan.memory.parameters import layer_dense, layer_experts
from shardway.plan.shapes.architecture import LayerRun
from shardway.plan.shapes.layer import LayerShape
from shardway.plan.stages import StageLayers
from shardway.plan.time.ceilings import Ceilings
from shardway.plan.time.collectives import CollectiveGroup, Wires
from shardway.plan.time.operators import LayerSeconds, Operators

Items = dict[str, float]

PRODUCTS, ATTENTION, MOVES = "products", "attention", "other operators"
TENSOR, CONTEXT, EXPERTS, SHARDS = "tensor messages", "context messages", "expert messages", "shard messages"
HOST = "waiting for the host"

BACKWARD_KERNELS = 2
"""Operators of a backward pass for each one forward."""
HIDDEN_RING = 0.8
"""Part of attention behind which a ring's messages hide."""
CONTENTION = 0.1
"""What computation loses while messages run beside it, as a part of their time."""
LOSS_BYTES, FUSED_LOSS_BYTES = 40, 10
"""Moved per logit: a cast to fp32 (2 + 4), a softmax in fp32 (8 + 4), its gradient (4 + 8 + 4) and a cast back (4 + 2);
where all is one operator, logits in 16 bits are read twice and their gradient is written and read once, with sums."""


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that exchange something, by axis; tp is innermost, then cp, then shards, then stages."""

    tp: CollectiveGroup
    cp: CollectiveGroup
    shards: CollectiveGroup
    experts: CollectiveGroup
    expert_shards: CollectiveGroup
    copies: CollectiveGroup
    stage_stride: int


def groups_of(case: Case) -> Groups:
    """Where ranks stand: neighbours on the axes that talk most are nearest."""
    degrees = case.degrees
    inner = degrees.tp * degrees.shards
    return Groups(
        tp=CollectiveGroup(degrees.tp),
        cp=CollectiveGroup(degrees.cp, degrees.tp),
        shards=CollectiveGroup(degrees.shards, degrees.tp),
        experts=CollectiveGroup(degrees.ep, degrees.etp),
        expert_shards=CollectiveGroup(degrees.expert_shards, degrees.ep * degrees.etp),
        copies=CollectiveGroup(degrees.dp_replicate, inner * degrees.pp),
        stage_stride=inner,
    )


def add_items(*parts: tuple[Mapping[str, float], float]) -> Items:
    """Sums of items, each part with its factor."""
    total: Items = {}
    for items, factor in parts:
        for name, seconds in items.items():
            total[name] = total.get(name, 0.0) + factor * seconds
    return total


class Passer:
    """Prices the passes of micro-batches of a case."""

    def __init__(self, case: Case, machine: Machine, ceilings: Ceilings) -> None:
        self.case, self.ceilings = case, ceilings
        self.operators = Operators(case, machine, ceilings)
        self.wires = Wires(machine, ceilings, case.engine.rails)
        self.groups = groups_of(case)
        self._layers: dict[tuple[int, str], Items] = {}

    def stages(self, stages: Iterable[StageLayers]) -> list[Items]:
        """Items of each stage, priced once where stages are alike."""
        known: dict[tuple[tuple[LayerRun, ...], bool, bool], Items] = {}
        found = []
        for stage in stages:
            key = (stage.layers, stage.first, stage.last)
            if key not in known:
                known[key] = self._stage(stage)
            found.append(known[key])
        return found

    def _stage(self, stage: StageLayers) -> Items:
        parts = [(self._layer(run), float(run.count)) for run in stage.layers]
        ends = ([(self._head(), 1.0)] if stage.last else []) + ([(self._embedding(), 1.0)] if stage.first else [])
        return add_items(*parts, *ends)

    def _layer(self, run: LayerRun) -> Items:
        """Forward, perhaps again, and backward."""
        key = (id(run.layer), run.side)
        if key not in self._layers:
            priced = self.operators.layer(run)
            items = self._computed(run.layer, priced)
            items |= self._exchanged(run, priced)
            busy = sum(items.values())
            items[HOST] = max(0.0, self._host(priced) - busy)
            items |= self._gathered(run.layer, busy)
            self._layers[key] = items
        return self._layers[key]

    def _computed(self, layer: LayerShape, priced: LayerSeconds) -> Items:
        again = _computed_again(layer, self.case)
        return {
            PRODUCTS: (1 + again.products) * priced.products.forward + priced.products.backward,
            ATTENTION: (1 + again.attention) * priced.attention.forward + priced.attention.backward,
            MOVES: (1 + again.moves) * priced.moves.forward + priced.moves.backward + self._summed(layer),
        }

    def _summed(self, layer: LayerShape) -> float:
        """A pass' gradients of all weights that a rank has are read, and added to sums in memory."""
        case = self.case
        if case.zero not in (1, 2) or not case.engine.sums_apart:
            return 0.0
        elements = layer_dense(layer, case) + layer_experts(layer, case)
        moved = elements * (case.value_bytes + 2 * case.gradient_bytes)
        return self.ceilings.sums * moved / self.operators.bandwidth

    def _host(self, priced: LayerSeconds) -> float:
        """What starting every operator takes, which the device waits for where it is faster."""
        again = 1 if self.case.recompute in ("full", "operators", "products") else 0
        return self.ceilings.kernel_s * priced.kernels * (1 + again + BACKWARD_KERNELS)

    def _exchanged(self, run: LayerRun, priced: LayerSeconds) -> Items:
        case, items = self.case, {}
        again = 1 if case.recompute == "full" else 0
        stream = case.side_tokens(run.side) * run.layer.hidden * case.value_bytes
        if case.degrees.tp > 1:
            items[TENSOR] = self._tensor(stream, again) * (1 - self.ceilings.async_tensor * case.async_tensor)
        if case.degrees.cp > 1:
            items[CONTEXT] = self._context(run, priced, again)
        if run.layer.experts is not None and case.degrees.ep > 1:
            share = case.degrees.tp if case.degrees.etp == 1 else 1
            rows = stream * run.layer.experts.per_token / share
            items[EXPERTS] = self.wires.seconds("all_to_all", rows, self.groups.experts) * (4 + 2 * again)
        return items

    def _tensor(self, stream: float, again: int) -> float:
        """Two crossings forward and two backward; split by sequence, the way back gathers its inputs once more, unless
        they were kept whole."""
        tp = self.groups.tp
        if not self.case.sequence:
            return self.wires.seconds("all_reduce", stream, tp) * (4 + 2 * again)
        gather = self.wires.seconds("all_gather", stream, tp)
        gathers = 4 if self.case.engine.whole_regions else 6
        return gather * (gathers + 2 * again) + self.wires.seconds("reduce_scatter", stream, tp) * (4 + 2 * again)

    def _context(self, run: LayerRun, priced: LayerSeconds, again: int) -> float:
        """Keys and values go round, and their gradients beside them on the way back."""
        case = self.case
        kv = case.side_tokens(run.side) * run.layer.attention.kv_width * case.value_bytes / case.degrees.tp
        ring = (case.degrees.cp - 1) * self.wires.send(kv, self.groups.cp.stride)
        forward = max(0.0, ring - HIDDEN_RING * priced.attention.forward)
        return (1 + again) * forward + max(0.0, 2 * ring - HIDDEN_RING * priced.attention.backward)

    def _gathered(self, layer: LayerShape, busy: float) -> Items:
        """What computation does not hide of a layer's weights on their way to it, and of its gradients back."""
        if self.case.zero < 3 or self.case.degrees.shards == 1:
            return {}
        messages = self._shard_seconds(layer_dense(layer, self.case), layer_experts(layer, self.case))
        if self.case.engine.by_parameter:
            messages += 3 * len(layer.matrices) * self.wires.start(self.groups.shards)
        hidden = min(messages, self.ceilings.overlap * busy)
        return {SHARDS: messages - hidden + CONTENTION * hidden}

    def _shard_seconds(self, dense: float, experts: float) -> float:
        """Gather before use (and again before the way back), scatter the gradient, in every micro-batch."""
        case, total = self.case, 0.0
        gathers = 2 if case.reshard else 1 / case.micro_batches
        scatters = 1 if case.reshard else 1 / case.micro_batches
        for elements, group in ((dense, self.groups.shards), (experts, self.groups.expert_shards)):
            total += gathers * self.wires.seconds("all_gather", elements * case.value_bytes, group)
            total += scatters * self.wires.seconds("reduce_scatter", elements * case.gradient_bytes, group)
        return total

    def _head(self) -> Items:
        """The output layer and the loss."""
        case, tp = self.case, self.case.degrees.tp
        tokens = case.micro_batch if case.model.patch_features else case.tokens
        product = self.operators.product(case.model.head, tokens)
        moves = FUSED_LOSS_BYTES if case.fused_loss else LOSS_BYTES
        logits = tokens * case.model.vocab / (tp if case.engine.splits_loss else 1)
        items = {PRODUCTS: product.forward + product.backward, MOVES: logits * moves / self.operators.bandwidth}
        if case.zero == 3 and case.degrees.shards > 1:
            messages = self._shard_seconds(case.model.head.parameters / tp, 0.0)
            items[SHARDS] = (1 - self.ceilings.overlap) * messages
        return items

    def _embedding(self) -> Items:
        moved = 6 * self.case.tokens * self.case.model.hidden * self.case.value_bytes / self.case.stream_split
        return {MOVES: moved / self.operators.bandwidth}


@dataclass(frozen=True)
class _Again:
    """Parts of a forward pass that the backward pass computes again."""

    products: float
    attention: float
    moves: float


def _computed_again(layer: LayerShape, case: Case) -> _Again:
    if case.recompute == "none":
        return _Again(0.0, 0.0, 0.0)
    if case.recompute == "full":
        return _Again(1.0, 1.0, 1.0)
    if case.recompute == "selective":
        return _Again(0.0, 0.0 if case.flash else 1.0, 0.0)
    return _Again(every_second(layer) if case.recompute == "operators" else 0.0, 0.0, 1.0)


def every_second(layer: LayerShape) -> float:
    """Part of a layer's FLOPs in every second product: keys, the one after attention, up (or down, without a gate)."""
    second = {"kv": 0.5, "o": 1.0, "ffn_up": 0.5 if layer.gated else 0.0, "ffn_down": 0.0 if layer.gated else 1.0}
    flops = sum(
        second.get(matrix.name, 0.5) * matrix.flops_per_token for matrix in layer.matrices if matrix.name != "q"
    )
    return flops / layer.matmul_flops_per_token
