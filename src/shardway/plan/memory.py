"""The memory of one rank of each pipeline stage, item by item: parameters, states, activations, overheads.

Invariants:
- Counts bytes of tensors that autograd saves, each once, with what splits it; for the layer of Korthikanti et al. they
  sum to its published 34 sbh + 5 a s^2 b (arXiv:2205.05198, section 4.1).
- Experts are counted separately, since other ranks share their states.
- Overheads are read from `overheads.toml`, which states what they were fitted on; no such number is written here.
- Items add up to `allocated`, which is what `torch.cuda.max_memory_allocated` reports; `reserved` adds what the caching
  allocator holds beyond that, `device` what nvidia-smi shows on top.
- Between steps there are no gradients and no activations; a checkpoint passes through the host, tensor by tensor or as
  one copy.

Sources: states: Rajbhandari et al., arXiv:1910.02054, section 5; activations: Korthikanti et al., arXiv:2205.05198,
section 4; what FSDP gathers: Zhao et al., arXiv:2304.11277, section 3.3; `torch.distributed.checkpoint` (PyTorch
documentation): `save` copies each rank's own shards to the host before they are written, `async_save` all of them at
once; `load` reads into existing tensors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from operator import attrgetter
from types import MappingProxyType

from shardway.plan.case import Case, Degrees, StageLayers, kept_micro_batches, list_stages
from shardway.plan.shapes import LayerRun, LayerShape, Matrix
from shardway.plugins import load_plugin

# --- the tensors of a micro-batch that a layer keeps for its backward pass

MASK_BYTES = 1
EXPERT_IMBALANCE = 0.5
ONLY_PRODUCTS = (
    "result of attention's last product",
    "result of feed-forward's last product",
    "summands of attention's last product",
    "summands of feed-forward's last product",
)
"""Inputs that the backward pass itself does not need, but recompute of other operators does."""

STATISTIC_BYTES = 4


@dataclass(frozen=True)
class SavedActivation:
    """A tensor of `bytes_per_token`, before anything splits it.

    `split`: "tensor" (features or heads; of experts, or the rows of their tokens), "stream" (by sequence if the tensor
    axis does that), "none".
    `product` is the part of it that is a result of a product (or of attention) or the layer's input; `second` the part
    that remains if only every second product's result is kept.
    """

    name: str
    bytes_per_token: float
    split: str = "stream"
    product: float = 0.0
    second: float = 0.0


_DEPENDS_ON = attrgetter(
    *("recompute", "value_bytes", "low_bits", "casts_each", "stream_bytes", "stream_split", "seq_len", "flash"),
    *("dropout", "compiled", "degrees.tp", "degrees.ep", "degrees.etp", "engine"),
)
"""All of a case that decides what a layer keeps."""


@dataclass(frozen=True)
class _CaseOfLayer:
    """A case, equal to others that keep the same of a layer."""

    case: Case = field(compare=False)
    decides: tuple[object, ...]


def kept_bytes(layer: LayerShape, case: Case) -> float:
    """Bytes per token of the micro-batch that a layer keeps under the recompute of the case, on one rank."""
    return _layer_bytes(layer, _CaseOfLayer(case, _DEPENDS_ON(case)))[0]


def whole_bytes(layer: LayerShape, case: Case) -> float:
    """The same without recompute: what one layer needs while it is computed again."""
    return _layer_bytes(layer, _CaseOfLayer(case, _DEPENDS_ON(case)))[1]


@lru_cache(maxsize=4096)
def _layer_bytes(layer: LayerShape, of: _CaseOfLayer) -> tuple[float, float]:
    """Both values at once, cached, since a search asks for the same layer thousands of times."""
    case = of.case
    ranks = {"tensor": case.degrees.tp, "stream": case.stream_split, "none": 1}
    saved = [(each, each.bytes_per_token / ranks[each.split]) for each in _list_saved(layer, case)]
    whole = sum(size for each, size in saved if each.name not in ONLY_PRODUCTS)
    if case.recompute == "full":
        return layer.hidden * case.stream_bytes / case.stream_split, whole
    part = {
        "none": lambda each: float(each.name not in ONLY_PRODUCTS),
        "selective": lambda each: float(not each.name.startswith("scores") and each.name not in ONLY_PRODUCTS),
        "products": lambda each: each.product,
        "operators": lambda each: each.second,
    }[case.recompute]
    return sum(size * part(each) for each, size in saved), whole


def _list_saved(layer: LayerShape, case: Case) -> list[SavedActivation]:
    """All that a layer saves if nothing is recomputed."""
    found: list[SavedActivation] = []
    size, width, engine, tp = case.value_bytes, layer.hidden, case.engine, case.degrees.tp
    # An engine may keep inputs of products in the format in which they are multiplied.
    input_size = 1 if case.low_bits and engine.keeps_low_bits else size
    norm_size = 4 if case.casts_each else size
    casts_each = case.casts_each and not case.compiled
    region = "none" if engine.whole_regions else "stream"  # what splits the input of a region of the tensor axis
    adapter = layer.adapter

    def add(name: str, kept: float, split: str = "stream", product: float = 0.0, second: float = 0.0) -> None:
        found.append(SavedActivation(name, kept, split, product, second))

    def add_input(name: str, features: float, readers: int, of: tuple[str, ...], split: str) -> None:
        """What `readers` products multiply, which their weights' gradients need: one tensor, or a copy of each in 16
        bits. A frozen product needs none, and each product of an adapter beside one its own."""
        copies = readers if casts_each else 1
        if adapter is not None:
            reading = adapter.count_readers(*of)
            copies = reading if casts_each or adapter.dropout else min(1, reading)
            if adapter.dropout:
                add(f"masks of dropout of {name}", reading * features * MASK_BYTES, split)
            add(f"products of an adapter with {name}", reading * adapter.rank * size, split)
        add(name, copies * features * input_size, split)

    def add_norm(name: str, product: float = 0.0) -> None:
        """The input of a norm; an unfused one also keeps a copy in fp32, and the result before its gain."""
        add(name, width * norm_size, product=product, second=product)
        if not (engine.fused_norms or case.compiled):
            add("copies in a norm", width * (4 + size))

    def add_result(name: str, second: float) -> None:
        """The result of the last product; with whole regions all tokens' summands on each rank of the tensor axis."""
        add(f"result of {name}", width * size, product=1, second=second)
        if engine.whole_regions and tp > 1:
            add(f"summands of {name}", width * size, "none", product=1)

    def add_activation(features: int, copies: float) -> None:
        """Tensors between the two products of a feed-forward layer (or of `copies` experts)."""
        wide = layer.gate_products
        add("input of the activation", copies * wide * features * size, "tensor", product=1, second=1 / wide)
        if layer.gated and not (engine.fused_activations or case.compiled):
            add("gate after its function", copies * features * size, "tensor")
        if adapter is None or layer.experts is not None:
            add("output of the activation", copies * features * input_size, "tensor")
        else:
            add_input("output of the activation", features, 1, ("ffn_down",), "tensor")

    for attention in layer.attentions:
        add_norm("input of attention's norm", case.stream_bytes / norm_size)
        readers = ("q", "kv", "q_down", "kv_down")
        add_input("input of queries, keys, values", width, attention.input_products, readers, region)
        latent = attention.latent
        if latent is not None:
            latents = 2 * (latent.q_rank + latent.kv_rank) * size
            add("latents before and after their norms", latents, "none", 0.5, 0.5)
        add("queries", attention.qk_width * size, "tensor", product=1, second=1)
        # With fewer heads than ranks each rank has one of them.
        split_heads = latent is not None or attention.kv_heads % tp == 0
        kv_width = attention.kv_width if split_heads else attention.kv_width // attention.kv_heads
        add("keys and values", kv_width * size, "tensor" if split_heads else "none", product=1, second=0.5)
        if case.flash:
            add("sums of exponentials", attention.heads * STATISTIC_BYTES, "tensor", product=1, second=1)
        else:  # softmax, and with dropout its mask and result: 5 bytes per score in 16 bits
            scores = attention.heads * case.seq_len
            add("scores after softmax", scores * size, "tensor")
            if not engine.fused_scores:
                add("scores before softmax, and their mask", scores * (size + 4 + MASK_BYTES), "tensor")
            if case.dropout:
                add("scores after dropout, and its mask", scores * (size + MASK_BYTES), "tensor")
        add("output of attention", attention.value_width * size, "tensor", product=1, second=1)
        if adapter is not None and (casts_each or adapter.dropout):  # attention keeps its own
            add_input("copy of attention's output", attention.value_width, 0, ("o",), "tensor")
        elif adapter is not None:
            add("products of an adapter", adapter.count_readers("o") * adapter.rank * size)
        add_result("attention's last product", 0)
        if case.dropout:
            add("mask of dropout after attention", width * MASK_BYTES)
    mixture = layer.experts
    if mixture is None:
        add_norm("input of feed-forward's norm")
        add_input("input of feed-forward", width, layer.gate_products, ("ffn_up",), region)
        add_activation(layer.ffn, 1)
        add_result("feed-forward's last product", 1)
        if case.dropout:
            add("mask of dropout after feed-forward", width * MASK_BYTES)
        return found
    add_norm("input of the router's norm")
    add("input of the router", width * norm_size)
    add("scores of the router", mixture.count * STATISTIC_BYTES, "none")
    # Tokens of the busiest rank over the mean: an assumption, approaching 1.5 for large ep.
    routed = mixture.per_token * (1 + EXPERT_IMBALANCE * (1 - 1 / case.degrees.ep))
    # Tokens reach experts once each; if experts are not split, the tensor ranks share their rows.
    split = "tensor" if case.degrees.etp == 1 else "stream"
    add("tokens sent to experts", routed * width * input_size, split)
    add_activation(mixture.dim, routed)
    add("results of experts", routed * width * size, split, product=1, second=1)
    if mixture.shared_dim:
        add_activation(mixture.shared_dim, 1)
    return found


