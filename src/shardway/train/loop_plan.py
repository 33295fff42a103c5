"""What a walk through a run is told before it begins: lengths, cadences, and what it works with.

Invariant: values alone, the same on every rank. This module must not do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardway.best import LOSS, Monitor
from shardway.checkpoint.retention import RetentionPolicy
from shardway.checkpoint.state import CheckpointState
from shardway.data.loader import Batch
from shardway.parallel.apply import ParallelModel
from shardway.train.by_hand import GradientsByHand
from shardway.train.engines.base import Engine
from shardway.train.guard import GuardPlan
from shardway.train.held import Holdings
from shardway.train.loss_scale import LossScale
from shardway.train.saves.cadence import LeastCost
from shardway.train.saves.tiers import LocalPlan
from shardway.train.schedule import LRSchedule
from shardway.train.validate import Validation


@dataclass(frozen=True)
class LoopPlan:
    """Lengths and cadences of a run, in steps unless named otherwise; None: never.

    `writes_lr`: each step sets the learning rate by the schedule; otherwise it is the script's own. `patience`: how
    many validations without a better `monitor` finish the run.
    """

    total_steps: int
    global_batch: int
    tokens_per_sample: int
    validate_every: int | None = None
    save_every: int | None = None
    save_every_s: float | LeastCost | None = None
    save_at_end: bool = True
    keep: RetentionPolicy = field(default_factory=lambda: RetentionPolicy(3))
    schedule: str = "constant"
    writes_lr: bool = True
    course: LRSchedule = field(default_factory=lambda: LRSchedule(1, 0, 0, 1.0))
    data_fingerprint: str = ""
    loss_scale: LossScale | None = None
    stop_margin_s: float | None = None
    guard: GuardPlan = field(default_factory=GuardPlan)
    local: LocalPlan | None = None
    monitor: Monitor = LOSS
    patience: int | None = None

    def saves_after(self, step: int) -> bool:
        """Whether a save is due by the number of this step."""
        return self.saves_shared_after(step) or self.saves_local_after(step)

    def saves_shared_after(self, step: int) -> bool:
        """One into the run directory; that which is kept for ever is made, whatever the cadence."""
        return any(every is not None and step % every == 0 for every in (self.save_every, self.keep.every))

    def saves_local_after(self, step: int) -> bool:
        """One on the disks of the nodes."""
        return self.local is not None and self.local.every is not None and step % self.local.every == 0


@dataclass(frozen=True)
class LoopParts:
    """What the loop works with: the engine, a stream of batches from a data position without some spans, validation.

    `others` are the engines of further optimizers. `reading_draws`: whether reading a batch may draw random numbers.
    `held` is what a script of its own holds, `by_hand` what its run.backward knows; None for a recipe. `data`: where
    its data stand, as far as a position does not say that.
    """

    engine: Engine
    batches_from: Callable[[int, Sequence[Sequence[int]]], Iterator[Batch]]
    validation: Validation | None = None
    on_step: Callable[[int, dict[str, Any]], None] | None = None
    others: tuple[Engine, ...] = ()
    held: Holdings | None = None
    reading_draws: bool = True
    by_hand: GradientsByHand | None = None
    data: CheckpointState | None = None

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them, the first first."""
        return (self.engine, *self.others)

    @property
    def parallels(self) -> tuple[ParallelModel, ...]:
        """Every model that is trained, each once."""
        if self.held is not None:
            return tuple(each.parallel for each in self.held.models)
        return (self.engine.passes.parallel,)
