"""One optimizer step: micro-batches, the exact mean over the global batch, clipping, the update.

Invariant: the gradient that the optimizer sees is that of the mean loss over all targets that count in the global
batch, however it was cut into ranks and micro-batches; every rank leaves with the same numbers. This module must not
fetch data, write files or decide what comes next.

Why gradients are rescaled at the end: the global number of targets is known only when every rank has seen its share,
so each micro-batch is divided by the number of samples in the global batch, which all ranks know, and the factor from
samples to targets (exactly 1 where each sample is one target) goes with that of clipping into one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardway.errors import UserError
from shardway.parallel.accumulate import accumulating
from shardway.parallel.precision import Precision
from shardway.ranks.agreement import Decision, Wishes, read_decision
from shardway.ranks.start import Ranks
from shardway.train.loss import LossSum, as_sum


@dataclass(frozen=True)
class StepOptions:
    """How a global batch is cut and what its gradient is limited to (`clip` None: not at all)."""

    global_batch: int
    data_ranks: int
    accumulation: int
    clip: float | None
    precision: Precision


@dataclass(frozen=True)
class StepResult:
    """Numbers of a finished step, the same on every rank: mean loss, norm of its gradient before clipping, targets."""

    loss: float
    grad_norm: float
    targets: float
    decision: Decision


@dataclass(frozen=True)
class _Micro:
    """A part of a rank's share. Weight 0 marks one that only keeps this rank in step with the others."""

    data: Any
    rows: int
    weight: float


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: Callable[..., LossSum | torch.Tensor],
    options: StepOptions,
    ranks: Ranks,
    wishes: Wishes,
) -> StepResult:
    """Forward, backward and update for this rank's share of a global batch.

    `batch` is a pair (inputs, targets), for which `loss_fn(model(inputs), targets)` is called, or any other tree of
    tensors, for which `loss_fn(model, batch)` is. All tensors have the samples in dim 0.
    """
    with ranks.contact("during a step"):
        sums = _forward_backward(model, batch, loss_fn, options, ranks.device)
        vector = torch.cat([sums, torch.tensor(wishes.as_numbers(), dtype=torch.float64, device=ranks.device)])
        vector = ranks.sum(vector)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = _scale_and_clip(grads, _samples_per_target(vector[1], options), options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total, targets, *wished = vector.tolist()
    return StepResult(total / targets if targets else float("nan"), float(norm), targets, read_decision(wished))


def _forward_backward(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., LossSum | torch.Tensor],
    options: StepOptions,
    device: torch.device,
) -> torch.Tensor:
    """Accumulate gradients; returns [sum of losses, targets] of this rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    micros = list(cut(batch, options.accumulation))
    for number, micro in enumerate(micros, start=1):
        with accumulating(model, last=number == len(micros)):
            with options.precision.autocast(device):
                loss = as_sum(call_loss(loss_fn, model, micro.data), micro.rows)
            # Ranks average their gradients, so each divides by a rank's part of the samples.
            (loss.total * (micro.weight * options.data_ranks / options.global_batch)).backward()
        with torch.no_grad():
            sums[0] += loss.total.detach() * micro.weight
            sums[1] += loss.count * micro.weight
    return sums


def _samples_per_target(targets: torch.Tensor, options: StepOptions) -> torch.Tensor:
    """What turns the gradient of a mean over samples into that over targets; 0 where no target counts."""
    return torch.where(targets > 0, options.global_batch / targets, torch.zeros_like(targets))


def call_loss(loss_fn: Callable[..., LossSum | torch.Tensor], model: nn.Module, data: Any) -> LossSum | torch.Tensor:
    """The loss of one batch: of a pair (inputs, targets), or of whatever else the loss function takes."""
    if isinstance(data, tuple | list) and len(data) == 2:
        inputs, targets = data
        return loss_fn(model(inputs), targets)
    return loss_fn(model, data)


def count_rows(batch: Any) -> int:
    """Samples in a batch: the length of dim 0 of its tensors. Raises UserError where they differ."""
    lengths = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(lengths) != 1:
        found = f"dim 0 of its tensors has the lengths {sorted(lengths)}" if lengths else "it holds no tensor"
        raise UserError(f"a batch must have its samples in dim 0 of every tensor, and {found}.")
    return lengths.pop()


def cut(batch: Any, parts: int) -> Iterator[_Micro]:
    """A rank's share in `parts` nearly equal micro-batches; a part without rows repeats a row with weight 0."""
    rows = count_rows(batch)
    if parts == 1 and rows:
        yield _Micro(batch, rows, 1.0)
        return
    for part in range(parts):
        start, end = rows * part // parts, rows * (part + 1) // parts
        weight = 1.0 if end > start else 0.0
        start, end = (start, end) if weight else (0, 1)
        yield _Micro(_slice(batch, start, end), end - start, weight)


def _slice(batch: Any, start: int, end: int) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor[start:end] if tensor.dim() else tensor, batch)


def _scale_and_clip(grads: list[torch.Tensor], scale: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Multiply gradients by `scale`, and further so that their global norm is at most `clip`; the norm before."""
    norm = torch.nn.utils.get_total_norm(grads)
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm) * scale.to(norm.dtype)
    factor = scale if clip is None else scale * torch.clamp(clip / (norm + 1e-6), max=1.0)
    # Reading the factor is free on a CPU and saves a pass over all gradients; on a GPU it would stall the queue.
    if factor.device.type != "cpu" or factor.item() != 1.0:
        torch._foreach_mul_([_local(grad) for grad in grads], factor.to(norm.dtype))
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