# --- parameters of one rank before sharding


@dataclass(frozen=True)
class AdapterElements:
    """Elements of an adapter on a rank (they are also among those of layers and ends), those of one layer, and elements
    of the frozen matrices, which are held in the format of products. No axis but that of data splits these models."""

    trained: float
    of_layer: float
    frozen: float


@dataclass(frozen=True)
class LocalParameters:
    """Elements on a rank: of layers, of experts, of the two ends; `largest` is the most of one layer."""

    dense: float
    experts: float
    ends: float
    largest_dense: float
    largest_experts: float
    adapter: AdapterElements | None = None

    @property
    def layers(self) -> float:  # those of layers, experts included
        return self.dense + self.experts

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.ends

    def shared(self, degrees: Degrees) -> float:
        """A rank's share, if states are sharded."""
        return (self.dense + self.ends) / degrees.shards + self.experts / degrees.expert_shards

    @property
    def trained(self) -> float:  # those that have a gradient
        return self.total if self.adapter is None else self.adapter.trained

    def trained_share(self, degrees: Degrees) -> float:
        """A rank's share of these, if states are sharded."""
        return self.shared(degrees) if self.adapter is None else self.adapter.trained / degrees.shards


def count_local(case: Case, stage: StageLayers) -> LocalParameters:
    """The elements on a rank of a stage, after tensor, expert and pipeline cuts."""
    model, tp = case.model, case.degrees.tp
    layers = [(*count_layer(run.layer, case), run.count) for run in stage.layers]
    # The ends are the embedding, and the head with its norm; a tied one is on both ends of a pipeline.
    embedding = model.embedding_parameters / tp if stage.first else 0.0
    head = model.head_parameters / tp + model.final_norm_parameters if stage.last else 0.0
    copied = model.embedding_parameters / tp if stage.last and not stage.first and model.tied else 0.0
    return LocalParameters(
        dense=sum(dense * count for dense, _, count in layers),
        experts=sum(experts * count for _, experts, count in layers),
        ends=embedding + head + copied,
        largest_dense=max((dense for dense, _, _ in layers), default=0.0),
        largest_experts=max((experts for _, experts, _ in layers), default=0.0),
        adapter=_count_adapter(case, stage) if model.adapter is not None else None,
    )


