"""A whole checkpoint of one run as the checkpoint of another.

Invariant: what was copied was compared with its seals where it is now, before it is a checkpoint; files of the source
are read alone, and nothing is written outside of the new folder. This module must not decide whether it fits.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path, PurePosixPath

from shardway.checkpoint.checksum import find_damage
from shardway.checkpoint.find import FoundCheckpoint
from shardway.checkpoint.manifest import Damaged, Manifest, write_manifest
from shardway.checkpoint.verify import manifest_of
from shardway.errors import JobError
from shardway.rundir.atomic import fsync_folder
from shardway.rundir.directory import RunDir
from shardway.rundir.run_id import find_run_id


def copy_checkpoint(found: FoundCheckpoint, directory: RunDir) -> Manifest:
    """Copy a checkpoint into a run that has none of its step. Raises Damaged, JobError where it cannot be written."""
    manifest = replace(manifest_of(found), epoch=0, run=find_run_id(directory.path))
    final, partial = directory.checkpoint_path(manifest.step), directory.partial_checkpoint_path(manifest.step)
    try:
        partial.mkdir()
        for name in manifest.files:
            _copy(found.folder, partial, name, manifest)
        write_manifest(partial, manifest)
        for within in {(partial / name).parent for name in manifest.files} | {partial}:
            fsync_folder(within)
        os.rename(partial, final)
        fsync_folder(final.parent)
    except OSError as error:
        raise JobError(f"the checkpoint {found.folder} cannot be copied: {error.strerror or error}") from error
    return manifest


def _copy(source: Path, target: Path, name: str, manifest: Manifest) -> None:
    """Copy one file, durably, and compare the copy."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise Damaged(source, [f"its manifest names {name}, which is not in it"])
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source / name, target / name)
    except FileNotFoundError:
        raise Damaged(source, [f"{name} is missing"]) from None
    with open(target / name, "rb") as file:
        os.fsync(file.fileno())
    if damage := find_damage(target, name, manifest.files[name]):
        raise Damaged(source, [damage])
