"""One optimizer step: passes, the exact mean over the global batch, clipping, the update.

Invariant: the gradient that the optimizer sees is that of the mean loss over all targets that count in the global
batch, however it was cut into ranks and micro-batches; every rank leaves with the same numbers. This module must not
fetch data, write files or decide what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardway.parallel.balance import balance
from shardway.parallel.gradients import own_squares, scale_gradients
from shardway.parallel.tensor import sum_partial_gradients
from shardway.ranks.agreement import Decision, Wishes, read_decision
from shardway.ranks.start import Ranks
from shardway.train.passes import SUMS, Loss, Passes


@dataclass(frozen=True)
class StepParts:
    """What a step works with; `clip` is what the norm of its gradient is limited to (None: not at all)."""

    passes: Passes
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    clip: float | None


@dataclass(frozen=True)
class StepResult:
    """Numbers of a finished step, the same on every rank: mean loss, norm of its gradient before clipping, targets."""

    loss: float
    grad_norm: float
    targets: float
    decision: Decision


def take_step(
    parts: StepParts, model: nn.Module, batch: Any, loss_fn: Loss, wishes: Wishes, position: int = 0
) -> StepResult:
    """Forward, backward and update for this rank's share of a global batch.

    `batch` is a pair (inputs, targets), for which `loss_fn(model(inputs), targets)` is called, or any other tree of
    tensors, for which `loss_fn(model, batch)` is. All tensors have the samples in dim 0. `position` is how many
    samples the run has consumed before.
    """
    passes, ranks, optimizer = parts.passes, parts.ranks, parts.optimizer
    parallel, device = passes.parallel, ranks.device
    with ranks.contact("during a step"):
        sums = passes.train(model, batch, loss_fn, position=position)
        if parallel.partial:
            sum_partial_gradients(parallel.module, parallel.partial, parallel.mesh.group("tp"))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        squares = own_squares(parameters, parallel.mesh, device)
        wished = torch.tensor(wishes.as_numbers(), dtype=torch.float64, device=device)
        vector = ranks.sum(torch.cat([sums, squares[None], wished]))
        scale = _samples_per_target(vector[1], passes.portions.global_batch)
        norm = vector[SUMS].sqrt() * scale
        factor = scale if parts.clip is None else scale * torch.clamp(parts.clip / (norm + 1e-6), max=1.0)
        scale_gradients(parameters, factor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance(passes.routers, parallel.mesh)
        total, targets, _, _, _, *wanted = vector.tolist()
    return StepResult(total / targets if targets else float("nan"), float(norm), targets, read_decision(wanted))


def _samples_per_target(targets: torch.Tensor, global_batch: int) -> torch.Tensor:
    """What turns the gradient of a mean over samples into that over targets (exactly 1 where each sample is one
    target); 0 where no target counts."""
    return torch.where(targets > 0, global_batch / targets, torch.zeros_like(targets))