def _count_adapter(case: Case, stage: StageLayers) -> AdapterElements:
    head, runs = case.model.head, stage.layers
    matrices = [(matrix, run.count) for run in runs for matrix in run.layer.matrices]
    if not case.model.tied:  # a tied one is the embedding's table
        matrices.append((head, 1))
    return AdapterElements(
        trained=sum(run.layer.trained_parameters * run.count for run in runs) + head.trained,
        of_layer=max(run.layer.trained_parameters for run in runs),
        frozen=sum((matrix.parameters - matrix.trained) * count for matrix, count in matrices),
    )


def count_layer(layer: LayerShape, case: Case) -> tuple[float, float]:
    """Elements of a layer on one rank: without its experts, and of its experts."""
    return _count_layer(layer, case.degrees, case.engine.whole_regions)


@lru_cache(maxsize=4096)
def _count_layer(layer: LayerShape, degrees: Degrees, whole_regions: bool) -> tuple[float, float]:
    """Both at once, cached, since a search asks for the same layer thousands of times."""

    def local(matrix: Matrix) -> float:
        # With whole regions, keys and values whose heads the tensor axis does not divide are not cut at all.
        whole = whole_regions and matrix.kv_heads % degrees.tp > 0
        return matrix.parameters / (1 if whole else matrix_split(matrix, degrees))

    dense = sum(local(each) for each in layer.matrices if each.part != "experts")
    return dense + layer.norm_parameters, sum(local(each) for each in layer.matrices if each.part == "experts")


