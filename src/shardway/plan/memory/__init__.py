"""The memory of one rank of each pipeline stage, item by item: parameters, states, activations, overheads.

Invariants:
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
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from types import MappingProxyType

from shardway.plan.activation_memory import kept_bytes, whole_bytes
from shardway.plan.case import Case
from shardway.plan.shapes.architecture import LayerRun, LayerShape, Matrix
from shardway.plan.stages import StageLayers, kept_micro_batches, list_stages

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
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.ends


def count_local(case: Case, stage: StageLayers) -> LocalParameters:
    """The elements on a rank of a stage, after tensor, expert and pipeline cuts."""
    dense = [(layer_dense(run.layer, case), run.count) for run in stage.layers]
    experts = [(layer_experts(run.layer, case), run.count) for run in stage.layers]
    return LocalParameters(
        dense=sum(size * count for size, count in dense),
        experts=sum(size * count for size, count in experts),
        ends=_count_ends(case, stage),
        largest_dense=max((size for size, _ in dense), default=0.0),
        largest_experts=max((size for size, _ in experts), default=0.0),
    )


def layer_dense(layer: LayerShape, case: Case) -> float:
    """Elements of a layer without its experts."""
    return _count_layer(layer, _cut_of(case)).dense


def layer_experts(layer: LayerShape, case: Case) -> float:
    """Elements of a layer's experts on one rank."""
    return _count_layer(layer, _cut_of(case)).experts


@dataclass(frozen=True)
class _Cut:
    """Ranks of the tensor axis, and of the axes that experts are split over; `whole`: keys and values whose heads these
    do not divide are not cut at all."""

    tp: int
    experts: int
    whole: bool


@dataclass(frozen=True)
class _LayerElements:
    dense: float
    experts: float


def _cut_of(case: Case) -> _Cut:
    return _Cut(case.degrees.tp, case.degrees.ep * case.degrees.etp, case.engine.whole_regions)


@lru_cache(maxsize=4096)
def _count_layer(layer: LayerShape, cut: _Cut) -> _LayerElements:
    """Both at once, cached, since a search asks for the same layer thousands of times."""
    dense = sum(_local(each, cut) for each in layer.matrices if each.part != "experts")
    experts = sum(_local(each, cut) for each in layer.matrices if each.part == "experts")
    return _LayerElements(dense + layer.norm_parameters, experts)


def _local(matrix: Matrix, cut: _Cut) -> float:
    whole = cut.whole and matrix.kv_heads % cut.tp > 0
    return matrix.parameters / (1 if whole else _split(matrix, cut))


def matrix_split(matrix: Matrix, case: Case) -> int:
    """Ranks that a matrix (all copies of it) is cut over; keys and values are cut at most to one head."""
    return _split(matrix, _cut_of(case))


def _split(matrix: Matrix, cut: _Cut) -> int:
    if matrix.part == "experts":
        return cut.experts
    if matrix.split == "none":
        return 1
    return min(cut.tp, matrix.kv_heads) if matrix.kv_heads else cut.tp


def _count_ends(case: Case, stage: StageLayers) -> float:
    """Embedding and head with its norm; a tied one is on both ends of a pipeline."""
    model, tp = case.model, case.degrees.tp
    embedding = model.embedding_parameters / tp if stage.first else 0.0
    head = model.head_parameters / tp + model.final_norm_parameters if stage.last else 0.0
    copied = model.embedding_parameters / tp if stage.last and not stage.first and model.tied else 0.0
    return embedding + head + copied


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

OPTIMIZER_BYTES: Mapping[str, float] = MappingProxyType(
    {"adamw": 8.0, "adamw8bit": 2.0, "adafactor": 0.02, "sgd": 4.0, "muon": 4.0}
)
"""Bytes of optimizer state per parameter: two moments in fp32 or eight bits (Dettmers et al., arXiv:2110.02861), row
and column sums (Shazeer and Stern, arXiv:1804.04235), one momentum (Jordan et al., 2024)."""

SUMMED_BYTES = 4
"""Bytes of a gradient of gathered weights while it is summed."""

MEMORY_ITEMS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "what products read, or this rank's share of it",
        "gradients": "summed over the micro-batches",
        "optimizer": "moments, and the copy of the weights that they update",
        "activations": "kept for the backward pass by the micro-batches in flight",
        "working": "used at the moment of the peak: the loss, or one layer's way back",
        "gathered": "whole weights and gradients of layers whose states are shared",
        "messages": "buffers between pipeline stages",
    }
)
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
        """Every item by its name."""
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
        """All items."""
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
    return _share(case, local, 1) * (OPTIMIZER_BYTES[case.optimizer] + copy)


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
    return case.value_bytes * (head + (_layer_elements(case, stage) if case.recompute == "none" else 0.0))


def _layer_elements(case: Case, stage: StageLayers) -> float:
    local = count_local(case, stage)
    return local.dense + local.experts


def _working(case: Case, stage: StageLayers) -> float:
    """The larger of the loss and the backward pass through one layer: the loss ends when the backward pass begins."""
    back = max((_way_back(case, run) for run in stage.layers), default=0.0)
    return max(back, loss_bytes(case) + _cached_copies(case, stage) if stage.last else 0.0)


def _cached_copies(case: Case, stage: StageLayers) -> float:
    """Copies of weights that autocast caches until the loss is computed, beyond those kept for the backward pass."""
    cached = case.casts_weights and case.degrees.pp == 1 and case.recompute != "none"
    return case.value_bytes * _layer_elements(case, stage) if cached else 0.0


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
class Moments:
    """Bytes of one rank. The allocator keeps the memory of a step, so nvidia-smi shows at least a step's peak while a
    checkpoint is written; a rank that resumes has not taken a step yet."""

    kept: float
    """On the device while a checkpoint is written: weights and optimizer states."""
    copied: float
    """In the host's memory at once, if all is staged before it is written (`async_save`)."""
    resuming: float
    """On the device while it is read: the same, and the largest tensor in transit."""


def estimate_moments(case: Case, peak: StageMemory) -> Moments:
    """The moments of the rank of `peak`."""
    kept = peak.weights + peak.optimizer
    stage = list_stages(case)[peak.rank]
    local = count_local(case, stage)
    matrices = [matrix.parameters / matrix_split(matrix, case) for run in stage.layers for matrix in run.layer.matrices]
    largest = max([*matrices, local.ends]) / (case.degrees.shards if case.zero == 3 else 1)
    return Moments(kept, kept + peak.host, kept + largest * case.kept_weight_bytes)
