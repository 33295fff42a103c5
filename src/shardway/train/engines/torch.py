"""PyTorch as the engine: DDP, FSDP2 and the other axes, a torch optimizer, a checkpoint that any layout reads.

Invariant: no logic of its own; passes, step and state are those of their modules.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardway.checkpoint.state import CheckpointState, Trained
from shardway.layout import needs_sharding
from shardway.models.contract import held_by_rank
from shardway.parallel.axes.replicate import follow_frozen
from shardway.train.engines.base import EngineParts
from shardway.train.engines.explain import explained
from shardway.train.passes import Loss, Passes
from shardway.train.several import SeveralPasses
from shardway.train.step import StepContext, StepParts, StepResult, take_step


class TorchEngine:
    """What trains where `train.engine` is "torch"."""

    def __init__(self, parts: EngineParts) -> None:
        like = (parts.parallel, parts.portions, parts.precision, parts.ranks.device)
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
    def can_void(self) -> bool:
        """Updates are its own to leave out."""
        return True

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

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, moment: StepContext) -> StepResult:
        """One step, as `take_step`; a script may have frozen or freed parameters since the last."""
        for each in self._copies:
            follow_frozen(each.call, each.module, each.mesh, self._section)
        with explained(model):
            return take_step(self._step, model, batch, loss_fn, moment)
