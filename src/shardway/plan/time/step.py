"""The time of one optimizer step, item by item, from the passes of each pipeline stage.

Invariants:
- Items of a stage are sums of items of its layers and ends.
- Items of the step add up to the step.

Sources: the tensor axis' messages: Shoeybi et al., arXiv:1909.08053, section 3, and Korthikanti et al.,
arXiv:2205.05198, section 4.2.2; shards: Zhao et al., arXiv:2304.11277, section 3.3; context: Liu et al.,
arXiv:2310.01889; experts: Lepikhin et al., arXiv:2006.16668, section 3.2; bubbles: Narayanan et al., arXiv:2104.04473,
section 2.2; zero bubble: Qi et al., arXiv:2401.10241, section 2 and 6; what is sent once a step: Rajbhandari et al.,
arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardway.plan.case import Case
from shardway.plan.machine import Machine
from shardway.plan.memory import LocalParameters, count_local, layer_dense, layer_experts
from shardway.plan.shapes.architecture import LayerRun, LayerShape
from shardway.plan.stages import StageLayers, list_stages
from shardway.plan.time.ceilings import Ceilings, CollectiveGroup, Wires
from shardway.plan.time.operators import LayerSeconds, Operators

# --- one micro-batch through a layer and a stage

Items = dict[str, float]

PRODUCTS, ATTENTION, MOVES = "products", "attention", "other operators"
TENSOR, CONTEXT, EXPERTS, SHARDS = "tensor messages", "context messages", "expert messages", "shard messages"
HOST = "waiting for the host"

BACKWARD_KERNELS = 2
"""Operators of a backward pass per forward one."""
HIDDEN_RING = 0.8
"""Part of attention behind which a ring's messages hide."""
CONTENTION = 0.1
"""The slowdown of computation while messages run beside it, as a fraction of their time."""
LOSS_BYTES, FUSED_LOSS_BYTES = 40, 10
"""Bytes moved per logit: a cast to fp32 (2 + 4), a softmax in fp32 (8 + 4), its gradient (4 + 8 + 4), a cast back
(4 + 2). As one operator: 16-bit logits are read twice, and their gradient is written and read once, with sums."""


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that exchange data, by axis; tp is innermost, then cp, then shards, then stages."""

    tp: CollectiveGroup
    cp: CollectiveGroup
    shards: CollectiveGroup
    experts: CollectiveGroup
    expert_shards: CollectiveGroup
    copies: CollectiveGroup
    stage_stride: int


def groups_of(case: Case) -> Groups:
    """The position of ranks: neighbours on the axes with most traffic are nearest."""
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
    """The sum of items, each part with its factor."""
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
        """Items of each stage, priced once for equal stages."""
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
        """One layer: forward, recompute if any, and backward."""
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
        """Adding the gradients of a pass to sums in memory, for all weights of a rank."""
        case = self.case
        if case.zero not in (1, 2) or not case.engine.sums_apart:
            return 0.0
        elements = layer_dense(layer, case) + layer_experts(layer, case)
        moved = elements * (case.value_bytes + 2 * case.gradient_bytes)
        return self.ceilings.sums * moved / self.operators.bandwidth

    def _host(self, priced: LayerSeconds) -> float:
        """Host time to start every operator; the device waits for it if it is faster."""
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
        """Two collectives forward and two backward. Split by sequence, the backward pass gathers its inputs once more,
        unless they were kept whole."""
        tp = self.groups.tp
        if not self.case.sequence:
            return self.wires.seconds("all_reduce", stream, tp) * (4 + 2 * again)
        gather = self.wires.seconds("all_gather", stream, tp)
        gathers = 4 if self.case.engine.whole_regions else 6
        return gather * (gathers + 2 * again) + self.wires.seconds("reduce_scatter", stream, tp) * (4 + 2 * again)

    def _context(self, run: LayerRun, priced: LayerSeconds, again: int) -> float:
        """Keys and values travel round the ring, in the backward pass with their gradients."""
        case = self.case
        kv = case.side_tokens(run.side) * run.layer.attention.kv_width * case.value_bytes / case.degrees.tp
        ring = (case.degrees.cp - 1) * self.wires.send(kv, self.groups.cp.stride)
        forward = max(0.0, ring - HIDDEN_RING * priced.attention.forward)
        return (1 + again) * forward + max(0.0, 2 * ring - HIDDEN_RING * priced.attention.backward)

    def _gathered(self, layer: LayerShape, busy: float) -> Items:
        """Messages that computation does not hide: gathering a layer's weights, and scattering its gradients."""
        if self.case.zero < 3 or self.case.degrees.shards == 1:
            return {}
        messages = self._shard_seconds(layer_dense(layer, self.case), layer_experts(layer, self.case))
        if self.case.engine.by_parameter:
            messages += 3 * len(layer.matrices) * self.wires.start(self.groups.shards)
        hidden = min(messages, self.ceilings.overlap * busy)
        return {SHARDS: messages - hidden + CONTENTION * hidden}

    def _shard_seconds(self, dense: float, experts: float) -> float:
        """Gather before use (and again before the backward pass), scatter the gradient, in every micro-batch."""
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
    """Every second product's share of a layer's FLOPs: keys, the one after attention, up (or down, without a gate)."""
    second = {"kv": 0.5, "o": 1.0, "ffn_up": 0.5 if layer.gated else 0.0, "ffn_down": 0.0 if layer.gated else 1.0}
    flops = sum(
        second.get(matrix.name, 0.5) * matrix.flops_per_token for matrix in layer.matrices if matrix.name != "q"
    )
    return flops / layer.matmul_flops_per_token


