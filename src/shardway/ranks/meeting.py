"""Where the ranks of one launch meet: the master's address and port.

Invariant: address and port come only from variables and files that all ranks of the launch share, so that each
rank computes the same ones without talking. This module must not open a connection or look a name up.
"""

from __future__ import annotations

import ipaddress
import zlib
from pathlib import Path

from shardway.ranks.hostlist import parse_hostlist
from shardway.ranks.variables import Environ, first_set, read_int, variables_error

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15000
PORTS = 15000
_LEFT_OVER = "unset MASTER_ADDR, or export it with rank 0's host in the job script"
_HAND_OVER = "export MASTER_ADDR with rank 0's host and hand it to every rank"


def find_address(environ: Environ, launcher: str, *, one_node: bool, may_be_own: bool = False) -> str:
    """The host of rank 0 as every rank can name it.

    MASTER_ADDR, else 127.0.0.1 where all ranks are on one node, else the first host of the Slurm step or job, else
    the first of PBS_NODEFILE. Raises SiteError where none of these is there, and for a loopback address with several
    nodes unless it `may_be_own`: the ranks of one node may meet there, and be told another one than the others.
    """
    if environ.get("MASTER_ADDR"):
        address = _without_brackets(environ["MASTER_ADDR"])
        if not one_node and not may_be_own and is_loopback(address):
            allowed = "a host name or address that all nodes reach: with this one each node would meet itself"
            raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, _LEFT_OVER)
        return address
    if one_node:
        return LOOPBACK
    nodelist = first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if nodelist in environ:
        return _read_slurm_hosts(environ, launcher, nodelist)[0]
    if "PBS_NODEFILE" in environ:
        return read_nodefile(environ, launcher, _HAND_OVER)[0]
    allowed = "a host name or address, since the ranks are on several nodes"
    raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, _HAND_OVER)


def is_loopback(address: str) -> bool:
    """Whether an address, or a name by its usual meaning, is of each node's own network: no other node reaches it."""
    name = address.lower().removesuffix(".")
    if name in ("localhost", "ip6-localhost", "ip6-loopback") or name.startswith("localhost."):
        return True
    try:
        parsed = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


def render_endpoint(address: str, port: int) -> str:
    """ADDRESS:PORT as URLs have it: an IPv6 address in brackets (RFC 3986, 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _without_brackets(address: str) -> str:
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def find_port(environ: Environ, launcher: str, world: int, job: str) -> int:
    """The port at which rank 0 listens.

    MASTER_PORT, else 0 ("choose") for a single rank, else 15000 + crc32(job) % 15000. It lies below Linux' range of
    ephemeral ports (32768 and up); two jobs on one node get the same port once in 15000 times. Raises SiteError
    where `job` is empty as well.
    """
    if environ.get("MASTER_PORT"):
        return _read_port(environ, launcher)
    if world == 1:
        return 0
    if job:
        return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    allowed = "a free port of rank 0's host, since no job id is there to derive one from"
    remedy = "export MASTER_PORT with one value for all ranks"
    raise variables_error(environ, launcher, ("MASTER_PORT",), allowed, remedy)


def read_nodefile(environ: Environ, launcher: str, remedy: str) -> list[str]:
    """The lines of PBS_NODEFILE: a host for each task, in the order of the tasks."""
    path = environ.get("PBS_NODEFILE", "")
    try:
        slots = Path(path).read_text(encoding="utf-8").split() if path else []
    except OSError:
        slots = []
    if slots:
        return slots
    allowed = "a file that this host can read, with one host name a line"
    raise variables_error(environ, launcher, ("PBS_NODEFILE",), allowed, remedy)


def _read_slurm_hosts(environ: Environ, launcher: str, name: str) -> list[str]:
    try:
        return parse_hostlist(environ[name])
    except ValueError:
        allowed = 'a host list such as "n[01-03,7],login1"'
        raise variables_error(environ, launcher, (name,), allowed, _HAND_OVER) from None


def _read_port(environ: Environ, launcher: str) -> int:
    port = read_int(environ, launcher, "MASTER_PORT")
    if not 0 < port < 65536:
        raise variables_error(environ, launcher, ("MASTER_PORT",), "a port from 1 to 65535")
    return port
