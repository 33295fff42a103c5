"""The network of this machine as the kernel shows it: interfaces and InfiniBand ports.

Invariant: nothing raises for what a machine lacks. This module must not open a connection or judge what it finds.

Sources: netdevice(7) on IFF_RUNNING; Linux, Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Interface:
    """A network interface; `up`: it is switched on and has a carrier. `addresses` of IPv4 and IPv6, without a zone."""

    name: str
    up: bool
    mtu: int
    addresses: tuple[str, ...] = ()

    @property
    def leaves_machine(self) -> bool:
        """Whether it may lead to other nodes: no loopback, and none towards containers and virtual machines."""
        return self.name != "lo" and not self.name.startswith(_WITHIN)


_WITHIN = ("docker", "veth", "virbr", "br-", "cni", "podman")
"""Beginnings of interfaces that lead to containers and virtual machines."""


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter; `rate_gbit_s` is one direction, 0 for unknown."""

    device: str
    port: str
    state: str
    link_layer: str
    rate_gbit_s: float

    @property
    def active(self) -> bool:
        """Whether it carries data now."""
        return self.state == "ACTIVE"


def list_interfaces() -> tuple[Interface, ...]:
    """Every network interface of this process's network namespace, those with an address first; /sys may show those
    of another one."""
    import psutil

    try:
        found, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError:
        return ()
    names = (name for name in dict.fromkeys((*addresses, *found)) if name in found)
    return tuple(
        Interface(name, bool(found[name].isup), int(found[name].mtu), _plain(addresses.get(name, ()))) for name in names
    )


def _plain(addresses: Iterable[Any]) -> tuple[str, ...]:
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(each.address.partition("%")[0] for each in addresses if each.family in families)


def list_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """Every port of every adapter below /sys/class/infiniband, by name."""
    folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return tuple(
        Port(
            device=folder.parents[1].name,
            port=folder.name,
            state=_read(folder / "state").rpartition(": ")[2],
            link_layer=_read(folder / "link_layer"),
            rate_gbit_s=parse_rate(_read(folder / "rate")),
        )
        for folder in folders
    )


def parse_rate(text: str) -> float:
    """Gbit/s from "200 Gb/sec (4X HDR)"; 0 for anything else."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    return float(match[1]) if match else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # some drivers refuse to be read
        return ""
