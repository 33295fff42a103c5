"""A rank does not outlive the agent that started it, nor a process of a rank that rank.

Whoever starts ranks as children and is killed cannot end them: without this they train on, and the next launch writes
into the same run beside them. srun and mpirun need no help, their daemons end what they started.

Invariant: quick to import (no torch), and without effect where the kernel does not know it. No rank is ended here but
by SIGTERM, a wish to stop, upon which the ranks save (`ranks.signals`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping

from shardway.ranks.launcher import AGENT_VARIABLE

_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies (prctl(2), Linux alone)."""
    _signal_with_parent(signal.SIGTERM)


def end_with_parent() -> None:
    """Ask the kernel to end this process, even one that is stopped, with the thread that has started it."""
    _signal_with_parent(signal.SIGKILL)


def _signal_with_parent(number: signal.Signals) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def stop_with_agent(environ: Mapping[str, str]) -> None:
    """The same for a rank that our agent has started as a child; at once where the agent is gone already."""
    stop_with_parent()
    if is_orphan(find_agent(environ)):
        signal.raise_signal(signal.SIGTERM)


def find_agent(environ: Mapping[str, str]) -> int:
    """The process that has started this rank: our agent, which says so, or who is its parent now."""
    return int(environ.get(AGENT_VARIABLE, "") or os.getppid())


def is_orphan(agent: int) -> bool:
    """Whether the process that has started this rank is gone; 0 for a rank that has none to outlive."""
    return agent not in (0, os.getppid())
