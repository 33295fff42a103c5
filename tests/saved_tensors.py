"""What a checkpoint holds, whole, whatever layout wrote it; and a save that is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardway.checkpoint.catalog import VALUE
from shardway.checkpoint.reader import TensorReader
from shardway.checkpoint.state import CheckpointState
from shardway.checkpoint.writer import SavedCheckpoint, collect_content, is_saved, shared_place, write_checkpoint
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random states, whole, by name."""
    reader = TensorReader(folder)
    return {
        name: reader.read(name)
        for name, entry in reader.entries.items()
        if entry.dtype != VALUE and entry.part != "random"
    }


def save_checkpoint(
    directory: RunDir, ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]
) -> SavedCheckpoint | None:
    """Save in the run directory, on all ranks together; None if this step is saved already."""
    place = shared_place(directory, ranks)
    if is_saved(place, ranks, step):
        return None
    return write_checkpoint(place, ranks, collect_content(ranks, state, step, numbers))
