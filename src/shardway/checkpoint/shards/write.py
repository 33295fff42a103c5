"""Writes the tensors of all ranks: each rank its file, rank 0 the table.

Invariant: what is sealed is what was in memory, not what a disk gave back; every file is on the disk (fsync) when
`write_tensors` returns. This module must not make a folder a checkpoint.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardway.checkpoint.checksum import STEP, ChecksumWriter, FileChecksum
from shardway.checkpoint.shards import table
from shardway.checkpoint.shards.table import Chunk, TensorRow, TensorTable, shard_name
from shardway.checkpoint.shards.tensor_subclasses import dtype_name, take_apart
from shardway.checkpoint.shards.values import SavePlanner
from shardway.checkpoint.state import Tensors
from shardway.ranks.start import Ranks


def write_tensors(folder: Path, ranks: Ranks, tensors: Tensors) -> dict[str, FileChecksum]:
    """Write a state on all ranks together; the seals of the files that this rank wrote.

    Raises CheckpointException (a BaseException) on every rank where one fails.
    """
    writer = _ShardWriter(folder, ranks.rank)
    # That a process without a group saves alone is meant. The filter stays: to put filters back is for a process with
    # one thread, and this may be another than that of training.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    dcp.save(
        tensors,
        storage_writer=writer,
        planner=SavePlanner(),
        process_group=ranks.group,
        no_dist=not ranks.grouped,
    )
    return writer.seals


@dataclass(frozen=True)
class _Value:
    """What is no tensor, as JSON."""

    text: str


class _ShardWriter(StorageWriter):
    """What torch.distributed.checkpoint writes through, on one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = shard_name(rank)
        self.seals: dict[str, FileChecksum] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan into its file."""
        values = [item for item in plan.items if item.tensor_data is None]
        boxes = [item for item in plan.items if item.tensor_data is not None]
        results = [WriteResult(item.index, 0, _Value(_text(planner.resolve_data(item)))) for item in values]
        if boxes:
            with open(self._folder / self._file, "xb", buffering=0) as file:
                stream = _Stream(file)
                results += [self._write_box(stream, item, planner) for item in boxes]
                os.fsync(file.fileno())
            self.seals[self._file] = stream.sealer.seal()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 alone: write the table."""
        written = [result for of_rank in results for result in of_rank]
        found = _make_table(metadata, written)
        self.seals[table.NAME] = table.write_table(self._folder / table.NAME, found)
        with open(self._folder / table.NAME, "rb") as file:
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Nobody asks: the folder is given."""
        return True

    def _write_box(self, stream: _Stream, item: WriteItem, planner: AnySavePlanner) -> WriteResult:
        tensor, at = cast(torch.Tensor, planner.resolve_data(item)), stream.written
        special, plain = take_apart(tensor.detach())
        for part in plain:
            stream.write(_bytes_of(part))
        box = item.tensor_data.chunk if item.tensor_data is not None else None
        offsets, sizes = (tuple(box.offsets), tuple(box.sizes)) if box is not None else ((), ())
        return WriteResult(item.index, stream.written - at, Chunk(self._file, at, offsets, sizes, special))


class _Stream:
    """A file that is written from first to last, and its seal."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sealer = ChecksumWriter()
        self.written = 0

    def write(self, data: memoryview) -> None:
        """Write all of it, in steps that are hashed while they are in the cache. Raises OSError."""
        while len(data):
            count = self._file.write(data[:STEP])
            self.sealer.update(data[:count])
            data = data[count:]
            self.written += count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The numbers of a plain tensor in C order; its own memory where that is on the host and has no gaps."""
    flat = tensor.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _text(data: Any) -> str:
    return bytes(data.getbuffer()).decode()


def _make_table(metadata: Metadata, written: list[WriteResult]) -> TensorTable:
    chunks: dict[str, list[Chunk]] = {}
    values: dict[str, str] = {}
    for result in written:
        if isinstance(result.storage_data, _Value):
            values[result.index.fqn] = result.storage_data.text
        else:
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if name in chunks}
    rows = {
        name: TensorRow(dtype_name(entry.properties.dtype), tuple(entry.size), tuple(chunks[name]))
        for name, entry in tensors.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return TensorTable(rows, values)
