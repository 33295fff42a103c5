"""The time of one optimizer step, item by item: collectives, operators, passes through each pipeline stage.

Invariants:
- An operator takes the longer of its arithmetic and its memory traffic (Williams et al., Roofline, CACM 52 (2009),
  doi:10.1145/1498765.1498785).
- Sizes of collectives are those of the whole tensor (the result of an all-gather, the input of a reduce-scatter), on
  one rank.
- Items of a stage are sums of items of its layers and ends, and items of the step add up to the step.

Sources: rings: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), section 3. Ranks of a node in the same group
carry its messages over all of their adapters (NVIDIA, Doubling all2all performance with NCCL 2.12, 2022). Fused
attention: Dao, arXiv:2307.08691, sections 3.1 and 4 (its backward pass has 2.5 times the forward FLOPs, since scores
are computed again); products are slower if rows are no multiples of 16 bytes: NVIDIA, Matrix Multiplication Background
User's Guide, section 3.1; moves of norms and activations follow from their definitions; the tensor axis' messages:
Shoeybi et al., arXiv:1909.08053, section 3, and Korthikanti et al., arXiv:2205.05198, section 4.2.2; beside products:
Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959; shards: Zhao et al., arXiv:2304.11277, section 3.3; context: Liu
et al., arXiv:2310.01889; experts: Lepikhin et al., arXiv:2006.16668, section 3.2; bubbles: Narayanan et al.,
arXiv:2104.04473, section 2.2; zero bubble: Qi et al., arXiv:2401.10241, section 2 and 6; what is sent once a step:
Rajbhandari et al., arXiv:1910.02054, section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shardway.plan.case import Case, Ceilings, Machine, StageLayers, list_stages
from shardway.plan.memory import LocalParameters, count_layer, count_local, matrix_split
from shardway.plan.shapes import AttentionShape, LayerRun, LayerShape, Matrix

# --- collectives

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class CollectiveGroup:
    """`ranks` ranks, each `stride` after the one before."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True)
