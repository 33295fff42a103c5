"""AdamW, AdamW with 8-bit states, and SGD with momentum.

Invariants:
- The numbers of AdamW and SGD are those of `torch.optim.AdamW` and `torch.optim.SGD`, whose functional forms compute
  them.
- Only this module imports torchao, when 8-bit states are asked for.

8-bit states: a block of 256 numbers is quantized together, and blocks are cut from what a rank holds. So a checkpoint
fits another layout only if that also cuts a parameter between blocks (otherwise torchao raises ValueError). States of
parts below 4096 numbers stay in fp32 and are quantized when they become part of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardway.errors import UserError
from shardway.parallel.axes.replicate import send
from shardway.train.optim.base import Groups, LocalOptimizer, ParameterPart


class AdamW(LocalOptimizer):
    """A group has `lr`, `betas`, `eps` and `weight_decay`; the states are `exp_avg` and `exp_avg_sq`."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        fused = self.can_fuse(parts)
        # Fused kernels want the steps beside the parameters: one copy carries all of them there.
        device = parts[0].parameter.device if fused else torch.device("cpu")
        steps = send([part.step - 1.0 for part in parts], torch.float32, device).unbind()
        first, second = group["betas"]
        adamw(
            [part.parameter for part in parts],
            [part.gradient for part in parts],
            [part.states[0] for part in parts],
            [part.states[1] for part in parts],
            [],
            list(steps),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


# --- SGD with momentum (Sutskever et al., ICML 2013)


class SGD(LocalOptimizer):
    """A group has `lr`, `momentum`, `nesterov` and `weight_decay`; with momentum there is a `momentum_buffer`."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        fused = self.can_fuse(parts)
        buffers: list[torch.Tensor | None] = [part.states[0] if part.states else None for part in parts]
        sgd(
            [part.parameter for part in parts],
            [part.gradient for part in parts],
            buffers,
            foreach=not fused,
            fused=fused,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )


# --- AdamW with 8-bit states (Dettmers et al., arXiv:2110.02861)


def build_adamw8bit(groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """torchao's AdamW8bit, with a learning rate that may be set to a number. Raises UserError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f'optim.name = "adamw8bit" needs torchao, which cannot be imported: {error}\n'
            '  To do: pip install "shardway[float8]", or choose optim.name = "adamw" with '
            'optim.state_dtype = "bf16", which takes half the memory of fp32 states and needs nothing.'
        ) from None
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    optimizer.register_step_pre_hook(_make_rates_tensors)
    return optimizer


def _make_rates_tensors(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Its update is compiled, and a number would be compiled into it again at every step of the schedule."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
