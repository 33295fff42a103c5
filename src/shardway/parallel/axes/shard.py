"""Sharding: each rank holds a part of every weight and gathers the whole when it is used (FSDP2 `fully_shard`).

Invariant: parameters are DTensors over the ranks that share the states (with dp_replicate around it: hybrid), and
gradients are the sum over both: the caller of the backward pass divides. Nothing is replicated by other means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

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
    formats = _find_formats(model, units)
    for module, dtype in formats.items():
        if module is not model and module not in units:
            kept = _policy_of(dtype, policy)
            fully_shard(module, mesh=grid, mp_policy=kept, offload_policy=offload, reshard_after_forward=reshard)
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
        kept = _policy_of(formats.get(unit), policy)
        fully_shard(unit, mesh=grid, mp_policy=kept, offload_policy=offload, reshard_after_forward=reshard)
    # The root's weights are the first of the forward and the last of the backward pass: freeing them in between
    # would gather them twice.
    kept = _policy_of(formats.get(model), policy)
    fully_shard(model, mesh=grid, mp_policy=kept, offload_policy=offload, reshard_after_forward=False)
    model.__dict__["__deepcopy__"] = partial(_refuse_copy, type(model).__name__.removeprefix("FSDP"))
    _add_up(model)
    _gather_ahead([unit for unit in units if isinstance(unit, FSDPModule)], shards.parallel.prefetch)


def _refuse_copy(name: str, memo: object) -> NoReturn:
    raise UserError(
        f"a copy of {name} was asked for (copy.deepcopy, AveragedModel), and its weights are shards of FSDP2, which "
        "cannot be copied so.\n"
        "  To do: for an average of weights, shard a second model of the same class (run.shard(model, "
        'name="average")) and update its parameters from those of the first; or keep {name: p.detach().clone()} of its '
        "named_parameters() and hand that to run.keep."
    )


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


def _find_formats(model: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Module, torch.dtype]:
    """The format of the trained weights of each unit and of the rest, and the modules in them that have another one:
    FSDP2 gathers these apart. Raises UserError where one module holds weights of several formats."""
    found: dict[nn.Module, torch.dtype] = {}
    taken: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}
    for scope in (*units, model):
        inside = [module for module in scope.modules() if module not in taken and not isinstance(module, FSDPModule)]
        taken.update(inside)
        kinds = {module: kind for module in inside if (kind := _own_format(module, names[module]))}
        if kinds:
            main = kinds.get(scope) or Counter(kinds.values()).most_common(1)[0][0]
            found |= {scope: main, **{module: kind for module, kind in kinds.items() if kind is not main}}
    return found


def _policy_of(dtype: torch.dtype | None, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Complex weights are neither computed with nor added up in a real format."""
    return MixedPrecisionPolicy() if dtype is not None and dtype.is_complex else policy


def _own_format(module: nn.Module, name: str) -> torch.dtype | None:
    """That of the weights that a module holds itself and trains."""
    formats = {p.dtype: leaf for leaf, p in module.named_parameters(recurse=False) if p.requires_grad}
    if len(formats) > 1:
        each = " and ".join(f"{leaf} is {str(kind).removeprefix('torch.')}" for kind, leaf in formats.items())
        raise UserError(
            f"{name or 'the model'} (a {type(module).__name__}) has parameters of several number formats side by side: "
            f"{each}. Shards (parallel.dp_shard) are gathered by module, in one format.\n  To do: put each into a "
            "module of its own, give them one format, or set parallel.dp_shard = 1."
        )
    return next(iter(formats), None)


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
