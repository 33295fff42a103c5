"""Two hosts on this machine whose names and networks look like those of a site, and ranks on them.

Each host has a network, a host name and an /etc/hosts of its own. A network that `joins` carries what the hosts send
each other; any other is up as well, and loses it without a word, as a management network does that is not for jobs.

Invariant: what is made here lives in namespaces of processes that end with the context, or with whoever entered it.
Nothing of this machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import warm

RANK = Path(__file__).with_name("pretended_rank.py")
ADDRESSES = Path(__file__).parents[2] / "src/shardway/launch/shell/lib.sh"
PATIENCE_S = 60.0
"""Guards against a hang alone."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SPACES = ("--net", "--mount", "--uts")
_HOLD = """
hostname "$1"
mount --bind "$2" /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
ip link set lo up
echo made
cat > /dev/null
"""


@dataclass(frozen=True)
class Net:
    """One network: its interface on both hosts, the beginning of its addresses, and how the hosts are called on it
    ("{}i": the short name and an i; "": not at all)."""

    interface: str
    start: str
    called: str = ""
    joins: bool = False

    def address(self, host: int) -> str:
        """That of the first host (0) or the second (1)."""
        return f"{self.start}{host + 1}"


@dataclass(frozen=True)
class Look:
    """What two nodes of a site look like. `own_is_loopback`: each takes its own name for 127.0.1.1, as Debian's
    installer writes it; `bridge`: each has docker0, with the same address."""

    hosts: tuple[str, str]
    nets: tuple[Net, ...]
    own_is_loopback: bool = False
    bridge: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names by which a scheduler knows the nodes."""
        return tuple(name.partition(".")[0] for name in self.hosts)

    def hosts_file(self, own: int) -> str:
        """/etc/hosts of one of them."""
        lines = ["127.0.0.1 localhost", "::1 ip6-localhost"]
        for host, (full, node) in enumerate(zip(self.hosts, self.nodes, strict=True)):
            for net in self.nets:
                if net.called:
                    at_home = self.own_is_loopback and host == own and net.called == "{}"
                    names = {net.called.format(node), *([full] if net.called == "{}" else [])}
                    lines.append(" ".join(["127.0.1.1" if at_home else net.address(host), *sorted(names)]))
        return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Hosts:
    """The two hosts, by the processes that hold them."""

    look: Look
    holders: tuple[int, int]

    def meet(self, suffix: str, resolve: bool) -> dict[str, str]:
        """What the job script exports on the first node, by its own function."""
        script = (
            '. "$1"; say() { echo "$*" >&2; }; job=17; nodes=("${@:4}"); meet "$2" "$3"; '
            'printf "%s\\n" "$MASTER_ADDR" "$MASTER_PORT" "$SHARDWAY_NODES"'
        )
        words = ("bash", "-euc", script, "meet", str(ADDRESSES), suffix, "yes" if resolve else "no", *self.look.nodes)
        done = subprocess.run(
            (*self._enter(0), *words), capture_output=True, text=True, timeout=PATIENCE_S, env={"PATH": SYSTEM_PATH}
        )
        assert done.returncode == 0, done.stderr
        address, port, nodes = done.stdout.splitlines()
        return {"MASTER_ADDR": address, "MASTER_PORT": port, "SHARDWAY_NODES": nodes}

    def run_ranks(
        self, environs: Sequence[Mapping[str, str]], meet_s: float = 20.0, talk_s: float = 20.0
    ) -> list[dict[str, Any]]:
        """A rank on each host with these variables: what each of them has to say. They wait so long for the first to
        be there, and for each other from then on."""
        with contextlib.ExitStack() as stack:
            with warm.starts():
                ranks = [
                    stack.enter_context(_start_rank(holder, environ, (meet_s, talk_s)))
                    for holder, environ in zip(self.holders, environs, strict=True)
                ]
            said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
        assert all(out.strip() for out, _ in said), said
        return [json.loads(out.splitlines()[-1]) for out, _ in said]

    def _enter(self, host: int) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self.holders[host]), *_SPACES)


@contextlib.contextmanager
def _start_rank(
    holder: int, environ: Mapping[str, str], waits_s: tuple[float, float]
) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, str(RANK), str(holder), *map(str, waits_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env={**os.environ, **environ}, stdout=pipe, stderr=pipe, text=True) as rank:
        try:
            yield rank
        finally:
            rank.kill()


@contextlib.contextmanager
def two_hosts(look: Look, folder: Path) -> Iterator[Hosts]:
    """Both hosts, as long as the context lasts; skips where this machine lets nobody have them."""
    with contextlib.ExitStack() as stack:
        holders = []
        for own, name in enumerate(look.hosts):
            file = folder / f"hosts-{own}"
            file.write_text(look.hosts_file(own), encoding="utf-8")
            holders.append(stack.enter_context(_hold(name, file)))
        hosts = Hosts(look, (holders[0], holders[1]))
        _lay_cables(look, hosts.holders)
        yield hosts


@contextlib.contextmanager
def _hold(name: str, hosts_file: Path) -> Iterator[int]:
    """A process in namespaces of its own, which ends with this one: `cat` reads to the end of its stdin."""
    words = ("unshare", *_SPACES, "--propagation", "private", "sh", "-euc", _HOLD, "hold", name, str(hosts_file))
    try:
        holder = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        pytest.skip(f"this machine has no unshare: {error}")
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "made\n":
            pytest.skip(f"this machine lets nobody have networks of their own: {holder.stderr.read().strip()[-300:]}")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _lay_cables(look: Look, holders: tuple[int, int]) -> None:
    """Interfaces that are up on both hosts, with their addresses."""
    joins = {net.interface: net.joins for net in look.nets}
    # With unlike numbers the kernel takes note of a carrier at once, and not within a second.
    first = [
        f"link add {name} index {10 + number} type veth peer name {name} index {30 + number} netns {holders[1]}"
        for number, name in enumerate(joins)
    ]
    both: list[list[str]] = [first, []]
    for host, lines in enumerate(both):
        for net in look.nets:
            bits = "64 nodad" if ":" in net.start else "24"
            length, *rest = bits.split()
            lines.append(" ".join(["address add", f"{net.address(host)}/{length}", "dev", net.interface, *rest]))
        # Nobody says which interface card has an address: packets leave, and are for none at the other end.
        lines += [f"link set {name} up arp {'on' if joined else 'off'}" for name, joined in joins.items()]
        if look.bridge:
            lines += [
                "link add docker0 type bridge",
                "address add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
            ]
        done = _ip(holders[host], ("-batch", "-"), "\n".join([*lines, ""]))
        if done.returncode:
            pytest.skip(f"this machine cannot join networks: {done.stderr.strip()[-300:]}")
    deadline = time.monotonic() + PATIENCE_S
    for holder in holders:
        while _ip(holder, ("-o", "link", "show", "type", "veth")).stdout.count(" state UP ") < len(joins):
            assert time.monotonic() < deadline, "the interfaces stay down"
            time.sleep(0.02)


def _ip(holder: int, words: Sequence[str], given: str = "") -> subprocess.CompletedProcess[str]:
    enter = ("nsenter", "--target", str(holder), "--net", "ip")
    return subprocess.run((*enter, *words), input=given, capture_output=True, text=True, timeout=PATIENCE_S)
