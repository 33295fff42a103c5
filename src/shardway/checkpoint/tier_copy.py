"""Copies a checkpoint from the disks of the nodes to the file system of the run.

Invariant: each rank copies the files that it wrote, and what is copied is what was in memory when they were written: a
file that is another by now makes no checkpoint. This module must not change the source.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardway.checkpoint.checksum import STEP, ChecksumWriter, FileChecksum
from shardway.checkpoint.manifest import Manifest
from shardway.checkpoint.place import CheckpointFolder
from shardway.checkpoint.save import SavedCheckpoint, SaveRequest, make_checkpoint, with_file_errors
from shardway.errors import JobError
from shardway.ranks.start import Ranks


def carry_checkpoint(
    source: CheckpointFolder, target: CheckpointFolder, ranks: Ranks, saved: SavedCheckpoint
) -> SavedCheckpoint:
    """Copy what `saved` tells of, on all ranks together, in any thread of theirs.

    Raises JobError on every rank alike.
    """
    here, manifest = source.path(saved.manifest.step), saved.manifest

    def write(folder: Path) -> tuple[Manifest, Sequence[str]]:
        ranks.together(lambda: _carry_all(here, folder, saved))
        return manifest, saved.own

    return make_checkpoint(target, ranks, SaveRequest(manifest.step, manifest.total_bytes, write))


def _carry_all(source: Path, target: Path, saved: SavedCheckpoint) -> None:
    for name in saved.own:
        _carry(source / name, target / name, saved.manifest.files[name])


def _carry(source: Path, target: Path, seal: FileChecksum) -> None:
    """Copy one file, durably, and compare what was read with its seal on the way."""
    sealer, step = ChecksumWriter(), memoryview(bytearray(STEP))
    with with_file_errors(), open(source, "rb", buffering=0) as old, open(target, "xb") as new:
        while count := old.readinto(step):
            sealer.update(step[:count])
            new.write(step[:count])
        new.flush()
        os.fsync(new.fileno())
    if sealer.seal() != seal:
        raise JobError(f"{source} is not what was written there, so it was not copied")
