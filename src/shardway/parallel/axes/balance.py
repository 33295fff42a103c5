"""Keeps experts equally busy over all ranks: their counts are added up, and each router adjusts to the same sum.

Invariant: routers of the same layer stay equal on all ranks that hold a copy. This module must not route.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from shardway.layout import SHARD
from shardway.models.contract import Balancing
from shardway.parallel.axes.collectives import summed
from shardway.parallel.mesh import Mesh


def find_routers(model: nn.Module) -> list[Balancing]:
    """The modules of a model that balance experts."""
    return [module for module in model.modules() if isinstance(module, Balancing)]


def connect_routers(model: nn.Module, mesh: Mesh) -> None:
    """Let routers whose sequences are spread over ranks count the whole sequence."""
    if mesh.degree("cp") > 1:
        for router in find_routers(model):
            router.sum_over_context = partial(summed, group=mesh.group("cp"))


def set_gradient_scale(routers: Sequence[Balancing], scale: float, mesh: Mesh) -> None:
    """Tell routers by what the sum over tokens of the main loss is multiplied: 0 for rows that do not count.

    All ranks of the tensor axis route the same tokens, and their gradients are summed: each answers for its part.
    """
    for router in routers:
        router.gradient_scale = scale / mesh.degree("tp")


@torch.no_grad()
def balance(routers: Sequence[Balancing], mesh: Mesh) -> None:
    """Add up what the routers of all ranks have counted since the last time, and let each adjust to it."""
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])
    for dim in ("dp_replicate", SHARD):
        if mesh.degree(dim) > 1:
            dist.all_reduce(loads, group=mesh.group(dim))
    for router, load in zip(routers, loads, strict=True):
        router.adjust(load)
