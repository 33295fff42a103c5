"""Passes of a loss that runs several models of one run: those that its optimizer updates, and others beside them.

Invariant: the gradients of all models that the optimizer updates are what one model of all of them would get; a model
beside them is run and keeps none of its gradients. This module must not update weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardway.parallel.accumulate import accumulating
from shardway.parallel.apply import ParallelModel
from shardway.parallel.axes.replicate import average_buffers
from shardway.train.passes import Loss, Passes


@dataclass(frozen=True)
class SeveralPasses(Passes):
    """`further`: models beside `parallel` that are updated with it; `beside`: those that are only run."""

    further: tuple[ParallelModel, ...] = ()
    beside: tuple[ParallelModel, ...] = ()

    @property
    def parallels(self) -> tuple[ParallelModel, ...]:
        """All models whose gradients count."""
        return (self.parallel, *self.further)

    def train(
        self,
        model: nn.Module,
        batch: object,
        loss_fn: Loss,
        *,
        position: int = 0,
        loss_scale: float = 1.0,
        rows: int | None = None,
    ) -> torch.Tensor:
        """As for one model; what the loss has gathered of models beside is let go of.

        FSDP frees the weights of a model after its backward pass. One that has had none would go on with the weights of
        now after its next update.
        """
        sums = super().train(model, batch, loss_fn, position=position, loss_scale=loss_scale, rows=rows)
        for parallel in (*self.further, *self.beside):
            let_go(parallel)
        return sums

    def count_averaged(self, model: nn.Module) -> int:
        """DDP averages the gradients of every model that it wraps."""
        wrapped = any(isinstance(each.call, DistributedDataParallel) for each in self.parallels)
        return self.parallel.mesh.data_ranks if wrapped else 1

    @contextlib.contextmanager
    def around(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Each model that is updated holds back what need not travel yet; those beside send nothing at all."""
        with contextlib.ExitStack() as stack:
            for each in self.parallels:
                stack.enter_context(accumulating(each.call, last=last))
            for each in self.beside:
                if isinstance(each.call, DistributedDataParallel) and not each.call.static_graph:
                    stack.enter_context(each.call.no_sync())
            yield


@contextlib.contextmanager
def evaluating(parallels: Sequence[ParallelModel]) -> Iterator[None]:
    """Models that a validation may run besides its own: each module has its own mode again afterwards."""
    for parallel in parallels:
        average_buffers(parallel.module, parallel.mesh)
    modes = [(module, module.training) for parallel in parallels for module in parallel.call.modules()]
    for parallel in parallels:
        parallel.call.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def let_go(parallel: ParallelModel) -> None:
    """Let FSDP free the weights that a forward pass alone has gathered: a script that looks at the parameters (or
    freezes one) between two steps means its shards."""
    for module in parallel.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
