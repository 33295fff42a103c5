"""Sharding: each rank holds a part of every weight and gathers the whole when it is used (FSDP2 `fully_shard`).

Invariant: parameters are DTensors over the ranks that share the states (with dp_replicate around it: hybrid), and
gradients are the sum over both: whoever runs the backward pass divides. This module must not replicate by other
means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardway.errors import UserError
from shardway.layout import EXPERT_SHARD, SHARD
from shardway.models.contract import held_by_rank
from shardway.parallel.formats.precision import Precision
from shardway.parallel.mesh import Mesh
from shardway.runfile.schema import ParallelSection


@dataclass(frozen=True)
class Shards:
    """The pieces of a model that FSDP2 handles, and how. `experts` are those that live on a grid of their own."""

    units: Sequence[nn.Module]
    experts: Sequence[nn.Module]
    mesh: Mesh
    parallel: ParallelSection
    precision: Precision
    device: torch.device


def shard(model: nn.Module, shards: Shards) -> None:
    """Shard each unit and then the rest of the model, in place.

    A unit with a weight that another part of the model uses as well is left to the rest: two units would each shard
    that weight for itself, and it would come apart. Raises UserError where a parameter has no dim to split.
    """
    _check_dims(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no other memory format, such as channels_last
    precision, mesh = shards.precision, shards.mesh
    grid, offload = _grid(mesh), _offload(shards)
    policy = MixedPrecisionPolicy(param_dtype=precision.autocast_dtype, reduce_dtype=precision.reduce_dtype)
    units = [unit for unit in shards.units if _is_self_contained(unit, model)]
    if precision.autocast_dtype is not None:
        # Batch norm takes its gain, bias and running statistics in one format, and the statistics stay fp32.
        for norm in _batch_norms(model):
            fully_shard(
                norm,
                mesh=grid,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype),
                offload_policy=offload,
            )
    reshard = _reshard(shards)
    for experts in shards.experts:
        fully_shard(
            experts,
            mesh=_expert_grid(mesh),
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=bool(reshard),
            shard_placement_fn=lambda parameter: Shard(_dim_to_shard(parameter, mesh.degree(EXPERT_SHARD))),
        )
    for unit in units:
        fully_shard(unit, mesh=grid, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    # The root's weights are the first of the forward and the last of the backward pass: freeing them in between
    # would gather them twice.
    fully_shard(model, mesh=grid, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    _add_up(model)
    _gather_ahead([unit for unit in units if isinstance(unit, FSDPModule)], shards.parallel.prefetch)


def _grid(mesh: Mesh) -> DeviceMesh:
    return mesh.part("dp_replicate", SHARD) if mesh.degree("dp_replicate") > 1 else mesh.part(SHARD)


def _expert_grid(mesh: Mesh) -> DeviceMesh:
    if mesh.degree("dp_replicate") > 1:
        return mesh.expert_part("dp_replicate", EXPERT_SHARD)
    return mesh.expert_part(EXPERT_SHARD)


def _reshard(shards: Shards) -> bool | int:
    """Under a pipeline the gathered weights stay until the last backward pass (decision 0009)."""
    wanted = shards.parallel.reshard_after_forward
    return shards.mesh.degree("pp") == 1 if wanted == "auto" else wanted


def _offload(shards: Shards) -> OffloadPolicy:
    if not shards.parallel.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=shards.device.type != "cpu")


def _dim_to_shard(parameter: nn.Parameter, degree: int) -> int:
    """Experts first; where fewer of them are left after the expert axis than there are ranks, the last dim."""
    return 0 if held_by_rank(parameter).shape[0] >= degree else parameter.dim() - 1


def _add_up(model: nn.Module) -> None:
    """Sums, not means, over whatever grid: experts share their states with fewer ranks than see their tokens."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check_dims(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"the parameter {name} of {type(model).__name__} has no dimension, so it cannot be split over "
                "parallel.dp_shard.\n  To do: make it a tensor of one element (`torch.zeros(1)`), or set "
                "parallel.dp_shard = 1."
            )


def _is_self_contained(unit: nn.Module, model: nn.Module) -> bool:
    uses, own = _count_uses(model), _count_uses(unit)
    return all(uses[parameter] == count for parameter, count in own.items())


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


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
