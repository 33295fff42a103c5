"""Where the values of a parameter are in a folder of weights: regions of parameters and of tensors in files.

Invariant: the pieces of one arrangement cover a parameter once and without overlap. This module must not read files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRegion:
    """A box of a tensor: where it starts and how far it reaches in each dim."""

    start: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return 0 in self.shape

    def meet(self, other: TensorRegion) -> TensorRegion:
        """What both have in common; empty where they are apart."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        return TensorRegion(start, tuple(max(0, end - first) for first, end in zip(start, ends, strict=True)))

    def seen_from(self, origin: Shape) -> TensorRegion:
        """The same box counted from another corner."""
        return TensorRegion(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.shape)


@dataclass(frozen=True)
class WeightPiece:
    """The part `region` of a parameter is what a file's tensor `name` of shape `whole` holds from `start` on.

    A file's tensor may lack leading dims of the parameter, along which the piece is one thick: one expert of a stack.
    """

    name: str
    region: TensorRegion
    whole: Shape
    start: Shape

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.region.shape)

    def source_of(self, wanted: TensorRegion) -> TensorRegion:
        """Where in the file's tensor a part of this piece's region stands."""
        inside = wanted.seen_from(self.region.start)
        missing = len(inside.start) - len(self.whole)
        start = tuple(a + b for a, b in zip(inside.start[missing:], self.start, strict=True))
        return TensorRegion(start, inside.shape[missing:])


Arrangement = tuple[WeightPiece, ...]
"""One way in which a parameter stands in files."""

Names = Callable[[str, Shape], Sequence[Arrangement]]
"""Name and whole shape of a parameter -> the ways in which files may hold it; the first one is written."""


def keep_name(name: str, shape: Shape) -> Arrangement:
    """The parameter as it is, under `name`."""
    origin = (0,) * len(shape)
    return (WeightPiece(name, TensorRegion(origin, shape), shape, origin),)


def keep_names(name: str, shape: Shape) -> Sequence[Arrangement]:
    """Names that are those of the files."""
    return (keep_name(name, shape),)


def stack(names: Sequence[str], shape: Shape) -> Arrangement:
    """One tensor of `shape[1:]` for each index of the first dim."""
    origin = (0,) * (len(shape) - 1)
    return tuple(
        WeightPiece(name, TensorRegion((index, *origin), (1, *shape[1:])), shape[1:], origin)
        for index, name in enumerate(names)
    )


def part_of(name: str, shape: Shape, dim: int, index: int, parts: int) -> Arrangement:
    """The parameter is one of several that stand side by side along `dim` of a tensor."""
    origin = (0,) * len(shape)
    whole = tuple(size * parts if d == dim else size for d, size in enumerate(shape))
    start = tuple(index * size if d == dim else 0 for d, size in enumerate(shape))
    return (WeightPiece(name, TensorRegion(origin, shape), whole, start),)
