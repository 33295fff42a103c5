"""How ranks reach each other: the network interface of a node, and the port at which the ranks of a launch meet.

Interface: gloo gives other ranks the first address of this node's own name. If /etc/hosts makes that 127.0.1.1, as
Debian's installer does, or the name is not known, the others get an address of their own loopback, and wait in vain. So
they do if the name belongs to a management network, or has an IPv6 address over which nothing arrives. The route to the
address at which all ranks meet is one that works.

Port: one that follows from a job's number may be held by a job of another user on the same node, or by a connection of
any program. Every rank derives the same few ports; rank 0 listens at the first that is free, and answers the ranks that
know the name of the launch. Then torch meets there. A port that was given is the only one that is tried.

Invariants:
- An interface that was given stays, and none is chosen if gloo's own choice is the same.
- Choosing an interface makes no connections: a UDP socket that is connected sends nothing (udp(7)), and knows its own
  address.
- A rank goes to torch's store only after rank 0 of its own launch has answered. A foreign store would count it, and
  torch waits without a limit for an answer from a program that is no store.
- No torch.

Sources: NCCL environment variables (NCCL_SOCKET_IFNAME: prefixes, "=" exact, "^" not these); gloo in torch
(GLOO_SOCKET_IFNAME: exact names); proc(5) on /proc/net/tcp.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence

from shardway.errors import SiteError
from shardway.hardware.probe import Interface, list_interfaces
from shardway.ranks.launcher import Placement, is_loopback, list_ports

# --- the interface

VARIABLE = "GLOO_SOCKET_IFNAME"


def name_interface(placement: Placement, environ: MutableMapping[str, str]) -> None:
    """Set gloo's variable for its interface if gloo would choose a wrong one; it stays for later groups."""
    if placement.local_world == placement.world or environ.get(VARIABLE):
        return
    if name := choose_interface(look_up(socket.gethostname()), list_others(placement, environ)):
        environ[VARIABLE] = name


def check_named(environ: Mapping[str, str], *, nccl: bool) -> None:
    """Raise SiteError if a variable names no interface of this node: gloo and NCCL would fail with a line of their own
    source, or wait. `nccl`: whether NCCL is used."""
    found = tuple(each for each in list_interfaces() if each.up)
    for name, exact in ((VARIABLE, True), *((("NCCL_SOCKET_IFNAME", False),) if nccl else ())):
        text = environ.get(name, "")
        if not text or not found or select_interfaces(text, found, exact=exact):
            continue
        usable = ", ".join(each.name for each in found if each.leaves_machine) or "none"
        how = "names without =, ^ or a part of a name" if exact else "names or their beginnings, after = or ^"
        raise SiteError(
            f"{name}={text}: {socket.gethostname()} has no such interface that is up.\n"
            f"      allowed: {how}, of {usable}\n"
            f"      to do: unset {name}, or name one of these, for the ranks of this node"
        )


def select_interfaces(text: str, found: Iterable[Interface], *, exact: bool) -> list[Interface]:
    """Interfaces that a variable selects, in NCCL's notation or (`exact`) gloo's."""
    negated = text.startswith("^") and not exact
    rest = text[1:] if negated else text
    literal = exact or rest.startswith("=")
    names = tuple(name.strip() for name in rest.removeprefix("" if exact else "=").split(",") if name.strip())
    return [each for each in found if (each.name in names if literal else each.name.startswith(names)) != negated]


