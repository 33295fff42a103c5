"""Safetensors as a source: a folder in the layout of the hub, any folder of such files, or one file.

Invariant: headers alone are read until a region is asked for. This module must not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardway.checkpoint.sources.base import Described, SourceReader
from shardway.hfconfig import CONFIG, read_config
from shardway.models.huggingface.files import WeightFiles

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}
)
"""How safetensors names formats -> torch's name; others stay as they are, and are no format of weights."""


@dataclass(frozen=True)
class HubSource:
    """The tensors of safetensors files at `path`."""

    path: Path
    files: WeightFiles

    @property
    def kind(self) -> str:
        """What it is."""
        return "safetensors"

    @property
    def tensors(self) -> Mapping[str, Described]:
        """By name."""
        dtypes = self.files.dtypes
        return {name: Described(shape, _DTYPES.get(dtypes[name], dtypes[name])) for name, shape in self._shapes}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Of its folder. Raises UserError for one that cannot be read."""
        folder = self.files.folder
        return read_config(folder) if (folder / CONFIG).is_file() else None

    def open(self) -> AbstractContextManager[SourceReader]:
        """Reads regions."""
        return self.files.open()

    @property
    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(self.files.shapes.items())
