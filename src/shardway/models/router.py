"""Which experts a token is sent to, and how they are kept equally busy.

Invariant: a choice depends on its token, the weights and the balance bias alone, never on how a batch is cut; neither
does the auxiliary loss, which is one of whole sequences. This module must not move tokens.

Balancing counts survive recompute: a block that runs its forward pass twice counts all its tokens twice, and the bias
moves by the sign of a difference of counts, which a common factor does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardway.models.contract import held_by_rank
from shardway.models.shapes import MixtureShape

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

    Who trains it sets, before each forward pass in training, `gradient_scale` to the factor that multiplies the sum
    over tokens of the main loss (0 for rows that do not count), divided by the number of ranks that compute the same
    tokens; and `sum_over_context`, once, where ranks hold parts of a sequence.
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
        scores = self._score(x)
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

    def _score(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, experts], in float32 whatever the format of products is."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), held_by_rank(self.weight).to(wide))
        return logits.softmax(dim=-1) if self.shape.score == "softmax" else logits.sigmoid()

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
        """Make experts that more tokens chose than the mean less likely, the others more, and count anew.

        `load`: the int64 [experts] of this layer, summed over all ranks (ranks that count the same tokens may all be
        summed). The bias moves by `bias_update_rate` (DeepSeek-V3, section 2.1.2); without balance = "bias" there is
        none.
        """
        if self.bias is not None:
            self.bias.add_(self.shape.bias_update_rate * torch.sign(load.sum() - load * self.shape.experts))
        self.load.zero_()

    @torch.no_grad()
    def reset(self) -> None:
        """Set the buffers to their values at the start."""
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
