"""Sets damaged checkpoints aside, so that the run can save these steps again and nobody takes them for good ones.

Invariant: nothing is deleted, and a checkpoint is only set aside after an older one was loaded. This module must not
judge what is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardway.checkpoint.load import PassedOver
from shardway.errors import JobError
from shardway.rundir.atomic import fsync_folder
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint: its name, the name that it has now, and what is wrong with it."""

    name: str
    kept_as: str
    reason: str


def set_aside(directory: RunDir, damaged: Sequence[PassedOver]) -> list[SetAside]:
    """Rename damaged checkpoints; called on rank 0 while it holds the writer's lock.

    Raises JobError where the file system refuses.
    """
    done = []
    for each in damaged:
        path, kept_as = directory.checkpoint_path(each.step), directory.damaged_checkpoint_path(each.step)
        try:
            os.rename(path, kept_as)
        except OSError as error:
            raise JobError(
                f"the checkpoint {path} is damaged ({each.reason}) and cannot be renamed: {error.strerror}.\n"
                "  An older one is whole. To do: move it out of the way, then run the same command again."
            ) from error
        done.append(SetAside(path.name, kept_as.name, each.reason))
    if done:
        fsync_folder(directory.checkpoints)
    return done
