"""Losses as sums with their counts, so that the mean over a global batch does not depend on how it was cut.

Invariant: a loss function never divides; whoever knows the global count does. This module must not reduce over
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

IGNORED = -100
"""Target of a position that does not count."""


@dataclass(frozen=True)
class LossSum:
    """Sum of the losses of a micro-batch (0-dim), and how many targets it counts.

    `count` may be a tensor (it depends on the data). `correct` is the number of right answers where that means
    something.
    """

    total: torch.Tensor
    count: torch.Tensor | int
    correct: torch.Tensor | None = None


LossFunction = Callable[[torch.Tensor, torch.Tensor], "LossSum | torch.Tensor"]
"""(output of the model, targets) -> LossSum, or the mean over the micro-batch as a 0-dim tensor."""


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """Cross-entropy in nats over [batch, seq, vocab] logits; targets of -100 do not count."""
    flat = targets.flatten()
    total = F.cross_entropy(logits.flatten(0, -2).float(), flat, ignore_index=IGNORED, reduction="sum")
    return LossSum(total, (flat != IGNORED).sum())


def class_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """Cross-entropy in nats over [batch, classes] logits, with the number of right answers."""
    logits = logits.float()
    total = F.cross_entropy(logits, targets, reduction="sum")
    return LossSum(total, targets.numel(), (logits.argmax(-1) == targets).sum())


def as_sum(loss: LossSum | torch.Tensor, samples: int) -> LossSum:
    """A user's mean over `samples` as the sum that it stands for."""
    if isinstance(loss, LossSum):
        return loss
    return LossSum(loss * samples if samples else torch.zeros_like(loss), samples)
