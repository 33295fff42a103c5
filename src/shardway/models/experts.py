"""The mixture of experts that takes the place of a feed-forward layer (Shazeer et al., arXiv:1701.06538).

Invariant: the output is linear in the hidden features that a rank holds, so that the outputs of ranks which hold parts
of every expert add up to the whole; and every weight has a gradient, also that of an expert nobody chose. This module
must not know on which rank an expert lives.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import held_by_rank
from shardway.models.router import Choice, Router
from shardway.models.shapes import MixtureShape

ALIGNED = 8
"""Rows of bf16 matrices must be a multiple of 16 bytes long for the grouped kernel."""


class MixtureOfExperts(nn.Module):
    """Each token through the experts it chose, weighted, and through the shared ones; [batch, seq, dim] -> the same."""

    def __init__(self, dim: int, shape: MixtureShape) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(dim, shape)
        self.experts = Experts(shape.experts, dim, shape.expert_dim)
        self.shared = SharedExperts(dim, shape.shared * shape.expert_dim) if shape.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x)
        tokens, k = x.flatten(0, 1), self.shape.per_token
        order, counts = self._sort(choice)
        mixed = self.experts(tokens[order // k], counts)
        # Back into the order of the tokens; what was dropped stays zero.
        rows = mixed.new_zeros(len(tokens) * k, mixed.shape[-1]).index_copy(0, order, mixed).unflatten(0, (-1, k))
        output = (rows * choice.weights.flatten(0, 1).unsqueeze(-1).type_as(rows)).sum(dim=1)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view_as(x)

    def _sort(self, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of the choices [n * k] by expert, and how many each expert takes."""
        experts, counts = choice.experts.flatten(), choice.counts
        if not self.shape.capacity_factor:
            return experts.argsort(stable=True), counts.sum(0)
        even = choice.experts[0].numel() / self.shape.experts
        limit = math.ceil(self.shape.capacity_factor * even)
        taken = first_of_each(choice, limit).flatten()
        counts = counts.clamp(max=limit).sum(0)
        order = torch.where(taken, experts, self.shape.experts).argsort(stable=True)
        return order[: int(counts.sum())], counts


def first_of_each(choice: Choice, limit: int) -> torch.Tensor:
    """Which choices are among the first `limit` of their expert in their sequence, bool [batch, seq * k].

    In the order of the tokens, and not by weight: whether a token is dropped must not tell it of those after it.
    """
    experts = choice.experts.flatten(1)
    order = experts.argsort(dim=1, stable=True)
    starts = choice.counts.cumsum(dim=1) - choice.counts
    places = torch.arange(experts.shape[1], device=experts.device) - starts.gather(1, experts.gather(1, order))
    return torch.zeros_like(experts, dtype=torch.bool).scatter(1, order, places < limit)


class Experts(nn.Module):
    """All experts side by side: down(silu(gate(x)) * up(x)), each for its own tokens."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """[n, dim] sorted by expert -> the same; `counts` int64 says how many belong to each expert held here."""
        weights = [held_by_rank(weight) for weight in (self.gate, self.up, self.down)]
        dtype = compute_dtype(tokens)
        if tokens.is_cuda and dtype == torch.bfloat16 and all(size % ALIGNED == 0 for size in weights[0].shape[1:]):
            return run_grouped(tokens.to(dtype), counts, [weight.to(dtype) for weight in weights])
        return run_each(tokens, counts, weights)


def run_each(tokens: torch.Tensor, counts: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """One expert after the other. One without tokens runs too: on none of them, so that its gradient is zero."""
    # `unbind` rather than indexing: its backward pass fills the whole gradient once, and not once an expert.
    parts = zip(tokens.split(counts.tolist()), *(weight.unbind() for weight in weights), strict=True)
    return torch.cat([run_gated(x, gate, up, down) for x, gate, up, down in parts])


def run_grouped(tokens: torch.Tensor, counts: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """All experts in one kernel a matrix, without the counts leaving the device."""
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up, down = (weight.transpose(-2, -1) for weight in weights)
    hidden = F.silu(F.grouped_mm(tokens, gate, offs=ends)) * F.grouped_mm(tokens, up, offs=ends)
    return F.grouped_mm(hidden, down, offs=ends)


class SharedExperts(nn.Module):
    """The experts that every token passes through, as one: [n, dim] -> the same."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(hidden, dim))
        self.up = nn.Parameter(torch.empty(hidden, dim))
        self.down = nn.Parameter(torch.empty(dim, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_gated(x, held_by_rank(self.gate), held_by_rank(self.up), held_by_rank(self.down))


def run_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """SwiGLU with weights [hidden, dim], [hidden, dim] and [dim, hidden]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The format in which products of x run: that of autocast where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
