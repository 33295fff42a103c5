"""What a rank holds when no step runs: while a checkpoint is written, and while one is read.

Invariant: gradients and activations are gone between steps; what is written or read passes through the host, tensor by
tensor or as one copy. This module must not know how long that takes.

Sources: `torch.distributed.checkpoint` (PyTorch documentation): `save` copies each rank's own shards to the host before
they are written, `async_save` all of them at once; `load` reads into tensors that are there already.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardway.plan.case import Case
from shardway.plan.memory.breakdown import StageMemory
from shardway.plan.memory.parameters import count_local, matrix_split
from shardway.plan.stages import list_stages


@dataclass(frozen=True)
class Moments:
    """Bytes of one rank. The allocator keeps what a step took, so that nvidia-smi shows no less than at a step's peak
    while a checkpoint is written; a rank that resumes has not taken a step yet."""

    kept: float
    """On the device while a checkpoint is written: weights and optimizer states."""
    copied: float
    """In the host's memory at once, where all of it is staged before it is written (`async_save`)."""
    resuming: float
    """On the device while it is read: the same, and the largest tensor on its way."""


def estimate_moments(case: Case, peak: StageMemory) -> Moments:
    """Of the rank that `peak` is of."""
    kept = peak.weights + peak.optimizer
    stage = list_stages(case)[peak.rank]
    local = count_local(case, stage)
    matrices = [matrix.parameters / matrix_split(matrix, case) for run in stage.layers for matrix in run.layer.matrices]
    largest = max([*matrices, local.ends]) / (case.degrees.shards if case.zero == 3 else 1)
    return Moments(kept, kept + peak.host, kept + largest * case.kept_weight_bytes)
