"""Names in and of a run: its id, the folders of its checkpoints, its folder on a node's own disk.

Invariants:
- The run id: written once, by the holder of the run directory; it stays with the directory wherever that is copied or
  moved. A file whose checksum does not match counts as absent, since a wrong id would reject all checkpoints.
- Checkpoint folders: the name of a complete one is never that of an unfinished one.
- `LocalRun`: makes every path below the run's folder on a node's disk and touches nothing outside it. The folder is
  its owner's alone.
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

# --- the id of a run

NAME = "run-id"
_ID = re.compile(r"[0-9a-f]{32}")


def find_run_id(run: Path) -> str:
    """The id of the run in a directory; empty where it has none yet."""
    try:
        text = (run / NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    name = text.partition(" ")[0]
    return name if _ID.fullmatch(name) and text == _with_checksum(name) else ""


def ensure_run_id(run: Path, known: str = "") -> str:
    """The id of the run, created if there is none; `known` is the id in its checkpoints, if any. Called while the run
    directory is held. Raises JobError where the file system refuses."""
    if found := find_run_id(run):
        return found
    chosen = known if _ID.fullmatch(known) else uuid.uuid4().hex
    try:
        write_whole(run / NAME, f"{_with_checksum(chosen)}\n")
    except OSError as error:
        raise JobError(
            f"the id of the run cannot be written into {run}: {error.strerror}.\n"
            f"  Nothing was changed. To do: {find_remedy(error)}; then run the same command again."
        ) from error
    return chosen


def _with_checksum(name: str) -> str:
    return f"{name} {zlib.crc32(name.encode()):08x}"


# --- names of checkpoint folders

_STEP = re.compile(r"step-(\d{9})")
_PARTIAL = re.compile(r"\.step-.*\.partial")
_SET_ASIDE = re.compile(r"(?:damaged|undone)-step-(\d{9})(\.\d+)?")


def step_name(step: int) -> str:
    """The folder of a complete checkpoint."""
    return f"step-{step:09d}"


def partial_name(step: int, mark: str = "") -> str:
    """The folder of an incomplete checkpoint; `mark` identifies its writer."""
    return f".{step_name(step)}{mark and f'.{mark}'}.partial"


def step_of_checkpoint(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder, also of one that was set aside; None for another name."""
    match = _STEP.fullmatch(folder.name) or _SET_ASIDE.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first; none where there is no such folder. Raises JobError
    where the file system does not answer."""
    return find_steps(list_names(folder))


def find_steps(names: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among the names in a folder, oldest first."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


def list_partials(folder: Path) -> list[Path]:
    """Incomplete checkpoints in a folder."""
    return sorted(folder / name for name in list_names(folder) if _PARTIAL.fullmatch(name))


# --- a run's folder on a node's disk

MODE = 0o700
_NODE = re.compile(r"node-\d+")


@dataclass(frozen=True)
class LocalRun:
    """A run's files on this machine's disk, `shardway-<run id>/node-<index>/step-NNNNNNNNN`: one folder a node, since
    one machine may act as several."""

    path: Path

    def node(self, index: int) -> Path:
        return self.path / f"node-{index}"

    def nodes(self) -> list[Path]:
        """The folders of all nodes visible from here, also those of an earlier start."""
        with contextlib.suppress(OSError, JobError):
            self._check_own()
            return sorted(path for path in self.path.iterdir() if _NODE.fullmatch(path.name) and path.is_dir())
        return []

    def steps(self) -> list[int]:
        """Steps of which any node has a complete folder, oldest first."""
        return sorted({step for node in self.nodes() for step in self.steps_of(node)})

    def steps_of(self, node: Path) -> list[int]:
        """Complete steps in a node's folder; none where another node of this machine has just removed it."""
        with contextlib.suppress(JobError):
            return list_steps(node)
        return []

    def make(self, index: int) -> Path:
        """The folder of a node, for its owner alone; made if missing. Raises OSError, JobError."""
        self.path.mkdir(MODE, parents=True, exist_ok=True)
        self._check_own()
        self.node(index).mkdir(MODE, exist_ok=True)
        return self.node(index)

    def keep_only(self, steps: Collection[int], *, up_to: int) -> None:
        """Remove every checkpoint up to that step except these."""
        self._remove(step for step in self.steps() if step <= up_to and step not in steps)

    def remove_after(self, step: int) -> None:
        self._remove(later for later in self.steps() if later > step)

    def remove_partials(self, index: int) -> None:
        """Remove incomplete checkpoints in the folder of a node."""
        for partial in list_partials(self.node(index)):
            remove_folder(partial)

    def remove(self) -> None:
        remove_folder(self.path)

    def _check_own(self) -> None:
        """In a shared folder such as /tmp, another user can make this name: nothing is read or written there then."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise JobError(f"{self.path} belongs to another user")

    def _remove(self, steps: Iterable[int]) -> None:
        # Renamed first, so that a half-deleted one is never taken for a checkpoint.
        for step in steps:
            for node in self.nodes():
                doomed = node / partial_name(step, f"gone-{uuid.uuid4().hex}")
                with contextlib.suppress(OSError):  # another node of this machine was faster, or a later call retries
                    (node / step_name(step)).rename(doomed)
                remove_folder(doomed)


def find_local_run(folder: str, run_id: str) -> LocalRun:
    """This machine's folder of the run with that id, within `folder`, which may contain variables. Raises UserError
    where they are not set here."""
    place = str(expand_place(folder))
    if not os.path.isabs(place):
        raise UserError(
            f'checkpoint.local_dir = "{folder}" is "{place}" on this node ({os.uname().nodename}), which is no whole '
            "path.\n  To do: name a folder that every node has, or look which variables are set there."
        )
    return LocalRun(Path(place) / f"shardway-{run_id}")
