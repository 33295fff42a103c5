"""Messages between two processes over a TCP connection: one JSON object a line.

Invariant: a message is whole or an OSError; none is larger than `MAX_BYTES`. This module must not know what is said.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

MAX_BYTES = 4 * 2**20


class Wire:
    """One end of a connection; each wait has a limit. Raises OSError for an end, a limit, or a stranger's words."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], limit_s: float = 10.0) -> None:
        """Send one message."""
        self._socket.settimeout(max(0.01, limit_s))
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next message."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            more = self._socket.recv(2**16)
            if not more:
                raise ConnectionResetError("the other end closed the connection")
            self._buffer += more
            if len(self._buffer) > MAX_BYTES:
                raise ConnectionError("the other end sends what no doctor sends")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("the other end is no doctor")
        return message

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()
