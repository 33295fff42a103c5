"""The protocol between the loop and an engine.

Invariant: the loop reaches model, optimizer and checkpoint only through this protocol, so events, data order, schedule
and decisions are the same with every engine. This module must not depend on an engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardway.checkpoint.state import CheckpointState
from shardway.parallel.apply import ParallelModel
from shardway.parallel.formats.precision import Precision
from shardway.ranks.start import Ranks
from shardway.resolve import Resolved
from shardway.rundir.directory import RunDir
from shardway.train.passes import BatchSplit, Loss, Passes
from shardway.train.step import StepContext, StepResult


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    `clip` limits the norm of gradients (None: no limit); `at_end` undoes what the engine changes outside the model,
    however the run ends; `to_write` is written into the run directory once the run goes on. `further` are models beside
    `parallel` that the optimizer updates as well, `beside` those of the run that it does not update; `own_model`: a
    script steps them, and may freeze any.
    """

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    portions: BatchSplit
    precision: Precision
    clip: float | None
    ranks: Ranks
    resolved: Resolved
    to_write: list[Callable[[RunDir], None]]
    at_end: contextlib.ExitStack
    further: tuple[ParallelModel, ...] = ()
    beside: tuple[ParallelModel, ...] = ()
    own_model: bool = False


class Engine(Protocol):
    """A model in training with its optimizer. All methods but `groups` are called on all ranks together."""

    @property
    def passes(self) -> Passes:
        """The passes over the model; `passes.parallel` is the model in training."""
        ...

    @property
    def state(self) -> CheckpointState:
        """What a checkpoint holds."""
        ...

    @property
    def can_void(self) -> bool:
        """Whether a step without a batch on some rank can be discarded, with everything left as it was."""
        ...

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, whose "lr" is read at each step."""
        ...

    def count_parameters(self) -> int:
        """Elements of the parameters that this rank answers for: over all ranks, those of the whole model."""
        ...

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, moment: StepContext) -> StepResult:
        """One optimizer step on this rank's share of a global batch; see `train.step`."""
        ...
