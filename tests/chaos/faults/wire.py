"""Two hosts on this machine and the wire between them, which can be long, or cut.

Each host is a network namespace with a tun device; what one sends the wire hands to the other, later or not at all, as
a switch that fails does: nobody is told.

Invariant: the namespaces live as long as the processes of this module, which end with whoever made the wire. Nothing
of this machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import relay

from commands import Room


@dataclass(frozen=True)
class Wire:
    """The rooms of the two hosts, and the process that hands on what they send."""

    rooms: tuple[Room, Room]
    process: subprocess.Popen[str]

    def delay(self, seconds: float) -> None:
        """What is sent from now on arrives so much later."""
        self._tell(f"delay {seconds}")

    def cut(self) -> None:
        """Nothing that is sent from now on arrives, and nothing that is on its way."""
        self._tell("cut")

    def heal(self) -> None:
        """As it was in the beginning."""
        self._tell("delay 0")

    def _tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def two_hosts() -> Iterator[Wire]:
    """Two hosts that reach each other at `relay.ADDRESSES`; skips where this machine lets nobody have them."""
    with subprocess.Popen(
        [sys.executable, relay.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        pids = process.stdout.readline().split()
        if len(pids) != len(relay.ADDRESSES):
            pytest.skip(f"this machine lets nobody have networks: {process.stderr.read().strip()[-300:]}")
        first, second = (Room(("nsenter", "--target", pid, "--net")) for pid in pids)
        try:
            yield Wire((first, second), process)
        finally:
            process.stdin.close()
