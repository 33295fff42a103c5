"""Compares a checkpoint with its manifest, byte by byte.

Invariant: a checkpoint passes only where every file that was saved is there with the bytes that were saved. This module
must not import torch, so that it runs on a login node, nor change anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.manifest import Damaged, Manifest, find_damage, read_manifest
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class Verified:
    """What one checkpoint was found to be; `reasons` is empty for one that is whole, `manifest` None for a lost one."""

    step: int
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


def verify_run(directory: RunDir) -> Iterator[Verified]:
    """Each checkpoint of a run, the newest first. Raises UserError for a newer format."""
    for step in reversed(directory.checkpoint_steps()):
        name, manifest = directory.checkpoint_path(step).name, None
        try:
            manifest = manifest_of_step(directory, step)
            verify_checkpoint(directory, step)
        except Damaged as damage:
            yield Verified(step, name, manifest, damage.reasons)
        else:
            yield Verified(step, name, manifest)


def verify_checkpoint(directory: RunDir, step: int, rank: int = 0, world: int = 1) -> Manifest:
    """Compare this rank's share of the files with the manifest. Raises Damaged that names what differs."""
    folder, manifest = directory.checkpoint_path(step), manifest_of_step(directory, step)
    shares = list(manifest.files.items())[rank::world]
    damages = [damage for name, seal in shares if (damage := find_damage(folder, name, seal))]
    if damages:
        raise Damaged(folder, damages)
    return manifest


def manifest_of_step(directory: RunDir, step: int) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged where it cannot be read or is another's, UserError for a newer
    format."""
    folder = directory.checkpoint_path(step)
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise Damaged(folder, [f"its manifest is that of step {manifest.step}"])
    return manifest