def matrix_split(matrix: Matrix, degrees: Degrees) -> int:
    """Ranks that a matrix (all copies of it) is cut over; keys and values are cut at most to one head."""
    if matrix.part == "experts":
        return degrees.ep * degrees.etp
    if matrix.split == "none":
        return 1
    return min(degrees.tp, matrix.kv_heads) if matrix.kv_heads else degrees.tp


# --- overheads of a device, and the uncertainty


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """`fragment_share`: of the transient memory within a step; `context_bytes`: outside of the allocator.

    `usable`: the part of a device's memory that a plan may count on. `low` and `high`: factors of the interval that
    holds four of five measured peaks.
    """

    fragment_share: float
    context_bytes: float
    usable: float
    low: float
    high: float


@cache
def load_overheads() -> Overheads:
    """The shipped numbers."""
    text = files(__package__).joinpath("overheads.toml").read_text(encoding="utf-8")
    return Overheads(**tomllib.loads(text)["overheads"])


# --- the memory at the peak of a step


@cache
def optimizer_bytes(name: str) -> float:
    """Bytes of optimizer state per parameter, as its class states them."""
    return float(load_plugin("optimizers", name).state_bytes)


def checkpoint_bytes(parameters: int, weight_bytes: int, optimizer: str) -> float:
    """Bytes of a checkpoint: the trained weights as the optimizer updates them, and their states."""
    return parameters * (weight_bytes + optimizer_bytes(optimizer))


SUMMED_BYTES = 4  # bytes of a gradient of gathered weights while it is summed

MEMORY_ITEMS: Mapping[str, str] = {
    "weights": "what products read, or this rank's share of it",
    "gradients": "summed over the micro-batches",
    "optimizer": "moments, and the copy of the weights that they update",
    "activations": "kept for the backward pass by the micro-batches in flight",
    "working": "used at the moment of the peak: the loss, or one layer's way back",
    "gathered": "whole weights and gradients of layers whose states are shared",
    "messages": "buffers between pipeline stages",
}
"""The items of a breakdown."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one rank of a pipeline stage at the peak of a step; `ITEMS` describes each."""

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    gathered: float
    messages: float
    in_flight: float  # micro-batches whose activations are kept at once, in units of all layers of the rank
    host: float  # bytes in the host's memory; no item, since they are not on the device
    overheads: Overheads

    @cached_property
    def items(self) -> Mapping[str, float]:
        return MappingProxyType({name: getattr(self, name) for name in MEMORY_ITEMS})

    @property
    def device_items(self) -> Mapping[str, float]:  # items, and overheads beyond them, which add up to `device`
        beyond = {"fragmentation": self.reserved - self.allocated, "context": self.device - self.reserved}
        return MappingProxyType({**self.items, **beyond})

    @property
    def states(self) -> float:  # bytes that stay from step to step
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        return self.states + self.passing + self.messages

    @property
    def passing(self) -> float:  # bytes that are transient within a step
        return self.activations + self.working + self.gathered

    @property
    def reserved(self) -> float:  # bytes that the allocator reserves: transient tensors leave gaps
        return self.allocated + self.overheads.fragment_share * self.passing

    @property
    def device(self) -> float:  # bytes as nvidia-smi shows them, with the driver's context, libraries and communicators
        return self.reserved + self.overheads.context_bytes


