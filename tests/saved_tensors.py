"""What a checkpoint holds, whole, whatever layout wrote it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random states, whole, by name."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("random")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it loads in one process is meant
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors
