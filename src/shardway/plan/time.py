"""The time of one optimizer step, item by item, from the passes of each pipeline stage.

Invariants:
- An operator takes the longer of its arithmetic and its memory traffic (Williams et al., Roofline, CACM 52 (2009),
  doi:10.1145/1498765.1498785). Messages and pipelines are priced elsewhere.
- Items of a stage are sums of items of its layers and ends.
- Items of the step add up to the step.

Sources: fused attention: Dao, arXiv:2307.08691, sections 3.1 and 4 (its backward pass has 2.5 times the forward FLOPs,
since scores are computed again); products are slower if rows are no multiples of 16 bytes: NVIDIA, Matrix
Multiplication Background User's Guide, section 3.1; moves of norms and activations follow from their definitions; the
tensor axis' messages: Shoeybi et al., arXiv:1909.08053, section 3, and Korthikanti et al., arXiv:2205.05198, section
4.2.2; shards: Zhao et al., arXiv:2304.11277, section 3.3; context: Liu et al., arXiv:2310.01889; experts: Lepikhin et
al., arXiv:2006.16668, section 3.2; bubbles: Narayanan et al., arXiv:2104.04473, section 2.2; zero bubble: Qi et al.,
arXiv:2401.10241, section 2 and 6; what is sent once a step: Rajbhandari et al., arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from shardway.plan.case import Case, StageLayers, list_stages
from shardway.plan.machine import Ceilings, CollectiveGroup, Kind, Machine, Wires
from shardway.plan.memory import LocalParameters, count_layer, count_local, matrix_split
from shardway.plan.shapes.architecture import AttentionShape, LayerRun, LayerShape, Matrix

# --- operators of one layer on one rank

FLASH_BACKWARD_FLOPS = 2.5
HEAD_WIDTH = 128
"""Width of a head for which fused kernels are made; narrower heads use their tiles less well."""
HEAD_LOSS = 0.3
PADDED_TO = 128
"""A padded vocabulary is a multiple of this."""
CAST_BYTES = 6
"""Bytes moved to copy a number from fp32 to 16 bits, or back."""
ALIGNED_BYTES = 16
"""Bytes that tensor cores read at once; rows of other multiples take slower kernels."""

EAGER_KERNELS, FUSED_KERNELS, COMPILED_KERNELS = 45, 28, 24
"""Operators of a layer's forward pass, counted in eager GPT blocks, in blocks of fused modules, and compiled."""
SCORE_KERNELS, TENSOR_KERNELS, EXPERT_KERNELS, CAST_KERNELS = 8, 4, 30, 20
"""Operators added by unfused attention, the tensor axis, experts and casts to eight bits."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.forward + other.forward, self.backward + other.backward)


NOTHING = PassTimes(0.0, 0.0)


def machine_bandwidth(machine: Machine) -> float:
    """Bytes per second of an accelerator's memory on paper."""
    return machine.accelerator.memory_bandwidth_bytes_per_s or 1e12


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


# --- the items and constants of a step

STAGES, BUBBLE = "stage messages", "bubble"
GRADIENTS, WEIGHTS = "gradient messages", "weight messages"
OPTIMIZER, REST = "optimizer", "rest of the step"

