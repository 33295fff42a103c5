"""One writer a run directory.

Invariant: while a `WriterLock` is held, no other process on a file system with working `flock` can take it; the
kernel frees it when its holder dies, however it dies. This module must not remove the lock file: unlinking a locked
file would let two writers hold two locks of the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from shardway.errors import SiteError, UserError

TRIES, PAUSE_S = 5, 0.05


class WriterLock:
    """The right to write one run directory, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def acquire(self) -> None:
        """Take the lock.

        Raises UserError that names the holder where another process has it, or where the file may not be written;
        SiteError where the file system knows no locks.
        """
        descriptor = _open(self._path)
        if not _try_lock(descriptor, self._path):
            holder = _render_holder(_read_note(descriptor))
            os.close(descriptor)
            raise UserError(_held_message(self._path.parent, holder))
        self._descriptor = descriptor
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # of a full disk: the lock holds without a note
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(note).encode(), 0)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def find_holder(path: Path) -> str | None:
    """Who holds the lock ("process 4711 on host n1 since ..."), or None where nobody does."""
    note = _find_note(path)
    return None if note is None else _render_holder(note)


def find_holder_host(path: Path) -> str:
    """The host of whoever holds the lock; empty where nobody does, or has not noted it yet."""
    return str((_find_note(path) or {}).get("host", ""))


def _find_note(path: Path) -> dict[str, Any] | None:
    """What the holder of a lock noted, empty where that cannot be read; None where nobody holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_note(descriptor)
    except OSError:  # a file system without locks, where no writer starts either
        return None
    finally:
        os.close(descriptor)
    return None


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(_unlockable(path, error.strerror)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a device, which others may hold for a reason of their own
        os.close(descriptor)
        raise UserError(_unlockable(path, "it is no file"))
    return descriptor


def _unlockable(path: Path, reason: str | None) -> str:
    return (
        f"the run directory {path.parent} cannot be locked: {reason} ({path}).\n"
        "  To do: move away what stands there where it is no file, or choose a directory that you may write to with "
        "--dir."
    )


def _try_lock(descriptor: int, path: Path) -> bool:
    """Take the lock, with a little patience: a reader that looks who holds it holds it for an instant itself."""
    for _ in range(TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError as error:  # ENOSYS of a Lustre that is mounted without `flock`, ENOLCK of an NFS
            os.close(descriptor)
            raise SiteError(
                f"the file system of {path.parent} cannot lock files ({error.strerror}), so two runs could write there "
                "at once.\n"
                "  To do: choose a directory on another file system with --dir, or have it mounted with locks."
            ) from None
        else:
            return True
    return False


def _read_note(descriptor: int) -> dict[str, Any]:
    try:
        note = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError, OSError):
        return {}
    return note if isinstance(note, dict) else {}


def _render_holder(note: dict[str, Any]) -> str:
    try:
        return f"process {note['pid']} on host {note['host']} since {note['since']}"
    except KeyError:
        return "a process that has just started"


def _held_message(directory: Path, holder: str) -> str:
    return (
        f"another run is training into {directory}: {holder}.\n"
        "  Two writers would destroy each other's checkpoints, so this one stops before it wrote anything.\n"
        f"  To do: wait for it, stop it gracefully with `touch {directory}/stop`, or give this run another "
        "directory with --dir."
    )
