"""Sharding: each rank holds a part of every weight and gathers the whole when it is used (FSDP2 `fully_shard`).

Invariant: parameters are DTensors over dp_shard (with dp_replicate around it: hybrid), gradients are the mean over
both. This module must not replicate by other means.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import Precision
from shardway.runfile.schema import ParallelSection


def shard(
    model: nn.Module, units: Sequence[nn.Module], mesh: Mesh, parallel: ParallelSection, precision: Precision
) -> None:
    """Shard each unit and then the rest of the model, in place."""
    hybrid = mesh.degrees["dp_replicate"] > 1
    grid = mesh.part("dp_replicate", "dp_shard") if hybrid else mesh.part("dp_shard")
    policy = MixedPrecisionPolicy(param_dtype=precision.autocast_dtype, reduce_dtype=precision.reduce_dtype)
    if precision.autocast_dtype is not None:
        # Batch norm takes its gain, bias and running statistics in one format, and the statistics stay fp32.
        for norm in _batch_norms(model):
            fully_shard(norm, mesh=grid, mp_policy=MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype))
    for unit in units:
        fully_shard(unit, mesh=grid, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward)
    # The root's weights are the first of the forward and the last of the backward pass: freeing them in between
    # would gather them twice.
    fully_shard(model, mesh=grid, mp_policy=policy, reshard_after_forward=False)
    _gather_ahead([unit for unit in units if isinstance(unit, FSDPModule)], parallel.prefetch)


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [module for module in model.modules() if isinstance(module, kinds) and module.affine]


def _gather_ahead(units: Sequence[FSDPModule], depth: int) -> None:
    """Let each unit start the gathering of the next `depth` ones, in the forward and in the backward pass."""
    if depth == 0:
        return
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - depth) : index])))
