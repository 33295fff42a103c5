"""Faults of an accelerator: a kernel that never ends or fails, and memory that runs out.

Invariant: it is struck from within a rank, and left with nothing that outlives the rank; what others on the same device
may have of its memory is not touched.
"""

from __future__ import annotations

from faults.numbers import MARK, harmed
from faults.strike import FIRST, LAST, Fault, starts_again_since, wait_for_mark


def _device_fault(name: str, kind: str, *reason: str, words: tuple[str, ...] = ()) -> Fault:
    """The run starts again once, with this in the reason."""
    return Fault(
        name,
        wait_for_mark(MARK),
        words,
        harmed(kind, FIRST, LAST),
        expects=starts_again_since(*reason),
        is_further=True,
        device="cuda",
    )


FAULTS = (
    _device_fault("a kernel never ends", "spin", "rank", "in a step", words=("run.hang_timeout=10s",)),
    _device_fault("an assertion in a kernel fails", "assert", "device-side assert"),
    _device_fault("memory of the device runs out", "device-hog", "ran out of memory on cuda"),
)
