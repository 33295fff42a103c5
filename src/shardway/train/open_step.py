"""The batch that the loop has handed to a script, and the updates that the script has made with it.

Invariant: only values; the loop decides what they mean for the run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from torch import nn

from shardway.data.loader import Batch
from shardway.errors import UserError
from shardway.ranks.stop import Decision
from shardway.train.engines.base import Engine
from shardway.train.passes import Loss
from shardway.train.step import StepResult


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
