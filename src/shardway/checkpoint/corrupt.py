"""Sets checkpoints aside that are damaged or undone, so that the run can save these steps again and nobody takes them
for good ones.

Invariant: nothing is deleted; a damaged one is only set aside after an older one was loaded, an undone one before. This
module must not judge which is which.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardway.checkpoint.find import PassedOver
from shardway.errors import JobError
from shardway.rundir.atomic import fsync_folder
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class CorruptCheckpoint:
    """A checkpoint: its name, the name that it has now, and what is wrong with it."""

    name: str
    kept_as: str
    reason: str


def set_aside(directory: RunDir, found: Sequence[PassedOver], kind: str = "damaged") -> list[CorruptCheckpoint]:
    """Rename checkpoints that are "damaged" or "undone"; called on rank 0 while it holds the writer's lock.

    Raises JobError where the file system refuses.
    """
    done = []
    for each in found:
        path, kept_as = directory.checkpoint_path(each.step), directory.aside_path(each.step, kind)
        try:
            os.rename(path, kept_as)
        except OSError as error:
            raise JobError(
                f"the checkpoint {path} is {kind} ({each.reason}) and cannot be renamed: {error.strerror}.\n"
                "  The run goes on from an older one. To do: move it out of the way, then run the same command again."
            ) from error
        done.append(CorruptCheckpoint(path.name, kept_as.name, each.reason))
    if done:
        fsync_folder(directory.checkpoints)
    return done
