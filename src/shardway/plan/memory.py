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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from types import MappingProxyType

from shardway.plan.case import Case, Recompute, StageLayers, kept_micro_batches, list_stages
from shardway.plan.shapes.architecture import AttentionShape, LayerRun, LayerShape, Matrix
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
class ActivationRules:
    """What decides what a layer keeps. `input_bytes`: of product inputs; `tp`, `ep`, `etp`: degrees."""

    recompute: Recompute
    value_bytes: int
    input_bytes: int
    seq_len: int
    tp: int
    stream_split: int
    ep: int
    etp: int
    flash: bool
    dropout: bool
    fused_norms: bool
    fused_activations: bool
    fused_scores: bool
    norm_bytes: int
    """Bytes of a norm's input."""
    stream_bytes: int
    casts_each: bool
    whole_regions: bool

    @property
    def region_split(self) -> str:
        """What splits the input of a region of the tensor axis."""
        return "none" if self.whole_regions else "stream"


def _rules_of(case: Case) -> ActivationRules:
    """The rules of a case; an engine may keep inputs of products in the format in which they are multiplied."""
    engine, degrees = case.engine, case.degrees
    return ActivationRules(
        recompute=case.recompute,
        value_bytes=case.value_bytes,
        input_bytes=1 if case.low_bits and engine.keeps_low_bits else case.value_bytes,
        seq_len=case.seq_len,
        tp=degrees.tp,
        stream_split=case.stream_split,
        ep=degrees.ep,
        etp=degrees.etp,
        flash=case.flash,
        dropout=case.dropout,
        fused_norms=engine.fused_norms or case.compiled,
        fused_activations=engine.fused_activations or case.compiled,
        fused_scores=engine.fused_scores,
        norm_bytes=4 if case.casts_each else case.value_bytes,
        stream_bytes=case.stream_bytes,
        casts_each=case.casts_each and not case.compiled,
        whole_regions=engine.whole_regions,
    )


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


def list_saved(layer: LayerShape, how: ActivationRules) -> tuple[SavedActivation, ...]:
    """All that a layer saves if nothing is recomputed."""
    found: list[SavedActivation] = []
    for attention in layer.attentions:
        found += _attention(layer, attention, how)
    found += _mixture(layer, how) if layer.experts else _feed_forward(layer, how)
    return tuple(found)


def kept_bytes(layer: LayerShape, case: Case) -> float:
    """Bytes per token of the micro-batch that a layer keeps under the recompute of the case, on one rank."""
    return _layer_bytes(layer, _rules_of(case))[0]


def whole_bytes(layer: LayerShape, case: Case) -> float:
    """The same without recompute: what one layer needs while it is computed again."""
    return _layer_bytes(layer, _rules_of(case))[1]


@lru_cache(maxsize=4096)
def _layer_bytes(layer: LayerShape, how: ActivationRules) -> tuple[float, float]:
    """Both values at once, cached, since a search asks for the same layer thousands of times."""
    ranks = {"tensor": how.tp, "stream": how.stream_split, "none": 1}
    saved = [(each, each.bytes_per_token / ranks[each.split]) for each in list_saved(layer, how)]
    whole = sum(size for each, size in saved if each.name not in ONLY_PRODUCTS)
    if how.recompute == "full":
        return layer.hidden * how.stream_bytes / how.stream_split, whole
    return sum(size * _kept_part(each, how) for each, size in saved), whole


def _kept_part(saved: SavedActivation, how: ActivationRules) -> float:
    if how.recompute == "none":
        return float(saved.name not in ONLY_PRODUCTS)
    if how.recompute == "selective":
        return float(not saved.name.startswith("scores") and saved.name not in ONLY_PRODUCTS)
    return saved.product if how.recompute == "products" else saved.second


