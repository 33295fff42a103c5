"""Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, for Nesterov's form).

Invariant: the numbers are those of `torch.optim.SGD`, whose functional form computes them. This module must not know
where a parameter lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.sgd import sgd

from shardway.train.optim.local import LocalOptimizer
from shardway.train.optim.parts import ParameterPart


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
