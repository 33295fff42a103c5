"""PyTorch as the engine, and torch's errors in a step with their remedy.

Invariants:
- Only errors of torch that a user can remedy are translated; the first error is kept as the cause.
- The engine has no logic of its own: passes, step and state are those of their modules.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import shardway
from shardway.checkpoint.state import CheckpointState, Trained
from shardway.errors import UserError
from shardway.layout import needs_sharding
from shardway.models.contract import held_by_rank
from shardway.parallel.apply import MIXED
from shardway.parallel.axes.replicate import follow_frozen
from shardway.train.engines.base import EngineParts
from shardway.train.passes import Loss, Passes, SeveralPasses
from shardway.train.step import StepContext, StepParts, StepResult, take_step

# --- torch's errors with their remedy

_MEANT: Mapping[str, str] = MappingProxyType(
    {
        "Expected more than 1 value per channel when training": (
            "a batch norm was given a micro-batch of one row, of which it can take no variance.\n"
            "  To do: set train.micro_batch (and the batch size) so that each rank has two rows or more, or use a norm "
            "that looks at each row alone (nn.GroupNorm, nn.LayerNorm)."
        ),
        "does not require grad and does not have a grad_fn": (
            "no parameter that is trained took part in the loss: all that it was computed from is frozen or detached.\n"
            "  To do: let some parameters of the model have requires_grad = True, and compute the loss from its "
            "outputs without detach() or torch.no_grad()."
        ),
        MIXED: (
            "a weight was used that is not gathered: with shards (parallel.dp_shard) only a call of the model, or of "
            "one of its own methods, has whole weights.\n"
            "  To do: reach it through a method of the model's own class, or set parallel.dp_shard = 1."
        ),
    }
)
"""A part of torch's message -> Shardway's message."""


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Around a step: raise UserError for an error of torch that a user can remedy."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for part, meant in _MEANT.items():
            if part in str(error):
                raise UserError(f"in a step of {type(model).__name__}, {meant}") from error
        raise


@contextlib.contextmanager
def script_explained() -> Iterator[None]:
    """Around a script: the same for its own computations with a sharded model."""
    try:
        yield
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        raise UserError(f"in {_find_line(error)}, {_MEANT[MIXED]}") from error


def _find_line(error: BaseException) -> str:
    """The line of the script that an error came from: the innermost one outside of libraries."""
    libraries = (os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(shardway.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else "the script"


# --- the engine


class TorchEngine:
    """The engine for train.engine = "torch"."""

    can_void = True

    def __init__(self, parts: EngineParts) -> None:
        like = (parts.parallel, parts.batch_split, parts.precision, parts.ranks.device)
        alone = not parts.further and not parts.beside
        self.passes = Passes(*like) if alone else SeveralPasses(*like, parts.further, parts.beside)
        self.state: CheckpointState = Trained(parts.parallel.module, parts.optimizer)
        replicated = parts.parallel.mesh.degree("dp_replicate") > 1 and not needs_sharding(parts.parallel.mesh.layout)
        self._copies = (*self.passes.parallels, *parts.beside) if parts.own_model and replicated else ()
        self._section = parts.resolved.values.parallel
        self._step = StepParts(self.passes, parts.optimizer, parts.ranks, parts.clip, parts.beside)
        if self._step.needs_closure:
            self._step.check_takes_closure()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self._step.optimizer.param_groups

    def count_parameters(self) -> int:
        """Elements of the parameters that this rank answers for."""
        own = {
            parameter
            for parallel in (*self.passes.parallels, *self._step.beside)
            for parameter in parallel.module.parameters()
            if parallel.mesh.answers_for(parameter)
        }
        return sum(held_by_rank(parameter).numel() for parameter in own)

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, context: StepContext) -> StepResult:
        """One step, as `take_step`; a script may have frozen or freed parameters since the last."""
        for each in self._copies:
            follow_frozen(each.call, each.module, each.mesh, self._section)
        with explained(model):
            return take_step(self._step, model, batch, loss_fn, context)
