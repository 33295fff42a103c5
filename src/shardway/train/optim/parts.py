"""What a rank holds of a parameter, with its gradient and states, as plain tensors.

Invariant: the tensors of a part have one shape and share memory with what they were taken from. This module must not
change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardway.errors import Bug


@dataclass(frozen=True)
class ParameterPart:
    """What this rank holds of one parameter, or some rows of that; `step` counts from 1.

    `shape` is that of the whole parameter and `offset` the place of this part in it; a rank that holds a part needs
    no communication to update it.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...]
    step: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameter, its gradient and its states."""
        return (self.parameter, self.gradient, *self.states)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ParameterPart:
        """The same part with other tensors in the order of `tensors`."""
        return replace(self, parameter=tensors[0], gradient=tensors[1], states=tuple(tensors[2:]))

    def rows(self, first: int, end: int) -> ParameterPart:
        """The part between two indices of the first dim."""
        piece = self.with_tensors([tensor[first:end] for tensor in self.tensors])
        return replace(piece, offset=(self.offset[0] + first, *self.offset[1:]))


Kernel = Callable[[Sequence[ParameterPart]], None]
"""Changes the parameters and states of parts in place."""


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of the elements that this rank holds of a parameter."""
    gradient = parameter.grad
    if gradient is None:
        raise Bug(f"a parameter of shape {tuple(parameter.shape)} has no gradient and is updated")
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:  # plain DTensor operators may leave it a sum over ranks
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def split_dim(placement: Placement) -> int | None:
    """The dim that an axis of a mesh splits, or None; FSDP2 over tensor parallel has a kind of split of its own."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def split_rows(part: ParameterPart, elements: int) -> Iterator[ParameterPart]:
    """The part in pieces of at most so many elements (one row, where a row is longer); none of an empty part."""
    if part.parameter.numel() <= elements:
        yield from [part] if part.parameter.numel() else []
        return
    length = part.parameter.shape[0]
    rows = max(1, elements * length // part.parameter.numel())
    for first in range(0, length, rows):
        yield part.rows(first, min(first + rows, length))
