"""A folder that a process holds for as long as it lives, so that others know what was left by one that was killed.

Invariant: the kernel frees a folder with its holder, in whichever namespace that is; where the file system knows no
locks, nobody is taken for gone. This module must not remove anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder while entered, where the file system knows locks. Raises OSError where it is no folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def take_left_folder(folder: Path) -> Iterator[int]:
    """Hold a folder that nobody holds, as an open descriptor. Raises OSError where somebody does, or none is there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)