def _attention(layer: LayerShape, attention: AttentionShape, how: ActivationRules) -> Iterator[SavedActivation]:
    size, width = how.value_bytes, layer.hidden
    stream = how.stream_bytes / how.norm_bytes
    yield SavedActivation("input of attention's norm", width * how.norm_bytes, product=stream, second=stream)
    yield from _norm(width, how)
    copies = attention.input_products if how.casts_each else 1
    yield SavedActivation("input of queries, keys, values", copies * width * how.input_bytes, how.region_split)
    if attention.latent is not None:
        latent = attention.latent
        yield SavedActivation(
            "latents before and after their norms", 2 * (latent.q_rank + latent.kv_rank) * size, "none", 0.5, 0.5
        )
    yield SavedActivation("queries", attention.qk_width * size, "tensor", product=1, second=1)
    split_heads = attention.latent is not None or attention.kv_heads % how.tp == 0
    # With fewer heads than ranks each rank has one of them.
    kv_width = attention.kv_width if split_heads else attention.kv_width // attention.kv_heads
    yield SavedActivation(
        "keys and values", kv_width * size, "tensor" if split_heads else "none", product=1, second=0.5
    )
    if not how.flash:
        yield from _scores(attention, how)
    else:
        yield SavedActivation("sums of exponentials", attention.heads * STATISTIC_BYTES, "tensor", product=1, second=1)
    yield SavedActivation("output of attention", attention.value_width * size, "tensor", product=1, second=1)
    yield SavedActivation(ONLY_PRODUCTS[0], width * size, product=1)
    yield from _summands(ONLY_PRODUCTS[2], width, how)
    if how.dropout:
        yield SavedActivation("mask of dropout after attention", width * MASK_BYTES)


def _summands(name: str, width: int, how: ActivationRules) -> Iterator[SavedActivation]:
    """Summands of all tokens on each rank of the tensor axis, whatever splits their sum."""
    if how.whole_regions and how.tp > 1:
        yield SavedActivation(name, width * how.value_bytes, "none", product=1)


def _norm(width: int, how: ActivationRules) -> Iterator[SavedActivation]:
    """What an unfused norm keeps beside its input: a copy in fp32, and the result before its gain."""
    if not (how.fused_norms):
        yield SavedActivation("copies in a norm", width * (4 + how.value_bytes))


def _scores(attention: AttentionShape, how: ActivationRules) -> Iterator[SavedActivation]:
    """Softmax, and with dropout its mask and result: 5 bytes per score in 16 bits."""
    scores = attention.heads * how.seq_len
    yield SavedActivation("scores after softmax", scores * how.value_bytes, "tensor")
    if not how.fused_scores:
        yield SavedActivation(
            "scores before softmax, and their mask", scores * (how.value_bytes + 4 + MASK_BYTES), "tensor"
        )
    if how.dropout:
        yield SavedActivation("scores after dropout, and its mask", scores * (how.value_bytes + MASK_BYTES), "tensor")


def _feed_forward(layer: LayerShape, how: ActivationRules) -> Iterator[SavedActivation]:
    size = how.value_bytes
    yield SavedActivation("input of feed-forward's norm", layer.hidden * how.norm_bytes)
    yield from _norm(layer.hidden, how)
    copies = layer.gate_products if how.casts_each else 1
    yield SavedActivation("input of feed-forward", copies * layer.hidden * how.input_bytes, how.region_split)
    yield from _activation(layer, layer.ffn, 1, how)
    yield SavedActivation(ONLY_PRODUCTS[1], layer.hidden * size, product=1, second=1)
    yield from _summands(ONLY_PRODUCTS[3], layer.hidden, how)
    if how.dropout:
        yield SavedActivation("mask of dropout after feed-forward", layer.hidden * MASK_BYTES)


def _activation(layer: LayerShape, width: int, copies: float, how: ActivationRules) -> Iterator[SavedActivation]:
    """Tensors between the two products of a feed-forward layer (or of `copies` experts)."""
    wide, size = 2 if layer.gated else 1, how.value_bytes
    yield SavedActivation("input of the activation", copies * wide * width * size, "tensor", product=1, second=1 / wide)
    if layer.gated and not (how.fused_activations):
        yield SavedActivation("gate after its function", copies * width * size, "tensor")
    yield SavedActivation("output of the activation", copies * width * how.input_bytes, "tensor")


