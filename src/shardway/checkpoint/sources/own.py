"""A checkpoint of another run as a source.

Invariant: what is read of it was compared with its seals. This module must not change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardway.checkpoint.contents import VALUE
from shardway.checkpoint.find import FoundCheckpoint
from shardway.checkpoint.sources.base import Described, WholeTensors
from shardway.checkpoint.tensors import TensorReader
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class OwnSource:
    """One checkpoint in Shardway's form."""

    found: FoundCheckpoint
    reader: TensorReader

    @property
    def kind(self) -> str:
        """What it is."""
        return "a Shardway checkpoint"

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.found.folder

    @property
    def tensors(self) -> Mapping[str, Described]:
        """By name, those of optimizer and random state too."""
        entries = self.reader.entries
        return {name: Described(each.shape, each.dtype) for name, each in entries.items() if each.dtype != VALUE}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """It has none: `resolved` says what its model is."""
        return None

    @property
    def resolved(self) -> dict[str, Any]:
        """The resolved run that it is a part of; empty for a checkpoint that was taken out of its run."""
        return RunDir(self.path.resolve().parent.parent).read_resolved()

    @contextmanager
    def open(self) -> Iterator[WholeTensors]:
        """Reads regions."""
        yield WholeTensors(self)

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor. Raises Damaged."""
        return self.reader.read(name)
