"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101, algorithm 2).

Invariant: the numbers are those of `torch.optim.AdamW`, whose functional form computes them. This module must not
know where a parameter lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from shardway.parallel.host import send
from shardway.train.optim.local import LocalOptimizer
from shardway.train.optim.parts import ParameterPart


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
