"""Compares a checkpoint with its manifest, byte by byte.

Invariant: a checkpoint passes only where every file that was saved is there with the bytes that were saved. This module
must not import torch, so that it runs on a login node, nor change anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.checksum import find_damage, find_short
from shardway.checkpoint.find import FoundCheckpoint, find_in_run
from shardway.checkpoint.manifest import Damaged, Manifest, read_manifest
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class Verified:
    """What one checkpoint was found to be; `reasons` is empty for one that is whole, `manifest` None for a lost one.

    `step` is None where neither name nor manifest says it.
    """

    step: int | None
    name: str
    manifest: Manifest | None
    reasons: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether a run can go on from it."""
        return not self.reasons

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        manifest = self.manifest
        return {
            "step": self.step,
            "name": self.name,
            "whole": self.is_whole,
            "reasons": list(self.reasons),
            "world": manifest.world if manifest else None,
            "files": len(manifest.files) if manifest else None,
            "bytes": manifest.total_bytes if manifest else None,
        }


def verify_all(checkpoints: Iterable[FoundCheckpoint]) -> Iterator[Verified]:
    """What each of these is. Raises UserError for a newer format."""
    for found in checkpoints:
        step, manifest = found.step, None
        try:
            manifest = manifest_of(found)
            step = manifest.step
            verify_found(found)
        except Damaged as damage:
            yield Verified(step, found.folder.name, manifest, damage.reasons)
        else:
            yield Verified(step, found.folder.name, manifest)


def verify_found(found: FoundCheckpoint, rank: int = 0, world: int = 1) -> Manifest:
    """Compare this rank's share of the files with the manifest. Raises Damaged that names what differs."""
    manifest = manifest_of(found)
    shares = list(manifest.files.items())[rank::world]
    damages = [damage for name, seal in shares if (damage := find_damage(found.folder, name, seal))]
    if damages:
        raise Damaged(found.folder, damages)
    return manifest


def check_files(found: FoundCheckpoint, *read: str) -> Manifest:
    """Whether all files are there in their size, and those in `read` with the bytes that were saved: quick, and enough
    to look into. Raises Damaged."""
    manifest = manifest_of(found)
    checks = {name: find_damage if name in read else find_short for name in manifest.files}
    damages = [what for name, check in checks.items() if (what := check(found.folder, name, manifest.files[name]))]
    if damages:
        raise Damaged(found.folder, damages)
    return manifest


def verify_checkpoint(directory: RunDir, step: int, rank: int = 0, world: int = 1) -> Manifest:
    """Compare this rank's share of a run's checkpoint with its manifest. Raises Damaged that names what differs."""
    return verify_found(find_in_run(directory, step), rank, world)


def manifest_of_step(directory: RunDir, step: int) -> Manifest:
    """The manifest of a run's checkpoint; raises as `manifest_of`."""
    return manifest_of(find_in_run(directory, step))


def manifest_of(found: FoundCheckpoint) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged where it cannot be read or is another's, UserError for a newer
    format."""
    manifest = read_manifest(found.folder)
    if found.step is not None and manifest.step != found.step:
        raise Damaged(found.folder, [f"its manifest is that of step {manifest.step}"])
    if found.run and manifest.run and manifest.run != found.run:
        remedy = "`shardway checkpoint import` makes a new run of it"
        raise Damaged(found.folder, [f"it is of another run ({manifest.run}, not {found.run}): {remedy}"])
    return manifest
