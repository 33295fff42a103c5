"""What a checkpoint holds, whole, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

import torch

from shardway.checkpoint.catalog import VALUE
from shardway.checkpoint.reader import TensorReader


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random states, whole, by name."""
    reader = TensorReader(folder)
    return {
        name: reader.read(name)
        for name, entry in reader.entries.items()
        if entry.dtype != VALUE and entry.part != "random"
    }