TIME_ITEMS: Mapping[str, str] = {
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


# --- the price of a step


class StepPricer:
    """Prices operators, passes of micro-batches, and what occurs once a step, of a case on a machine."""

    def __init__(self, case: Case, machine: Machine, ceilings: Ceilings) -> None:
        self.case, self.machine, self.ceilings = case, machine, ceilings
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
        if stage.last:
            parts.append((self._head(), 1.0))
        if stage.first:  # the embedding
            moved = 6 * self.case.tokens * self.case.model.hidden * self.case.value_bytes / self.case.stream_split
            parts.append(({MOVES: moved / self.bandwidth}, 1.0))
        return add_items(*parts)

    def _layer(self, run: LayerRun) -> Items:
        """One layer: forward, recompute if any, and backward."""
        key = (id(run.layer), run.side)
        if key in self._layers:
            return self._layers[key]
        case, layer, tokens = self.case, run.layer, self.case.side_tokens(run.side)
        seq = case.model.side_seq(run.side, case.seq_len)
        products, attention, moves = NOTHING, NOTHING, self._moves(layer, tokens)
        for matrix in layer.matrices:
            products = products + self.product(matrix, tokens)
        for each in layer.attentions:
            attention = attention + self._attention(each, tokens, seq)
        again = _computed_again(layer, case)
        summed = 0.0
        if case.zero in (1, 2) and case.engine.sums_apart:
            # Gradients of a pass are added to sums in memory, for all weights of a rank.
            moved = sum(count_layer(layer, case)) * (case.value_bytes + 2 * case.gradient_bytes)
            summed = self.ceilings.sums * moved / self.bandwidth
        items = {
            PRODUCTS: (1 + again[0]) * products.forward + products.backward,
            ATTENTION: (1 + again[1]) * attention.forward + attention.backward,
            MOVES: (1 + again[2]) * moves.forward + moves.backward + summed,
        }
        items |= self._exchanged(run, attention)
        busy = sum(items.values())
        # Host time to start every operator; the device waits for it if it is faster.
        passes = 1 + (1 if case.recompute in ("full", "operators", "products") else 0) + BACKWARD_KERNELS
        items[HOST] = max(0.0, self.ceilings.kernel_s * self._kernels(layer) * passes - busy)
        items |= self._gathered(layer, busy)
        self._layers[key] = items
        return items

    def _exchanged(self, run: LayerRun, attention: PassTimes) -> Items:
        case, items = self.case, {}
        again = 1 if case.recompute == "full" else 0
        stream = case.side_tokens(run.side) * run.layer.hidden * case.value_bytes
        if case.degrees.tp > 1:
            items[TENSOR] = self._tensor(stream, again) * (1 - self.ceilings.async_tensor * case.async_tensor)
        if case.degrees.cp > 1:
            items[CONTEXT] = self._context(run, attention, again)
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

    def _context(self, run: LayerRun, attention: PassTimes, again: int) -> float:
        """Keys and values travel round the ring, in the backward pass with their gradients."""
        case = self.case
        kv = case.side_tokens(run.side) * run.layer.attention.kv_width * case.value_bytes / case.degrees.tp
        ring = (case.degrees.cp - 1) * self.wires.send(kv, self.groups.cp.stride)
        forward = max(0.0, ring - HIDDEN_RING * attention.forward)
        return (1 + again) * forward + max(0.0, 2 * ring - HIDDEN_RING * attention.backward)

    def _gathered(self, layer: LayerShape, busy: float) -> Items:
        """Messages that computation does not hide: gathering a layer's weights, and scattering its gradients."""
        if self.case.zero < 3 or self.case.degrees.shards == 1:
            return {}
        messages = self._shard_seconds(*count_layer(layer, self.case))
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
        product = self.product(case.model.head, tokens)
        moves = FUSED_LOSS_BYTES if case.fused_loss else LOSS_BYTES
        logits = tokens * case.model.vocab / (tp if case.engine.splits_loss else 1)
        items = {PRODUCTS: product.forward + product.backward, MOVES: logits * moves / self.bandwidth}
        if case.zero == 3 and case.degrees.shards > 1:
            messages = self._shard_seconds(case.model.head.parameters / tp, 0.0)
            items[SHARDS] = (1 - self.ceilings.overlap) * messages
        return items

    # --- operators

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that memory-bound operators reach."""
        return machine_bandwidth(self.machine) * self.ceilings.memory

    @cached_property
    def rate(self) -> float:
        """FLOP/s of large products in the wider format."""
        return self.machine.peak(self._wide) * self.ceilings.matmul * self._clock

    @property
    def _wide(self) -> str:
        return "bf16" if self.case.low_bits else self.case.precision

    @cached_property
    def low_rate(self) -> float:
        """FLOP/s of large products in the format of the case, if that has eight bits or less."""
        if self.case.precision == "fp4" and self.machine.accelerator.peak("fp4"):
            return self.machine.peak("fp4") * self.ceilings.matmul_fp4 * self._clock
        return self.machine.peak("fp8") * self.ceilings.matmul_low * self._clock

    @cached_property
    def _clock(self) -> float:
        return float(self.machine.power_share**self.ceilings.power)

    def product(self, matrix: Matrix, tokens: int) -> PassTimes:
        """All products with a matrix: forward, then for the gradients of inputs and of weights."""
        split, copies, rows = matrix_split(matrix, self.case), 1.0, tokens
        if matrix.part == "experts":
            degrees = self.case.degrees
            copies, split = matrix.copies / degrees.ep, degrees.etp
            # Tokens of one expert, from all ranks that it serves, evenly shared
            shared = degrees.tp if degrees.etp == 1 else 1
            rows = max(1, round(tokens * matrix.met * degrees.ep / matrix.copies / shared))
        elif matrix.split == "none":
            rows = max(1, tokens // self.case.stream_split)
        outputs = max(1, matrix.outputs // split) if matrix.split == "outputs" else matrix.outputs
        inputs = max(1, matrix.inputs // split) if matrix.split == "inputs" else matrix.inputs
        if matrix.part == "head" and split > 1 and self.case.engine.pads_vocab:
            outputs = -(-outputs // PADDED_TO) * PADDED_TO
        low = self.case.low_bits and matrix.part not in ("router", "head")
        if not self._aligned(inputs, outputs):
            copies *= 1 + self.ceilings.misaligned
        back = self._gemm(rows, inputs, outputs, low) + self._gemm(inputs, outputs, rows, low)
        return PassTimes(copies * self._gemm(rows, outputs, inputs, low), copies * back)

    def _gemm(self, m: int, n: int, k: int, low: bool) -> float:
        """A product of m x k with k x n."""
        c, wide = self.ceilings, self.case.value_bytes
        ramp = (1 + c.matmul_ramp / k) * (1 + c.narrow_ramp / min(m, n))
        arithmetic = 2.0 * m * n * k / (self.low_rate if low else self.rate) * ramp
        traffic = (1 if low else wide) * (m * k + k * n) + wide * m * n
        return max(arithmetic, traffic / self.bandwidth)

    def _aligned(self, *sizes: int) -> bool:
        """Whether rows of these sizes fill whole units of what tensor cores read."""
        return all(size * self.case.value_bytes % ALIGNED_BYTES == 0 for size in sizes)

    def _attention(self, attention: AttentionShape, tokens: int, seq: int) -> PassTimes:
        """Scores and sums of values."""
        if not self.case.flash:
            return self._plain_attention(attention, tokens, seq)
        flops = tokens * attention.core_flops_per_token(seq, causal=True) / self.case.degrees.tp
        width = attention.qk_width / attention.heads
        ramp = 1 + self.ceilings.flash_ramp / attention.mean_span(seq, True)
        ramp *= 1 + HEAD_LOSS * max(0.0, HEAD_WIDTH / width - 1)
        part: float = getattr(self.ceilings, self.case.attention)
        forward = flops * ramp / (self._wide_peak * part)
        return PassTimes(forward, forward * FLASH_BACKWARD_FLOPS / self.ceilings.flash_backward)

    @cached_property
    def _wide_peak(self) -> float:
        return self.machine.peak(self._wide) * self._clock

    def _plain_attention(self, attention: AttentionShape, tokens: int, seq: int) -> PassTimes:
        """Batched products that ignore the mask, and passes over the scores in memory."""
        case, c = self.case, self.ceilings
        flops = tokens * attention.core_flops_per_token(seq, causal=False) / case.degrees.tp
        width = attention.qk_width // attention.heads
        products = flops / (self._wide_peak * c.batched) * (2 / 3 + 2 / 3 * 64 / width)
        products *= 1.0 if self._aligned(width) else 1 + c.misaligned_batched
        scores = tokens * attention.heads * seq / case.degrees.tp * case.value_bytes
        passes = c.scores_passes * (1 if case.engine.fused_scores else 2)
        forward = products + scores * passes / self.bandwidth
        return PassTimes(forward, 2 * forward)

    def _moves(self, layer: LayerShape, tokens: int) -> PassTimes:
        """Norms, residuals, rotations, activations, dropout, casts: forward, and twice that backward."""
        case, c = self.case, self.ceilings
        size = case.value_bytes
        norm = 2.0 if case.engine.fused_norms or case.compiled else c.plain_norm
        passes = layer.hidden * (layer.norms * norm + 3 * (1 + len(layer.attentions)) + (1 if case.dropout else 0))
        stream = case.stream_bytes * c.stream * passes / case.stream_split
        moved = tokens * (stream + size * c.gates * self._gate_moves(layer)) + CAST_BYTES * self._casts(layer, tokens)
        if case.low_bits:  # read in 16 bits, write in 8, as it is and transposed
            inputs = 0.0
            for matrix in layer.matrices:
                split = matrix.split == "inputs" and matrix.part != "experts"
                inputs += matrix.met * (matrix.inputs / (matrix_split(matrix, case) if split else 1))
            moved += c.gates * size * tokens * inputs
        forward = moved / self.bandwidth
        return PassTimes(forward, 2 * forward)

    def _casts(self, layer: LayerShape, tokens: int) -> float:
        """Numbers copied to 16 bits if each product makes its own copies; compiled code fuses these copies."""
        case = self.case
        if not case.casts_each or case.compiled:
            return 0.0
        inputs = sum(each.input_products for each in layer.attentions) + layer.gate_products
        weights = sum(count_layer(layer, case)) if case.casts_weights else 0.0
        return tokens * inputs * layer.hidden + weights

    def _gate_moves(self, layer: LayerShape) -> float:
        fused = self.case.engine.fused_activations or self.case.compiled
        gate = (3 if fused else 5) if layer.gated else 2
        heads = sum(2 * (each.qk_width + each.kv_width) for each in layer.attentions)
        tp = self.case.degrees.tp
        if layer.experts is None:
            return (gate * layer.ffn + heads) / tp
        mixture = layer.experts
        width = gate * (mixture.dim * mixture.per_token + mixture.shared_dim)
        routed = 8 * mixture.per_token * layer.hidden / (tp if self.case.degrees.etp == 1 else 1)
        return (width + heads) / tp + routed

    def _kernels(self, layer: LayerShape) -> int:
        """Operators of a forward pass."""
        case = self.case
        own = COMPILED_KERNELS if case.compiled else EAGER_KERNELS if case.engine.eager else FUSED_KERNELS
        own += 0 if case.flash else SCORE_KERNELS
        own += TENSOR_KERNELS if case.degrees.tp > 1 else 0
        own += EXPERT_KERNELS if layer.experts is not None else 0
        return own + (CAST_KERNELS if case.low_bits else 0)

    # --- once a step

    def once(self, stage: StageLayers, pass_seconds: float) -> Items:
        """The work of a rank of a stage that occurs once per step. `pass_seconds`: one micro-batch through the stage;
        messages may hide behind its backward pass."""
        case, engine, local, groups = self.case, self.case.engine, count_local(self.case, stage), self.groups
        cover = self.ceilings.overlap * BACKWARD_SHARE * pass_seconds / case.stages_per_rank
        # Gradients are summed over the ranks that share states, then over copies.
        kind: Kind = "reduce_scatter" if case.zero else "all_reduce"
        summed = self._exchange(local, stage, kind, case.gradient_bytes) if case.zero < 3 else 0.0
        shared = case.degrees.shards if case.zero >= 2 else 1
        summed += self.wires.seconds("all_reduce", local.total * case.gradient_bytes / shared, groups.copies)
        gathered = self._exchange(local, stage, "all_gather", case.value_bytes) if case.zero in (1, 2) else 0.0
        return {
            GRADIENTS: exposed(summed, cover if engine.overlaps_gradients else 0.0),
            WEIGHTS: exposed(gathered, cover / 2 if engine.overlaps_parameters else 0.0),
            OPTIMIZER: self._update(local),
        }

    def _exchange(self, local: LocalParameters, stage: StageLayers, kind: Kind, size: int) -> float:
        """All elements, exchanged with the ranks that share their states; by parameter each has a start-up time."""
        groups = self.groups
        total = self.wires.seconds(kind, (local.dense + local.ends) * size, groups.shards)
        total += self.wires.seconds(kind, local.experts * size, groups.expert_shards)
        if self.case.engine.by_parameter and self.case.zero:
            messages = sum(run.count * (len(run.layer.matrices) + run.layer.norms) for run in stage.layers)
            total += messages * self.wires.start(groups.shards)
        return total

    def _update(self, local: LocalParameters) -> float:
        case, degrees = self.case, self.case.degrees
        elements = local.total
        if case.zero:
            elements = (local.dense + local.ends) / degrees.shards + local.experts / degrees.expert_shards
        if not case.offload:
            return self.ceilings.optimizer_passes * elements * UPDATE_BYTES / self.bandwidth
        # Gradients go to the host, which updates (Ren et al., arXiv:2101.06840, section 4), and weights come back: once
        # per step, or, if weights themselves are kept there, each time that they are gathered.
        gathers = case.micro_batches * (2 if case.reshard else 1) if case.zero == 3 else 1
        moved = elements * (case.gradient_bytes + gathers * case.value_bytes)
        return moved / HOST_LINK + elements * UPDATE_BYTES / HOST_MEMORY


def _computed_again(layer: LayerShape, case: Case) -> tuple[float, float, float]:
    """Parts of a forward pass that the backward pass computes again: of products, attention, moves."""
    if case.recompute == "none":
        return 0.0, 0.0, 0.0
    if case.recompute == "full":
        return 1.0, 1.0, 1.0
    if case.recompute == "selective":
        return 0.0, 0.0 if case.flash else 1.0, 0.0
    return every_second(layer) if case.recompute == "operators" else 0.0, 0.0, 1.0


def every_second(layer: LayerShape) -> float:
    """Every second product's share of a layer's FLOPs: keys, the one after attention, up (or down, without a gate)."""
    second = {"kv": 0.5, "o": 1.0, "ffn_up": 0.5 if layer.gated else 0.0, "ffn_down": 0.0 if layer.gated else 1.0}
    flops = sum(
        second.get(matrix.name, 0.5) * matrix.flops_per_token for matrix in layer.matrices if matrix.name != "q"
    )
    return flops / layer.matmul_flops_per_token


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by item; the interval holds four of five measured steps."""

    items: Mapping[str, float]
    low: float
    high: float

    @property
    def seconds(self) -> float:
        return sum(self.items.values())


def estimate_step(case: Case, machine: Machine, ceilings: Ceilings) -> StepTime:
    """Price a step. Raises UserError if the machine has no rate for the precision."""
    stages, pricer, ranks = list_stages(case), StepPricer(case, machine, ceilings), case.degrees.pp
    priced = pricer.stages(stages)
    totals = [sum(items.values()) for items in priced]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    pipeline: Items = {}
    if ranks > 1:
        others = (sum(totals) - totals[slowest]) / (ranks - 1)
        # One of the two messages of a micro-batch travels during the computation on the other.
        messages = case.micro_batches * case.stages_per_rank + 2 * (ranks - 1)
        pipeline = {BUBBLE: others * _bubble_passes(case), STAGES: messages * _send_seconds(case, pricer)}
    items = add_items(
        (priced[slowest], float(case.micro_batches)),
        (pipeline, 1.0),
        (pricer.once(stages[slowest], totals[slowest]), 1.0),
    )
    return total_time(items, ceilings)


def total_time(items: Items, ceilings: Ceilings) -> StepTime:
    """The items of passes and of what happens once, and the rest of the step."""
    items = {**items, REST: ceilings.step_s}
    seconds = sum(items.values())
    ordered = {name: items[name] for name in TIME_ITEMS if items.get(name)}
    return StepTime(MappingProxyType(ordered), seconds * ceilings.low, seconds * ceilings.high)


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


def _send_seconds(case: Case, pricer: StepPricer) -> float:
    stream = case.tokens * case.model.hidden * case.value_bytes
    gathers = case.degrees.tp > 1 and not case.sequence and case.engine.splits_sends
    split = case.degrees.tp if gathers else case.stream_split
    send = pricer.wires.send(stream / split, pricer.groups.stage_stride)
    return send + (pricer.wires.seconds("all_gather", stream, pricer.groups.tp) if gathers else 0.0)


def exposed(messages: float, cover: float) -> float:
    """Seconds of messages that nothing hides."""
    return max(messages - cover, LEAST_EXPOSED * messages)
