"""Collectives with gradients, and parameters cut into one rank's part of them.

Invariants:
- Each pair is exact for losses that are the same on all ranks of the group (`copy_in`, `sum_out`, `gather_whole`) or a
  sum over them (the others).
- Every rank that calls it holds the same whole parameter (or it is on the meta device), and the parts are equal in
  size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardway.compat import all_gather_along, reduce_scatter_along
from shardway.errors import UserError


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, seq / n, ...] -> [batch, seq, ...]; the gradients of all ranks are summed, each keeps its part."""
    return _GatherSequence.apply(x, group)


def scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A summand [batch, seq, ...] of each rank -> this rank's part of the sum, [batch, seq / n, ...]."""
    return _ScatterSum.apply(x, group)


def copy_in(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same x on every rank, used by each for a part of a sum: its gradient is the sum of theirs."""
    return _CopyIn.apply(x, group)


def sum_out(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's x; each passes the gradient of the sum on as it is."""
    return _SumOut.apply(x, group)


def gather_whole(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[..., features / n] -> [..., features]; every rank then computes the same and keeps its part of the gradient."""
    return _GatherWhole.apply(x, group)


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


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gathered(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered_sum(grad, 1, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return scattered_sum(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(grad, 1, ctx.group), None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(grad, ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gathered(x, x.dim() - 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return narrow_to_rank(grad, grad.dim() - 1, ctx.group).contiguous(), None


# --- parameters split over ranks


def split_parameter(model: nn.Module, name: str, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Keep of the parameter `name` this rank's part: each dim of `mesh` splits the tensor dim at its place in `dims`.

    Raises UserError where a size does not split evenly.
    """
    parameter = model.get_parameter(name)
    local = parameter.detach()
    for axis, dim in enumerate(dims):
        local = _part(local, dim, mesh.size(axis), mesh.get_local_rank(axis), f"{name} {list(parameter.shape)}")
    placements: list[Placement] = [Shard(dim) for dim in dims]
    whole = DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(whole, parameter.requires_grad))


def _part(tensor: torch.Tensor, dim: int, parts: int, place: int, what: str) -> torch.Tensor:
    size = tensor.shape[dim]
    if size % parts:
        raise UserError(
            f"the parameter {what} does not split into {parts} equal parts along dim {dim}.\n"
            f"  To do: choose a degree that divides {size}, or another size of the model."
        )
    return tensor.narrow(dim, place * (size // parts), size // parts)
