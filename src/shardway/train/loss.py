"""Losses as sums with their counts, so that the mean over a global batch does not depend on how it was cut.

Invariant: a loss function never divides; whoever knows the global count does. This module must not reduce over
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardway.data.batch_tree import map_leaves
from shardway.errors import UserError

IGNORED = -100
"""Target of a position that does not count."""


@dataclass(frozen=True)
class LossSum:
    """Sum of the losses of a micro-batch (0-dim), and how many targets it counts.

    `count` may be a tensor (it depends on the data). `correct` is the number of right answers where that means
    something. `metrics` are further sums by name: a validation adds them up over all samples and gives the sums back.
    `outputs` is what metric objects of a validation are updated with (predictions, targets), where that is not what the
    loss function was given.
    """

    total: torch.Tensor
    count: torch.Tensor | int
    correct: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict)
    outputs: Sequence[Any] | None = None

    def counted(self, counts: torch.Tensor) -> LossSum:
        """The same where `counts` (a 0-dim bool), and else nothing."""
        correct = None if self.correct is None else self.correct * counts
        metrics = {name: value * counts for name, value in self.metrics.items()}
        return LossSum(self.total * counts, self.count * counts, correct, metrics)


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


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> LossSum:
    """The loss of a Hugging Face causal language model: cross-entropy in nats of each token of `batch["labels"]` given
    those before it; labels of -100 do not count.

    As `model(**batch).loss`, but the mean is one over all tokens of the global batch. Raises UserError where the batch
    has no labels.
    """
    if not isinstance(batch, Mapping) or batch.get("labels") is None:
        raise UserError(
            'shardway.causal_lm_loss needs a batch with "labels" (token ids, -100 where none counts).\n'
            "  To do: let the dataset give them, for example as a copy of input_ids."
        )
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    return token_cross_entropy(outputs.logits[:, :-1], batch["labels"][:, 1:])


def fill_missing_targets(data: Any, *, pair: bool) -> tuple[Any, torch.Tensor | None]:
    """A batch whose targets are all -100 with others in their place, and False: it must not count; any other batch as
    it is, and True (None: it counts).

    Without, a mean over its targets would be 0 / 0. Targets are those of a pair, or what is called "labels". The device
    is not waited for.
    """
    if pair:
        inputs, targets = data
        filled, counts = _fill(targets)
        return ((inputs, filled), counts) if counts is not None else (data, None)
    if isinstance(data, MutableMapping) and "labels" in data:
        labels, counts = _fill(data["labels"])
        if counts is not None:
            data = map_leaves(lambda leaf: leaf, data)  # the script keeps its own
            data["labels"] = labels
        return data, counts
    return data, None


def _fill(targets: Any) -> tuple[Any, torch.Tensor | None]:
    whole = isinstance(targets, torch.Tensor) and targets.layout is torch.strided and not targets.is_nested
    if not whole or targets.dtype not in (torch.int64, torch.int32) or not targets.ndim:
        return targets, None
    if targets.device.type == "cpu" and type(targets) is torch.Tensor and (targets.numpy() != IGNORED).any():
        return targets, None  # the usual case, at next to no cost
    counts = (targets != IGNORED).any()
    return torch.where(counts, targets, 0), counts


def as_sum(loss: LossSum | torch.Tensor, samples: int) -> LossSum:
    """A user's mean over `samples` as the sum that it stands for."""
    if isinstance(loss, LossSum):
        return loss
    return LossSum(loss * samples if samples else torch.zeros_like(loss), samples)
