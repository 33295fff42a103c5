"""Where commands run: this machine, or a login node by the user's own ssh.

Invariant: nothing connects before the first command. This package must not know what commands mean.
"""

from __future__ import annotations

from shardway.launch.hosts.base import Host, Target, parse_target
from shardway.launch.hosts.local import LocalHost

__all__ = ["Host", "LocalHost", "Target", "find_host", "parse_target"]


def find_host(name: str) -> Host:
    """The host of that name as ssh knows it; this machine for an empty one."""
    if not name:
        return LocalHost()
    from shardway.launch.hosts.ssh import SshHost  # most commands need no connection

    return SshHost(name)
