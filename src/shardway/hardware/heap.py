"""The heap of this process: what a step frees stays for the next one.

Invariant: only how long free memory stays with the process changes, never what a program finds in it; what a person has
set stays.

By itself glibc gives back what lies free at the end of its heap, often several times a step, and every page that is
taken again costs a fault (mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD). Whether it does depends on what happens to
lie at the end.
"""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 2**30
"""What may lie free at the end of the heap."""

LARGEST_BLOCK = 32 * 2**20
"""Blocks above are mapped by themselves: the largest number that glibc takes on a machine of 64 bits. It gets there by
itself, but not once another number is set."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> None:
    """Let the C library keep what is freed. Nothing changes where a person has set it, or where it is not glibc."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "glibc.malloc" in tunables or any(name in os.environ for name in _VARIABLES):
        return
    mallopt(_M_MMAP_THRESHOLD, LARGEST_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
