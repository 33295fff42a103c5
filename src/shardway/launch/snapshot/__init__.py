"""A copy of the code that an attempt runs, so that editing the working tree while it is queued does no harm.

Invariant: first a plan, which is a value that can be shown, then its effect. This package must not submit anything.
"""

from __future__ import annotations

from shardway.launch.snapshot.take import plan_snapshot, take_snapshot
from shardway.launch.snapshot_files import (
    CopiedFile,
    ExcludedPath,
    LinkedPath,
    Revision,
    Snapshot,
    SnapshotLimits,
    SnapshotPlan,
    Submodule,
)

__all__ = [
    "CopiedFile",
    "ExcludedPath",
    "LinkedPath",
    "Revision",
    "Snapshot",
    "SnapshotLimits",
    "SnapshotPlan",
    "Submodule",
    "plan_snapshot",
    "take_snapshot",
]
