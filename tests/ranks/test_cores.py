"""A rank and all its threads are bound to the cores that the site's profile names, or the rank says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from shardway.ranks.heartbeat import CPU_MASKS

BOUND = """
import json, os, sys, threading
from shardway.ranks.heartbeat import bind_to_cores
here, is_over = threading.Event(), threading.Event()
threading.Thread(target=lambda: (here.set(), is_over.wait())).start()
here.wait()
why = bind_to_cores(os.environ)
print(json.dumps([sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]))
print(why, file=sys.stderr, end="")
is_over.set()
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")


def bound(**environ: str) -> tuple[list[list[int]], str]:
    """The cores of each thread of a rank, and what it says."""
    done = subprocess.run(
        [sys.executable, "-c", BOUND], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout), done.stderr


def test_each_local_rank_has_the_cores_of_its_mask() -> None:
    cores = sorted(os.sched_getaffinity(0))
    masks = ",".join(f"{1 << core:#x}" for core in cores)
    for local, core in enumerate(cores[:2]):
        assert bound(LOCAL_RANK=str(local), **{CPU_MASKS: masks}) == ([[core], [core]], "")


def test_who_is_told_nothing_keeps_all() -> None:
    every = sorted(os.sched_getaffinity(0))
    assert bound(LOCAL_RANK="0", **{CPU_MASKS: ""}) == ([every, every], "")


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        ("0x1,0x0", "Invalid argument"),
        (f"0x1,{1 << 1000:#x}", "Invalid argument"),
        ("0x1,mine", "invalid literal"),
    ],
)
def test_a_rank_that_cannot_be_bound_says_so_and_goes_on(masks: str, why: str) -> None:
    every = sorted(os.sched_getaffinity(0))
    cores, said = bound(LOCAL_RANK="1", **{CPU_MASKS: masks})
    assert cores == [every, every]
    assert said.startswith("local rank 1 is bound to no cores: ")
    assert why in said
    assert f"{CPU_MASKS}={masks}" in said
