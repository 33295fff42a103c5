"""What updates the weights: the protocol between the loop and an engine, PyTorch as the engine, and the table of all.

Invariants:
- The loop reaches model, optimizer and checkpoint only through this protocol, so events, data order, schedule and
  decisions are the same with every engine. Nothing outside this package tests which engine trains.
- Loading the table imports no library beside PyTorch.
- Only errors of torch that a user can remedy are translated; the first error is kept as the cause.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import nn

import shardway
from shardway.checkpoint.state import CheckpointState, Trained
from shardway.data.loader import Batch
from shardway.errors import UserError
from shardway.layout import needs_sharding
from shardway.models.contract import held_by_rank
from shardway.parallel.apply import MIXED, ParallelModel
from shardway.parallel.axes.replicate import follow_frozen
from shardway.parallel.precision import Precision
from shardway.ranks.start import Ranks
from shardway.ranks.stop import Decision
from shardway.resolve import Resolved
from shardway.rundir.directory import RunDir
from shardway.train.cuda_graphs import GraphedPasses, find_obstacle
from shardway.train.loss import class_cross_entropy, token_cross_entropy
from shardway.train.passes import BatchSplit, Loss, Passes
from shardway.train.step import StepContext, StepParts, StepResult, take_step

# --- the protocol


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    `clip` limits the norm of gradients (None: no limit); `at_end` undoes what the engine changes outside the model,
    however the run ends; `to_write` is written into the run directory once the run goes on. `further` are models beside
    `parallel` that the optimizer updates as well, `beside` those of the run that it does not update; `own_model`: a
    script steps them, and may freeze any. `note` is given what was found out about the speed of passes.
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
    note: Callable[[str], None] = lambda text: None


class Engine(Protocol):
    """A model in training with its optimizer. Its methods are called on all ranks together.

    `passes` are those over the model; `passes.parallel` is the model in training. `state` is what a checkpoint holds.
    `can_void`: whether a step without a batch on some rank can be discarded, with everything left as it was.
    """

    passes: Passes
    state: CheckpointState
    can_void: bool

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, whose "lr" is read at each step."""

    def count_parameters(self) -> int:
        """Elements of the parameters that this rank answers for: over all ranks, those of the whole model."""

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, context: StepContext) -> StepResult:
        """One optimizer step on this rank's share of a global batch; see `train.step`."""


def lr_of(engine: Engine) -> float:
    """The learning rate of the first group; NaN if it has none."""
    return float(engine.groups[0].get("lr", math.nan)) if engine.groups else math.nan


# --- the batch that the loop has handed to a script, and the updates that the script has made with it


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
        return any(each.by_hand for each in self.taken)

    @property
    def decision(self) -> Decision:
        """What all ranks agreed on in it."""
        return functools.reduce(Decision.also, (each.result.decision for each in self.taken))


# --- torch's errors with their remedy

_MEANT = {
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
    """Around a script: the same for its own computations with a sharded model, with the line of the script."""
    try:
        yield
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        libraries = (os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(shardway.__file__))
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(libraries)]
        line = f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else "the script"
        raise UserError(f"in {line}, {_MEANT[MIXED]}") from error


# --- the engines


class TorchEngine:
    """The engine for train.engine = "torch"; passes, step and state are those of their modules."""

    can_void = True

    def __init__(self, parts: EngineParts) -> None:
        parallel = parts.parallel
        values, replays = parts.resolved.values, None
        on_cuda = parts.ranks.device.type == "cuda"
        if on_cuda and not find_obstacle(values, parallel, own_model=parts.own_model):
            replays = GraphedPasses(parallel.module, (token_cross_entropy, class_cross_entropy), parts.note)
        self.passes = Passes(
            *(parallel, parts.batch_split, parts.precision, parts.ranks.device, parts.further, parts.beside),
            compiles=values.train.compiles,
            replays=replays,
        )
        self.state: CheckpointState = Trained(parallel.module, parts.optimizer)
        replicated = parallel.mesh.degree("dp_replicate") > 1 and not needs_sharding(parallel.mesh.layout)
        self._copies = (*self.passes.parallels, *parts.beside) if parts.own_model and replicated else ()
        self._section = parts.resolved.values.parallel
        self._step = StepParts(self.passes, parts.optimizer, parts.ranks, parts.clip)
        self._step.check_takes_closure()

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._step.optimizer.param_groups

    def count_parameters(self) -> int:
        own = {
            parameter
            for parallel in (*self.passes.parallels, *self.passes.beside)
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


@dataclass(frozen=True)
class EngineKind:
    """An engine before it is made: its module and class, `needs_group` also for a single process; `wraps_copies`: the
    copies of a model are kept equal by `parallel.apply`, not by the engine. `package` is what it needs beside PyTorch.
    """

    module: str
    name: str
    needs_group: bool = False
    wraps_copies: bool = True
    package: str | None = None

    def make(self, parts: EngineParts) -> Engine:
        """The engine; its module is imported now."""
        engine: Engine = getattr(import_module(self.module), self.name)(parts)
        return engine

    def check_installed(self) -> None:
        """Raise UserError if its package is missing."""
        if self.package is not None and find_spec(self.package) is None:
            raise UserError(
                f'train.engine = "{self.package}" needs the package {self.package}, which is not installed.\n'
                f"  To do: DS_BUILD_OPS=0 pip install --no-build-isolation 'shardway[{self.package}]' "
                '(without isolation, since it is built for the PyTorch that is there); or set train.engine = "torch".'
            )


ENGINES = {
    "torch": EngineKind(__name__, "TorchEngine"),
    "deepspeed": EngineKind(
        f"{__name__}.deepspeed", "DeepSpeedEngine", needs_group=True, wraps_copies=False, package="deepspeed"
    ),
}
"""Name in the run file -> engine."""
