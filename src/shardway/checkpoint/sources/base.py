"""What every source of weights is: tensors with names, shapes and formats, read by regions.

Invariant: a source that was opened describes all its tensors; what is wrong with its files is a UserError that says so
in one message. This module must not know formats of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shardway.errors import UserError
from shardway.models.huggingface.pieces import Shape, TensorRegion


@dataclass(frozen=True)
class Described:
    """A tensor of a source: its whole shape, and its number format in torch's words ("float32")."""

    shape: Shape
    dtype: str


class SourceReader(Protocol):
    """Reads tensors of a source."""

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region of a tensor, on the CPU, in the format of the source. Raises UserError, Damaged."""
        ...


class ForeignSource(Protocol):
    """Tensors that somebody else has written."""

    @property
    def kind(self) -> str:
        """What it is, in a few words."""
        ...

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor by name."""
        ...

    @property
    def config(self) -> Mapping[str, Any] | None:
        """What its config.json says, where it has one."""
        ...

    def open(self) -> AbstractContextManager[SourceReader]:
        """A reader; files stay open until it is closed."""
        ...


class WholeTensors:
    """Regions out of tensors that can only be read whole: the last one is kept, since its regions come together."""

    def __init__(self, source: ReadsWhole) -> None:
        self._source = source
        self._name: str | None = None
        self._tensor = torch.empty(0)

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A view of a region."""
        if name != self._name:
            self._tensor = torch.empty(0)  # let go of the last one first
            self._tensor, self._name = self._source.read_whole(name), name
        return self._tensor[region.slices] if region.shape else self._tensor


class ReadsWhole(Protocol):
    """A source that reads a tensor whole."""

    def read_whole(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU."""
        ...


def source_error(path: Path, what: str, remedy: str) -> UserError:
    """Something wrong with a source."""
    return UserError(f"{path} {what}.\n  Nothing was written. To do: {remedy}.")
