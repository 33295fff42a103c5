"""Turns a parameter into this rank's part of it, a DTensor that knows the whole.

Invariant: every rank that calls it holds the same whole parameter (or it is on the meta device), and the parts are
equal in size. This module must not communicate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardway.errors import UserError


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
