"""A mixture of experts: the router and the experts (Shazeer et al., arXiv:1701.06538).

Invariants:
- The choice of experts for a token depends on the token, the weights and the balance bias alone, never on how a batch
  is cut. The auxiliary loss is one of whole sequences, so it does not depend on the cut either.
- The output is linear in the hidden features that a rank holds, so the outputs of ranks that hold parts of every expert
  add up to the whole. Every weight has a gradient, even that of an expert with no tokens.

Balancing counts survive recompute: a block that runs its forward pass twice counts all its tokens twice. The bias moves
by the sign of a difference of counts, which a common factor does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import held_by_rank


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """Sizes of a mixture of experts, how it chooses, and how it keeps its experts equally busy."""

    experts: int
    per_token: int
    """Experts that one token is sent to (top-k)."""
    expert_dim: int
    shared: int = 0
    """Experts that every token passes through; together one feed-forward layer of `shared * expert_dim`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """Weights of the chosen experts sum to `scale`."""
    scale: float = 1.0
    balance: Literal["bias", "loss", "none"] = "bias"
    bias_update_rate: float = 1e-3
    balance_weight: float = 1e-2
    capacity_factor: float = 0.0
    """An expert takes at most this times its even share of a sequence; 0 takes all."""


# --- the router, and how experts are kept equally busy

TINY = 1e-20
"""Keeps the division by a sum of scores finite; far below any sum that matters in float32."""


@dataclass(frozen=True)
class Choice:
    """Where each token goes."""

    experts: torch.Tensor
    """int64 [batch, seq, k]."""
    weights: torch.Tensor
    """[batch, seq, k], at least float32."""
    counts: torch.Tensor
    """int64 [batch, experts]: tokens of each sequence that chose an expert."""


class Router(nn.Module):
    """Tokens [batch, seq, dim] -> their `Choice`, from scores in float32.

    Before each forward pass in training, the trainer sets `gradient_scale` to the factor that multiplies the sum over
    tokens of the main loss (0 for rows that do not count), divided by the number of ranks that compute the same tokens.
    It sets `sum_over_context` once if ranks hold parts of a sequence.
    """

    bias: torch.Tensor | None
    load: torch.Tensor

    def __init__(self, dim: int, shape: MixtureShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, dim))
        self.register_buffer("bias", torch.zeros(shape.experts) if shape.balance == "bias" else None)
        # Integers: what brings running statistics of ranks together by averaging them leaves these alone.
        self.register_buffer("load", torch.zeros(shape.experts, dtype=torch.int64), persistent=False)
        self.gradient_scale = 1.0
        self.sum_over_context: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> Choice:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), held_by_rank(self.weight).to(wide))
        scores = logits.softmax(dim=-1) if self.shape.score == "softmax" else logits.sigmoid()
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias
        experts = ranked.topk(self.shape.per_token, dim=-1).indices
        counts = count_choices(experts, self.shape.experts)
        weights = scores.gather(-1, experts)
        if self.shape.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        if self.training and torch.is_grad_enabled() and self.gradient_scale != 0:
            self.load.add_(counts.sum(0))
            if self.shape.balance == "loss":
                weights = _AddLoss.apply(weights, self._balance_loss(scores, counts) * self.gradient_scale)
        return Choice(experts, weights * self.shape.scale, counts)

    def _balance_loss(self, scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The sum over sequences of seq_len * coefficient * sum_i f_i P_i (DeepSeek-V3, arXiv:2412.19437, equations 17
        to 20): f_i the expert's part of the choices of the sequence times `experts`, P_i its mean share of the scores.

        Only P has a gradient, and it is a sum over tokens: where the sequence is spread over ranks, each adds the part
        of its own tokens, and only the counts need to be those of the whole sequence.
        """
        if self.sum_over_context is not None:
            counts = self.sum_over_context(counts)
        frequency = (counts * self.shape.experts / counts.sum(dim=-1, keepdim=True)).to(scores.dtype)
        shares = scores / (scores.sum(dim=-1, keepdim=True) + TINY)
        return self.shape.balance_weight * (frequency[:, None] * shares).sum()

    @torch.no_grad()
    def adjust(self, load: torch.Tensor) -> None:
        """Make experts with more tokens than the mean less likely and the others more likely, and reset the counts.

        `load`: the int64 [experts] of this layer, summed over all ranks (ranks that count the same tokens may all be
        summed). The bias moves by `bias_update_rate` (DeepSeek-V3, section 2.1.2); without balance = "bias" there is
        none.
        """
        if self.bias is not None:
            self.bias.add_(self.shape.bias_update_rate * torch.sign(load.sum() - load * self.shape.experts))
        self.load.zero_()

    @torch.no_grad()
    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


def count_choices(experts: torch.Tensor, number: int) -> torch.Tensor:
    """int64 [batch, number]: how often each of `number` experts is in a row of int64 [batch, seq, k]."""
    batch = experts.shape[0]
    cells = experts.flatten(1) + number * torch.arange(batch, device=experts.device)[:, None]
    # Along one dim of integers: the only scatter that is deterministic on every device.
    counts = torch.zeros(batch * number, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, cells.flatten(), torch.ones_like(cells).flatten()).view(batch, number)


class _AddLoss(torch.autograd.Function):
    """x as it is; the backward pass of whatever uses it also runs that of `loss`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.new_ones(())


# --- the experts, in place of a feed-forward layer

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
        # The first `limit` of an expert in a sequence, in the order of the tokens and not by weight: whether a token is
        # dropped must not depend on those after it.
        by_row = choice.experts.flatten(1)
        order = by_row.argsort(dim=1, stable=True)
        starts = counts.cumsum(dim=1) - counts
        places = torch.arange(by_row.shape[1], device=experts.device) - starts.gather(1, by_row.gather(1, order))
        taken = torch.zeros_like(by_row, dtype=torch.bool).scatter(1, order, places < limit).flatten()
        counts = counts.clamp(max=limit).sum(0)
        order = torch.where(taken, experts, self.shape.experts).argsort(stable=True)
        return order[: int(counts.sum())], counts


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
        device, dtype = tokens.device.type, tokens.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
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
