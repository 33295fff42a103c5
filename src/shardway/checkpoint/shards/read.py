"""Reads tensors out of a checkpoint's files, and compares every byte that is read with its seal meanwhile.

Invariant: each byte is read once, into the tensor itself where that has room for it as it lies in the file; a block
that differs from its seal is damage, and none of its numbers is copied on from a buffer. After damage the tensors that
were read into are a mixture. This module must not change anything on disk.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardway.checkpoint.checksum import FileChecksum, describe_unreadable
from shardway.checkpoint.shards.ranges import Range, read_ranges
from shardway.checkpoint.shards.table import Chunk, Shape, Special, TensorTable
from shardway.checkpoint.shards.tensor_subclasses import find_dtype, put_together
from shardway.checkpoint.shards.values import LoadPlanner
from shardway.checkpoint.state import Tensors


@dataclass(frozen=True)
class ShardSource:
    """The files of a checkpoint: their folder, seals and table. `whole`: those that are read from first to last, so
    that they are compared whatever is wanted of them."""

    folder: Path
    seals: Mapping[str, FileChecksum]
    table: TensorTable
    whole: Collection[str] = ()


def read_tensors(source: ShardSource, tensors: Tensors) -> list[str]:
    """Read a nested state, each rank for itself; what is damaged (empty: it was read).

    Raises what torch raises where the state does not fit (RuntimeError, KeyError, ValueError).
    """
    planner, boxes = _plan(source.table, tensors), dict[tuple[str, Shape], list[_Wish]]()
    chunks = _chunks(source.table)
    for item in planner.finish_plan(planner.create_local_plan()).items:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(source.table.values[item.storage_index.fqn].encode()))
            continue
        name = item.storage_index.fqn
        dtype = find_dtype(source.table.tensors[name].dtype)
        wish = _Wish(item, planner.resolve_tensor(item).detach(), dtype)
        boxes.setdefault((name, tuple(item.storage_index.offset or ())), []).append(wish)
    wanted: dict[str, list[Range]] = {name: [] for name in source.whole}
    for place, wishes in boxes.items():
        wanted.setdefault(chunks[place].file, []).extend(_ranges(chunks[place], wishes))
    return [damage for name in sorted(wanted) if (damage := _read_file(source, name, wanted[name]))]


def list_wanted(table: TensorTable, tensors: Tensors) -> set[str]:
    """The files that `read_tensors` would read for this state. Raises as it does."""
    items, chunks = _plan(table, tensors).create_local_plan().items, _chunks(table)
    places = ((item.storage_index.fqn, tuple(item.storage_index.offset or ())) for item in items)
    return {chunks[place].file for place in places if place in chunks}


def _plan(table: TensorTable, tensors: Tensors) -> LoadPlanner:
    planner = LoadPlanner()
    planner.set_up_planner(tensors, _describe(table))
    return planner


def _chunks(table: TensorTable) -> dict[tuple[str, Shape], Chunk]:
    """By tensor and where they begin in it."""
    return {(name, chunk.offsets): chunk for name, row in table.tensors.items() for chunk in row.chunks}


def _read_file(source: ShardSource, name: str, wanted: Sequence[Range]) -> str | None:
    seal = source.seals.get(name)
    if seal is None:
        return f"{name} is not in the manifest"
    try:
        return read_ranges(source.folder, name, seal, wanted, whole=name in source.whole)
    except OSError as error:
        return describe_unreadable(source.folder, name, error)


@dataclass(frozen=True)
class _Wish:
    """A part of a chunk, and the tensor that it goes into."""

    item: ReadItem
    target: torch.Tensor
    dtype: torch.dtype

    def takes_directly(self, chunk: Chunk) -> bool:
        """Whether the part lies in the target's memory as it does in the file."""
        plain = type(self.target) in (torch.Tensor, torch.nn.Parameter) and chunk.special is None
        here = plain and self.target.device.type == "cpu" and self.target.is_contiguous()
        return here and self.target.dtype == self.dtype and tuple(self.item.lengths[1:]) == chunk.sizes[1:]


def _ranges(chunk: Chunk, wishes: Sequence[_Wish]) -> Iterator[Range]:
    """What to read of a chunk: rows from the first that is wished for to the last, once."""
    if chunk.special is not None:
        yield from _special_ranges(chunk, chunk.special, wishes)
        return
    dtype = wishes[0].dtype
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    first, end = _rows(wishes) if chunk.sizes else (0, 1)
    at, length = chunk.at + first * row_bytes, (end - first) * row_bytes
    if len(wishes) == 1 and wishes[0].takes_directly(chunk):
        memory = _memory(wishes[0].target)
        yield Range(at, length, lambda: memory)
        return
    buffer = _ReadBuffer(((end - first, *chunk.sizes[1:]) if chunk.sizes else (), dtype))

    def copy_on() -> None:
        rows = buffer.take()
        for wish in wishes:
            offsets = list(wish.item.storage_offsets)
            if offsets:
                offsets[0] -= first
            wish.target.copy_(narrow_tensor_by_index(rows, offsets, wish.item.lengths))

    yield Range(at, length, buffer.open, copy_on)


def _special_ranges(chunk: Chunk, special: Special, wishes: Sequence[_Wish]) -> Iterator[Range]:
    """The parts of a tensor of a special class, which is put together when the last was read."""
    buffers = [_ReadBuffer((part.shape, find_dtype(part.dtype))) for part in special.parts]

    def copy_on() -> None:
        whole = put_together(special, [buffer.take() for buffer in buffers])
        for wish in wishes:
            wish.target.copy_(narrow_tensor_by_index(whole, wish.item.storage_offsets, wish.item.lengths))

    at = chunk.at
    for number, buffer in enumerate(buffers):
        last = number == len(buffers) - 1
        yield Range(at, buffer.bytes, buffer.open, copy_on if last else None)
        at += buffer.bytes


class _ReadBuffer:
    """Memory that is made when it is first needed, and let go of when its tensor is taken."""

    def __init__(self, form: tuple[Sequence[int], torch.dtype]) -> None:
        self._shape, self._dtype = tuple(form[0]), form[1]
        self._tensor: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self._shape) * self._dtype.itemsize

    def open(self) -> memoryview:
        """The memory."""
        return _memory(self._made())

    def take(self) -> torch.Tensor:
        """What was read, once."""
        tensor, self._tensor = self._made(), None
        return tensor

    def _made(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=self._dtype)
        return self._tensor


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _rows(wishes: Sequence[_Wish]) -> tuple[int, int]:
    firsts = [wish.item.storage_offsets[0] for wish in wishes]
    return min(firsts), max(first + wish.item.lengths[0] for first, wish in zip(firsts, wishes, strict=True))


def _describe(found: TensorTable) -> Metadata:
    """The table in torch's words."""
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in found.values}
    for name, row in found.tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in row.chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(find_dtype(row.dtype)), torch.Size(row.shape), boxes)
    return Metadata(entries)
