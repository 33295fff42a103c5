"""The tensors of a checkpoint, without the run that it belongs to.

Invariant: one tensor is in memory at a time beside what the caller keeps and a few blocks, and what is read of it was
compared with its seal. Asked for in the order of `place`, tensors cost one reading of each block, however small they
are. This module must not write.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from shardway.checkpoint.contents import TensorEntry, make_entries
from shardway.checkpoint.manifest import Damaged, read_manifest
from shardway.checkpoint.shards.blocks import BlockReader
from shardway.checkpoint.shards.table import Chunk, Shape, Special, TensorRow, read_table
from shardway.checkpoint.shards.tensor_subclasses import find_dtype, put_together


class TensorReader:
    """Reads tensors of one checkpoint, whole, on the CPU. Raises Damaged where it is not what was saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = read_manifest(folder)
        self._blocks = BlockReader(folder, manifest.files)
        self._table = read_table(folder, manifest)
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in make_entries(self._table)}

    def place(self, name: str) -> tuple[str, int]:
        """Where a tensor begins: its first file and byte there; before all for what is no tensor, or is not there."""
        row = self._table.tensors.get(name)
        return min(((chunk.file, chunk.at) for chunk in row.chunks), default=("", 0)) if row is not None else ("", 0)

    def read(self, name: str) -> torch.Tensor:
        """A tensor with the values that were saved; of what is no tensor, the bytes of its JSON. Raises Damaged."""
        row = self._table.tensors.get(name)
        if row is None:
            return torch.frombuffer(bytearray(self._table.values[name].encode()), dtype=torch.uint8)
        if not _is_covered(row):
            raise Damaged(self._folder, [f"its parts of {name} are not the whole of it"])
        tensor = torch.empty(row.shape, dtype=find_dtype(row.dtype))
        for chunk in row.chunks:
            box = tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
            if chunk.special is not None:
                box.copy_(self._read_special(chunk, chunk.special))
            elif box.is_contiguous():
                self._fill(chunk.file, chunk.at, box)
            else:
                box.copy_(self._read_plain(chunk.file, chunk.at, chunk.sizes, tensor.dtype))
        return tensor

    def _read_special(self, chunk: Chunk, special: Special) -> torch.Tensor:
        parts, at = [], chunk.at
        for part in special.parts:
            parts.append(self._read_plain(chunk.file, at, part.shape, find_dtype(part.dtype)))
            at += parts[-1].nbytes
        return put_together(special, parts)

    def _read_plain(self, file: str, at: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self._fill(file, at, tensor)
        return tensor

    def _fill(self, file: str, at: int, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._blocks.read(file, at, tensor.view(-1).view(torch.uint8).numpy().data)


def _is_covered(row: TensorRow) -> bool:
    """Whether the boxes lie within the tensor and have as many elements as it."""
    inside = all(
        len(chunk.sizes) == len(chunk.offsets) == len(row.shape)
        and all(0 <= at <= at + n <= size for at, n, size in zip(chunk.offsets, chunk.sizes, row.shape, strict=True))
        for chunk in row.chunks
    )
    return inside and sum(math.prod(chunk.sizes) for chunk in row.chunks) == math.prod(row.shape)