def estimate_memory(case: Case, overheads: Overheads) -> tuple[StageMemory, ...]:
    """One entry per pipeline rank."""
    return tuple(_estimate_stage(case, stage, overheads) for stage in list_stages(case))


def estimate_peak(case: Case, overheads: Overheads) -> StageMemory:
    """The fullest rank, found without pricing ranks that equal an earlier one and keep no more than it."""
    kinds: dict[tuple[tuple[LayerRun, ...], bool, bool], StageLayers] = {}
    for stage in list_stages(case):
        kinds.setdefault((stage.layers, stage.first, stage.last), stage)
    return peak_stage(tuple(_estimate_stage(case, stage, overheads) for stage in kinds.values()))


def peak_stage(stages: tuple[StageMemory, ...]) -> StageMemory:
    """The fullest rank."""
    return max(stages, key=lambda stage: stage.device)


def _estimate_stage(case: Case, stage: StageLayers, overheads: Overheads) -> StageMemory:
    local, degrees, size = count_local(case, stage), case.degrees, case.value_bytes
    tokens, hidden = case.tokens, case.model.hidden

    # States: a rank keeps its share of what ZeRO shards. Sharded weights (zero 3) are the copy that the optimizer
    # updates; otherwise products may read another one.
    share, trained_share, adapter = local.shared(degrees), local.trained_share(degrees), local.adapter
    if case.zero == 3:
        weights = share * case.kept_weight_bytes
    else:
        weights = local.total * (size if case.splits_copy else case.kept_weight_bytes)
    if adapter is not None:
        held = adapter.frozen / (degrees.shards if case.zero == 3 else 1)
        weights -= held * (case.kept_weight_bytes - size)
    gradient_bytes = case.gradient_bytes + (case.engine.spare_gradient_bytes if size == 2 else 0)
    gradients = (trained_share if case.zero >= 2 else local.trained) * gradient_bytes
    copy = case.kept_weight_bytes if case.splits_copy and case.zero < 3 else 0
    optimizer = (trained_share if case.zero >= 1 else local.trained) * (optimizer_bytes(case.optimizer) + copy)
    host = 0.0
    if case.offload:  # optimizer states lie in the host's memory, sharded weights and their gradients too
        host, optimizer = optimizer, 0.0
        if case.zero == 3:
            host, weights, gradients = host + weights + gradients, 0.0, 0.0

    # What one micro-batch keeps for its backward pass, in all layers and in the embedding. 16-bit copies of weights are
    # kept too; recompute of a layer makes them again.
    a_pass = sum(case.side_tokens(run.side) * kept_bytes(run.layer, case) * run.count for run in stage.layers)
    a_pass += tokens * (hidden if stage.first and case.dropout else 0) / case.stream_split
    if case.casts_weights:
        head = case.model.head.parameters / degrees.tp if stage.last else 0.0
        copied = local.layers
        if adapter is not None:  # frozen matrices need none, but for a tied head: its table keeps its format
            head, copied = head if case.model.tied else 0.0, adapter.trained
        a_pass += size * (head + (copied if case.recompute == "none" else 0.0))
    # The inputs of the last norm and the head: of one micro-batch (its backward pass follows at once), or all in GPipe.
    by_head = 0.0
    if stage.last:
        norm = 4 if case.casts_each else size
        head_split = 1 if case.engine.whole_regions else case.stream_split
        read = 0 if case.model.head.frozen and not case.model.head.adapter else size
        by_head = tokens * hidden * (norm / case.stream_split + read / head_split)
        by_head *= case.micro_batches if case.schedule == "gpipe" and degrees.pp > 1 else 1
    kept = kept_micro_batches(case, stage.rank)

    # The larger of the loss and the backward pass through one layer: the loss ends when the backward pass begins.
    working = max([0.0, *(_backward_bytes(case, run) for run in stage.layers)])
    if stage.last:
        # Copies of weights that autocast caches until the loss is computed, beyond those kept for the backward pass.
        cached = case.casts_weights and degrees.pp == 1 and case.recompute != "none"
        copies = local.layers if adapter is None else adapter.trained
        working = max(working, loss_bytes(case) + (size * copies if cached else 0.0))

    # Weights of the layer in use and of the next, and one layer's gradient; the ends are gathered separately. Without
    # resharding all weights stay gathered, and in a pipeline all gradients until its last micro-batch.
    gathered = 0.0
    if case.zero == 3 and degrees.shards > 1:
        layer = local.largest_dense + (local.largest_experts if degrees.expert_shards > 1 else 0.0)
        summed = layer if adapter is None else adapter.of_layer
        if case.reshard:
            gathered = 2 * layer * size + summed * (size + SUMMED_BYTES) + local.ends * size
        else:
            added = local.total * SUMMED_BYTES if degrees.pp > 1 else summed * (size + SUMMED_BYTES)
            gathered = local.total * size + added

    # Receive and send buffers of stages: two of the stream each way, or one each way per micro-batch.
    messages = 0.0
    if degrees.pp > 1:
        buffers = 2 * case.micro_batches * case.stages_per_rank if case.engine.buffers_each_pass else 4
        messages = buffers * tokens * hidden * case.stream_bytes / case.stream_split
    return StageMemory(
        rank=stage.rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept * a_pass + by_head,
        working=working,
        gathered=gathered,
        messages=messages,
        in_flight=kept,
        host=host,
        overheads=overheads,
    )