class Wires:
    """A machine with its factors; without `rails` each rank's messages use only its own adapter."""

    machine: Machine
    ceilings: Ceilings
    rails: bool = True

    def seconds(self, kind: Kind, size: float, group: CollectiveGroup) -> float:
        if group.ranks == 1 or size <= 0:
            return 0.0
        travels = size * (group.ranks - 1) / group.ranks * (2 if kind == "all_reduce" else 1)
        domain, start = self.machine.domain, self.start(group)
        if not self.machine.spans_nodes(group.ranks, group.stride):
            return travels / self._link_rate(group.ranks) + start
        near = self._near(group)
        network = self.machine.network * self.ceilings.network
        if kind == "all_to_all":  # only messages for ranks of other domains use the network
            inside = travels * (near - 1) / (group.ranks - 1)
            exchange = (travels - inside) / network + (inside / self._link_rate(near) if near > 1 else 0.0)
            return exchange + self.start(CollectiveGroup(2, domain))
        rate = (near if self.rails else 1) * self.machine.network * self.ceilings.network
        rate = min(rate, self._link_rate(near)) if near > 1 else rate
        return travels / rate * (1 + self.ceilings.half_bytes * group.ranks / size) + start

    def start(self, group: CollectiveGroup) -> float:
        """Seconds before the first byte of a message."""
        if group.ranks == 1:
            return 0.0
        if not self.machine.spans_nodes(group.ranks, group.stride):
            return self.ceilings.link_latency_s
        return self.ceilings.network_latency_s + self.ceilings.hop_s * group.ranks

    def cover(self, *groups: CollectiveGroup) -> float:
        """The part of the computation beside them behind which messages of these groups hide: of the group that hides
        least. NCCL copies with as many thread blocks as the links that it finds need (its src/graph/search.cc and
        connect.cc): one adapter needs few, those of a node and its links many, which products then lack."""
        at_work = [group for group in groups if group.ranks > 1]
        alone = all(self.machine.spans_nodes(each.ranks, each.stride) and self._near(each) == 1 for each in at_work)
        return 1.0 if at_work and alone else self.ceilings.overlap

    def _near(self, group: CollectiveGroup) -> int:
        """Ranks of a group that the fast link joins."""
        return max(1, min(group.ranks, self.machine.domain // group.stride))

    def send(self, size: float, stride: int) -> float:
        """Seconds of one message to the rank `stride` further on."""
        return self._message(size, self.machine.spans_nodes(2, stride))

    def turn(self, size: float, group: CollectiveGroup) -> float:
        """Seconds in which each rank of a ring sends a message to the next: those of the slowest link."""
        return self._message(size, self.machine.spans_nodes(group.ranks, group.stride))

    def _message(self, size: float, leaves: bool) -> float:
        rate = self.machine.network * self.ceilings.network if leaves else self._link_rate(2)
        return size / rate + (self.ceilings.network_latency_s if leaves else self.ceilings.link_latency_s)

    def _link_rate(self, ranks: int) -> float:
        """Without a switch a rank reaches each peer over a part of its links."""
        return min(self.machine.link, self.machine.peer * (ranks - 1)) * self.ceilings.link


def groups_of(case: Case) -> Mapping[str, CollectiveGroup]:
    """The groups of ranks that exchange data, by axis. Neighbours on the axes with most traffic are nearest: tp is
    innermost, then cp, then shards, then stages, then copies."""
    degrees = case.degrees
    inner = degrees.tp * degrees.shards
    return {
        "tp": CollectiveGroup(degrees.tp),
        "cp": CollectiveGroup(degrees.cp, degrees.tp),
        "dp_shard": CollectiveGroup(degrees.shards, degrees.tp),
        "ep": CollectiveGroup(degrees.ep, degrees.etp),
        "expert_shards": CollectiveGroup(degrees.expert_shards, degrees.ep * degrees.etp),
        "pp": CollectiveGroup(degrees.pp, inner),
        "dp_replicate": CollectiveGroup(degrees.dp_replicate, inner * degrees.pp),
    }


# --- the items of a step, and what their prices are made of

Items = dict[str, float]

PRODUCTS, ATTENTION, MOVES, HOST = "products", "attention", "other operators", "waiting for the host"
TENSOR, CONTEXT, EXPERTS, SHARDS = "tensor messages", "context messages", "expert messages", "shard messages"
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

FLASH_BACKWARD_FLOPS = 2.5
HEAD_WIDTH = 128  # width of a head for which fused kernels are made; narrower heads use their tiles less well
HEAD_LOSS = 0.3
PADDED_TO = 128  # a padded vocabulary is a multiple of this
ADAPTER_MOVES = 5  # of a result: it is read and written with the factor; both summands are read, the sum is written
CAST_BYTES = 6  # bytes moved to copy a number from fp32 to 16 bits, or back
ALIGNED_BYTES = 16  # bytes that tensor cores read at once; rows of other multiples take slower kernels
LOSS_BYTES, FUSED_LOSS_BYTES = 40, 10
"""Bytes moved per logit: a cast to fp32 (2 + 4), a softmax in fp32 (8 + 4), its gradient (4 + 8 + 4), a cast back
(4 + 2). As one operator: 16-bit logits are read twice, and their gradient is written and read once, with sums."""

EAGER_KERNELS, FUSED_KERNELS, COMPILED_KERNELS = 45, 28, 24
"""Operators of a layer's forward pass, counted in eager GPT blocks, in blocks of fused modules, and compiled."""
SCORE_KERNELS, TENSOR_KERNELS, EXPERT_KERNELS, CAST_KERNELS = 8, 4, 30, 20
"""Operators added by unfused attention, the tensor axis, experts and casts to eight bits."""
ADAPTER_KERNELS = 6  # of one layer's adapter: two casts, two products, the factor, the sum
BACKWARD_KERNELS = 2  # operators of a backward pass per forward one

HIDDEN_RING = 0.8  # part of attention behind which a ring's messages hide
CONTENTION = 0.1  # the slowdown of computation while messages run beside it, as a fraction of their time
LEAST_EXPOSED = 0.1  # the fraction of a hidden message that is exposed: the last bucket has nothing to hide behind
BACKWARD_SHARE = 2 / 3  # the fraction of a pass behind which messages hide

UPDATE_BYTES = 34
"""Bytes that AdamW moves per parameter: it reads and writes weight and two moments in fp32, reads the gradient, writes
16 bits, and clips."""
HOST_LINK = 20e9
"""Bytes per second between a device and its host, one direction; an assumption: what PCIe 4.0 with 16 lanes reaches."""
HOST_MEMORY = 25e9
"""Bytes per second of the host's memory per rank; an assumption: an eighth of a node with two sockets."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.forward + other.forward, self.backward + other.backward)


def sum_passes(passes: Iterable[PassTimes]) -> PassTimes:
    """Seconds of passes one after the other."""
    return sum(passes, PassTimes(0.0, 0.0))


def product_ramp(ceilings: Ceilings, m: int, n: int, k: int) -> float:
    """How many times as long a product takes as at the rate of a large one."""
    return (1 + ceilings.matmul_ramp / k) * (1 + ceilings.narrow_ramp / min(m, n))


def span_ramp(ceilings: Ceilings, span: float) -> float:
    """How many times as long fused attention takes as at the rate of a long sequence, if a position is scored with
    `span` others on average."""
    return 1 + ceilings.flash_ramp / span


def clock_share(machine: Machine, ceilings: Ceilings) -> float:
    """The part of its rated clock that an accelerator keeps within the node's power limit."""
    return float(machine.power_share**ceilings.power)


def product_rate(machine: Machine, ceilings: Ceilings, precision: str) -> float:
    """FLOP/s that large products reach. Raises UserError if the machine has no rate for the precision."""
    shares = {"fp8": ceilings.matmul_low, "fp4": ceilings.matmul_fp4}
    return machine.peak(precision) * shares.get(precision, ceilings.matmul) * clock_share(machine, ceilings)


def machine_bandwidth(machine: Machine) -> float:
    """Bytes per second of an accelerator's memory on paper."""
    return machine.accelerator.memory_bandwidth_bytes_per_s or 1e12


def exposed(messages: float, cover: float) -> float:
    """Seconds of messages that nothing hides."""
    return max(messages - cover, LEAST_EXPOSED * messages)


def _add_items(*parts: tuple[Mapping[str, float], float]) -> Items:
    """The sum of items, each part with its factor."""
    total: Items = {}
    for items, factor in parts:
        for name, seconds in items.items():
            total[name] = total.get(name, 0.0) + factor * seconds
    return total


# --- the price of a step


class StepPricer:
    """Prices operators, passes of micro-batches, and what occurs once a step, of a case on a machine.

    Raises UserError if the machine has no rate for the precision.
    """

    def __init__(self, case: Case, machine: Machine, ceilings: Ceilings) -> None:
        self.case, self.machine, self.ceilings = case, machine, ceilings
        self.wires = Wires(machine, ceilings, case.engine.rails)
        self.groups = groups_of(case)
        self.hides_tensor = case.hides_tensor and not machine.spans_nodes(case.degrees.tp)
        self._layers: dict[tuple[int, str], Items] = {}
        self.bandwidth = machine_bandwidth(machine) * ceilings.memory  # bytes per second of memory-bound operators
        # FLOP/s of large products in a format of eight bits or less, and in the wider one
        self.low_rate = 0.0
        if case.low_bits:
            low = "fp4" if case.precision == "fp4" and machine.accelerator.peak("fp4") else "fp8"
            self.low_rate = product_rate(machine, ceilings, low)
        wide = "bf16" if case.low_bits else case.precision
        self.rate = product_rate(machine, ceilings, wide)
        self.wide_peak = machine.peak(wide) * clock_share(machine, ceilings)

    def stages(self, stages: Iterable[StageLayers]) -> list[Items]:
        """Items of one micro-batch in each stage, priced once for equal stages."""
        known: dict[tuple[tuple[LayerRun, ...], bool, bool], Items] = {}
        found = []
        for stage in stages:
            key = (stage.layers, stage.first, stage.last)
            if key not in known:
                parts = [(self._layer(run), float(run.count)) for run in stage.layers]
                if stage.last:
                    parts.append((self._head(), 1.0))
                if stage.first:  # the embedding
                    case = self.case
                    moved = 6 * case.tokens * case.model.hidden * case.value_bytes / case.stream_split
                    parts.append(({MOVES: moved / self.bandwidth}, 1.0))
                known[key] = _add_items(*parts)
            found.append(known[key])
        return found

    def _layer(self, run: LayerRun) -> Items:
        """One layer: forward, recompute if any, and backward."""
        key = (id(run.layer), run.side)
        if key in self._layers:
            return self._layers[key]
        case, layer, tokens = self.case, run.layer, self.case.side_tokens(run.side)
        seq = case.model.side_seq(run.side, case.seq_len)
        attention, moves = PassTimes(0.0, 0.0), self._moves(layer, tokens)
        each = [(matrix, self.product(matrix, tokens)) for matrix in layer.matrices]
        products = sum_passes(times for _, times in each)
        for shape in layer.attentions:
            attention = attention + self._attention(shape, tokens, seq)
        # Parts of a forward pass that the backward pass computes again: of products, attention, moves.
        again = {
            "none": (0.0, 0.0, 0.0),
            "selective": (0.0, 0.0 if case.flash else 1.0, 0.0),
            "products": (0.0, 0.0, 1.0),
            "operators": (every_second(layer) if case.recompute == "operators" else 0.0, 0.0, 1.0),
            "full": (1.0, 1.0, 1.0),
        }[case.recompute]
        skipped = each[-1][1].forward if self._stops_early(layer) else 0.0
        summed = 0.0
        if case.zero in (1, 2) and case.engine.sums_apart:
            # Gradients of a pass are added to sums in memory, for all weights of a rank.
            moved = sum(count_layer(layer, case)) * (case.value_bytes + 2 * case.gradient_bytes)
            summed = self.ceilings.sums * moved / self.bandwidth
        items = {
            PRODUCTS: (1 + again[0]) * products.forward - skipped + products.backward,
            ATTENTION: (1 + again[1]) * attention.forward + attention.backward,
            MOVES: (1 + again[2]) * moves.forward + moves.backward + summed,
        }
        items |= self._exchanged(run, attention, each)
        busy = sum(items.values())
        # Host time to start every operator; the device waits for it if it is faster.
        kernels = COMPILED_KERNELS if case.compiled else EAGER_KERNELS if case.engine.eager else FUSED_KERNELS
        kernels += 0 if case.flash else SCORE_KERNELS
        kernels += TENSOR_KERNELS if case.degrees.tp > 1 else 0
        kernels += EXPERT_KERNELS if layer.experts is not None else 0
        kernels += CAST_KERNELS if case.low_bits else 0
        kernels += ADAPTER_KERNELS * len(layer.adapter.layers) if layer.adapter is not None else 0
        passes = 1 + (1 if case.recompute in ("full", "operators", "products") else 0) + BACKWARD_KERNELS
        items[HOST] = 0.0 if case.replays else max(0.0, self.ceilings.kernel_s * kernels * passes - busy)
        if case.zero == 3 and case.degrees.shards > 1:
            # a layer's weights are gathered, its gradients scattered, beside the computation that hides most of it.
            messages = self._shard_seconds(*count_layer(layer, case), layer.trained_parameters)
            if case.engine.by_parameter:
                messages += 3 * len(layer.matrices) * self.wires.start(self.groups["dp_shard"])
            hidden = min(messages, self.wires.cover(self.groups["dp_shard"]) * busy)
            items[SHARDS] = messages - hidden + CONTENTION * hidden
        self._layers[key] = items
        return items

    def _stops_early(self, layer: LayerShape) -> bool:
        """Whether recompute of a layer leaves out its last product, and the message after that."""
        return self.case.recompute == "full" and self.case.engine.stops_recompute and layer.experts is None

    def _exchanged(self, run: LayerRun, attention: PassTimes, products: Sequence[tuple[Matrix, PassTimes]]) -> Items:
        """Messages of the tensor, context and expert axes in a layer."""
        case, wires, groups, items = self.case, self.wires, self.groups, Items()
        degrees, again = case.degrees, 1 if case.recompute == "full" else 0
        numbers = case.side_tokens(run.side) * run.layer.hidden
        stream = numbers * case.value_bytes
        if degrees.tp > 1 and case.sequence:
            items[TENSOR] = self._tensor_seconds(run.layer, numbers, products)
        elif degrees.tp > 1:
            items[TENSOR] = wires.seconds("all_reduce", stream, groups["tp"]) * (4 + 2 * again)
        if degrees.cp > 1:
            items[CONTEXT] = self._context_seconds(run, attention)
        if run.layer.experts is not None and degrees.ep > 1:
            rows = stream * run.layer.experts.per_token / (degrees.tp if degrees.etp == 1 else 1)
            items[EXPERTS] = wires.seconds("all_to_all", rows, groups["ep"]) * (4 + 2 * again)
        return items

    def _tensor_seconds(self, layer: LayerShape, numbers: int, products: Sequence[tuple[Matrix, PassTimes]]) -> float:
        """Messages of a layer whose stream of `numbers` the tensor axis splits by sequence. Attention and the
        feed-forward layer each gather their input and scatter their sums; the backward pass does the reverse, and
        gathers inputs once more unless they were kept whole."""
        case, engine, group = self.case, self.case.engine, self.groups["tp"]
        gather = self.wires.seconds("all_gather", numbers * case.gathered_bytes, group)
        scatter = self.wires.seconds("reduce_scatter", numbers * case.value_bytes, group)
        gathers = 2 if case.recompute == "full" or (case.recompute == "operators" and engine.whole_regions) else 1
        parts, total = (self.case.degrees.tp - 1) / self.case.degrees.tp, 0.0
        for part in ("attention", "ffn"):
            first = sum_passes(times for matrix, times in products if matrix.part == part and matrix.split == "outputs")
            second = sum_passes(times for matrix, times in products if matrix.part == part and matrix.split == "inputs")
            scatters = 2 if case.recompute == "full" and not (part == "ffn" and self._stops_early(layer)) else 1
            # Beside a product in parts: a part is computed while the next one travels, the first or last one alone.
            total += gathers * self._beside(gather, parts * first.forward)
            total += scatters * self._beside(scatter, parts * second.forward)
            # Of a backward pass half is for gradients of inputs, half for those of weights.
            total += self._beside(gather, parts * second.backward / 2)
            total += 0.0 if engine.whole_regions else self._beside(gather, first.backward / 2)
            # Gradients of an input that several products read are summed before they travel.
            joined = engine.joins_inputs or (part == "ffn" and not layer.gated)
            total += self._beside(scatter, first.backward / 2 if joined else 0.0)
        return total

    def _beside(self, messages: float, product: float) -> float:
        """Seconds of messages of the tensor axis beside a product, and of what they slow it down."""
        hidden = min(messages, product) if self.hides_tensor else 0.0
        return messages - hidden + self.ceilings.tensor_contention * hidden

    def _context_seconds(self, run: LayerRun, attention: PassTimes) -> float:
        """Keys and values of a layer between ranks of the context axis, in the backward pass with their gradients."""
        case, wires, group = self.case, self.wires, self.groups["cp"]
        shape, again = run.layer.attention, 1 if case.recompute == "full" else 0
        width = 2 * shape.qk_width if case.engine.repeats_keys else shape.kv_width
        own = case.side_tokens(run.side) * width * case.value_bytes / case.degrees.tp  # bytes of a rank's part
        turns = group.ranks - 1
        if not case.engine.gathers_keys:
            ring = turns * wires.turn(own, group)
            forward = max(0.0, ring - HIDDEN_RING * attention.forward)
            return (1 + again) * forward + max(0.0, 2 * ring - HIDDEN_RING * attention.backward)
        # Beside the gather a rank computes on its own part alone. Gradients go round a ring, summed in fp32.
        gather, part = wires.seconds("all_gather", group.ranks * own, group), HIDDEN_RING / group.ranks
        gradients = turns * wires.turn(own * 4 / case.value_bytes, group)
        forward, backward = (max(0.0, gather - part * each) for each in (attention.forward, attention.backward))
        return (1 + again) * forward + backward + max(0.0, gradients - (HIDDEN_RING - part) * attention.backward)

    def _shard_seconds(self, dense: float, experts: float, trained: float) -> float:
        """Gather before use (and again before the backward pass), scatter the gradient, in every micro-batch; beside an
        adapter only its `trained` elements have one."""
        case, total = self.case, 0.0
        gathers = 2 if case.reshard else 1 / case.micro_batches
        scatters = 1 if case.reshard else 1 / case.micro_batches
        for elements, group in ((dense, self.groups["dp_shard"]), (experts, self.groups["expert_shards"])):
            total += gathers * self.wires.seconds("all_gather", elements * case.shared_bytes, group)
            if case.model.adapter is None:
                total += scatters * self.wires.seconds("reduce_scatter", elements * case.gradient_bytes, group)
        if case.model.adapter is not None:
            size = trained * case.gradient_bytes
            total += scatters * self.wires.seconds("reduce_scatter", size, self.groups["dp_shard"])
        return total

    def _head(self) -> Items:
        """The output layer and the loss."""
        case, tp = self.case, self.case.degrees.tp
        if case.model.head.outputs == 0:
            return {}
        tokens = case.micro_batch if case.model.pooled else case.tokens
        product = self.product(case.model.head, tokens)
        moves = FUSED_LOSS_BYTES if case.fuses_loss else LOSS_BYTES
        logits = tokens * case.model.head.outputs / (tp if case.engine.splits_loss else 1)
        items = {PRODUCTS: product.forward + product.backward, MOVES: logits * moves / self.bandwidth}
        if case.zero == 3 and case.degrees.shards > 1:
            messages = self._shard_seconds(case.model.head.parameters / tp, 0.0, case.model.head.trained)
            items[SHARDS] = (1 - self.ceilings.overlap) * messages
        return items

    # --- operators

    def product(self, matrix: Matrix, tokens: int) -> PassTimes:
        """All products with a matrix: forward, then for the gradients of inputs and of weights."""
        case, degrees = self.case, self.case.degrees
        split, copies, rows = matrix_split(matrix, case.degrees), 1.0, tokens
        if matrix.part == "experts":
            copies, split = matrix.copies / degrees.ep, degrees.etp
            # Tokens of one expert, from all ranks that it serves, evenly shared
            shared = degrees.tp if degrees.etp == 1 else 1
            rows = max(1, round(tokens * matrix.met * degrees.ep / matrix.copies / shared))
        elif matrix.split == "none":
            rows = max(1, tokens // case.stream_split)
        outputs = max(1, matrix.outputs // split) if matrix.split == "outputs" else matrix.outputs
        inputs = max(1, matrix.inputs // split) if matrix.split == "inputs" else matrix.inputs
        if matrix.part == "head" and split > 1 and case.engine.pads_vocab:
            outputs = -(-outputs // PADDED_TO) * PADDED_TO
        low = case.low_bits and matrix.part not in ("router", "head")
        if not self._aligned(inputs, outputs):
            copies *= 1 + self.ceilings.misaligned
        back = self._gemm(rows, inputs, outputs, low)
        back += 0.0 if matrix.frozen else self._gemm(inputs, outputs, rows, low)
        beside = self._adapter(matrix, rows)
        return PassTimes(copies * self._gemm(rows, outputs, inputs, low), copies * back) + beside

    def _adapter(self, matrix: Matrix, rows: int) -> PassTimes:
        """The two products of an adapter beside a matrix; of several together, as one of their ranks' sum."""
        if not matrix.adapter:
            return PassTimes(0.0, 0.0)
        rank = max(1, round(matrix.adapter / (matrix.inputs + matrix.outputs)))
        pairs = ((matrix.inputs, rank), (rank, matrix.outputs))
        forward = sum(self._gemm(rows, outputs, inputs, False) for inputs, outputs in pairs)
        to_inputs = sum(self._gemm(rows, inputs, outputs, False) for inputs, outputs in pairs)
        return PassTimes(forward, to_inputs + sum(self._gemm(*pair, rows, False) for pair in pairs))

    def _gemm(self, m: int, n: int, k: int, low: bool) -> float:
        c, wide = self.ceilings, self.case.value_bytes
        arithmetic = 2.0 * m * n * k / (self.low_rate if low else self.rate) * product_ramp(c, m, n, k)
        traffic = (1 if low else wide) * (m * k + k * n) + wide * m * n
        return max(arithmetic, traffic / self.bandwidth)

    def _aligned(self, *sizes: int) -> bool:
        """Whether rows of these sizes fill whole units of what tensor cores read."""
        return all(size * self.case.value_bytes % ALIGNED_BYTES == 0 for size in sizes)

    def _attention(self, attention: AttentionShape, tokens: int, seq: int) -> PassTimes:
        case, c = self.case, self.ceilings
        if case.flash:
            flops = tokens * attention.core_flops_per_token(seq, causal=True) / case.degrees.tp
            ramp = span_ramp(c, attention.mean_span(seq, True))
            ramp *= 1 + HEAD_LOSS * max(0.0, HEAD_WIDTH / (attention.qk_width / attention.heads) - 1)
            kernel = case.attention_kernel
            part: float = getattr(c, "early_flash3" if kernel == "flash3" and case.engine.early_attention else kernel)
            forward = flops * ramp / (self.wide_peak * part)
            return PassTimes(forward, forward * FLASH_BACKWARD_FLOPS / c.flash_backward)
        # Batched products that ignore the mask, and passes over the scores in memory
        flops = tokens * attention.core_flops_per_token(seq, causal=False) / case.degrees.tp
        width = attention.qk_width // attention.heads
        products = flops / (self.wide_peak * c.batched) * (2 / 3 + 2 / 3 * 64 / width)
        products *= 1.0 if self._aligned(width) else 1 + c.misaligned_batched
        scores = tokens * attention.heads * seq / case.degrees.tp * case.value_bytes
        passes = c.scores_passes * (1 if case.engine.fused_scores else 2)
        forward = products + scores * passes / self.bandwidth
        return PassTimes(forward, 2 * forward)

    def _moves(self, layer: LayerShape, tokens: int) -> PassTimes:
        """Norms, residuals, rotations, activations, dropout, casts: forward, and twice that backward."""
        case, c, tp, size = self.case, self.ceilings, self.case.degrees.tp, self.case.value_bytes
        norm = 2.0 if case.engine.fused_norms or case.compiled else c.plain_norm
        passes = layer.hidden * (layer.norms * norm + 3 * (1 + len(layer.attentions)) + (1 if case.dropout else 0))
        stream = case.stream_bytes * c.stream * passes / case.stream_split
        # Gates of the feed-forward layer or of experts, rotations of heads, tokens that are routed
        gate = (3 if case.engine.fused_activations or case.compiled else 5) if layer.gated else 2
        heads = sum(2 * (each.qk_width + each.kv_width) for each in layer.attentions)
        turned = sum(each.qk_width + each.kv_width / 2 for each in layer.attentions) / tp  # queries and keys
        if layer.experts is None:
            gates = (gate * layer.ffn + heads) / tp
        else:
            width = gate * (layer.experts.dim * layer.experts.per_token + layer.experts.shared_dim)
            routed = 8 * layer.experts.per_token * layer.hidden / (tp if case.degrees.etp == 1 else 1)
            gates = (width + heads) / tp + routed
        # Numbers copied to 16 bits: weights, and inputs if each product makes its own copies; compiled code fuses them.
        casts = 0.0
        if case.casts_each and not case.compiled:
            inputs = sum(each.input_products for each in layer.attentions) + layer.gate_products
            casts += tokens * inputs * layer.hidden
        if case.casts_weights and not case.compiled:
            casts += sum(count_layer(layer, case)) if layer.adapter is None else layer.trained_parameters
        moved = tokens * (stream + size * c.gates * gates) + CAST_BYTES * casts
        if layer.adapter is not None and not case.compiled:  # the factor and the sum pass over results
            added = sum(matrix.outputs for matrix in layer.matrices if matrix.adapter)
            moved += ADAPTER_MOVES * size * c.gates * tokens * added
        if case.low_bits:  # read in 16 bits, write in 8, as it is and transposed
            read = 0.0
            for matrix in layer.matrices:
                split = matrix.split == "inputs" and matrix.part != "experts"
                read += matrix.met * (matrix.inputs / (matrix_split(matrix, case.degrees) if split else 1))
            moved += c.gates * size * tokens * read
        forward, turns = moved / self.bandwidth, 0.0 if case.compiled else case.engine.rotation_moves
        turned *= tokens * size * c.gates / self.bandwidth
        # Counted so far: 2 moves of what is rotated forward, 4 backward.
        return PassTimes(forward + max(0.0, turns - 2) * turned, 2 * forward + max(0.0, turns - 4) * turned)

    # --- once a step

    def once(self, stage: StageLayers, pass_seconds: float) -> Items:
        """The work of a rank of a stage that occurs once per step. `pass_seconds`: one micro-batch through the stage;
        messages may hide behind its backward pass."""
        case, engine, local, groups = self.case, self.case.engine, count_local(self.case, stage), self.groups

        def exchange(kind: Kind, size: int) -> float:
            """All elements, with the ranks that share their states; by parameter each has a start-up time."""
            total = self.wires.seconds(kind, (local.dense + local.ends) * size, groups["dp_shard"])
            total += self.wires.seconds(kind, local.experts * size, groups["expert_shards"])
            if engine.by_parameter and case.zero:
                messages = sum(run.count * (len(run.layer.matrices) + run.layer.norms) for run in stage.layers)
                total += messages * self.wires.start(groups["dp_shard"])
            return total

        share = self.wires.cover(groups["dp_shard"], groups["dp_replicate"])
        cover = share * BACKWARD_SHARE * pass_seconds / case.stages_per_rank
        # Gradients are summed over the ranks that share states, then over copies.
        kind: Kind = "reduce_scatter" if case.zero else "all_reduce"
        summed = exchange(kind, case.gradient_bytes) if case.zero < 3 else 0.0
        shared = case.degrees.shards if case.zero >= 2 else 1
        summed += self.wires.seconds("all_reduce", local.trained * case.gradient_bytes / shared, groups["dp_replicate"])
        gathered = exchange("all_gather", case.shared_bytes) if case.zero in (1, 2) else 0.0
        return {
            GRADIENTS: exposed(summed, cover if engine.overlaps_gradients else 0.0),
            WEIGHTS: exposed(gathered, cover / 2 if engine.overlaps_parameters else 0.0),
            OPTIMIZER: self._update(local),
        }

    def _update(self, local: LocalParameters) -> float:
        case = self.case
        elements = local.trained_share(case.degrees) if case.zero else local.trained
        if not case.offload:
            return self.ceilings.optimizer_passes * elements * UPDATE_BYTES / self.bandwidth
        # Gradients go to the host, which updates (Ren et al., arXiv:2101.06840, section 4), and weights come back: once
        # per step, or, if weights themselves are kept there, each time that they are gathered.
        gathers = case.micro_batches * (2 if case.reshard else 1) if case.zero == 3 else 1
        moved = elements * (case.gradient_bytes + gathers * case.value_bytes)
        return moved / HOST_LINK + elements * UPDATE_BYTES / HOST_MEMORY


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
    ranks, per_rank = case.degrees.pp, case.stages_per_rank
    stages, pricer = list_stages(case), StepPricer(case, machine, ceilings)
    priced = pricer.stages(stages)
    totals = [sum(items.values()) for items in priced]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    pipeline: Items = {}
    if ranks > 1:
        # a rank idles for one stage of each other rank, forward and backward; with fewer micro-batches than ranks an
        # interleaved pipeline idles once more for each further stage of a rank. Zero-bubble schedules fill all but a
        # third with gradients of weights, the V all but a forward pass.
        idle = ranks - 1 + (per_rank - 1) * max(0, ranks - case.micro_batches)
        passes = idle * (1 / 3 if case.schedule in ("zero_bubble", "zbv") else 1.0) / per_rank
        others = (sum(totals) - totals[slowest]) / (ranks - 1)
        # One of the two messages of a micro-batch travels during the computation on the other.
        messages = case.micro_batches * per_rank + 2 * (ranks - 1)
        stream = case.tokens * case.model.hidden * case.value_bytes
        gathers = case.degrees.tp > 1 and not case.sequence  # stages send only each tensor rank's share of the stream
        send = pricer.wires.send(
            stream / (case.degrees.tp if gathers else case.stream_split), pricer.groups["pp"].stride
        )
        send += pricer.wires.seconds("all_gather", stream, pricer.groups["tp"]) if gathers else 0.0
        pipeline = {BUBBLE: others * passes, STAGES: messages * send}
    items = _add_items(
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
