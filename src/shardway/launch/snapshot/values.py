"""What a snapshot consists of, as values.

Invariant: a path of the project is in at most one of files, links and left out, relative to the root, with "/"
between names. This module must not touch a disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
_MOST_TOLD = 1000
"""Entries of a kind that a record lists; of further ones it says how many there are."""


@dataclass(frozen=True)
class SnapshotLimits:
    """How large a snapshot may grow; sizes in bytes.

    A larger file is linked instead; more than `total_bytes` or `files` is an error. `entries`: a folder without git
    that holds more than so many is taken for data. `links`: further ones are left out.
    """

    file_bytes: int = 8 << 20
    total_bytes: int = 256 << 20
    files: int = 20_000
    diff_bytes: int = 1 << 20
    entries: int = 1_000
    links: int = 2_000


@dataclass(frozen=True)
class CopiedFile:
    """A plain file, or a symbolic link that stays within the project (0 bytes)."""

    path: str
    bytes: int


@dataclass(frozen=True)
class LinkedPath:
    """A file or folder that stays where it is; the snapshot has a symbolic link to `target` in its place."""

    path: str
    target: str
    reason: str


@dataclass(frozen=True)
class ExcludedPath:
    """A file or folder that the snapshot has not at all."""

    path: str
    reason: str


@dataclass(frozen=True)
class Submodule:
    """A repository inside of the repository: a submodule, or a clone that lies there."""

    path: str
    commit: str
    dirty: bool


@dataclass(frozen=True)
class Revision:
    """Where the code stands in git.

    `commit` is empty before the first one, `branch` where none is checked out. `dirty`: the commit alone does not
    give this code, for changed or for untracked files. `diff` holds tracked text against the commit, cut where
    `diff_cut`; secrets are not in it.
    """

    commit: str
    branch: str
    dirty: bool
    untracked: int
    diff: str
    diff_cut: bool
    submodules: tuple[Submodule, ...] = ()


@dataclass(frozen=True)
class SnapshotPlan:
    """What a snapshot will consist of.

    `root` is the project: the top of the git repository, or the folder itself. `below` is the folder that was asked
    for, relative to it ("" for the root). `notes` are sentences that people should read.
    """

    root: Path
    below: str
    revision: Revision | None
    files: tuple[CopiedFile, ...]
    links: tuple[LinkedPath, ...]
    left_out: tuple[ExcludedPath, ...]
    notes: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Folders with nothing in them, relative to `root`."""

    @property
    def bytes(self) -> int:
        """Size of all that is copied."""
        return sum(file.bytes for file in self.files)

    def start_folder(self, target: Path) -> Path:
        """Where in a snapshot at `target` the folder lies that was asked for."""
        return target / self.below if self.below else target


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was taken: the plan, and what became of it. `taken` in Unix seconds."""

    plan: SnapshotPlan
    files: int
    bytes: int
    left_out: tuple[ExcludedPath, ...]
    taken: float

    def as_json(self) -> dict[str, Any]:
        """Its record; lists are cut to a thousand entries, and their lengths are told."""
        plan, revision = self.plan, self.plan.revision
        return {
            "format": FORMAT,
            "root": str(plan.root),
            "below": plan.below,
            "taken": self.taken,
            "git": revision is not None,
            "commit": revision.commit if revision else "",
            "branch": revision.branch if revision else "",
            "dirty": revision.dirty if revision else None,
            "untracked": revision.untracked if revision else None,
            "diff_cut": revision.diff_cut if revision else False,
            "submodules": [vars(entry) for entry in revision.submodules] if revision else [],
            "files": self.files,
            "bytes": self.bytes,
            "links_count": len(plan.links),
            "links": [vars(entry) for entry in plan.links[:_MOST_TOLD]],
            "left_out_count": len(self.left_out),
            "left_out": [vars(entry) for entry in self.left_out[:_MOST_TOLD]],
            "notes": list(plan.notes),
        }
