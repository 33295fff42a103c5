"""The folder of a run on a node's own disk: `shardway-<run id>/node-<index>/step-NNNNNNNNN`.

Invariant: every path below it is made here, and nothing outside of it is touched. It is its owner's alone. This module
must not judge checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import JobError, UserError
from shardway.places import expand_place
from shardway.rundir.atomic import remove_folder
from shardway.rundir.steps import list_partials, list_steps, partial_name, step_name

MODE = 0o700
_NODE = re.compile(r"node-\d+")


@dataclass(frozen=True)
class LocalRun:
    """What a run has on the disk of this machine: a folder a node, since one machine may stand for several."""

    path: Path

    def node(self, index: int) -> Path:
        """The folder of a node."""
        return self.path / f"node-{index}"

    def nodes(self) -> list[Path]:
        """The folders of all nodes that are seen from here, also of those that an earlier start had."""
        with contextlib.suppress(OSError, JobError):
            self._check_own()
            return sorted(path for path in self.path.iterdir() if _NODE.fullmatch(path.name) and path.is_dir())
        return []

    def steps(self) -> list[int]:
        """Steps of which any node has a complete folder, oldest first."""
        return sorted({step for node in self.nodes() for step in self.steps_of(node)})

    def steps_of(self, node: Path) -> list[int]:
        """Steps that the folder of a node has complete; none where another node of this machine has just removed it."""
        with contextlib.suppress(JobError):
            return list_steps(node)
        return []

    def make(self, index: int) -> Path:
        """The folder of a node, made where it is missing, its owner's alone. Raises OSError, JobError."""
        folder = self.node(index)
        self.path.mkdir(MODE, parents=True, exist_ok=True)
        self._check_own()
        folder.mkdir(MODE, exist_ok=True)
        return folder

    def keep_only(self, steps: Collection[int], *, up_to: int) -> None:
        """Remove every checkpoint up to that step but these."""
        for step in self.steps():
            if step <= up_to and step not in steps:
                self._remove(step)

    def remove_after(self, step: int) -> None:
        """Remove every checkpoint of a later step."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def remove_partials(self, index: int) -> None:
        """Remove what was never complete in the folder of a node."""
        for partial in list_partials(self.node(index)):
            remove_folder(partial)

    def remove(self) -> None:
        """Remove all of it."""
        remove_folder(self.path)

    def _check_own(self) -> None:
        """In a folder for all, such as /tmp, anybody can make one of that name: nothing there is read or written."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise JobError(f"{self.path} belongs to somebody else")

    def _remove(self, step: int) -> None:
        # Renamed first, so that one that is half deleted is never taken for a checkpoint.
        for node in self.nodes():
            doomed = node / partial_name(step, f"gone-{uuid.uuid4().hex}")
            with contextlib.suppress(OSError):  # another node of this machine was faster, or it is tried again later
                (node / step_name(step)).rename(doomed)
            remove_folder(doomed)


def find_local_run(folder: str, run_id: str) -> LocalRun:
    """The folder of the run of that id on this machine, within `folder`, in which variables may stand.

    Raises UserError where they are not set here.
    """
    place = str(expand_place(folder))
    if not os.path.isabs(place):
        raise UserError(
            f'checkpoint.local_dir = "{folder}" is "{place}" on this node ({os.uname().nodename}), which is no whole '
            "path.\n  To do: name a folder that every node has, or look which variables are set there."
        )
    return LocalRun(Path(place) / f"shardway-{run_id}")