def _backward_bytes(case: Case, run: LayerRun) -> float:
    """What is recomputed for a layer, gradients of its widest tensors, and its gathered stream."""
    layer, experts = run.layer, run.layer.experts
    again = whole_bytes(layer, case) - (0.0 if case.recompute == "full" else kept_bytes(layer, case))
    # Features of the gradients that are alive at once in the feed-forward layer
    widest = layer.ffn * (3 if layer.gated else 2)
    if experts is not None:
        widest = experts.per_token * (2 * layer.hidden + 3 * experts.dim)
    wide = widest / case.degrees.tp + 2 * layer.hidden / case.stream_split
    gathered = 2 * layer.hidden if case.stream_split > 1 else 0
    return case.side_tokens(run.side) * (max(again, 0.0) + case.value_bytes * (wide + gathered))


def loss_bytes(case: Case) -> float:
    """Logits at the peak of the loss, and the stream that the head reads."""
    engine, split = case.engine, case.degrees.tp > 1
    per_logit = 2 * case.value_bytes if case.fuses_loss else engine.logit_bytes
    if split and engine.splits_loss and not case.fuses_loss:
        per_logit += engine.split_logit_bytes
    positions = case.micro_batch if case.model.pooled else case.tokens
    logits = positions * case.model.head.outputs * per_logit / (case.degrees.tp if engine.splits_loss else 1)
    return logits + (2 * positions * case.model.hidden * case.value_bytes if case.stream_split > 1 else 0)


# --- the memory while a checkpoint is written or read


@dataclass(frozen=True)
class BetweenSteps:
    """Bytes of one rank. The allocator keeps the memory of a step, so nvidia-smi shows at least a step's peak while a
    checkpoint is written; a rank that resumes has not taken a step yet."""

    kept: float  # on the device while a checkpoint is written: weights and optimizer states
    copied: float  # in the host's memory at once, if all is staged before it is written (`async_save`)
    resuming: float  # on the device while it is read: the same, and the largest tensor in transit


def estimate_between_steps(case: Case, peak: StageMemory) -> BetweenSteps:
    """What the rank of `peak` holds between steps."""
    kept = peak.weights + peak.optimizer
    stage = list_stages(case)[peak.rank]
    local = count_local(case, stage)
    saved = kept + peak.host
    if local.adapter is not None:  # frozen weights are in no checkpoint
        share = local.trained_share(case.degrees) if case.zero == 3 else local.trained
        saved = share * (case.kept_weight_bytes + optimizer_bytes(case.optimizer))
    matrices = [
        matrix.parameters / matrix_split(matrix, case.degrees) for run in stage.layers for matrix in run.layer.matrices
    ]
    largest = max([*matrices, local.ends]) / (case.degrees.shards if case.zero == 3 else 1)
    return BetweenSteps(kept, saved, kept + largest * case.kept_weight_bytes)