def _mixture(layer: LayerShape, how: ActivationRules) -> Iterator[SavedActivation]:
    mixture, size = layer.experts, how.value_bytes
    if mixture is None:
        return
    yield SavedActivation("input of the router's norm", layer.hidden * how.norm_bytes)
    yield from _norm(layer.hidden, how)
    yield SavedActivation("input of the router", layer.hidden * how.norm_bytes)
    yield SavedActivation("scores of the router", mixture.count * STATISTIC_BYTES, "none")
    # Tokens of the busiest rank over the mean: an assumption, approaching 1.5 for large ep.
    copies = mixture.per_token * (1 + EXPERT_IMBALANCE * (1 - 1 / how.ep))
    # Tokens reach experts once each; if experts are not split, the tensor ranks share their rows.
    split = "tensor" if how.etp == 1 else "stream"
    yield SavedActivation("tokens sent to experts", copies * layer.hidden * how.input_bytes, split)
    yield from _activation(layer, mixture.dim, copies, how)
    yield SavedActivation("results of experts", copies * layer.hidden * size, split, product=1, second=1)
    if mixture.shared_dim:
        yield from _activation(layer, mixture.shared_dim, 1, how)


# --- parameters of one rank before sharding


@dataclass(frozen=True)
class LocalParameters:
    """Elements on a rank: of layers, of experts, of the two ends; `largest` is the most of one layer."""

    dense: float
    experts: float
    ends: float
    largest_dense: float
    largest_experts: float

    @property
    def layers(self) -> float:
        """Those of layers, experts included."""
        return self.dense + self.experts

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.ends


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
    )


def count_layer(layer: LayerShape, case: Case) -> tuple[float, float]:
    """Elements of a layer on one rank: without its experts, and of its experts."""
    return _count_layer(layer, case.degrees.tp, case.degrees.ep * case.degrees.etp, case.engine.whole_regions)


@lru_cache(maxsize=4096)
def _count_layer(layer: LayerShape, tp: int, experts: int, whole_regions: bool) -> tuple[float, float]:
    """Both at once, cached, since a search asks for the same layer thousands of times."""

    def local(matrix: Matrix) -> float:
        # With whole regions, keys and values whose heads the tensor axis does not divide are not cut at all.
        whole = whole_regions and matrix.kv_heads % tp > 0
        return matrix.parameters / (1 if whole else _split(matrix, tp, experts))

    dense = sum(local(each) for each in layer.matrices if each.part != "experts")
    return dense + layer.norm_parameters, sum(local(each) for each in layer.matrices if each.part == "experts")


def matrix_split(matrix: Matrix, case: Case) -> int:
    """Ranks that a matrix (all copies of it) is cut over; keys and values are cut at most to one head."""
    return _split(matrix, case.degrees.tp, case.degrees.ep * case.degrees.etp)


def _split(matrix: Matrix, tp: int, experts: int) -> int:
    if matrix.part == "experts":
        return experts
    if matrix.split == "none":
        return 1
    return min(tp, matrix.kv_heads) if matrix.kv_heads else tp


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


SUMMED_BYTES = 4
"""Bytes of a gradient of gathered weights while it is summed."""

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
    in_flight: float
    """Micro-batches whose activations are kept at once, in units of all layers of the rank."""
    host: float
    """Bytes in the host's memory; no item, since they are not on the device."""
    overheads: Overheads

    @cached_property
    def items(self) -> Mapping[str, float]:
        return MappingProxyType({name: getattr(self, name) for name in MEMORY_ITEMS})

    @property
    def device_items(self) -> Mapping[str, float]:
        """Items, and overheads beyond them, which add up to `device`."""
        beyond = {"fragmentation": self.reserved - self.allocated, "context": self.device - self.reserved}
        return MappingProxyType({**self.items, **beyond})

    @property
    def states(self) -> float:
        """Bytes that stay from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        return self.states + self.passing + self.messages

    @property
    def passing(self) -> float:
        """Bytes that are transient within a step."""
        return self.activations + self.working + self.gathered

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves: transient tensors leave gaps."""
        return self.allocated + self.overheads.fragment_share * self.passing

    @property
    def device(self) -> float:
        """Bytes as nvidia-smi shows them, with the driver's context, libraries and communicators."""
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
    local = count_local(case, stage)
    kept = kept_micro_batches(case, stage.rank)
    return StageMemory(
        rank=stage.rank,
        weights=_weights(case, local),
        gradients=_gradients(case, local),
        optimizer=_optimizer(case, local),
        activations=kept * _activations_of_pass(case, stage) + _kept_by_head(case, stage),
        working=_working(case, stage),
        gathered=_gathered(case, local),
        messages=_messages(case),
        in_flight=kept,
        host=_on_host(case, local),
        overheads=overheads,
    )


