"""How fast a folder's disk takes bytes and gives them back, past the memory that would hold them.

Invariants:
- The file has no name any more once it is open: the system removes it when this process ends, however it ends.
- A rate is of the disk, not of the page cache: reads and writes are direct (O_DIRECT) where the file system has that;
  else the time of a write ends when the file is synced (fsync), and its pages are dropped before it is read.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardway.hardware.mounts import find_mount, read_mounts
from shardway.units import render_bytes

DISK_BYTES = 2**31
"""The size of the file, if there is time to write it."""
_BLOCK = 2**23


@dataclass(frozen=True)
class DiskTimes:
    """A file of `size` bytes in `folder`, written and read once by one process in blocks of 8 MiB. `kind` is the file
    system's, "" where it is not known; `direct`: the page cache had no part in it."""

    folder: str
    kind: str
    size: int
    direct: bool
    write_s: float
    read_s: float

    @property
    def write_bytes_per_s(self) -> float:
        """Bytes written in a second."""
        return self.size / self.write_s

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes read in a second."""
        return self.size / self.read_s


def describe_lack(name: str, size: int = DISK_BYTES) -> str:
    """Why the folder of that name cannot be measured; "" where it can. Twice the size has to be free, so that files of
    others find room beside it."""
    folder = Path(name)
    if not name or not folder.is_dir():
        return f'"{name}" is no folder'
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    free = shutil.disk_usage(folder).free
    if free >= 2 * size:
        return ""
    return f"{folder} has {free / 2**30:.1f} GiB free, less than twice the file of {render_bytes(size)}"


def measure_disk(
    folder: Path, seconds: float, size: int = DISK_BYTES, now: Callable[[], float] = time.perf_counter
) -> DiskTimes:
    """Write a file of `size` bytes (a multiple of 8 MiB), or as much of it as half of the time allows, and read it.
    Raises OSError where that fails."""
    descriptor, direct = _open_unnamed(folder)
    with mmap.mmap(-1, _BLOCK) as block:  # begins at a page, as direct reads and writes need
        block.write(os.urandom(_BLOCK))
        try:
            began, written = now(), 0
            while written < size and (not written or now() - began < seconds / 2):
                block[:8] = written.to_bytes(8, "little")
                written += _move(os.write, descriptor, block)
            os.fsync(descriptor)
            write_s = now() - began
            if not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            began, left = now(), written
            while left > 0:
                left -= _move(lambda file, view: os.readv(file, [view]), descriptor, block)
            read_s = now() - began
        finally:
            os.close(descriptor)
    mount = find_mount(str(folder.resolve()), read_mounts())
    return DiskTimes(str(folder), mount.kind if mount else "", written, direct, max(write_s, 1e-9), max(read_s, 1e-9))


def _move(call: Callable[[int, memoryview], int], descriptor: int, block: mmap.mmap) -> int:
    """Write or read a whole block. Raises OSError where it ends early."""
    with memoryview(block) as view:
        done = call(descriptor, view)
    if done != _BLOCK:
        raise OSError(errno.EIO, f"{done} of {_BLOCK} bytes")
    return done


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """A new file that no name leads to, and whether it is written directly."""
    for flag in (getattr(os, "O_DIRECT", 0), 0):
        path = folder / f".shardway-bench-{os.getpid()}-{time.time_ns()}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag, 0o600)
        except OSError as error:
            if not flag or error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # a file system without direct access may have made it all the same
            continue
        try:
            return descriptor, bool(flag)
        finally:
            path.unlink()
    raise OSError(errno.EINVAL, "no file could be opened")
