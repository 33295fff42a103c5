"""Whether something stands at a path, where a file system may not answer.

Invariant: "no" means that the file system said so. One that does not answer (a server that is gone, a mount that was
lost) is an error that says what to do, since what is taken for absent may be made anew, and what is taken for damaged
set aside. This module must not write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from itertools import takewhile
from pathlib import Path

from shardway.errors import JobError
from shardway.refusals import AWAY, find_remedy

ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG))
"""What a file system says where nothing stands at a path, or can."""

UNREADABLE = AWAY | {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EIO}
"""What says nothing of the file either: it may not, or cannot, be looked at from here."""


def is_there(path: Path) -> bool:
    """Whether something stands there. Raises JobError where the file system does not answer."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise unanswered(path, error) from error
    return True


def is_seen(path: Path) -> bool:
    """The same as far as the file system answers now: for what is looked for again."""
    with contextlib.suppress(JobError):
        return is_there(path)
    return False


def list_names(folder: Path) -> list[str]:
    """The names in a folder, in no order; none where there is no folder. Raises JobError as `is_there` does."""
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise unanswered(folder, error) from error


def list_missing(path: Path) -> tuple[Path, ...]:
    """Of a path and the folders above it, those that are not there, innermost first. Raises JobError."""
    return tuple(takewhile(lambda folder: not is_there(folder), (path, *path.parents)))


def answers(folder: Path) -> bool:
    """Whether the file system of a folder answers now: asked for a name that no cache knows."""
    try:
        os.stat(folder / f".shardway-{uuid.uuid4().hex}")
    except OSError as error:
        return error.errno not in AWAY
    return True


def check_answers(path: Path, error: Exception) -> None:
    """Raise JobError where this error, of reading a file, says nothing of the file."""
    if isinstance(error, OSError) and error.errno in AWAY:
        raise unanswered(path, error) from error


def unanswered(path: Path, error: OSError) -> JobError:
    """That error of a file system which was only asked."""
    return JobError(
        f"{path} cannot be looked at: {error.strerror}.\n"
        f"  Nothing that was saved has changed. To do: {find_remedy(error)}; then run the same command again. A run "
        "goes on from its last checkpoint."
    )
