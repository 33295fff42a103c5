"""Parameters that one rank of a stage has before anything shards them: after tensor, expert and pipeline cuts.

Invariant: experts are counted apart, since other ranks share their states. This module must not count bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    matrices = sum(local_matrix(each, case) for each in layer.matrices if each.part != "experts")
    return matrices + layer.norm_parameters


def layer_experts(layer: LayerShape, case: Case) -> float:
    """The experts of a layer that are on one rank."""
    return sum(local_matrix(each, case) for each in layer.matrices if each.part == "experts")


def local_matrix(matrix: Matrix, case: Case) -> float:
    """A matrix's share of one rank."""
    whole = case.engine.whole_regions and matrix.kv_heads % case.degrees.tp > 0
    return matrix.parameters / (1 if whole else matrix_split(matrix, case))


def matrix_split(matrix: Matrix, case: Case) -> int:
    """Ranks that a matrix (all copies of it) is cut over; keys and values are not cut below one head."""
    if matrix.part == "experts":
        return case.degrees.ep * case.degrees.etp
    if matrix.split == "none":
        return 1
    return min(case.degrees.tp, matrix.kv_heads) if matrix.kv_heads else case.degrees.tp


def _count_ends(case: Case, stage: StageLayers) -> float:
    """Embedding and head with its norm; one that is tied is on both ends of a pipeline."""
    model, tp = case.model, case.degrees.tp
    embedding = model.embedding_parameters / tp if stage.first else 0.0
    head = model.head_parameters / tp + model.final_norm_parameters if stage.last else 0.0
    copied = model.embedding_parameters / tp if stage.last and not stage.first and model.tied else 0.0
    return embedding + head + copied
