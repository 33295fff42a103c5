"""PyTorch as the engine: DDP, FSDP2 and the other axes, a torch optimizer, a checkpoint that any layout reads.

Invariant: no logic of its own; passes, step and state are those of their modules.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardway.checkpoint.state import State, Trained
from shardway.models.contract import held_by_rank
from shardway.train.engines.base import EngineParts
from shardway.train.engines.explain import explained
from shardway.train.passes import Loss, Passes
from shardway.train.step import Moment, StepParts, StepResult, take_step


class TorchEngine:
    """What trains where `train.engine` is "torch"."""

    def __init__(self, parts: EngineParts) -> None:
        self.passes = Passes(parts.parallel, parts.portions, parts.precision, parts.ranks.device)
        self.state: State = Trained(parts.parallel.module, parts.optimizer)
        self._step = StepParts(self.passes, parts.optimizer, parts.ranks, parts.clip)

    @property
    def can_void(self) -> bool:
        """Updates are its own to leave out."""
        return True

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self._step.optimizer.param_groups

    def count_parameters(self) -> int:
        """Elements of the parameters that this rank answers for."""
        parallel = self.passes.parallel
        own = [parameter for parameter in parallel.module.parameters() if parallel.mesh.answers_for(parameter)]
        return sum(held_by_rank(parameter).numel() for parameter in own)

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, moment: Moment) -> StepResult:
        """One step, as `take_step`."""
        with explained(model):
            return take_step(self._step, model, batch, loss_fn, moment)
