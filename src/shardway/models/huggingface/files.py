"""The tensors in a folder of safetensors files, read by slices.

Invariant: opening a folder reads headers alone, and `read` no more than the region that is asked for. This module must
not know models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from shardway.errors import UserError
from shardway.hfconfig import hf_error, import_extra
from shardway.models.huggingface.pieces import Shape, TensorRegion

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """A folder's tensors: where each stands, its shape, and its number format in the words of safetensors ("BF16")."""

    folder: Path
    files: Mapping[str, str]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]

    @contextmanager
    def open(self) -> Iterator[RegionReader]:
        """A reader; the files that it has used stay open until it is closed."""
        reader = RegionReader(self)
        try:
            yield reader
        finally:
            reader.close()


class RegionReader:
    """Reads regions of tensors; on CPU, in the format that the file has."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._handles: dict[str, Any] = {}

    def read(self, name: str, region: TensorRegion) -> torch.Tensor:
        """A region of a tensor: a view of the file's pages in memory, of which only those of the region are read."""
        part = self._handle(self._files.files[name]).get_slice(name)
        tensor: torch.Tensor = part[region.slices] if region.shape else part[...]
        return tensor

    def close(self) -> None:
        """Let go of all files."""
        self._handles.clear()

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = _open(self._files.folder / file)
        return self._handles[file]


def find_weights(folder: Path) -> WeightFiles | None:
    """The weights of a folder, None where there are none: a model that has a config alone.

    Raises UserError for files that are missing, damaged or of another format.
    """
    names = _list_files(folder)
    if names:
        return _read_headers(folder, names)
    if next(folder.glob("*.bin"), None) is not None:
        remedy = "convert it once with transformers: from_pretrained(...), then save_pretrained(folder)"
        raise hf_error(str(folder), "has weights as .bin files", "weights as safetensors", remedy)
    return None


def read_weight_file(path: Path) -> WeightFiles:
    """The weights of one file. Raises UserError as `find_weights`."""
    return _read_headers(path.parent, [path.name])


def _list_files(folder: Path) -> list[str]:
    """The files that the index names; without one the usual single file, or all there are."""
    if (folder / INDEX).is_file():
        return sorted(set(_read_index(folder / INDEX).values()))
    if (folder / SINGLE).is_file():
        return [SINGLE]
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _read_index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in placed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no index of safetensors files: {error!r}\n  To do: fetch it again.") from error


def _read_headers(folder: Path, names: list[str]) -> WeightFiles:
    files: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, str] = {}
    for file in names:
        handle = _open(folder / file)
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            files[name] = file
            part = handle.get_slice(name)
            shapes[name], dtypes[name] = tuple(part.get_shape()), str(part.get_dtype())
    return WeightFiles(folder, MappingProxyType(files), MappingProxyType(shapes), MappingProxyType(dtypes))


def _open(path: Path) -> Any:
    library = import_extra("safetensors")
    try:
        return library.safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, though the index names it.\n  To do: fetch the model again.") from None
    except (OSError, library.SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {error}\n"
            "  To do: fetch the model again: the file is damaged, or came in part alone."
        ) from error
