"""A rank does not outlive the agent that started it.

Whoever starts ranks as children and is killed cannot end them: without this they train on, and the next launch writes
into the same run beside them. srun and mpirun need no help, their daemons end what they started.

Invariant: quick to import (no torch), and without effect where the kernel does not know it. This module must not end
anything itself: SIGTERM is a wish to stop, upon which the ranks save (`ranks.signals`).
"""

from __future__ import annotations

import contextlib
import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies (prctl(2), Linux alone)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
