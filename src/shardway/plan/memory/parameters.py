"""Parameters that one rank of a stage has before anything shards them: after tensor, expert and pipeline cuts.

Invariant: experts are counted apart, since other ranks share their states. This module must not count bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardway.plan.case import Case
from shardway.plan.shapes.layer import LayerShape, Matrix
from shardway.plan.stages import StageLayers


@dataclass(frozen=True)
class LocalParameters:
    """Elements on a rank: of layers, of experts, of the two ends; `largest` is the most that one layer has."""

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
    """What a rank of a stage has."""
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
    """A layer without its experts."""
    return _count_layer(layer, _cut_of(case)).dense


def layer_experts(layer: LayerShape, case: Case) -> float:
    """The experts of a layer that are on one rank."""
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
    """Both at once; a search asks for the same layer thousands of times."""
    dense = sum(_local(each, cut) for each in layer.matrices if each.part != "experts")
    experts = sum(_local(each, cut) for each in layer.matrices if each.part == "experts")
    return _LayerElements(dense + layer.norm_parameters, experts)


def _local(matrix: Matrix, cut: _Cut) -> float:
    whole = cut.whole and matrix.kv_heads % cut.tp > 0
    return matrix.parameters / (1 if whole else _split(matrix, cut))


def matrix_split(matrix: Matrix, case: Case) -> int:
    """Ranks that a matrix (all copies of it) is cut over; keys and values are not cut below one head."""
    return _split(matrix, _cut_of(case))


def _split(matrix: Matrix, cut: _Cut) -> int:
    if matrix.part == "experts":
        return cut.experts
    if matrix.split == "none":
        return 1
    return min(cut.tp, matrix.kv_heads) if matrix.kv_heads else cut.tp


def _count_ends(case: Case, stage: StageLayers) -> float:
    """Embedding and head with its norm; one that is tied is on both ends of a pipeline."""
    model, tp = case.model, case.degrees.tp
    embedding = model.embedding_parameters / tp if stage.first else 0.0
    head = model.head_parameters / tp + model.final_norm_parameters if stage.last else 0.0
    copied = model.embedding_parameters / tp if stage.last and not stage.first and model.tied else 0.0
    return embedding + head + copied
