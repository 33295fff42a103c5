"""Who is at work on a submission, so that one whose process died is known to be dead at once.

The submitter writes its claim into the attempt's folder: host, process, the start of that process, and which boot and
which process namespace its number belongs to. On the same machine whoever comes later looks whether it still runs;
of a process elsewhere (a laptop that submits by ssh, another login node) nobody here can know, and only its age tells.

Invariant: a claim is called alive or dead only by a process that sees the same process numbers since the same boot;
everything else is unknown. This module must not know what an attempt is.

Source: proc_pid_stat(5), fields (3) state and (22) starttime; proc_sys_kernel(5), random/boot_id; pid_namespaces(7).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_PROC = Path("/proc")
_FIELDS = 5


class Life(Enum):
    """Whether the process of a claim is still there."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProcessIdentity:
    """One process: its number and its `start` (clock ticks since the boot) name it within `boot` and `namespace`; the
    three are empty where the system does not tell them."""

    host: str
    process: int
    start: str = ""
    boot: str = ""
    namespace: str = ""

    def render(self) -> str:
        """One line without blanks in its fields."""
        realm = (word or "-" for word in (self.start, self.boot, self.namespace))
        return " ".join((self.host, str(self.process), *realm))

    @property
    def words(self) -> str:
        """As people name it: "process 4711 on login1"."""
        return f"process {self.process} on {self.host}"


def claim_of_this_process(proc: Path = _PROC) -> ProcessIdentity:
    """The claim that this process makes."""
    host = "".join(socket.gethostname().split()) or "localhost"
    return ProcessIdentity(host, os.getpid(), _read_start(proc, os.getpid()) or "", *_read_realm(proc))


def parse_claim(text: str) -> ProcessIdentity | None:
    """A claim from its line; None for anything else, such as that of an older Shardway."""
    parts = ["" if word == "-" else word for word in text.split()]
    if len(parts) != _FIELDS or not parts[1].isdecimal():
        return None
    return ProcessIdentity(parts[0], int(parts[1]), *parts[2:])


def look_at(claim: ProcessIdentity, proc: Path = _PROC) -> Life:
    """Whether the process of a claim still runs, as far as it can be seen from here."""
    here = claim_of_this_process(proc)
    realm = (claim.host, claim.boot, claim.namespace)
    if not (claim.start and claim.boot and claim.namespace) or realm != (here.host, here.boot, here.namespace):
        return Life.UNKNOWN
    start = _read_start(proc, claim.process)
    if start is None:
        return Life.UNKNOWN if _exists(claim.process) else Life.DEAD
    return Life.ALIVE if start == claim.start else Life.DEAD


def _read_realm(proc: Path) -> tuple[str, str]:
    """What process numbers belong to: the boot of the machine and the namespace; empty where there is no such file."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, os.readlink(proc / "self/ns/pid")
    except (OSError, UnicodeDecodeError):
        return "", ""


def _read_start(proc: Path, process: int) -> str | None:
    """When a process started; empty for one that is dead and only waits for its parent (a zombie), None where it
    cannot be seen."""
    try:
        fields = (proc / str(process) / "stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def _exists(process: int) -> bool:
    """Whether there is a process of this number, of whoever: /proc may hide those of others (proc(5), hidepid)."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
