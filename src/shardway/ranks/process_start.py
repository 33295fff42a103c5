"""When this process began, or the job that it is a part of.

Invariant: clocks of two hosts are never compared; where an age cannot be known on this host, it is 0. This module must
not import torch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from shardway.ranks.gate import find_released
from shardway.rundir.attempts import Attempt, AttemptStart

_STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Place of `starttime` in /proc/self/stat behind the name of the program (its field 22; proc(5))."""


def find_began(attempt: Attempt | None, environ: Mapping[str, str]) -> float:
    """When the attempt began, in seconds of `time.monotonic()`.

    That is when its job began where that is known and this is the host that said so, else when this process did (a
    spare: when it was released).
    """
    released = find_released(environ)
    age_s = process_age_s() if released is None else max(0.0, time.monotonic() - released)
    started = attempt.read_started() if attempt is not None else None
    if started is not None:
        age_s = max(age_s, job_age_s(started))
    return time.monotonic() - age_s


def process_age_s() -> float:
    """Seconds since this process began, Python's start and all imports in them; 0 on a system that does not tell."""
    try:
        fields = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def job_age_s(started: AttemptStart) -> float:
    """Seconds since a job began, by this host's clock; 0 for a job of another host, or where the clock was set."""
    if started.host != socket.gethostname() or not started.started:
        return 0.0
    age_s = time.time() - started.started
    return age_s if 0 <= age_s <= _uptime_s() else 0.0


def _uptime_s() -> float:
    """Seconds since this machine was started: no job of it is older."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return float("inf")
