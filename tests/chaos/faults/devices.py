"""Faults of an accelerator: a kernel that never ends or fails, and memory that runs out.

Invariant: it is struck from within a rank, and left with nothing that outlives the rank; what others on the same device
may have of its memory is not touched.
"""

from __future__ import annotations

from collections.abc import Callable

from faults.numbers import MARK, harmed
from faults.strike import FIRST, LAST, Aftermath, Fault, wait_for_mark


def starts_again_since(*words: str) -> Callable[[Aftermath], None]:
    """Once, and the reason has these words."""

    def expects(after: Aftermath) -> None:
        (restarted,) = after.events("restarted")
        for each in words:
            assert each in restarted["reason"], restarted["reason"]

    return expects


FAULTS = (
    Fault(
        "a kernel never ends",
        wait_for_mark(MARK),
        ("run.hang_timeout=10s",),
        harmed("spin", FIRST, LAST),
        expects=starts_again_since("rank", "in a step"),
        is_further=True,
        device="cuda",
    ),
    Fault(
        "an assertion in a kernel fails",
        wait_for_mark(MARK),
        (),
        harmed("assert", FIRST, LAST),
        expects=starts_again_since("device-side assert"),
        is_further=True,
        device="cuda",
    ),
    Fault(
        "memory of the device runs out",
        wait_for_mark(MARK),
        (),
        harmed("device-hog", FIRST, LAST),
        expects=starts_again_since("ran out of memory on cuda"),
        is_further=True,
        device="cuda",
    ),
)
