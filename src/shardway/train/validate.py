"""The loss on held-out data.

Invariant: every held-out sample counts once, whatever the number of ranks, and every rank runs the same number of
forward passes (a sharded model waits for all of them). Training state is left as it was. It must not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardway.parallel.mesh import Mesh
from shardway.parallel.precision import Precision
from shardway.parallel.replicate import average_buffers
from shardway.ranks.start import Ranks
from shardway.train.loss import LossSum, as_sum
from shardway.train.step import call_loss, count_rows


@dataclass(frozen=True)
class Validation:
    """What is validated on: a fresh pass over this rank's batches (as many on every rank, the last one perhaps
    without samples), and the loss."""

    batches: Callable[[], Iterable[Any]]
    loss_fn: Callable[..., LossSum | torch.Tensor]
    bytes_per_token: float | None = None


@torch.no_grad()
def validate(
    model: nn.Module, validation: Validation, mesh: Mesh, ranks: Ranks, precision: Precision
) -> dict[str, float]:
    """Mean loss in nats, and accuracy or bits per byte where they mean something."""
    average_buffers(model, mesh)
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    has_accuracy = False
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for data in validation.batches():
            with precision.autocast(ranks.device):
                loss = as_sum(call_loss(validation.loss_fn, model, data), count_rows(data))
            sums[0] += loss.total
            sums[1] += loss.count
            if loss.correct is not None:
                has_accuracy = True
                sums[2] += loss.correct
    finally:
        for module, training in modes.items():
            module.training = training
    total, count, correct = ranks.sum(sums).tolist()
    metrics = {"loss": total / count if count else math.nan}
    if has_accuracy:
        metrics["accuracy"] = correct / count
    if validation.bytes_per_token:
        # Shannon: nats a token / ln 2 = bits a token, spread over the bytes that a token stands for.
        metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / validation.bytes_per_token
    return metrics
