"""The port at which the ranks of a launch meet: that which was named, or else a free one of rank 0's host.

A port that follows from a job's number may be held already by a job of another person on the same node, or by a
connection of any program. Every rank derives the same few ports; rank 0 listens at the first that is free, and answers
those that know what the launch is called. Then torch meets there. A port that was named is the only one that is tried.

Invariant: a rank goes to torch's store only where rank 0 of its own launch has answered. A store of others would count
it, and torch waits without a limit for an answer of a program that is no store. This module must not import torch.

Source: proc(5) on /proc/net/tcp.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Sequence

from shardway.ranks.launcher import Placement, list_ports

_ANSWER_S = 5.0
"""How long a rank waits for an answer: rank 0 may have to hear out a stranger before."""
_HEAR_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_YES = b"yes\n"
_LISTENS = "0A"


class NoMeeting(Exception):
    """Ranks did not find each other; the message says which, or what each port answered."""


class PortTaken(NoMeeting):
    """Rank 0 can listen at none of the ports; the message says who holds them."""


def agree_on_port(placement: Placement, wait_s: float) -> int:
    """The port at which this launch meets, on every rank. Raises NoMeeting after `wait_s`, and where all are taken."""
    ports = list_ports(placement.launch) if placement.launch else (placement.master_port,)
    if placement.rank == 0:
        return _gather(placement, ports, wait_s)
    return _find(placement, ports, wait_s)


def _name(placement: Placement) -> str:
    return f"shardway {placement.launch} {placement.world}"


def _gather(placement: Placement, ports: Sequence[int], wait_s: float) -> int:
    """Rank 0: wait for all others at the first port that is free."""
    until, missing = time.monotonic() + wait_s, set(range(1, placement.world))
    with _listen(ports) as listener:
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                came = f"{placement.world - 1 - len(missing)} of {placement.world - 1} others came"
                raise NoMeeting(f"{came}, and not rank {', '.join(map(str, sorted(missing)[:8]))}")
            listener.settimeout(left)
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    missing.discard(_hear(connection, _name(placement), missing))
        return int(listener.getsockname()[1])


def _listen(ports: Sequence[int]) -> socket.socket:
    """At every address of this host, as torch's store does: its name may mean another of them here than elsewhere."""
    why = []
    for port in ports:
        try:
            return _listen_at(port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why.append(describe_holder(port) if taken else f"port {port}: {error.strerror}")
    raise PortTaken("; ".join(why))


def _listen_at(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is there, and switched off
                raise
    return socket.create_server(("", port))


def _hear(connection: socket.socket, name: str, missing: set[int]) -> int:
    """The rank that has come, which is told yes; 0 for a stranger, or a rank of a launch that is called the same."""
    connection.settimeout(_HEAR_S)
    said, _, rank = connection.makefile("rb").readline(1000).decode(errors="replace").strip().rpartition(" ")
    if said != name or not rank.isdecimal() or int(rank) not in missing:
        return 0
    connection.sendall(_YES)
    return int(rank)


def _find(placement: Placement, ports: Sequence[int], wait_s: float) -> int:
    """Any other rank: look for the one of these ports at which rank 0 answers."""
    until, pause, said = time.monotonic() + wait_s, _FIRST_PAUSE_S, dict.fromkeys(ports, "not tried")
    while (left := until - time.monotonic()) > 0:
        for port in ports:
            try:
                if _ask(placement, port, min(left, _ANSWER_S)):
                    return port
                said[port] = "something that is not rank 0 of this launch answered"
            except TimeoutError:
                said[port] = "no answer"
            except OSError as error:
                said[port] = error.strerror or str(error)
        time.sleep(max(0.0, min(pause, until - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    raise NoMeeting("; ".join(f"port {port}: {words}" for port, words in said.items()))


def _ask(placement: Placement, port: int, limit_s: float) -> bool:
    with socket.create_connection((placement.master_addr, port), timeout=limit_s) as connection:
        connection.sendall(f"{_name(placement)} {placement.rank}\n".encode())
        return connection.makefile("rb").readline(len(_YES)) == _YES


def describe_holder(port: int) -> str:
    """Who holds a port of this host, as far as the system shows it: "port 29500 is held by process 1234 (python3) of
    alice". Processes of others are not shown, their names are."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr[1] == port and each.pid:
                holder = psutil.Process(each.pid)
                return f"port {port} is held by process {each.pid} ({holder.name()}) of {holder.username()}"
    owner = _find_owner(port)
    return f"port {port} is held by a process of {owner}" if owner else f"port {port} is taken"


def _find_owner(port: int) -> str:
    """The user of a socket with this port in the kernel's table; "" for none."""
    import pwd

    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == _LISTENS:
                    with contextlib.suppress(KeyError):
                        return pwd.getpwuid(int(fields[7])).pw_name
                    return f"user {fields[7]}"
    return ""
