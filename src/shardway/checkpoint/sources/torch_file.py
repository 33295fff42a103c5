"""A file of torch.save as a source.

Invariant: torch's reader of weights alone opens it (`weights_only`), mapped into memory: a file that asks for anything
but tensors and plain data is refused, and nothing of it is run. This module must not import what a file names.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardway.checkpoint.shards.tensor_subclasses import dtype_name
from shardway.checkpoint.sources.base import Described, WholeTensors, source_error


@dataclass(frozen=True)
class TorchFile:
    """The tensors of a file, by the keys that lead to them: `{"model": {"a": ...}}` has "model.a"."""

    path: Path
    found: Mapping[str, torch.Tensor]

    @property
    def kind(self) -> str:
        """What it is."""
        return "a file of torch.save"

    @property
    def tensors(self) -> Mapping[str, Described]:
        """By name."""
        return {name: Described(tuple(each.shape), dtype_name(each.dtype)) for name, each in self.found.items()}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """It has none."""
        return None

    @contextmanager
    def open(self) -> Iterator[WholeTensors]:
        """Reads regions."""
        yield WholeTensors(self)

    def read_whole(self, name: str) -> torch.Tensor:
        """A view of the file's pages in memory."""
        return self.found[name]


def open_torch_file(path: Path) -> TorchFile:
    """Map a file into memory. Raises UserError where it is damaged or holds more than tensors and plain data."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise source_error(
            path,
            f"holds more than tensors and plain data{what}; reading it could run code, so nothing of it was read",
            "where you trust whoever made it, load it there and save its weights alone: "
            "torch.save(model.state_dict(), FILE), or safetensors",
        ) from None
    except Exception as error:  # a damaged archive fails in many ways
        raise source_error(
            path,
            f"cannot be read as a file of torch.save: {' '.join(str(error).split())[:300]}",
            "fetch or copy it again: it is damaged, or came in part alone",
        ) from None
    return TorchFile(path, dict(_flatten(content, "")))


def _flatten(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors within dicts and lists."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter):
            yield name, value.detach()
        return
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in inner:
        yield from _flatten(each, f"{name}.{key}" if name else str(key))