def _share(case: Case, local: LocalParameters, from_stage: int) -> float:
    """Elements that a rank keeps: its share if ZeRO shards these from `from_stage` on and is at least there, else
    all."""
    if case.zero < from_stage:
        return local.total
    degrees = case.degrees
    return (local.dense + local.ends) / degrees.shards + local.experts / degrees.expert_shards


def _weights(case: Case, local: LocalParameters) -> float:
    """The weights that products read. Sharded weights (zero 3) are the copy that the optimizer updates."""
    if case.zero == 3:
        return 0.0 if case.offload else _share(case, local, 3) * case.kept_weight_bytes
    return local.total * (case.value_bytes if case.splits_copy else case.kept_weight_bytes)


def _gradients(case: Case, local: LocalParameters) -> float:
    size = case.gradient_bytes + (case.engine.spare_gradient_bytes if case.value_bytes == 2 else 0)
    return 0.0 if case.offload and case.zero == 3 else _share(case, local, 2) * size


def _optimizer(case: Case, local: LocalParameters) -> float:
    """Optimizer states, and the copy that the optimizer updates if that is not the weights themselves."""
    if case.offload:
        return 0.0
    copy = case.kept_weight_bytes if case.splits_copy and case.zero < 3 else 0
    return _share(case, local, 1) * (optimizer_bytes(case.optimizer) + copy)


def _on_host(case: Case, local: LocalParameters) -> float:
    """What offload moves to the host: the items of `_optimizer`, and for sharded weights their gradients too."""
    if not case.offload:
        return 0.0
    here = replace(case, offload=False)
    states = _optimizer(here, local)
    return states + _weights(here, local) + _gradients(here, local) if case.zero == 3 else states


def _activations_of_pass(case: Case, stage: StageLayers) -> float:
    """Bytes that one micro-batch keeps in all layers of a stage, and in the embedding. The head's input is counted
    separately."""
    layers = sum(case.side_tokens(run.side) * kept_bytes(run.layer, case) * run.count for run in stage.layers)
    mask = case.model.hidden if stage.first and case.dropout else 0
    return layers + case.tokens * mask / case.stream_split + _kept_copies(case, stage)


def _kept_by_head(case: Case, stage: StageLayers) -> float:
    """The inputs of the last norm and the head, of one micro-batch (its backward pass follows at once), or all in
    GPipe."""
    if not stage.last:
        return 0.0
    norm = 4 if case.casts_each else case.value_bytes
    head_split = 1 if case.engine.whole_regions else case.stream_split
    read = case.tokens * case.model.hidden * (norm / case.stream_split + case.value_bytes / head_split)
    return read * (case.micro_batches if case.schedule == "gpipe" and case.degrees.pp > 1 else 1)


def _kept_copies(case: Case, stage: StageLayers) -> float:
    """16-bit copies of weights that one micro-batch keeps; recompute of a layer makes them again."""
    if not case.casts_weights:
        return 0.0
    head = case.model.head.parameters / case.degrees.tp if stage.last else 0.0
    return case.value_bytes * (head + (count_local(case, stage).layers if case.recompute == "none" else 0.0))


