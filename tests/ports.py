"""Ports for processes that are about to be started."""

from __future__ import annotations

import random
import socket

BELOW_CONNECTIONS = range(30000, 32768)
"""Ports that Linux gives to no connection by itself (ip_local_port_range), and that are not Shardway's own. One of the
others may be taken by a connection of any program before a process that is being started listens at it."""


def free_port() -> int:
    """A port of loopback at which nothing listens now."""
    for port in random.SystemRandom().sample(BELOW_CONNECTIONS, len(BELOW_CONNECTIONS)):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
