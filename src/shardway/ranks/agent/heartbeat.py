"""The heartbeat of a rank: what it does now, in memory that its agent reads; the private folder it is in.

Invariants:
- A reader gets an entry as it was written or none; a rank that has no heartbeat file, or cannot make one, runs as well.
  Times are those of CLOCK_MONOTONIC, which the processes of a host share.
- A folder goes when it is left, and one whose agent was killed with the next agent of the same user here. What Shardway
  did not make stays, and so does a folder that is held.
- Without an agent nothing happens.

A heartbeat is a small file in memory (`/dev/shm` where there is one), written by the rank at every change of activity
and read by the agent at any moment, also while the rank is stopped or one of its threads holds Python's lock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardway.ranks.agent.stacks import answer_with_record, answer_with_stacks
from shardway.ranks.progress import Activity
from shardway.rundir.lock import hold_folder, take_left_folder

VARIABLE = "SHARDWAY_PROGRESS"
"""Names the folder of the pages to the ranks that an agent starts."""

_LAYOUT = struct.Struct("<QqqqdQ")
"""Count of changes, process id, activity, steps done, since when (seconds), count of changes again."""

_TRIES = 8

_ACTIVITIES = frozenset(Activity)
"""What a page that something else has written over does not say."""


@dataclass(frozen=True)
class HeartbeatEntry:
    """What a page says: `changes` counts what was written, `since` is in monotonic seconds."""

    changes: int
    pid: int
    activity: Activity
    step: int
    since: float


class HeartbeatWriter:
    """The page of this process; a `Page` for `ranks.progress`. Raises OSError where the file cannot be made.

    Opened once more in the same process, it goes on.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(_LAYOUT.size)
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._changes = int(_LAYOUT.unpack(self._memory[:])[0])

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Show an activity. A reader that comes in between sees two counts that differ."""
        self._changes += 1
        _LAYOUT.pack_into(self._memory, 0, self._changes, os.getpid(), activity, step, now, self._changes)


def read_page(path: Path) -> HeartbeatEntry | None:
    """What a page says now; None where there is none, nothing was written yet, or it is not whole."""
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _LAYOUT.size:
            return None
        first, pid, activity, step, since, last = _LAYOUT.unpack(data)
        if first == last and activity in _ACTIVITIES:
            return HeartbeatEntry(first, pid, Activity(activity), step, since) if first else None
    return None


def page_path(folder: Path, local_rank: int) -> Path:
    """Where the page of a rank of this node is."""
    return folder / f"rank-{local_rank}"


def open_page(environ: Mapping[str, str], local_rank: int) -> HeartbeatWriter | None:
    """The page of this rank where an agent wants one; None where none does or it cannot be made."""
    folder = environ.get(VARIABLE, "")
    if not folder:
        return None
    try:
        return HeartbeatWriter(page_path(Path(folder), local_rank))
    except OSError:
        return None


# --- Private folders of an agent, in memory where the machine has that: for the pages of its ranks, for gates of
# spares

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


# --- How a rank lets its agent see what it does: from its first moment, before torch is imported


def join_agent(environ: Mapping[str, str]) -> None:
    """Show that this rank starts, and answer when the agent asks where its threads are and what they sent last.

    From the main thread.
    """
    local_rank = environ.get("LOCAL_RANK", "")
    page = open_page(environ, int(local_rank)) if local_rank.isdecimal() else None
    if page is not None:
        answer_with_stacks(Path(environ[VARIABLE]), int(local_rank))
        answer_with_record(Path(environ[VARIABLE]), int(local_rank))
        page.write(Activity.START, 0, time.monotonic())
