"""The pipeline axis: stages on different ranks work on different micro-batches at a time (Huang et al., GPipe,
arXiv:1811.06965), in one of the orders that `torch.distributed.pipelining` knows.

Invariant: all micro-batches of a pass have the same shape, and gradients are the plain sum over them. This module must
not know losses or batches: whoever calls it brings inputs and a function of the last stage's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardway.compat import runs_v_schedules
from shardway.errors import Bug, UserError
from shardway.parallel.axes.cut import Stage

LossOf = Callable[[torch.Tensor, int], torch.Tensor]
"""(output of the model for a micro-batch, its number) -> what is to be differentiated, 0-dim."""

SCHEDULES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
    }
)
_ONE_STAGE = ("gpipe", "1f1b")
_FORWARD = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""Of the kinds of action of `torch.distributed.pipelining.schedules`, those that an evaluation needs."""


@dataclass
class Pipeline:
    """This rank's stages and the schedules that run them, made when the first inputs show their shape."""

    stages: Sequence[Stage]
    total_stages: int
    schedule: str
    group: dist.ProcessGroup
    device: torch.device
    _schedules: dict[Any, Any] = field(default_factory=dict)
    _loss_of: LossOf | None = None

    @property
    def has_first(self) -> bool:
        """Whether inputs enter on this rank."""
        return self.stages[0].index == 0

    @property
    def has_last(self) -> bool:
        """Whether outputs, and so losses, leave on this rank."""
        return any(stage.index == self.total_stages - 1 for stage in self.stages)

    def is_new_to(self, inputs: torch.Tensor, micro_batches: int, *, training: bool) -> bool:
        """Whether a pass of this shape is the first, in which torch runs stages once more to learn their shapes."""
        return (inputs.shape, micro_batches, training) not in self._schedules

    def run(self, inputs: torch.Tensor, micro_batches: int, loss_of: LossOf, *, training: bool) -> None:
        """One pass: `inputs` [micro_batches x rows, ...] through all stages, `loss_of` for each output on the rank that
        has it, and in training all backward passes. Gradients add to what is there."""
        schedule = self._schedule_for(inputs, micro_batches, training)
        self._loss_of = loss_of
        arguments = (inputs,) if self.has_first else ()
        # torch cuts targets like inputs; numbers of micro-batches in their place let the caller find its own.
        numbers = torch.arange(micro_batches, device=self.device) if self.has_last else None
        step = schedule.step if training else schedule.eval
        step(*arguments, target=numbers, losses=[] if self.has_last else None, return_outputs=False)
        self._loss_of = None

    def _schedule_for(self, inputs: torch.Tensor, micro_batches: int, training: bool) -> Any:
        key = (inputs.shape, micro_batches, training)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(micro_batches, training)
        return self._schedules[key]

    def _make_schedule(self, micro_batches: int, training: bool) -> Any:
        stages = [
            PipelineStage(stage.module, stage.index, self.total_stages, self.device, group=self.group)
            for stage in self.stages
        ]
        make = SCHEDULES[self.schedule]
        what = stages[0] if self.schedule in _ONE_STAGE else stages
        schedule = make(what, micro_batches, loss_fn=self._loss, scale_grads=False)
        if not training and self.schedule not in _ONE_STAGE:
            _leave_out_backward(schedule)
        return schedule

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if self._loss_of is None:
            raise Bug("a loss was asked for outside a pass")
        return self._loss_of(output, int(number))


def send_contiguous(stage: nn.Module) -> None:
    """Let what a stage sends, forward and backward, lie in memory as its shape says: transports take nothing else."""

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for x in inputs:
            if x.requires_grad:
                x.register_hook(torch.Tensor.contiguous)

    def after(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.contiguous()

    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(after)


def _leave_out_backward(schedule: Any) -> None:
    """Of the actions of each rank keep those of forward passes: torch walks through the others in an evaluation too,
    and fails in those between two stages of one rank."""
    actions = schedule.pipeline_order_with_comms
    for rank, own in actions.items():
        actions[rank] = [action for action in own if action.computation_type.value in _FORWARD]


def check_schedule(schedule: str, device: torch.device) -> None:
    """Raise UserError for a schedule that this torch cannot run on this device."""
    if schedule == "zbv" and not runs_v_schedules(device):
        raise UserError(
            f'parallel.pp_schedule = "zbv" needs torch 2.13 or later on a CPU; this is torch {torch.__version__}.\n'
            '  To do: update torch, or set parallel.pp_schedule = "zero_bubble".'
        )


def hide_forward(model: nn.Module) -> None:
    """A rank's part of a cut model cannot be called as a whole; say so instead of failing in the middle."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise UserError(
            "this rank holds some stages of the model alone (parallel.pp > 1), so it cannot be called.\n"
            "  To do: train with run.step(model, batch, loss_fn), which runs the whole pipeline."
        )

    model.forward = refuse
