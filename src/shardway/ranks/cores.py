"""Binds a rank to the cores of its node that are next to its accelerator, if the profile or the job names them.

srun binds each task that it starts. An agent is one task with all cores of its node, and its ranks inherit them; the
cores of the site's profile come in a variable.

Invariant: a rank that cannot be bound trains unbound, with a message why. No torch: threads that a library starts keep
the cores of the thread that started them.

Sources: sched_setaffinity(2); srun(1), "--cpu-bind=mask_cpu".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

VARIABLE = "SHARDWAY_CPU_MASKS"
"""The CPU mask of each local rank in hexadecimal, separated by commas."""


def bind_to_cores(environ: Mapping[str, str]) -> str:
    """Bind this rank and its present threads to its cores, if VARIABLE names them; returns why it could not."""
    masks = environ.get(VARIABLE, "")
    if not masks or not hasattr(os, "sched_setaffinity"):
        return ""
    local = environ.get("LOCAL_RANK", "")
    try:
        every = masks.split(",")
        cores = _read_mask(every[int(local) % len(every)])  # as srun does if there are more ranks than masks
        for thread in _list_threads():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, cores)
    except (OSError, ValueError) as error:
        return f"local rank {local} is bound to no cores: {error}; {VARIABLE}={masks}"
    return ""


def _read_mask(text: str) -> set[int]:
    """The cores of a mask; core 0 is its lowest bit."""
    mask = int(text, 16)
    return {core for core in range(mask.bit_length()) if mask >> core & 1}


def _list_threads() -> Iterator[int]:
    """A standby has threads when it becomes a rank: those of the libraries that it has imported."""
    yield from map(int, os.listdir("/proc/self/task"))
