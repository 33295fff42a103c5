"""Memory that this host still has for this process.

Invariant: the tightest of what the machine has and what its control groups leave.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from shardway.hardware.cgroup import read_cgroup_memory_left


def read_memory_left(root: Path = Path("/")) -> int:
    """Bytes; `root` stands for "/" where the files of control groups are looked for."""
    limits = [psutil.virtual_memory().available, read_cgroup_memory_left(root)]
    return min(limit for limit in limits if limit is not None)
