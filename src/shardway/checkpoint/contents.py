"""What a checkpoint is by its manifest: step, ranks, counters, files. Quick, and without torch.

Invariant: what is shown was compared with the manifest as far as it was read. This module must not read tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardway.checkpoint.find import Found
from shardway.checkpoint.manifest import Manifest
from shardway.checkpoint.verify import check_files

METADATA = ".metadata"
"""Where torch.distributed.checkpoint says what is in the shards."""


@dataclass(frozen=True)
class Head:
    """A checkpoint and its manifest."""

    found: Found
    manifest: Manifest

    def as_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        manifest = self.manifest
        return {
            "folder": str(self.found.folder),
            "step": manifest.step,
            "world": manifest.world,
            "numbers": dict(manifest.numbers),
            "bytes": manifest.total_bytes,
            "files": {name: seal.bytes for name, seal in sorted(manifest.files.items())},
        }


def read_head(found: Found) -> Head:
    """The manifest of a checkpoint whose files are all there in their size; what says what is in them is compared.

    Raises Damaged.
    """
    return Head(found, check_files(found, METADATA))
