"""Sharding: each rank holds a part of every weight and gathers the whole when it is used (FSDP2 `fully_shard`).

Invariant: parameters are DTensors over the ranks that share the states (with dp_replicate around it: hybrid), and
gradients are the sum over both: the caller of the backward pass divides. Nothing is replicated by other means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardway.errors import UserError
from shardway.layout import EXPERT_SHARD, SHARD
from shardway.models.contract import held_by_rank
from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import BATCH_NORMS, Precision
from shardway.runfile.schema import ParallelSection


def shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    mesh: Mesh,
    parallel: ParallelSection,
    precision: Precision,
    device: torch.device,
) -> None:
    """Shard each unit that is in the model and then the rest of it, in place. `experts` live on a grid of their own.

    A unit with a weight that another part of the model uses as well is left to the rest: two units would each shard
    that weight for itself, and it would come apart. Raises UserError where a parameter has no dim to split, or a module
    has weights of several formats.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"the parameter {name} of {type(model).__name__} has no dimension, so it cannot be split over "
                "parallel.dp_shard.\n  To do: make it a tensor of one element (`torch.zeros(1)`), or set "
                "parallel.dp_shard = 1."
            )
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no other memory format, such as channels_last
    replicas = ("dp_replicate",) if mesh.degree("dp_replicate") > 1 else ()
    grid = mesh.part(*replicas, SHARD)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if parallel.cpu_offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=precision.autocast_dtype, reduce_dtype=precision.reduce_dtype)
    # Under a pipeline the gathered weights stay until the last backward pass (decision 0009).
    reshard = parallel.reshard_after_forward
    reshard = mesh.degree("pp") == 1 if reshard == "auto" else reshard

    uses, inside = _count_uses(model), set(model.modules())
    own = [
        unit
        for unit in units
        if unit in inside and all(uses[parameter] == count for parameter, count in _count_uses(unit).items())
    ]
    if precision.autocast_dtype is not None:
        # Batch norm takes its gain, bias and running statistics in one format, and the statistics stay fp32.
        norm_policy = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype)
        for module in model.modules():
            if isinstance(module, BATCH_NORMS) and module.affine:
                fully_shard(module, mesh=grid, mp_policy=norm_policy, offload_policy=offload)
    formats = _find_formats(model, own)

    def shard_one(module: nn.Module, reshard: bool | int) -> None:
        """Complex weights are neither computed with nor added up in a real format."""
        dtype = formats.get(module)
        kept = MixedPrecisionPolicy() if dtype is not None and dtype.is_complex else policy
        fully_shard(module, mesh=grid, mp_policy=kept, offload_policy=offload, reshard_after_forward=reshard)

    for module in formats:
        if module is not model and module not in own:
            shard_one(module, reshard)
    for module in experts:
        fully_shard(
            module,
            mesh=mesh.expert_part(*replicas, EXPERT_SHARD),
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=bool(reshard),
            shard_placement_fn=partial(_place_experts, mesh.degree(EXPERT_SHARD)),
        )
    for unit in own:
        shard_one(unit, reshard)
    # The root's weights are the first of the forward and the last of the backward pass: freeing them in between
    # would gather them twice.
    shard_one(model, False)

    model.__dict__["__deepcopy__"] = partial(_refuse_copy, type(model).__name__.removeprefix("FSDP"))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means, over whatever grid: experts share their states with fewer ranks than see their tokens.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    depth = parallel.prefetch
    gathering: list[FSDPModule] = [unit for unit in own if isinstance(unit, FSDPModule)]
    for index, member in enumerate(gathering if depth else ()):
        member.set_modules_to_forward_prefetch(gathering[index + 1 : index + 1 + depth])
        member.set_modules_to_backward_prefetch(gathering[max(0, index - depth) : index][::-1])


def _refuse_copy(name: str, memo: object) -> NoReturn:
    raise UserError(
        f"a copy of {name} was asked for (copy.deepcopy, AveragedModel), and its weights are shards of FSDP2, which "
        "cannot be copied so.\n"
        "  To do: for an average of weights, shard a second model of the same class (run.shard(model, "
        'name="average")) and update its parameters from those of the first; or keep {name: p.detach().clone()} of its '
        "named_parameters() and hand that to run.keep."
    )


def _place_experts(degree: int, parameter: nn.Parameter) -> Shard:
    """Experts first; where fewer of them are left after the expert axis than there are ranks, the last dim."""
    return Shard(0 if held_by_rank(parameter).shape[0] >= degree else parameter.dim() - 1)


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


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
