"""Which process somebody is, in words that another process can check, on the same machine or not.

Invariant: a process is said to be gone only where that is certain: the same kernel, the same view of processes, and no
such process in it. On another host nothing is certain. This module must not know what processes do.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Identity:
    """A process: its host, that host's boot, the namespace of its pid, the pid, and when it started (clock ticks).

    An empty field is not known. The boot tells a host from one of the same name, the namespace a container from another
    on the same host, the start a process from a later one of the same pid.
    """

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""


def own_identity(proc: Path = Path("/proc")) -> Identity:
    """This process."""
    pid = os.getpid()
    return Identity(socket.gethostname(), _read_boot(proc), _read_namespace(proc), pid, _read_stat(proc, pid)[1])


def is_gone(other: Identity, proc: Path = Path("/proc")) -> bool:
    """Whether a process has certainly ended; False for one that lives and for one that cannot be seen from here."""
    if not is_seen_here(other, proc):
        return False
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is somebody else's; what follows may not be visible then
        pass
    state, started = _read_stat(proc, other.pid)
    if state in _ENDED:
        return _count_threads(proc, other.pid) <= 1  # further ones may be in the middle of a write
    return bool(started and other.started) and started != other.started


def is_seen_here(other: Identity, proc: Path = Path("/proc")) -> bool:
    """Whether a process has its number among those of this machine that this process sees."""
    known = (other.host, other.boot, other.namespace)
    here = (socket.gethostname(), _read_boot(proc), _read_namespace(proc))
    return all(known) and known == here and other.pid > 0


def is_here(other: Identity) -> bool:
    """Whether a process is, by its name, of this host."""
    return other.host == socket.gethostname()


def _read_boot(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _read_namespace(proc: Path) -> str:
    try:
        return os.readlink(proc / "self/ns/pid")
    except OSError:
        return ""


def _read_stat(proc: Path, pid: int) -> tuple[str, str]:
    """State and start of a process (proc(5), fields 3 and 22); both empty where they cannot be read."""
    try:
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _count_threads(proc: Path, pid: int) -> int:
    try:
        return len(os.listdir(proc / str(pid) / "task"))
    except OSError:
        return 0
