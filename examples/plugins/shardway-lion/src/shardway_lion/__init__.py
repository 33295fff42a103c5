"""The optimizer Lion for Shardway: what a run file and a plan ask of it, without torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from shardway.train.optim.kinds import OptimizerKind


class LionKind(OptimizerKind):
    """Lion; one momentum in fp32, or in bf16 by optim.state_dtype."""

    state_bytes = 4.0
    keys = ("optim.state_dtype",)
    rounds = True
    settings = MappingProxyType({"betas": [0.9, 0.99]})

    def build(self, section: Any, model: Any, peak_lr: float) -> Any:
        import torch

        from shardway.train.optim.base import Numerics, decay_groups
        from shardway_lion.lion import Lion

        first, second = self.read_settings(section.settings)["betas"]
        numerics = Numerics(state_dtype=torch.bfloat16 if section.state_dtype == "bf16" else None)
        return Lion(decay_groups(model, section.weight_decay), {"lr": peak_lr, "betas": (first, second)}, numerics)
