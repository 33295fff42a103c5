"""Names: the id of a run, the folders of its checkpoints, its folder on a node's own disk.

Invariants:
- It is written once, by whoever holds the run directory, and stays with the directory wherever that is copied or moved.
  A file that is not what was written (a checksum stands behind the id) is as good as none, since a wrong id would make
  all checkpoints strangers.
- The name of a complete one is never that of an unfinished one.
- Every path below it is made here, and nothing outside of it is touched. It is its owner's alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import JobError, UserError
from shardway.places import expand_place
from shardway.refusals import find_remedy
from shardway.rundir.file_io import list_names, remove_folder, write_whole

# --- The id of a run: a random name that its run directory and all its checkpoints have in common

NAME = "run-id"
_ID = re.compile(r"[0-9a-f]{32}")


def find_run_id(run: Path) -> str:
    """The id of the run in a directory; empty where it has none yet."""
    try:
        text = (run / NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    name = text.partition(" ")[0]
    return name if _ID.fullmatch(name) and text == _seal(name) else ""


def ensure_run_id(run: Path, known: str = "") -> str:
    """The id of a run, given to it where it has none; `known` is what its checkpoints say, where they do.

    Called while the run directory is held. Raises JobError where the file system refuses.
    """
    found = find_run_id(run)
    if found:
        return found
    chosen = known if _ID.fullmatch(known) else uuid.uuid4().hex
    try:
        write_whole(run / NAME, f"{_seal(chosen)}\n")
    except OSError as error:
        raise JobError(
            f"the id of the run cannot be written into {run}: {error.strerror}.\n"
            f"  Nothing was changed. To do: {find_remedy(error)}; then run the same command again."
        ) from error
    return chosen


def _seal(name: str) -> str:
    """The id and a checksum of it."""
    return f"{name} {zlib.crc32(name.encode()):08x}"


# --- The names of checkpoints' folders: the same on the file system of the run and on a node's own disk

_STEP = re.compile(r"step-(\d{9})")
_PARTIAL = re.compile(r"\.step-.*\.partial")
_SET_ASIDE = re.compile(r"(?:damaged|undone)-step-(\d{9})(\.\d+)?")


def step_name(step: int) -> str:
    """The folder of a complete checkpoint."""
    return f"step-{step:09d}"


def partial_name(step: int, mark: str = "") -> str:
    """The folder of one that is not complete; `mark` says whose it is."""
    return f".{step_name(step)}{mark and f'.{mark}'}.partial"


def step_of_checkpoint(folder: Path) -> int | None:
    """The step that the name of a checkpoint's folder says, also of one that was set aside; None for another name."""
    match = _STEP.fullmatch(folder.name) or _SET_ASIDE.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first; none where there is no such folder.

    Raises JobError where the file system does not answer.
    """
    return find_steps(list_names(folder))


def find_steps(names: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among the names in a folder, oldest first."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def list_partials(folder: Path) -> list[Path]:
    """What stands in a folder and never became complete."""
    return sorted(folder / name for name in list_names(folder) if _PARTIAL.fullmatch(name))


# --- The folder of a run on a node's own disk: `shardway-<run id>/node-<index>/step-NNNNNNNNN`

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
