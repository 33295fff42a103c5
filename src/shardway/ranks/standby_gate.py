"""Where a spare process waits until it is needed as a rank, and with which variables it starts then.

Invariant: A process that is no spare is not kept waiting; a spare is released once, with the variables of its rank.

A spare is a rank's program, started while the ranks train: it imports what takes seconds (on a shared file system of a
large machine, minutes) and waits. When ranks have to start again it becomes one of them at once. A FIFO is the gate:
the process that holds it open for writing is alive, so no spare waits for an agent that was killed.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

VARIABLE = "SHARDWAY_GATE"
"""The FIFO that a spare waits at."""

_RELEASED = "SHARDWAY_RELEASED"
"""When it was released, in seconds of `time.monotonic()` on its own host."""


class StandbyGate:
    """The agent's side of the gate of one spare. Raises OSError where no FIFO can be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        # Also for reading: to open it for writing alone waits for the spare.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def release(self, variables: Mapping[str, str]) -> None:
        """Let the spare be a rank with these variables. Less than PIPE_BUF goes into a pipe in one piece."""
        os.write(self._descriptor, json.dumps(dict(variables)).encode())

    def close(self) -> None:
        """A spare that was not released leaves; one that was must have read it by now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def wait_at_gate(environ: MutableMapping[str, str], prepare: Callable[[], object]) -> bool:
    """Whether this process is to be a rank: at once where it is no spare, else once it is released.

    A spare calls `prepare` first. Once released, its variables are those of its rank.
    """
    path = environ.pop(VARIABLE, "")
    if not path:
        return True
    try:
        gate = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it this would wait where the agent is gone
    except OSError:
        return False
    try:
        prepare()
        told = _read_line(gate)
    finally:
        os.close(gate)
    if not told:
        return False
    environ.update(json.loads(told))
    environ[_RELEASED] = repr(time.monotonic())
    return True


def _read_line(gate: int) -> bytes:
    """What is written, in one piece; empty once nobody is left who could."""
    poll = select.poll()
    poll.register(gate, select.POLLIN)
    while True:
        try:
            return os.read(gate, select.PIPE_BUF)
        except BlockingIOError:
            poll.poll()


def find_released(environ: Mapping[str, str]) -> float | None:
    """When this process was released from its gate, in seconds of `time.monotonic()`; None where it was no spare."""
    text = environ.get(_RELEASED, "")
    return float(text) if text else None
