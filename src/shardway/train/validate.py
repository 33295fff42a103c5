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

from shardway.parallel.axes.replicate import average_buffers
from shardway.ranks.start import Ranks
from shardway.train.loss import LossSum
from shardway.train.passes import SUMS, Passes


@dataclass(frozen=True)
class Validation:
    """What is validated on: a fresh pass over this rank's batches (as many on every rank, the last one perhaps
    without samples), and the loss."""

    batches: Callable[[], Iterable[Any]]
    loss_fn: Callable[..., LossSum | torch.Tensor]
    bytes_per_token: float | None = None


@torch.no_grad()
def validate(model: nn.Module, validation: Validation, passes: Passes, ranks: Ranks) -> dict[str, float]:
    """Mean loss in nats, and accuracy or bits per byte where they mean something."""
    average_buffers(model, passes.parallel.mesh)
    sums = torch.zeros(SUMS, dtype=torch.float64, device=ranks.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for data in validation.batches():
            sums += passes.evaluate(model, data, validation.loss_fn)
    finally:
        for module, training in modes.items():
            module.training = training
    total, count, correct, answered = ranks.sum(sums).tolist()
    metrics = {"loss": total / count if count else math.nan}
    if answered:
        metrics["accuracy"] = correct / answered
    if validation.bytes_per_token:
        # Shannon: nats a token / ln 2 = bits a token, spread over the bytes that a token stands for.
        metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / validation.bytes_per_token
    return metrics
