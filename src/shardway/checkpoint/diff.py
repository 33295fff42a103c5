"""Compares two checkpoints: tensors that only one has, shapes, formats, values, and files of other libraries.

Invariant: two checkpoints are equal only if every bit of every tensor is equal. At most two tensors and the few blocks
around them are in memory. This module must not decide what a difference means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardway.checkpoint import file_format
from shardway.checkpoint.catalog import TensorEntry, part_of
from shardway.checkpoint.file_format import Manifest, is_shard
from shardway.checkpoint.reader import TensorReader

BLOCK = 2**20
"""Elements that are compared at a time: their fp64 copies take some tens of megabytes."""
INFINITE = float("inf")


@dataclass(frozen=True)
class Values:
    """How far two tensors of one shape and dtype are apart: their elements, those with equal bits, and of the others
    the largest |a - b| and the largest |a - b| / max(|a|, |b|). Infinite if one is not finite."""

    elements: int
    same_bits: int
    max_absolute: float
    max_relative: float


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs; a side is None if it has none of this name, `values` is set if values differ."""

    name: str
    first: TensorEntry | None
    second: TensorEntry | None
    values: Values | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {key: value for key, value in asdict(self).items() if key != "values"} | {
            "values": asdict(self.values) if self.values else None
        }


@dataclass(frozen=True)
class FileDifference:
    """A file of another library that differs; its size in bytes, None if it is missing."""

    name: str
    first: int | None
    second: int | None


def find_differences(first: TensorReader, second: TensorReader, parts: Sequence[str]) -> list[TensorDifference]:
    """The tensors of these parts that differ, by name. They are read in the order of the first checkpoint's files, so
    each block of these is read once."""
    names = {name for name in {*first.entries, *second.entries} if part_of(name) in parts}
    ordered = sorted(names, key=lambda name: (first.place(name), second.place(name), name))
    return sorted(_compare(first, second, ordered), key=lambda each: each.name)


def _compare(first: TensorReader, second: TensorReader, names: Sequence[str]) -> Iterator[TensorDifference]:
    for name in names:
        one, other = first.entries.get(name), second.entries.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            yield TensorDifference(name, one, other)
            continue
        values = compare_values(first.read(name), second.read(name))
        if values.same_bits < values.elements:
            yield TensorDifference(name, one, other, values)


def find_other_files(first: Manifest, second: Manifest) -> list[FileDifference]:
    """Files of other libraries that differ, by their checksums; our own are compared by tensors."""
    names = sorted(name for name in {*first.files, *second.files} if name != file_format.TABLE and not is_shard(name))
    return [
        FileDifference(name, _size(first.files, name), _size(second.files, name))
        for name in names
        if first.files.get(name) != second.files.get(name)
    ]


def compare_values(first: torch.Tensor, second: torch.Tensor) -> Values:
    """Compare two tensors of one dtype, a block at a time; byte strings may differ in length."""
    if first.numel() != second.numel():  # values that are no tensors
        return Values(max(first.numel(), second.numel()), 0, INFINITE, INFINITE)
    blocks = [_compare_block(*pair) for pair in zip(_blocks(first), _blocks(second), strict=True)]
    return Values(
        elements=first.numel(),
        same_bits=sum(block.same_bits for block in blocks),
        max_absolute=max((block.max_absolute for block in blocks), default=0.0),
        max_relative=max((block.max_relative for block in blocks), default=0.0),
    )


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.contiguous().view(-1).split(BLOCK) if tensor.numel() else ()


def _compare_block(first: torch.Tensor, second: torch.Tensor) -> Values:
    same = (_bits(first) == _bits(second)).all(dim=1)
    if bool(same.all()):
        return Values(len(first), len(first), 0.0, 0.0)
    wide = torch.complex128 if first.is_complex() else torch.float64
    a, b = first[~same].to(wide), second[~same].to(wide)
    apart = (a - b).abs().nan_to_num(nan=INFINITE, posinf=INFINITE)
    size = torch.maximum(a.abs(), b.abs())
    relative = torch.where(apart > 0, apart / size, 0.0).nan_to_num(nan=INFINITE, posinf=INFINITE)
    return Values(len(first), int(same.sum()), float(apart.max()), float(relative.max()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """[elements, bytes of one]."""
    return tensor.view(torch.uint8).view(len(tensor), -1)


def _size(files: Mapping[str, Any], name: str) -> int | None:
    return files[name].bytes if name in files else None
