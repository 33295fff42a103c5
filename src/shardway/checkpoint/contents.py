"""What a checkpoint is: step, ranks, counters and files by its manifest, tensors by its table; without torch.

Invariant: what is shown was compared with the manifest as far as it was read. This module must not read tensors.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.find import FoundCheckpoint, find_in_run
from shardway.checkpoint.manifest import Damaged, Manifest
from shardway.checkpoint.shards.table import NAME, TensorTable, read_table
from shardway.checkpoint.verify import check_files
from shardway.rundir.directory import RunDir

PARTS = ("model", "optimizer", "random", "kept", "script", "stream", "order")
"""What of a run a tensor may belong to; a script of one's own may keep things, and has settings and schedulers."""


def part_of(name: str) -> str:
    """The part of the run that a name in a checkpoint belongs to: one of `PARTS`.

    Further models and optimizers have a name after a dash; `structure` says how a part is built that is no plain tree.
    """
    first, _, rest = name.partition(".")
    return part_of(rest) if first == "structure" else first.partition("-")[0]


VALUE = "value"
"""Stands for the dtype of what is no tensor."""


_EMBEDDING, _HEAD = "model.model.embed_tokens.weight", "model.lm_head.weight"


@dataclass(frozen=True)
class CheckpointHead:
    """A checkpoint and its manifest."""

    found: FoundCheckpoint
    manifest: Manifest

    def as_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        manifest = self.manifest
        return {
            "folder": str(self.found.folder),
            "run": manifest.run,
            "step": manifest.step,
            "world": manifest.world,
            "numbers": dict(manifest.numbers),
            "bytes": manifest.total_bytes,
            "files": {name: seal.bytes for name, seal in sorted(manifest.files.items())},
        }


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as it is saved, whole: its name in the model that nothing wraps, its shape, its size in bytes.

    What is no tensor has the dtype "value", no shape, and the size of its JSON.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def part(self) -> str:
        """What of the run it belongs to: one of `PARTS`."""
        return part_of(self.name)


def read_head(found: FoundCheckpoint) -> CheckpointHead:
    """The manifest of a checkpoint whose files are all there in their size; the table in it is compared.

    Raises Damaged.
    """
    return CheckpointHead(found, check_files(found, NAME))


def list_entries(head: CheckpointHead) -> list[TensorEntry]:
    """What a checkpoint holds, by name. Raises Damaged."""
    return make_entries(read_table(head.found.folder, head.manifest))


def list_newest(run: RunDir) -> list[TensorEntry]:
    """What the newest checkpoint of a run holds that can be looked into; nothing where there is none."""
    for step in reversed(run.checkpoint_steps()):
        with contextlib.suppress(Damaged):  # a load passes it over, and tells
            return list_entries(read_head(find_in_run(run, step)))
    return []


def find_tie(run: RunDir) -> bool | None:
    """Whether the checkpoints of a model of the Hugging Face library hold one matrix for embedding and output layer;
    None where no checkpoint tells."""
    names = {entry.name for entry in list_newest(run)}
    return _HEAD not in names if _EMBEDDING in names else None


def make_entries(table: TensorTable) -> list[TensorEntry]:
    """What a table tells of, by name."""
    tensors = [
        TensorEntry(name, row.shape, row.dtype, math.prod(row.shape) * _item_bytes(row.dtype))
        for name, row in table.tensors.items()
    ]
    values = [TensorEntry(name, (), VALUE, len(text)) for name, text in table.values.items()]
    return sorted((*tensors, *values), key=lambda entry: entry.name)


def _item_bytes(dtype: str) -> int:
    """Bytes of one number: names of formats end with their bits, but for what follows them in those of 8."""
    if dtype == "bool":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 0
