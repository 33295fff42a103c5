"""Random numbers of a forward pass that do not depend on the layout where the axes allow it.

Invariant: before each block runs, the generator starts at a hash of (train.seed, the first sample of the micro-batch,
the block's name). So the masks of dropout are those of one rank with the same micro-batches, over dp_replicate,
dp_shard, pp and accumulation, and over tp without sequence parallelism; where ranks hold parts of a sequence (cp, tp
with sequence parallelism) each part has masks of its own. This module must not touch a model without dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardway.models.contract import canonical_name
from shardway.models.initialise import stream_key
from shardway.parallel.axes.pipeline import Stage


@dataclass
class _SamplePosition:
    """Where one stage is in the data: the first sample of the micro-batch that it is working on."""

    sample: int = 0
    following: int = 0


@dataclass
class DropoutSeeds:
    """Seeds the generator as forward passes go; `part` differs between ranks that hold parts of one sequence."""

    seed: int
    part: int
    stride: int = 0
    places: list[_SamplePosition] = field(default_factory=list)

    def start(self, sample: int, stride: int = 0) -> None:
        """The next forward pass of each stage is for the micro-batch that starts at `sample`; those after it in a
        pipeline are `stride` samples apart."""
        self.stride = stride
        for place in self.places:
            place.following = sample

    def enter_stage(self, place: _SamplePosition, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook of a stage: its next micro-batch begins."""
        place.sample, place.following = place.following, place.following + self.stride
        self.enter("", place, module, inputs)

    def enter(self, name: str, place: _SamplePosition, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook of a block."""
        if module.training:
            key = stream_key(self.seed, f"dropout/{place.sample}/{self.part}/{name}")
            torch.default_generator.manual_seed(key)
            if torch.cuda.is_available():
                torch.cuda.manual_seed(key)


def seed_dropout(stages: Sequence[Stage], units: Sequence[nn.Module], seeds: DropoutSeeds) -> DropoutSeeds | None:
    """Have each stage and each of its units start from their own seed; None for a model without dropout."""
    if not any(drops(stage.module) for stage in stages):
        return None
    wanted = set(units)
    for stage in stages:
        place = _SamplePosition()
        seeds.places.append(place)
        stage.module.register_forward_pre_hook(partial(seeds.enter_stage, place))
        for name, module in stage.module.named_modules():
            if module in wanted:
                module.register_forward_pre_hook(partial(seeds.enter, canonical_name(name), place))
    return seeds


def drops(model: nn.Module) -> bool:
    """Whether a model has dropout."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.MultiheadAttention)
    dropping = (module for module in model.modules() if isinstance(module, kinds))
    return any(getattr(module, "p", getattr(module, "dropout", 0.0)) > 0.0 for module in dropping)
