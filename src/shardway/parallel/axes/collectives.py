"""Collectives with gradients, and parameters cut into one rank's part of them.

Invariants:
- Each pair is exact for losses that are the same on all ranks of the group (`copy_in`, `sum_out`, `gather_whole`) or a
  sum over them (the others).
- Every rank that calls it holds the same whole parameter (or it is on the meta device), and the parts are equal in
  size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardway.compat import all_gather_along, reduce_scatter_along
from shardway.errors import UserError

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def gathered(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's x, joined along a dim; without a gradient, as the next two."""
    return functional.wait_tensor(all_gather_along(x.contiguous(), dim, group))


def scattered_sum(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part along a dim of the sum of every rank's x."""
    return functional.wait_tensor(reduce_scatter_along(x.contiguous(), dim, group))


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's x."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


def narrow_to_rank(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of x along a dim (no communication; the gradient is a part of a sum)."""
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size)


def _with_gradient(name: str, there: Collective, back: Collective) -> Collective:
    """`there`, whose gradient is what `back` makes of that of its result; profiles show it by the name."""

    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return there(x, group)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return back(grad, ctx.group), None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]


gather_sequence = _with_gradient(
    "GatherSequence", lambda x, group: gathered(x, 1, group), lambda x, group: scattered_sum(x, 1, group)
)
"""[batch, seq / n, ...] -> [batch, seq, ...]; the gradients of all ranks are summed, each keeps its part."""

scatter_sum = _with_gradient(
    "ScatterSum", lambda x, group: scattered_sum(x, 1, group), lambda x, group: gathered(x, 1, group)
)
"""A summand [batch, seq, ...] of each rank -> this rank's part of the sum, [batch, seq / n, ...]."""

copy_in = _with_gradient("CopyIn", lambda x, group: x.view_as(x), summed)
"""The same x on every rank, used by each for a part of a sum: its gradient is the sum of theirs."""

sum_out = _with_gradient("SumOut", summed, lambda x, group: x)
"""The sum of every rank's x; each passes the gradient of the sum on as it is."""

gather_whole = _with_gradient(
    "GatherWhole",
    lambda x, group: gathered(x, x.dim() - 1, group),
    lambda x, group: narrow_to_rank(x, x.dim() - 1, group).contiguous(),
)
"""[..., features / n] -> [..., features]; every rank then computes the same and keeps its part of the gradient."""


def split_parameter(model: nn.Module, name: str, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Keep of the parameter `name` this rank's part: each dim of `mesh` splits the tensor dim at its place in `dims`.

    Raises UserError where a size does not split evenly.
    """
    parameter = model.get_parameter(name)
    local = parameter.detach()
    for axis, dim in enumerate(dims):
        size, parts = local.shape[dim], mesh.size(axis)
        if size % parts:
            raise UserError(
                f"the parameter {name} {list(parameter.shape)} does not split into {parts} equal parts along dim "
                f"{dim}.\n  To do: choose a degree that divides {size}, or another size of the model."
            )
        local = local.narrow(dim, mesh.get_local_rank(axis) * (size // parts), size // parts)
    placements: list[Placement] = [Shard(dim) for dim in dims]
    local, layout = local.clone(memory_format=torch.contiguous_format), (parameter.shape, parameter.stride())
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=layout[0], stride=layout[1])
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(whole, parameter.requires_grad))
