"""Where the ranks of one launch meet: the master's address and port.

Invariant: address and port come only from variables and files that all ranks of the launch share, so that each
rank computes the same ones without talking. This module must not open a connection or look a name up.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import zlib
from pathlib import Path

from shardway.ranks.hostlist import parse_hostlist
from shardway.ranks.variables import Environ, first_set, read_int, variables_error

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15000
PORTS = 15000
_TRIED = 4
_LEFT_OVER = "unset MASTER_ADDR, or export it with rank 0's host in the job script"
_HAND_OVER = "export MASTER_ADDR with rank 0's host and hand it to every rank"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_SHORT_IPV4 = re.compile(r"[0-9][0-9a-fx.]*", re.IGNORECASE)
_ONE_HOST = "one host name or address, without a port (which MASTER_PORT says), a scheme or further hosts"
_LOOPBACK_NAMES = re.compile(r"localhost[46]?(\..*)?|.*\.localhost|ip6-(localhost|loopback)")


def find_address(environ: Environ, launcher: str, *, one_node: bool, may_be_own: bool = False) -> str:
    """The host of rank 0 as every rank can name it.

    MASTER_ADDR, else 127.0.0.1 where all ranks are on one node, else the first host of the Slurm step or job, else
    the first of PBS_NODEFILE. Raises SiteError where none of these is there or it is no address, and for a loopback
    address with several nodes unless it `may_be_own`: the ranks of one node may meet there, and be told another one
    than the others.
    """
    if environ.get("MASTER_ADDR"):
        address = _read_address(environ, launcher)
        if not one_node and not may_be_own and is_loopback(address):
            allowed = "a host name or address that all nodes reach: with this one each node would meet itself"
            raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, _LEFT_OVER)
        return address
    if one_node:
        return LOOPBACK
    # The step of another launcher is that of its daemons, which may leave out the node on which it was called itself.
    steps = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if launcher == "srun" else ("SLURM_JOB_NODELIST",)
    nodelist = first_set(environ, *steps)
    if nodelist in environ:
        return _first_of_several(environ, launcher, nodelist, _read_slurm_hosts(environ, launcher, nodelist))
    if "PBS_NODEFILE" in environ:
        hosts = read_nodefile(environ, launcher, _HAND_OVER)
        return _first_of_several(environ, launcher, "PBS_NODEFILE", hosts)
    allowed = "a host name or address, since the ranks are on several nodes"
    raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, _HAND_OVER)


def _first_of_several(environ: Environ, launcher: str, name: str, hosts: list[str]) -> str:
    """The first host of a job that has several; where it has one, the variable is of another job than the ranks."""
    if len(set(hosts)) > 1:
        return hosts[0]
    allowed = f"several hosts, since the ranks are on several nodes ({name} may be left over from another job)"
    raise variables_error(environ, launcher, (name,), allowed, _HAND_OVER)


def _read_address(environ: Environ, launcher: str) -> str:
    if address := parse_host(environ["MASTER_ADDR"]):
        return address
    raise variables_error(environ, launcher, ("MASTER_ADDR",), _ONE_HOST, _HAND_OVER)


def parse_host(text: str) -> str:
    """One host name or address, an IPv6 address without its brackets; "" where the text is anything else."""
    text = text.strip()
    address = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return address if _NAME.fullmatch(address) or _parse_ip(address) is not None else ""


def is_loopback(address: str) -> bool:
    """Whether an address, or a name by its usual meaning, is of each node's own network: no other node reaches it."""
    name = address.lower().removesuffix(".")
    if _LOOPBACK_NAMES.fullmatch(name):
        return True
    parsed = _parse_ip(name)
    if parsed is None:
        return False
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_loopback or parsed.is_unspecified


def _parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, also in the short forms of IPv4 that resolvers take ("127.1", inet(3)); None for a name."""
    plain = text.partition("%")[0]
    if _SHORT_IPV4.fullmatch(plain):
        with contextlib.suppress(OSError):
            return ipaddress.IPv4Address(socket.inet_aton(plain))
    try:
        return ipaddress.ip_address(plain)
    except ValueError:
        return None


def render_endpoint(address: str, port: int) -> str:
    """ADDRESS:PORT as URLs have it: an IPv6 address in brackets (RFC 3986, 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def find_port(environ: Environ, launcher: str, world: int, job: str) -> int:
    """The port at which rank 0 listens.

    MASTER_PORT, else 0 ("choose") for a single rank, else the first of `list_ports`. Raises SiteError where `job` is
    empty as well.
    """
    if environ.get("MASTER_PORT"):
        return _read_port(environ, launcher)
    if world == 1:
        return 0
    if job:
        return list_ports(job)[0]
    allowed = "a free port of rank 0's host, since no job id is there to derive one from"
    remedy = "export MASTER_PORT with one value for all ranks"
    raise variables_error(environ, launcher, ("MASTER_PORT",), allowed, remedy)


def list_ports(launch: str) -> tuple[int, ...]:
    """The ports that follow from what a launch is called, in the order in which they are tried.

    The first is 15000 + crc32(launch) % 15000. They lie below Linux' range of ephemeral ports (32768 and up); two jobs
    on one node get the same first port once in 15000 times.
    """
    names = (launch, *(f"{launch} {number}" for number in range(1, _TRIED)))
    return tuple(FIRST_PORT + zlib.crc32(name.encode()) % PORTS for name in names)


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
