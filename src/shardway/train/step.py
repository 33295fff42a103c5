"""One optimizer step: passes, the exact mean over the global batch, clipping, the update.

Invariant: the gradient that the optimizer sees is that of the mean loss over all targets that count in the global
batch, however it was cut into ranks and micro-batches. All ranks return the same numbers. This module must not fetch
data, write files or decide what comes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardway.checkpoint.state import needs_closure
from shardway.errors import UserError
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.expert import balance
from shardway.parallel.axes.tensor import sum_partial_gradients
from shardway.parallel.formats.float8 import compute_scales
from shardway.parallel.gradients import own_squares, scale_gradients, send
from shardway.ranks.start import Ranks
from shardway.ranks.stop import Decision, Wishes, read_decision
from shardway.train.guard_repeat import GuardChecks, RepeatablePasses, Tried, Watched, run_watched
from shardway.train.loss import LossScale
from shardway.train.passes import SUMS, Loss, Passes
from shardway.train.snapshot import Before, RngAndBufferSnapshot, find_changeable


@dataclass(frozen=True)
class StepParts:
    """What a step works with; `clip` limits the norm of its gradient (None: no limit).

    `beside` are the run's other models: a loss may run them, and their gradients do not count.
    """

    passes: Passes
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    clip: float | None
    beside: Sequence[ParallelModel] = ()

    @cached_property
    def changeable(self) -> RngAndBufferSnapshot:
        """What the passes change beside gradients."""
        return find_changeable(*self.passes.parallels, *self.beside)

    def clear_gradients(self) -> None:
        """Drop all gradients, also those in models beside."""
        self.optimizer.zero_grad(set_to_none=True)
        for parallel in self.beside:
            for parameter in parallel.module.parameters():
                parameter.grad = None

    @cached_property
    def needs_closure(self) -> bool:
        """Whether the optimizer evaluates the loss itself, as often as it needs."""
        return needs_closure(self.optimizer)

    def check_takes_closure(self) -> None:
        """Raise UserError where an optimizer that evaluates the loss itself cannot train."""
        name = type(self.optimizer).__name__
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise UserError(
                f"{name} looks at all parameters as one vector, and here they are shards or slices (parallel.dp_shard, "
                "tp, ep).\n  To do: use parallel.dp_replicate alone, or another optimizer."
            )
        if self.passes.parallel.pipeline is not None or self.passes.precision.scales_loss:
            what = "a pipeline (parallel.pp)" if self.passes.parallel.pipeline is not None else "a loss scale (fp16)"
            raise UserError(
                f"{name} evaluates the loss itself, as often as it wants, which {what} does not allow.\n"
                "  To do: use parallel.pp = 1 and a format without a loss scale, or another optimizer."
            )

    def parameters(self) -> list[nn.Parameter]:
        """All that the optimizer updates."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        """Those that are there, in the order of the parameters."""
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]


@dataclass
class UpdateMark:
    """Whether a step has begun to change the model for good."""

    begun: bool = False


@dataclass(frozen=True)
class StepContext:
    """The context of a step: its position in the order of samples, this rank's requests, the loss scale (None: no
    fp16), the checks before the update (None: none), and how many samples this rank has (None: from the tensors of its
    batch)."""

    position: int = 0
    wishes: Wishes = field(default_factory=Wishes)
    loss_scale: LossScale | None = None
    watch: GuardChecks | None = None
    rows: int | None = None
    update: UpdateMark = field(default_factory=UpdateMark)


@dataclass(frozen=True)
class StepResult:
    """Numbers of a finished step, the same on every rank: mean loss, norm of its gradient before clipping, targets.

    If `decision.void`, a rank had no batch: nothing has changed, and the loss is NaN.

    `skipped`: no rank changed its weights, since fp16 gradients overflowed on some rank, or since the checks in
    `watched` refused them.
    """

    loss: float
    grad_norm: float
    targets: float
    decision: Decision
    skipped: bool = False
    loss_scale: LossScale | None = None
    watched: Watched | None = None


def take_step(parts: StepParts, model: nn.Module, batch: Any, loss_fn: Loss, moment: StepContext) -> StepResult:
    """Forward, backward and update for this rank's share of a global batch.

    The host waits for the device once, before the update, which the device does while the host goes on.

    `batch` is a pair (inputs, targets), for which `loss_fn(model(inputs), targets)` is called, or any other tree (see
    `data.batch_tree`), for which `loss_fn(model, batch)` is. Raises JobError where an fp16 loss cannot be scaled,
    UserError where passes that shall be repeated cannot be, or a batch cannot be cut.
    """
    passes, optimizer, scale = parts.passes, parts.optimizer, moment.loss_scale
    factor_of_loss = scale.scale if scale is not None else 1.0
    with parts.ranks.contact("during a step"):
        before = parts.changeable.remember(batch)
        run = partial(_accumulate, parts, model, batch, loss_fn, moment)
        try:
            watched = _run_passes(parts, run, batch, moment.watch, before)
        except BaseException:  # in a notebook the run may go on from here
            before.put_back()
            parts.clear_gradients()
            raise
        moment.update.begun = True
        numbers = watched.tried.numbers
        total, targets, squares = numbers[0], numbers[1], numbers[SUMS]
        decision = read_decision(numbers[SUMS + 1 :])
        refused = watched.is_refused or decision.void
        overflow = scale is not None and not math.isfinite(squares)
        per_target = _samples_per_target(targets, passes.portions.global_batch) / factor_of_loss
        norm = math.sqrt(squares) * per_target
        if not (overflow or refused):
            scale_gradients(parts.parameters(), per_target * _clipping(norm, parts.clip))
            if parts.needs_closure:
                _step_with_closure(parts, run, total / targets if targets else 0.0)
            else:
                optimizer.step()
            for parallel in passes.parallels:
                compute_scales(parallel.module, passes.precision.float8)
        parts.clear_gradients()
        if not refused:
            balance(passes.routers, passes.parallel.mesh)
        elif decision.void:
            before.put_back_model()
    return StepResult(
        loss=total / targets if targets and not decision.void else float("nan"),
        grad_norm=norm,
        targets=targets,
        decision=decision,
        skipped=overflow or refused,
        loss_scale=scale.after(overflow) if scale is not None and not decision.void else scale,
        watched=watched if moment.watch is not None else None,
    )


def _step_with_closure(parts: StepParts, run: Callable[[], Tried], loss: float) -> None:
    """A step of an optimizer that evaluates loss and gradients itself: the first evaluation exists already."""
    losses = [loss]

    def evaluate() -> Any:
        if losses:
            return torch.tensor(losses.pop(), dtype=torch.float64)
        parts.clear_gradients()
        with torch.enable_grad():
            numbers = run().numbers
        total, targets, squares = numbers[0], numbers[1], numbers[SUMS]
        per_target = _samples_per_target(targets, parts.passes.portions.global_batch)
        scale_gradients(parts.parameters(), per_target * _clipping(math.sqrt(squares) * per_target, parts.clip))
        return torch.tensor(total / targets if targets else 0.0, dtype=torch.float64)

    parts.optimizer.step(evaluate)


def _run_passes(
    parts: StepParts, run: Callable[[], Tried], batch: Any, watch: GuardChecks | None, before: Before
) -> Watched:
    """The passes of a step, checked if `watch` is given."""
    if watch is None:
        return Watched(run())
    return run_watched(
        RepeatablePasses(run, parts.clear_gradients, parts.gradients, parts.ranks, batch, SUMS), watch, before
    )


def _accumulate(parts: StepParts, model: nn.Module, batch: Any, loss_fn: Loss, moment: StepContext) -> Tried:
    """The gradients of this rank's share, and the numbers of all ranks."""
    passes, scale = parts.passes, moment.loss_scale
    factor = scale.scale if scale is not None else 1.0
    sums = passes.train(model, batch, loss_fn, position=moment.position, loss_scale=factor, rows=moment.rows)
    for parallel in passes.parallels:
        if parallel.partial:
            sum_partial_gradients(parallel.module, parallel.partial, parallel.mesh.group("tp"))
    vector = _own_vector(sums, parts.parameters(), passes, moment.wishes)
    return Tried(sums, parts.ranks.sum(vector))


def _own_vector(sums: torch.Tensor, parameters: list[nn.Parameter], passes: Passes, wishes: Wishes) -> torch.Tensor:
    """This rank's part of the sum over all ranks: [SUMS], squares of gradients, requests."""
    squares = own_squares(parameters, passes.parallel.mesh, sums.device)
    wished = send(wishes.as_numbers(), torch.float64, sums.device)
    return torch.cat([sums, squares[None], wished])


def _clipping(norm: float, most: float | None) -> float:
    """The factor that brings gradients of this norm down to `most`."""
    return 1.0 if most is None else min(most / (norm + 1e-6), 1.0)


def _samples_per_target(targets: float, global_batch: int) -> float:
    """What turns the gradient of a mean over samples into that over targets (exactly 1 where each sample is one
    target); 0 where no target counts."""
    return global_batch / targets if targets > 0 else 0.0
