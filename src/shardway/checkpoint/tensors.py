"""The tensors of a checkpoint, without the run that it belongs to.

Invariant: one tensor is in memory at a time beside what the caller keeps, and what is read of it was compared with its
seal. This module must not write.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shardway.checkpoint.contents import Entry, make_entries
from shardway.checkpoint.manifest import Damaged, read_manifest
from shardway.checkpoint.shards.read import Source, read_tensors
from shardway.checkpoint.shards.special import find_dtype
from shardway.checkpoint.shards.table import Table, read_table


class TensorReader:
    """Reads tensors of one checkpoint, whole, on the CPU. Raises Damaged where it is not what was saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        self._table = read_table(folder, self._manifest)
        self.entries: dict[str, Entry] = {entry.name: entry for entry in make_entries(self._table)}

    def read(self, name: str) -> torch.Tensor:
        """A tensor with the values that were saved; of what is no tensor, the bytes of its JSON. Raises Damaged."""
        row = self._table.tensors.get(name)
        if row is None:
            return torch.frombuffer(bytearray(self._table.values[name].encode()), dtype=torch.uint8)
        tensor = torch.empty(row.shape, dtype=find_dtype(row.dtype))
        source = Source(self._folder, self._manifest.files, Table({name: row}, {}))
        if damages := read_tensors(source, {name: tensor}):
            raise Damaged(self._folder, damages)
        return tensor
