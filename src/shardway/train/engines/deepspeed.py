"""DeepSpeed as the engine: ZeRO shards states, gradients or weights over the ranks, and offloads them.

Invariant: loss, gradient norm, clipping and decisions are those of `train.step`, to rounding. This module must not
write files: what a checkpoint holds is `checkpoint.zero`.

DeepSpeed averages gradients over ranks and can divide them by a loss scale just before it clips and updates. That
divisor carries the factor from samples to targets, which is known only after the passes, and the fp16 loss scale:
both are Shardway's own (decision 0012).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.state import CheckpointState, needs_closure
from shardway.checkpoint.zero import ZeroState
from shardway.errors import UserError
from shardway.parallel.axes.balance import balance
from shardway.parallel.host import send
from shardway.ranks.agreement import read_decision
from shardway.resolve.deepspeed import Settings, render_settings, resolve_ds_config
from shardway.train.engines.base import EngineParts
from shardway.train.engines.zero import started_zero
from shardway.train.passes import Loss, Passes
from shardway.train.step import StepContext, StepResult


@dataclass(frozen=True)
class ZeroPasses(Passes):
    """Passes whose gradients DeepSpeed takes as they come about."""

    engine: Any = None

    def count_averaged(self, model: nn.Module) -> int:
        """DeepSpeed takes the mean over all ranks."""
        return self.parallel.mesh.data_ranks

    @contextlib.contextmanager
    def around(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Tell DeepSpeed whether this micro-batch ends the step."""
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """DeepSpeed's own; the loss is a part of the mean over the global batch already."""
        self.engine.backward(loss, scale_wrt_gas=False)


class DeepSpeedEngine:
    """What trains where `train.engine` is "deepspeed"."""

    def __init__(self, parts: EngineParts) -> None:
        if needs_closure(parts.optimizer):
            raise UserError(
                f"{type(parts.optimizer).__name__} evaluates the loss itself, which DeepSpeed does not allow.\n"
                '  To do: set train.engine = "torch", or use another optimizer.'
            )
        self._ranks, self._optimizer = parts.ranks, parts.optimizer
        self._parameters = sum(parameter.numel() for parameter in parts.parallel.module.parameters())
        settings = _settings(parts)
        text = render_settings(settings)
        parts.to_write.append(lambda run: run.write_ds_config(text))
        module, optimizer, ranks = parts.parallel.module, parts.optimizer, parts.ranks
        self._engine = parts.at_end.enter_context(started_zero(module, optimizer, settings, ranks))
        parallel = replace(parts.parallel, call=self._engine)
        # Its weights have the format of products already.
        precision = replace(parts.precision, autocast_dtype=None)
        self.passes: Passes = ZeroPasses(parallel, parts.portions, precision, parts.ranks.device, self._engine)
        self.state: CheckpointState = ZeroState(self._engine, parts.optimizer, self._parameters, parts.ranks)

    @property
    def can_void(self) -> bool:
        """DeepSpeed has taken the gradients in before anybody knows."""
        return False

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer that DeepSpeed steps."""
        return self._optimizer.param_groups

    def count_parameters(self) -> int:
        """All are counted by rank 0: once they are sharded, their shapes are gone."""
        return self._parameters if self._ranks.is_first else 0

    def step(self, model: nn.Module, batch: Any, loss_fn: Loss, moment: StepContext) -> StepResult:
        """One step; `model` is what the script has, and DeepSpeed's wrapper of it is what runs."""
        scale = moment.loss_scale
        factor = scale.scale if scale is not None else 1.0
        with self._ranks.contact("during a step"):
            self._engine.optimizer.override_loss_scale(1.0)  # the passes multiply
            sums = self.passes.train(
                self._engine, batch, loss_fn, position=moment.position, loss_scale=factor, rows=moment.rows
            )
            wished = send(moment.wishes.as_numbers(), torch.float64, sums.device)
            total, targets, _, _, *wanted = self._ranks.sum(torch.cat([sums, wished])).tolist()
            per_sample = targets / self.passes.portions.global_batch
            self._engine.optimizer.override_loss_scale(factor * per_sample if targets else math.inf)
            self._engine.step()
            balance(self.passes.routers, self.passes.parallel.mesh)
        overflow = not self._engine.was_step_applied()
        return StepResult(
            loss=total / targets if targets else float("nan"),
            grad_norm=math.inf if overflow else float(self._engine.get_global_grad_norm()),
            targets=targets,
            decision=read_decision(wanted),
            skipped=overflow and scale is not None,
            loss_scale=scale.after(overflow) if scale is not None else None,
        )


def _settings(parts: EngineParts) -> Settings:
    """Those of the run; a script's own model is clipped only where it asks for that."""
    return {**resolve_ds_config(parts.resolved), "gradient_clipping": parts.clip or 0.0}
