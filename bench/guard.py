"""What looking at a step before its update costs: the same run with and without its guard, on ranks of their own.

    python bench/guard.py [--rounds 100] [--ranks 1] [--json FILE] [KEY=VALUE ...]

Two runs of ours with the model and batch of `shardway init`, one as it is (`guard.non_finite = "skip"`), one with
`guard.non_finite = "off"` (`pairs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from pairs import Pair, run
from plain_loops import ours
from turns import Task


def guarded(task: Task) -> Iterator[float]:
    """As every run is."""
    return ours(task, 'guard.non_finite="skip"')


def unguarded(task: Task) -> Iterator[float]:
    """Passes run once, and nobody looks before the update."""
    return ours(task, 'guard.non_finite="off"')


if __name__ == "__main__":
    run(Pair("guard:guarded", "guard:unguarded"), __doc__)
