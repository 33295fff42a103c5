"""Lion (Chen et al., arXiv:2302.06675, algorithm 2).

Invariant: each element is updated by itself, so that what a rank holds of a parameter is all that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardway.train.optim.base import LocalOptimizer, ParameterPart


class Lion(LocalOptimizer):
    """A group has `lr`, `betas` and `weight_decay`; the state is `exp_avg`."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> None:
        first, second = group["betas"]
        for part in parts:
            momentum = part.states[0]
            direction = momentum.lerp(part.gradient, 1 - first).sign_()
            part.parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
            momentum.lerp_(part.gradient, 1 - second)
