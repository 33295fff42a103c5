"""The loss on held-out data.

Invariant: every held-out sample counts once, whatever the number of ranks, and every rank runs the same number of
forward passes (a sharded model waits for all of them), also where a stop breaks it off: then there is no result.
Training state is left as it was. It must not train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardway.parallel.axes.replicate import average_buffers
from shardway.ranks.start import Ranks
from shardway.train.loss import LossSum
from shardway.train.passes import SUMS, Passes


@dataclass(frozen=True)
class Validation:
    """What is validated on: a fresh pass over this rank's batches (as many on every rank, the last one perhaps
    without samples), and the loss. `rows`: this rank's samples in each of them, where that is known."""

    batches: Callable[[], Iterable[Any]]
    loss_fn: Callable[..., LossSum | torch.Tensor]
    bytes_per_token: float | None = None
    rows: Callable[[], Sequence[int]] | None = None


class Breaks(Protocol):
    """What a validation asks before each batch."""

    def over(self, validation: Validation) -> Iterator[tuple[Any, bool]]:
        """The batches, and whether each stands in for one that this rank gave up waiting for."""
        ...

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Whether all ranks end the validation here; asked on all of them before the same batches.

        `last`: after all of them, since some rank has missed one.
        """
        ...


class Undisturbed:
    """A validation that nothing ends."""

    def over(self, validation: Validation) -> Iterator[tuple[Any, bool]]:
        """All batches as they come."""
        return ((data, False) for data in validation.batches())

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Never."""
        return False


@torch.no_grad()
def validate(
    model: nn.Module, validation: Validation, passes: Passes, ranks: Ranks, breaks: Breaks | None = None
) -> dict[str, float] | None:
    """Mean loss in nats, and accuracy or bits per byte where they mean something; None where it was broken off."""
    breaks = breaks or Undisturbed()
    average_buffers(model, passes.parallel.mesh)
    sums = torch.zeros(SUMS, dtype=torch.float64, device=ranks.device)
    any_missed = False
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for data, missed in breaks.over(validation):
            any_missed = any_missed or missed
            if breaks.breaks_off(missed=any_missed):
                return None
            sums += passes.evaluate(model, data, validation.loss_fn)
    finally:
        for module, training in modes.items():
            module.training = training
    total, count, correct, answered, gave_up = ranks.sum(torch.cat([sums, sums.new_tensor([any_missed])])).tolist()
    if gave_up and breaks.breaks_off(missed=any_missed, last=True):
        return None
    metrics = {"loss": total / count if count else math.nan}
    if answered:
        metrics["accuracy"] = correct / answered
    if validation.bytes_per_token:
        # Shannon: nats a token / ln 2 = bits a token, spread over the bytes that a token stands for.
        metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / validation.bytes_per_token
    return metrics
