"""The protocol between the loop and an engine.

Invariants:
- The loop reaches model, optimizer and checkpoint only through this protocol, so events, data order, schedule and
  decisions are the same with every engine.
- Only values; the loop decides what they mean for the run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardway.checkpoint.state import CheckpointState
from shardway.data.loader import Batch
from shardway.errors import UserError
from shardway.parallel.apply import ParallelModel
from shardway.parallel.precision import Precision
from shardway.ranks.start import Ranks
from shardway.ranks.stop import Decision
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
    batch_split: BatchSplit
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

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, context: StepContext) -> StepResult:
        """One optimizer step on this rank's share of a global batch; see `train.step`."""
        ...


# --- The batch that the loop has handed to a script, and the updates that the script has made with it


@dataclass(frozen=True)
class StepCall:
    """A call of `run.step`: its engine, the name of its loss, and the script's arguments."""

    engine: Engine
    name: str
    model: nn.Module
    loss_fn: Loss


@dataclass(frozen=True)
class TakenStep:
    """An update: the name of its loss, its learning rate, and its numbers.

    `by_hand`: the gradients are those of run.backward, and the script makes the update.
    """

    name: str
    lr: float
    result: StepResult
    by_hand: bool = False


@dataclass(frozen=True)
class OpenStep:
    """A batch that was handed out, when (perf_counter), and the updates that the script has made with it.

    `finishing`: the script of this rank had ended the run before.
    """

    batch: Batch
    started: float
    taken: list[TakenStep] = field(default_factory=list)
    finishing: bool = False

    @property
    def by_hand(self) -> bool:
        """Whether the script has used run.backward for it."""
        return any(each.by_hand for each in self.taken)

    @property
    def decision(self) -> Decision:
        """What all ranks agreed on in it."""
        first, *others = (each.result.decision for each in self.taken)
        return functools.reduce(Decision.also, others, first)


def check_taken(step: OpenStep, number: int) -> None:
    """Raise UserError if no update was made with a batch; `number` is that of its step."""
    if not step.taken:
        raise UserError(
            f"the loop went on without run.step for the batch of step {number}, so nothing was learnt from it.\n"
            "  To do: call run.step(model, batch, loss_fn) once for each batch of run.steps; or run.backward(loss) in "
            "place of loss.backward(), and run.stop after it."
        )


def lr_of(engine: Engine) -> float:
    """The learning rate of the first group; NaN if it has none."""
    return float(engine.groups[0].get("lr", math.nan)) if engine.groups else math.nan