# --- the whole step

STAGES, BUBBLE = "stage messages", "bubble"
GRADIENTS, WEIGHTS = "gradient messages", "weight messages"
OPTIMIZER, REST = "optimizer", "rest of the step"

TIME_ITEMS: Mapping[str, str] = MappingProxyType(
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
"""The items of a step."""

UPDATE_BYTES = 34
"""Bytes that AdamW moves per parameter: it reads and writes weight and two moments in fp32, reads the gradient, writes
16 bits, and clips."""
HOST_LINK = 20e9
"""Bytes per second between a device and its host, one direction; an assumption: what PCIe 4.0 with 16 lanes reaches."""
HOST_MEMORY = 25e9
"""Bytes per second of the host's memory per rank; an assumption: an eighth of a node with two sockets."""
LEAST_EXPOSED = 0.1
"""The fraction of a hidden message that is exposed: the last bucket has nothing to hide behind."""
BACKWARD_SHARE = 2 / 3
"""The fraction of a pass behind which messages hide."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by item; the interval holds four of five measured steps."""

    items: Mapping[str, float]
    low: float
    high: float

    @property
    def seconds(self) -> float:
        """The sum of all items."""
        return sum(self.items.values())


def estimate_step(case: Case, machine: Machine, ceilings: Ceilings) -> StepTime:
    """Price a step. Raises UserError if the machine has no rate for the precision."""
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
    ordered = {name: items[name] for name in TIME_ITEMS if items.get(name)}
    return StepTime(MappingProxyType(ordered), seconds * ceilings.low, seconds * ceilings.high)


def _pipeline(case: Case, passer: Passer, totals: list[float], slowest: int) -> Items:
    """The pipeline's additions to the slowest stage's own work."""
    ranks = case.degrees.pp
    if ranks == 1:
        return {}
    others = (sum(totals) - totals[slowest]) / (ranks - 1)
    bubble = others * _bubble_passes(case)
    send = _send_seconds(case, passer)
    # One of the two messages of a micro-batch travels during the computation on the other.
    return {BUBBLE: bubble, STAGES: (case.micro_batches * case.stages_per_rank + 2 * (ranks - 1)) * send}


def _bubble_passes(case: Case) -> float:
    """The idle time of a rank in a step, in passes of a micro-batch through another rank.

    One stage of each other rank, forward and backward; with fewer micro-batches than ranks an interleaved pipeline
    idles once more for each further stage of a rank. Zero-bubble schedules fill all but a third with gradients of
    weights, the V all but a forward pass.
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
    """The work of a rank of the slowest stage that occurs once per step."""

    def __init__(self, passer: Passer, stage: StageLayers) -> None:
        self.passer, self.case, self.stage = passer, passer.case, stage
        self.local: LocalParameters = count_local(self.case, stage)

    def items(self, pass_seconds: float) -> Items:
        """`pass_seconds`: one micro-batch through the stage; messages may hide behind its backward pass."""
        cover = self.passer.ceilings.overlap * BACKWARD_SHARE * pass_seconds / self.case.stages_per_rank
        engine = self.case.engine
        gradients = _exposed(self._gradients(), cover if engine.overlaps_gradients else 0.0)
        weights = _exposed(self._weights(), cover / 2 if engine.overlaps_parameters else 0.0)
        return {GRADIENTS: gradients, WEIGHTS: weights, OPTIMIZER: self._update()}

    def _gradients(self) -> float:
        """Gradients summed over the ranks that share states, then over copies."""
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
        """All elements, exchanged with the ranks that share their states; by parameter each has a start-up time."""
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
        once per step, or, if weights themselves are kept there, each time that they are gathered."""
        case = self.case
        gathers = case.micro_batches * (2 if case.reshard else 1) if case.zero == 3 else 1
        moved = elements * (case.gradient_bytes + gathers * case.value_bytes)
        return moved / HOST_LINK + elements * UPDATE_BYTES / HOST_MEMORY


def _exposed(messages: float, cover: float) -> float:
    """Seconds of messages that nothing hides."""
    return max(messages - cover, LEAST_EXPOSED * messages)
