"""Bytes of what a rank keeps from step to step: parameters, gradients and optimizer state.

Invariant: exact for the reference transformer with optimizers whose state is some numbers per parameter; what a step
uses besides (activations, gathered weights, messages) is not counted. This module must not look at a device.

What each way of sharding leaves on a rank follows Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5: replicas keep
all of it, shards 1/n of each of the three (stage 3). Tensor parallelism leaves 1/n of the matrices and all of the
norms (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3), experts 1/n of the experts (Lepikhin et al., GShard,
arXiv:2006.16668, section 3.3), a pipeline the blocks of a rank's stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from exact_weights import WeightShape, allotted_elements, held_elements, weights_of_rank
from shardway.layout import layout_of
from shardway.runfile.schema import ParallelSection

OPTIMIZER_STATES: Mapping[str, int] = MappingProxyType({"adamw": 2, "sgd": 1})
"""Numbers that an optimizer keeps per parameter: two moments, or the momentum."""


@dataclass(frozen=True)
class StateFormats:
    """Bytes of one number: of a parameter and its gradient, and of the optimizer's, of which it keeps `states`."""

    weight_bytes: int = 4
    state_bytes: int = 4
    states: int = OPTIMIZER_STATES["adamw"]


@dataclass(frozen=True)
class StateBytes:
    """What one rank keeps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


def estimate_states(
    weights: Sequence[WeightShape],
    parallel: ParallelSection,
    rank: int = 0,
    blocks: Sequence[int] = (),
    formats: StateFormats | None = None,
) -> StateBytes:
    """The bytes on a rank of a resolved layout; with a pipeline, `blocks` gives the number of blocks of each stage.

    FSDP2 pads the parts of parameters and gradients to equal sizes, and the optimizer takes them without that.
    """
    formats, layout = formats or StateFormats(), layout_of(parallel)
    held = weights if parallel.pp == 1 else weights_of_rank(weights, parallel, blocks, rank)
    allotted = sum(allotted_elements(weight, layout) for weight in held) * formats.weight_bytes
    elements = sum(held_elements(weight, layout, rank) for weight in held)
    return StateBytes(allotted, allotted, elements * formats.states * formats.state_bytes)