def _working(case: Case, stage: StageLayers) -> float:
    """The larger of the loss and the backward pass through one layer: the loss ends when the backward pass begins."""
    back = max((_way_back(case, run) for run in stage.layers), default=0.0)
    if not stage.last:
        return max(back, 0.0)
    # Copies of weights that autocast caches until the loss is computed, beyond those kept for the backward pass.
    cached = case.casts_weights and case.degrees.pp == 1 and case.recompute != "none"
    copies = case.value_bytes * count_local(case, stage).layers if cached else 0.0
    return max(back, loss_bytes(case) + copies)


def _way_back(case: Case, run: LayerRun) -> float:
    """What is recomputed for a layer, gradients of its widest tensors, and its gathered stream."""
    layer = run.layer
    again = whole_bytes(layer, case) - (0.0 if case.recompute == "full" else kept_bytes(layer, case))
    wide = _widest(layer) / case.degrees.tp + 2 * layer.hidden / case.stream_split
    gathered = 2 * layer.hidden if case.stream_split > 1 else 0
    return case.side_tokens(run.side) * (max(again, 0.0) + case.value_bytes * (wide + gathered))


def _widest(layer: LayerShape) -> float:
    """Features of the gradients that are alive at once in the feed-forward layer."""
    if layer.experts is not None:
        return layer.experts.per_token * (2 * layer.hidden + 3 * layer.experts.dim)
    return layer.ffn * (3 if layer.gated else 2)


def loss_bytes(case: Case) -> float:
    """Logits at the peak of the loss, and the stream that the head reads."""
    engine, split = case.engine, case.degrees.tp > 1
    per_logit = 2 * case.value_bytes if case.fused_loss else engine.logit_bytes
    if split and engine.splits_loss and not case.fused_loss:
        per_logit += engine.split_logit_bytes
    positions = case.micro_batch if case.model.patch_features else case.tokens
    logits = positions * case.model.vocab * per_logit / (case.degrees.tp if engine.splits_loss else 1)
    return logits + (2 * positions * case.model.hidden * case.value_bytes if case.stream_split > 1 else 0)


def _gathered(case: Case, local: LocalParameters) -> float:
    """Weights of the layer in use and of the next, and one layer's gradient; the ends are gathered separately.

    Without resharding all weights stay gathered, and in a pipeline all gradients until its last micro-batch.
    """
    if case.zero < 3 or case.degrees.shards == 1:
        return 0.0
    size = case.value_bytes
    layer = local.largest_dense + (local.largest_experts if case.degrees.expert_shards > 1 else 0.0)
    if case.reshard:
        return layer * (3 * size + SUMMED_BYTES) + local.ends * size
    summed = local.total * SUMMED_BYTES if case.degrees.pp > 1 else layer * (size + SUMMED_BYTES)
    return local.total * size + summed


def _messages(case: Case) -> float:
    """Receive and send buffers of stages: two of the stream each way, or one each way per micro-batch."""
    if case.degrees.pp == 1:
        return 0.0
    buffers = 2 * case.micro_batches * case.stages_per_rank if case.engine.buffers_each_pass else 4
    return buffers * case.tokens * case.model.hidden * case.stream_bytes / case.stream_split


# --- the memory while a checkpoint is written or read


@dataclass(frozen=True)
class BetweenSteps:
    """Bytes of one rank. The allocator keeps the memory of a step, so nvidia-smi shows at least a step's peak while a
    checkpoint is written; a rank that resumes has not taken a step yet."""

    kept: float
    """On the device while a checkpoint is written: weights and optimizer states."""
    copied: float
    """In the host's memory at once, if all is staged before it is written (`async_save`)."""
    resuming: float
    """On the device while it is read: the same, and the largest tensor in transit."""


def estimate_between_steps(case: Case, peak: StageMemory) -> BetweenSteps:
    """What the rank of `peak` holds between steps."""
    kept = peak.weights + peak.optimizer
    stage = list_stages(case)[peak.rank]
    local = count_local(case, stage)
    matrices = [matrix.parameters / matrix_split(matrix, case) for run in stage.layers for matrix in run.layer.matrices]
    largest = max([*matrices, local.ends]) / (case.degrees.shards if case.zero == 3 else 1)
    return BetweenSteps(kept, kept + peak.host, kept + largest * case.kept_weight_bytes)
