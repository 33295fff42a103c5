"""Sharding: each rank holds a part of every weight and gathers the whole when it is used (FSDP2 `fully_shard`).

Invariant: parameters are DTensors over dp_shard (with dp_replicate around it: hybrid), gradients are the mean over
both. This module must not replicate by other means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardway.errors import UserError
from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import Precision
from shardway.runfile.schema import ParallelSection


def shard(
    model: nn.Module, units: Sequence[nn.Module], mesh: Mesh, parallel: ParallelSection, precision: Precision
) -> None:
    """Shard each unit and then the rest of the model, in place.

    A unit with a weight that another part of the model uses as well is left to the rest: two units would each shard
    that weight for itself, and it would come apart. Raises UserError where a parameter has no dim to split.
    """
    _check_dims(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no other memory format, such as channels_last
    hybrid = mesh.degrees["dp_replicate"] > 1
    grid = mesh.part("dp_replicate", "dp_shard") if hybrid else mesh.part("dp_shard")
    units = [unit for unit in units if _is_self_contained(unit, model)]
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
