"""The network interface by which other nodes reach the ranks of this one, where gloo would not find it by itself.

gloo tells other ranks the first address of this node's own name. Where /etc/hosts makes that 127.0.1.1, as Debian's
installer does, or nothing knows the name, the others get an address of their own loopback, and wait in vain. They wait
in vain too where the name is that of a network for management, or has an IPv6 address over which nothing arrives. The
way to the address at which all ranks meet is one that works.

Sources: NCCL environment variables (NCCL_SOCKET_IFNAME: prefixes, "=" exact, "^" not these); gloo in torch
(GLOO_SOCKET_IFNAME: exact names).

Invariant: an interface that was named stays, and none is chosen where gloo's own way is that one. This
module must not make connections: a UDP socket that is connected sends nothing (udp(7)), and knows its own address.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

from shardway.errors import SiteError
from shardway.hardware.links import Interface, list_interfaces
from shardway.ranks.launcher import Placement, is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"

_OF_NCCL = "NCCL_SOCKET_IFNAME"
_NODES = "SHARDWAY_NODES"
_ANY_PORT = 9
_TRIED = 4


def name_interface(placement: Placement, environ: MutableMapping[str, str]) -> None:
    """Set the variable by which gloo is told its interface, where it needs to be told; it stays for later groups."""
    if placement.local_world == placement.world or environ.get(VARIABLE):
        return
    if name := choose_interface(look_up(socket.gethostname()), list_others(placement, environ)):
        environ[VARIABLE] = name


def check_named(environ: Mapping[str, str], *, nccl: bool) -> None:
    """Raise SiteError where a variable names no interface of this node: gloo and NCCL would end with a place in their
    own source, or wait. `nccl`: whether NCCL is used."""
    found = tuple(each for each in list_interfaces() if each.up)
    for name, exact in ((VARIABLE, True), *(((_OF_NCCL, False),) if nccl else ())):
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
    names = [name.strip() for name in rest.removeprefix("" if exact else "=").split(",") if name.strip()]

    def selects(interface: Interface) -> bool:
        hit = interface.name in names if literal else interface.name.startswith(tuple(names))
        return hit != negated

    return [interface for interface in found if selects(interface)]


def list_others(placement: Placement, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes towards which a way is looked for, as they are called: first that of rank 0, at which all ranks meet."""
    return (placement.master_addr, *environ.get(_NODES, "").split())


def choose_interface(own: Iterable[str], others: Iterable[str]) -> str:
    """The interface towards the first of these nodes that is another one; "" where gloo finds it by the first of the
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
    """The addresses of this node that packets to these nodes come from; loopbacks left out. The first few nodes are
    tried: each name may cost as long as a resolver waits."""
    for other in itertools.islice(others, _TRIED):
        for address in look_up(other):
            found = ""
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((address, _ANY_PORT))
                    found = str(probe.getsockname()[0])
            if found and not is_loopback(found):
                yield found


def find_interface(address: str) -> str:
    """The interface that has this address; "" for none."""
    return next((each.name for each in _list_reachable() if address in each.addresses), "")


def look_up(name: str) -> tuple[str, ...]:
    """Addresses of a name in the order of the resolver; empty where it is not known."""
    try:
        return tuple(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except OSError:
        return ()


def _list_reachable() -> list[Interface]:
    """Interfaces that are up; the loopback left out."""
    return [each for each in list_interfaces() if each.up and each.name != "lo"]
