"""What a checkpoint holds, tensor by tensor, without the run that it belongs to.

Invariant: one tensor is in memory at a time beside what the caller keeps. This module must not compare a checkpoint
with its manifest (that is `verify`), and is only for checkpoints that were.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardway.errors import JobError

SHARD = ".distcp"
"""How names of shards end."""

PARTS = ("model", "optimizer", "random")
"""What the names of tensors begin with."""

OBJECT = "object"
"""Stands for the dtype of what is no tensor."""


@dataclass(frozen=True)
class Entry:
    """One tensor as it is saved, whole: its name in the model that nothing wraps, its shape, its size in bytes.

    What is no tensor has the dtype "object", no shape, and the size of its pickle.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def part(self) -> str:
        """What of the run it belongs to: one of `PARTS`."""
        return self.name.partition(".")[0]


_UNREADABLE = (
    pickle.UnpicklingError,
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    AttributeError,
    ImportError,
)
"""What torch and its pickles raise for files that they cannot read."""


class TensorReader:
    """Reads tensors of one checkpoint, whole, on the CPU. Raises JobError where torch cannot read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._told():
            self._metadata = dcp.FileSystemReader(folder).read_metadata()
            self.entries = {name: self._entry(name) for name in sorted(self._metadata.state_dict_metadata)}

    def read(self, name: str) -> torch.Tensor:
        """A tensor with the values that were saved; of what is no tensor, the bytes of its pickle."""
        with self._told():
            saved = self._metadata.state_dict_metadata[name]
            if not isinstance(saved, TensorStorageMetadata):
                return self._read_bytes(name)
            tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
            reader = _MetadataKnown(self._folder, self._metadata)
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    def _entry(self, name: str) -> Entry:
        saved = self._metadata.state_dict_metadata[name]
        if not isinstance(saved, TensorStorageMetadata):
            return Entry(name, (), OBJECT, int(self._place(name).length))
        dtype = saved.properties.dtype
        size = math.prod(saved.size) * dtype.itemsize
        return Entry(name, tuple(saved.size), str(dtype).removeprefix("torch."), size)

    def _place(self, name: str) -> Any:
        return self._metadata.storage_data[MetadataIndex(name)]

    def _read_bytes(self, name: str) -> torch.Tensor:
        place = self._place(name)
        with open(self._folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return torch.frombuffer(bytearray(file.read(place.length)), dtype=torch.uint8)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                # That a process without a group reads alone is meant.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
                yield
        except CheckpointException as error:  # a BaseException
            raise self._unreadable(next(iter(error.failures.values()))[0]) from None
        except _UNREADABLE as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: BaseException) -> JobError:
        reason = (str(error).splitlines() or [""])[0].partition(". ")[
            0
        ]  # advice of torch's follows, for its own callers
        return JobError(
            f"torch cannot read the checkpoint {self._folder}: {type(error).__name__}: {reason}\n"
            "  To do: `shardway checkpoint verify` says whether its files are what was saved; if so, read it with the "
            "version of torch that saved it (the report of its run names it)."
        )


class _MetadataKnown(dcp.FileSystemReader):
    """A reader that does not read the metadata of the whole checkpoint again for each tensor."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self._known