def list_others(placement: Placement, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the nodes to find a route to: first that of rank 0, at which all ranks meet."""
    return (placement.master_addr, *environ.get("SHARDWAY_NODES", "").split())


def choose_interface(own: Iterable[str], others: Iterable[str]) -> str:
    """The interface towards the first of these nodes that is another one; "" if gloo finds it by the first of the
    node's `own` addresses, or none is found."""
    first = next(iter(own), "127.0.0.1")
    for address in own_addresses(others):
        if name := find_interface(address):
            is_same = (":" in address) == (":" in first) and find_interface(first) == name
            return "" if is_same else name
    if not is_loopback(first):
        return ""
    return next((each.name for each in _list_reachable() if each.addresses and each.leaves_machine), "")


def own_addresses(others: Iterable[str]) -> Iterator[str]:
    """The addresses of this node from which packets to these nodes leave, without loopbacks. Only the first few nodes
    are tried: each name may cost a timeout of the resolver."""
    for address in (address for other in itertools.islice(others, 4) for address in look_up(other)):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # any port: nothing is sent
                found = str(probe.getsockname()[0])
            if not is_loopback(found):
                yield found


def list_addresses(placement: Placement, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Addresses of this node for others of the job, the likeliest first: of the interface that gloo is given, of the
    routes to other nodes, of the node's name, of each interface; a loopback last, for ranks of one machine."""
    found = _list_reachable()
    named = [address for each in found if each.name == environ.get(VARIABLE) for address in each.addresses]
    others = [address for each in found if each.leaves_machine for address in each.addresses]
    known = (*named, *own_addresses(list_others(placement, environ)), *look_up(socket.gethostname()), *others)
    usable = [each for each in known if not is_loopback(each) and not each.startswith("fe80:")]
    return tuple(dict.fromkeys((*usable, "127.0.0.1")))


def find_interface(address: str) -> str:
    """The interface that has this address; "" for none."""
    return next((each.name for each in _list_reachable() if address in each.addresses), "")


def look_up(name: str) -> tuple[str, ...]:
    """Addresses of a name in the order of the resolver; empty if it is not known."""
    try:
        return tuple(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except OSError:
        return ()


def _list_reachable() -> list[Interface]:
    return [each for each in list_interfaces() if each.up and each.name != "lo"]


# --- the port

_ANSWER_S = 5.0  # how long a rank waits for an answer: rank 0 may be busy with a foreign connection
_YES = b"yes\n"


class NoMeeting(Exception):
    """Ranks did not find each other; the message names them, or the answer of each port."""


class PortTaken(NoMeeting):
    """Rank 0 can listen at none of the ports; the message names their holders."""


def agree_on_port(placement: Placement, wait_s: float) -> int:
    """The port at which this launch meets, on every rank. Raises NoMeeting after `wait_s`, and where all are taken."""
    ports = list_ports(placement.launch) if placement.launch else (placement.master_port,)
    name = f"shardway {placement.launch} {placement.world}"
    if placement.rank == 0:
        return _gather(name, placement.world, ports, wait_s)
    return _find(f"{name} {placement.rank}\n".encode(), placement.master_addr, ports, wait_s)


def _gather(name: str, world: int, ports: Sequence[int], wait_s: float) -> int:
    """Rank 0: wait for all others at the first port that is free."""
    until, missing = time.monotonic() + wait_s, set(range(1, world))
    with _listen(ports) as listener:
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                came = f"{world - 1 - len(missing)} of {world - 1} others came"
                raise NoMeeting(f"{came}, and not rank {', '.join(map(str, sorted(missing)[:8]))}")
            listener.settimeout(left)
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(1.0)
                    hello = connection.makefile("rb").readline(1000).decode(errors="replace").strip()
                    said, _, rank = hello.rpartition(" ")
                    if said == name and rank.isdecimal() and int(rank) in missing:  # no other program or rank
                        connection.sendall(_YES)
                        missing.discard(int(rank))
        return int(listener.getsockname()[1])


def _listen(ports: Sequence[int]) -> socket.socket:
    """At every address of this host, as torch's store does: its name may mean another of them here than elsewhere."""
    why = []
    for port in ports:
        try:
            return listen_anywhere(port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why.append(describe_holder(port) if taken else f"port {port}: {error.strerror}")
    raise PortTaken("; ".join(why))


def listen_anywhere(port: int = 0) -> socket.socket:
    """Listen at a port of every address of this host; 0 chooses a port. Raises OSError."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is there, and switched off
                raise
    return socket.create_server(("", port))


def _find(hello: bytes, address: str, ports: Sequence[int], wait_s: float) -> int:
    """Any other rank: look for the one of these ports at which rank 0 answers."""
    until, pause, said = time.monotonic() + wait_s, 0.02, dict.fromkeys(ports, "not tried")
    while (left := until - time.monotonic()) > 0:
        for port in ports:
            try:
                with socket.create_connection((address, port), timeout=min(left, _ANSWER_S)) as connection:
                    connection.sendall(hello)
                    if connection.makefile("rb").readline(len(_YES)) == _YES:
                        return port
                said[port] = "something that is not rank 0 of this launch answered"
            except TimeoutError:
                said[port] = "no answer"
            except OSError as error:
                said[port] = error.strerror or str(error)
        time.sleep(max(0.0, min(pause, until - time.monotonic())))
        pause = min(2 * pause, 1.0)
    raise NoMeeting("; ".join(f"port {port}: {words}" for port, words in said.items()))


def describe_holder(port: int) -> str:
    """The holder of a port of this host, as far as the system shows it: "port 29500 is held by process 1234 (python3)
    of alice". Of processes of other users only the user is shown."""
    import pwd

    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr[1] == port and each.pid:
                holder = psutil.Process(each.pid)
                return f"port {port} is held by process {each.pid} ({holder.name()}) of {holder.username()}"
    for table in ("tcp", "tcp6"):  # the kernel's tables, in which another user's socket has an owner
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/net/{table}", encoding="ascii") as file:
            for fields in map(str.split, file.readlines()[1:]):
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # it listens
                    owner = f"user {fields[7]}"
                    with contextlib.suppress(KeyError):
                        owner = pwd.getpwuid(int(fields[7])).pw_name
                    return f"port {port} is held by a process of {owner}"
    return f"port {port} is taken"
