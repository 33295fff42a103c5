"""What remembering the last collectives costs: the same run with and without torch's flight recorder.

    python bench/flight_recorder.py [--rounds 100] [--ranks 2] [--json FILE] [KEY=VALUE ...]

Two runs of ours with the model and batch of `shardway init`, copies on all ranks, one as an agent starts its ranks, one
with the recorder off (`pairs.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from pairs import Pair, run
from plain_loops import our_ddp
from shardway.ranks.evidence import SIZE, VARIABLES
from turns import Task


def recording(task: Task) -> Iterator[float]:
    """As an agent starts its ranks."""
    os.environ[VARIABLES[0]] = str(SIZE)
    return our_ddp(task)


def forgetting(task: Task) -> Iterator[float]:
    """Nothing is remembered."""
    os.environ[VARIABLES[0]] = "0"
    return our_ddp(task)


if __name__ == "__main__":
    run(Pair("flight_recorder:recording", "flight_recorder:forgetting", ranks=2), __doc__)
