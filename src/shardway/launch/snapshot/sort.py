"""Each listed path looked at: copied, linked, or left out.

Invariant: no file is copied whose way leads through a symbolic link, so that a snapshot never reaches what it was
taken of. This module must not change anything.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import stat
from pathlib import Path

from shardway.launch.snapshot.listing import Listing
from shardway.launch.snapshot.names import is_cache, is_secret
from shardway.launch.snapshot.values import CopiedFile, ExcludedPath, LinkedPath, SnapshotLimits
from shardway.rundir.directory import RunDir
from shardway.units import render_bytes


class Sorter:
    """Sorts the paths of one listing; what was found stands in `files`, `links`, `left_out` and `notes`, and in `large`
    the files among the links that are there for their size."""

    def __init__(self, root: Path, limits: SnapshotLimits) -> None:
        self.files: list[CopiedFile] = []
        self.links: list[LinkedPath] = []
        self.large: list[CopiedFile] = []
        self.left_out: list[ExcludedPath] = []
        self.notes: list[str] = []
        self._root = str(root)
        self._limits = limits
        self._stops: dict[str, str] = {"": ""}

    def sort(self, listing: Listing) -> None:
        """Look at every path of a listing, once."""
        self.left_out += listing.left_out
        for path in dict.fromkeys(listing.files):
            self._sort_file(path)
        inside = {parent for file in self.files for parent in list_parents(file.path)}
        copied = {file.path for file in self.files}
        for entry in listing.outside:
            self._sort_outside(entry.path, entry.reason, inside, copied)

    def _sort_file(self, path: str) -> None:
        if self._stop(posixpath.dirname(path)):
            return
        name = posixpath.basename(path)
        if is_secret(name):
            self.left_out.append(ExcludedPath(path, "secret by its name"))
            return
        try:
            state = os.lstat(f"{self._root}/{path}")
        except FileNotFoundError:  # deleted, but git still tracks it
            return
        except OSError as error:
            self.left_out.append(ExcludedPath(path, f"cannot be read: {error.strerror}"))
            return
        if stat.S_ISLNK(state.st_mode):
            self._sort_symlink(path)
        elif not stat.S_ISREG(state.st_mode):
            self.left_out.append(ExcludedPath(path, "not a plain file"))
        elif state.st_size > self._limits.file_bytes:
            size = f"{state.st_size / 2**20:.1f} MiB, more than {render_bytes(self._limits.file_bytes)}"
            self._link(path, size)
            self.large.append(CopiedFile(path, state.st_size))
        else:
            self.files.append(CopiedFile(path, state.st_size))

    def _sort_symlink(self, path: str) -> None:
        """One that leads out of the project leads to the same place from the snapshot."""
        target = os.readlink(f"{self._root}/{path}")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if posixpath.isabs(target) or place == ".." or place.startswith("../"):
            absolute = posixpath.normpath(posixpath.join(self._root, posixpath.dirname(path), target))
            self.links.append(LinkedPath(path, absolute, "symbolic link that leads out of the project"))
        else:
            self.files.append(CopiedFile(path, 0))

    def _sort_outside(self, path: str, reason: str, inside: set[str], copied: set[str]) -> None:
        """Link a file or a folder; of a folder with copied files in it, whatever else is in it."""
        name = posixpath.basename(path)
        if path in copied or is_cache(name) or self._stop(posixpath.dirname(path)):
            return
        whole = f"{self._root}/{path}"
        if path not in inside:
            if is_secret(name) and not os.path.isdir(whole):
                self.left_out.append(ExcludedPath(path, "secret by its name"))
            elif os.path.lexists(whole):
                self._link(path, reason)
            return
        with os.scandir(whole) as scan:
            entries = sorted(entry.name for entry in itertools.islice(scan, self._limits.entries + 1))
        if len(entries) > self._limits.entries:
            self.left_out.append(ExcludedPath(path, f"{reason}; more than {self._limits.entries} entries beside code"))
            return
        for entry in entries:
            self._sort_outside(f"{path}/{entry}", reason, inside, copied)

    def _link(self, path: str, reason: str) -> None:
        self.links.append(LinkedPath(path, f"{self._root}/{path}", reason))

    def _stop(self, folder: str) -> str:
        """Why nothing below a folder is copied, empty where it may be; a run directory is linked as one thing."""
        known = self._stops.get(folder)
        if known is not None:
            return known
        reason = self._stop(posixpath.dirname(folder)) or self._look(folder)
        self._stops[folder] = reason
        return reason

    def _look(self, folder: str) -> str:
        path = Path(self._root, folder)
        if path.is_symlink():
            return "behind a symbolic link"
        run = RunDir(path)
        if os.path.isfile(run.resolved_path) or run.attempts():
            self._link(folder, "run directory")
            return "run directory"
        return ""


def list_parents(path: str) -> list[str]:
    """Every folder above a path, relative like it."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]
