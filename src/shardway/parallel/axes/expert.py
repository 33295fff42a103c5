"""The expert axis: experts on different ranks, tokens exchanged between them (GShard, arXiv:2006.16668), load balance.

Invariants:
- Routers of the same layer stay equal on all ranks that hold a copy.
- An experts module gets exactly the tokens of its experts from all ranks of the axis; its results return to each
  token's rank, in the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardway.errors import UserError
from shardway.layout import SHARD
from shardway.models.contract import Balancing, ModelPlan, find_routers, match_modules, match_parameters
from shardway.parallel.axes.collectives import split_parameter, summed
from shardway.parallel.mesh import Mesh

# --- load balance of experts


def connect_routers(model: nn.Module, mesh: Mesh) -> None:
    """Let routers, whose sequences are spread over the ranks of the context axis, count the whole sequence."""
    for router in find_routers(model):
        router.sum_over_context = partial(summed, group=mesh.group("cp"))


@torch.no_grad()
def balance(routers: Sequence[Balancing], mesh: Mesh) -> None:
    """Add up what the routers (at least one) of all ranks have counted since the last time, and let each adjust."""
    loads = torch.stack([router.load for router in routers])
    for dim in ("dp_replicate", SHARD):
        if mesh.degree(dim) > 1:
            dist.all_reduce(loads, group=mesh.group(dim))
    for router, load in zip(routers, loads, strict=True):
        router.adjust(load)


# --- the exchange of tokens


def apply_experts(model: nn.Module, plan: ModelPlan, mesh: Mesh) -> None:
    """Split the experts of a plan over the expert axis (and their hidden features over the tensor axis), in place.

    Raises UserError for a model that names none, and where they do not split evenly.
    """
    if not plan.experts:
        raise UserError(
            f"parallel.ep splits experts, and the plan of {type(model).__name__} names none.\n"
            "  To do: set parallel.ep = 1, or train a mixture of experts (model.experts)."
        )
    inner = dict(match_parameters(model, plan.held))
    tensor = mesh.degree("tp") > 1
    grid = mesh.expert_part("ep", "tp") if tensor else mesh.expert_part("ep")
    group = mesh.expert_part("ep").get_group()
    for name, experts in match_modules(model, plan.experts):
        for leaf, _ in list(experts.named_parameters(recurse=False)):
            split_parameter(model, f"{name}.{leaf}", grid, [0, inner[f"{name}.{leaf}"]] if tensor else [0])
        experts.forward = partial(_exchange_around, experts.forward, group)


def _exchange_around(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup,
    tokens: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """`forward` of the experts that this rank holds, for the tokens [n, dim] of all ranks; back to where they were.

    `counts` [experts] says how many of this rank's tokens, sorted by expert, each expert of the model gets.
    """
    to_ranks = counts.reshape(group.size(), -1).contiguous()
    from_ranks = torch.empty_like(to_ranks)
    dist.all_to_all_single(from_ranks, to_ranks, group=group)
    send, receive = torch.stack((to_ranks.sum(1), from_ranks.sum(1))).tolist()  # waits for the device: sizes are needed
    arrived = _AllToAll.apply(tokens, receive, send, group)
    experts = torch.arange(from_ranks.shape[1], device=counts.device).repeat(group.size())
    by_expert = torch.repeat_interleave(experts, from_ranks.flatten()).argsort(stable=True)
    out = forward(arrived[by_expert], from_ranks.sum(0))
    back = torch.empty_like(out).index_copy(0, by_expert, out)
    return _AllToAll.apply(back, send, receive, group)


class _AllToAll(torch.autograd.Function):
    """Rows to and from every rank; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grad, ctx.send, ctx.receive, ctx.group), None, None, None


def _all_to_all(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out
