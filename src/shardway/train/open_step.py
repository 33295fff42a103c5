"""A batch that the loop has handed to a script, and the updates that the script has made with it.

Invariant: values alone; what they mean for the run is the loop's to say.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from torch import nn

from shardway.data.loader import Batch
from shardway.ranks.agreement import Decision
from shardway.train.engines.base import Engine
from shardway.train.passes import Loss
from shardway.train.step import StepResult


@dataclass(frozen=True)
class StepCall:
    """A call of `run.step`: the engine that takes it, what its loss is called, and the script's arguments."""

    engine: Engine
    name: str
    model: nn.Module
    loss_fn: Loss


@dataclass(frozen=True)
class TakenStep:
    """An update: what its loss is called, the learning rate that it was made with, and its numbers."""

    name: str
    lr: float
    result: StepResult


@dataclass(frozen=True)
class OpenStep:
    """A batch that was handed out, when (perf_counter), and the updates that the script has made with it."""

    batch: Batch
    started: float
    taken: list[TakenStep] = field(default_factory=list)

    @property
    def decision(self) -> Decision:
        """What all ranks agreed on in it."""
        first, *others = (each.result.decision for each in self.taken)
        return functools.reduce(Decision.also, others, first)


def lr_of(engine: Engine) -> float:
    """The learning rate of the first group; no number where it has none."""
    return float(engine.groups[0].get("lr", math.nan)) if engine.groups else math.nan
