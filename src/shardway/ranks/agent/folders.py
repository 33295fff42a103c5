"""Private folders of an agent, in memory where the machine has that: for the pages of its ranks, for gates of spares.

Invariant: a folder goes when it is left, and one whose agent was killed with the next agent of the same user here. What
Shardway did not make stays, and a folder that somebody holds.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardway.rundir.holding import hold_folder, take_left_folder

_NEW_S = 60.0
"""A folder that is younger may belong to an agent that has not locked it yet."""


@dataclass(frozen=True)
class Kind:
    """Folders by how their names begin, and the files in them by how theirs do."""

    prefix: str
    files: tuple[str, ...]


PAGES = Kind("shardway-pages-", ("rank-", "stacks-", "asked-", "record-"))
GATES = Kind("shardway-spares-", ("gate-",))


def find_memory() -> Path:
    """Where files are in memory, else where temporary ones are."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def private_folder(kind: Kind) -> Iterator[Path]:
    """A new folder of this user alone, held while entered. Raises OSError where none can be made."""
    where = find_memory()
    sweep_folders(kind, where)
    folders = tempfile.TemporaryDirectory(prefix=kind.prefix, dir=where, ignore_cleanup_errors=True)
    with folders as folder, hold_folder(Path(folder)):
        yield Path(folder)


def sweep_folders(kind: Kind, where: Path) -> None:
    """Remove the folders of this user that are older than a minute and that no agent holds."""
    for folder in where.glob(f"{kind.prefix}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW_S:
                _remove_if_left(kind, folder)


def _remove_if_left(kind: Kind, folder: Path) -> None:
    with take_left_folder(folder) as descriptor:
        for name in os.listdir(descriptor):
            if name.startswith(kind.files):
                os.unlink(name, dir_fd=descriptor)
        folder.rmdir()
