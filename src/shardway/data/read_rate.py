"""How fast this machine reads some files from where they lie, found by reading a little of them.

Invariants:
- The page cache is left out: what is read, at random places of random files, is first dropped from it
  (posix_fadvise(2)).
- It ends after its time, whatever the file system does: threads that still wait for it are left behind.
- Files are opened and read as `shardway.data.stage` does, so many small ones cost what opening them costs.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PIECE_BYTES = 2**23
"""What is read at once, as for a copy."""

MEASURE_S = 0.5
"""How long it is measured at most."""

THREADS = 4
"""At most so many files are read at once: each rank of a node copies one."""

Read = Callable[[Path, int, int], int]
"""(path, offset, size) -> the bytes that were there."""


class _BytesRead:
    """What the threads of a measurement have read."""

    def __init__(self) -> None:
        self.lock, self.bytes, self.last_s = threading.Lock(), 0, 0.0
        """The time at which the last piece was there."""
        self.error: OSError | None = None


def measure_read_rate(
    files: Sequence[tuple[Path, int]],
    *,
    read: Read | None = None,
    clock: Callable[[], float] = time.monotonic,
    seconds: float = MEASURE_S,
    threads: int = THREADS,
) -> float:
    """Bytes a second from `files` [(path, bytes)], read for at most `seconds` or until as many bytes were read as they
    have. Raises OSError if one cannot be read; TimeoutError, one of them, if nothing came in time."""
    held = [(path, size) for path, size in files if size]
    whole, tally, began = sum(size for _, size in held), _BytesRead(), clock()
    if not held:
        raise OSError("they are empty")
    ends = threading.Event()

    def read_some() -> None:
        drawn = random.Random()  # other places at each call: servers have caches too
        while not ends.is_set() and clock() - began < seconds and tally.bytes < whole:
            path, size = drawn.choice(held)
            offset = drawn.randrange(max(1, size - PIECE_BYTES + 1)) & ~4095
            try:
                count = (read or read_uncached)(path, offset, min(PIECE_BYTES, size - offset))
            except OSError as error:
                tally.error = error
                ends.set()
                return
            with tally.lock:
                if not ends.is_set():
                    tally.bytes, tally.last_s = tally.bytes + count, clock()

    running = [threading.Thread(target=read_some, daemon=True) for _ in range(min(threads, len(held)))]
    for thread in running:
        thread.start()
    until = time.monotonic() + 2 * seconds  # a piece may take longer than the rest of the time
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))
    with tally.lock:
        ends.set()
    if tally.error is not None:
        raise tally.error
    if not tally.bytes:
        raise TimeoutError(f"no byte came within {2 * seconds:g} s")
    return tally.bytes / max(tally.last_s - began, 1e-9)


def read_uncached(path: Path, offset: int, size: int) -> int:
    """Read a part of a file that is dropped from the page cache before; returns how many bytes were there. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
        return len(os.pread(descriptor, size, offset))
    finally:
        os.close(descriptor)
