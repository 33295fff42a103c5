"""Checks of a node's network: interfaces that variables name, the master's address, InfiniBand ports.

Invariant: a name is looked up, nothing is connected to: that is `rollcall`. Verdicts are functions of what was read.

Sources: NCCL environment variables (NCCL_SOCKET_IFNAME: prefixes, "=" exact, "^" not these); gloo in torch
(GLOO_SOCKET_IFNAME: exact names); RFC 1122 section 3.2.1.3 on 127/8.
"""

from __future__ import annotations

from shardway.hardware.catalogue import load_links
from shardway.hardware.links import Interface, Port, list_interfaces
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView
from shardway.ranks.interface import choose_interface, list_others, look_up, select_interfaces
from shardway.ranks.meeting import is_loopback


def check_interfaces(around: MachineView) -> CheckResult:
    """Whether the interfaces that NCCL and gloo are told to use exist and are up."""
    return judge_interfaces(around, list_interfaces())


def judge_interfaces(around: MachineView, found: tuple[Interface, ...]) -> CheckResult:
    """The first variable that leaves no usable interface decides."""
    said = []
    for name, exact in (("NCCL_SOCKET_IFNAME", False), ("GLOO_SOCKET_IFNAME", True)):
        text = around.environ.get(name, "")
        if not text:
            continue
        chosen = select_interfaces(text, found, exact=exact)
        up = [each for each in chosen if each.up]
        usable = ", ".join(each.name for each in found if each.up and each.leaves_machine) or "none"
        remedy = f"unset {name}, or name one that is up here: {usable}"
        if not chosen:
            return bad(f"{name}={text}: {around.host} has no such interface", remedy)
        if not up:
            return bad(f"{name}={text}: {', '.join(each.name for each in chosen)} is down", remedy)
        names = ", ".join(each.name for each in up)
        if around.several_nodes and not any(each.leaves_machine for each in up):
            return bad(f"{name}={text}: {names} leads to no other node", remedy)
        said.append(f"{name}={text}: {names}")
    if said:
        return good("; ".join(said))
    usable = ", ".join(each.name for each in found if each.up and each.leaves_machine)
    if not usable:
        return good("only the loopback is up") if not around.several_nodes else _alone(around)
    return good(f"no variable chooses; up: {usable}")


def _alone(around: MachineView) -> CheckResult:
    remedy = (
        "in a container: start it with the host's network (podman run --network=host); else tell the site's support"
    )
    return bad(f"{around.host} has no interface that is up, and ranks are on several nodes", remedy)


def check_master(around: MachineView) -> CheckResult:
    """Whether the address at which ranks meet is known here, and is one that other nodes can use."""
    if around.placement is None:
        return unknown("this rank does not know its place")
    if around.placement.world == 1:
        return good("one rank meets nobody")
    return judge_master(around, look_up(around.placement.master_addr))


def check_hostname(around: MachineView) -> CheckResult:
    """Whether this node's own name leads to an address that others can use: gloo tells it to them."""
    if not around.several_nodes:
        return unknown("all ranks are on one node")
    addresses = look_up(around.host)
    others = list_others(around.placement, around.environ) if around.placement else ()
    return judge_hostname(around, addresses, choose_interface(addresses, others))


def judge_hostname(around: MachineView, addresses: tuple[str, ...], way: str = "") -> CheckResult:
    """gloo tells others the first address of the name, or falls back to the loopback where there is none: then the
    ranks of other nodes wait in vain. `way`: the interface that ranks of ours name to it."""
    chosen = around.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        return good(f"gloo uses {chosen}, not the name of the host")
    if way:
        own = f"{around.host} is {addresses[0]}" if addresses else f"{around.host} does not know its own name"
        return good(f"{own}; ranks of Shardway talk by {way}, and others need GLOO_SOCKET_IFNAME={way}")
    remedy = "export GLOO_SOCKET_IFNAME with the interface that joins the nodes (ip -br addr), or mend /etc/hosts"
    if not addresses:
        return bad(f"{around.host} does not know its own name, by which gloo tells others where it is", remedy)
    if is_loopback(addresses[0]):
        return bad(f"{around.host} takes its own name for {addresses[0]}, which gloo would tell others", remedy)
    return good(f"{around.host} is {addresses[0]}")


def judge_master(around: MachineView, addresses: tuple[str, ...]) -> CheckResult:
    """A loopback address leads every node to itself; the profile may ask for a suffix."""
    name = around.placement.master_addr if around.placement else ""
    if not addresses:
        remedy = "export MASTER_ADDR with a name or an IPv4 address that every node knows (getent hosts NAME)"
        return bad(f"{around.host} does not know {name}", remedy)
    first = next((each for each in addresses if ":" not in each), addresses[0])
    if around.several_nodes and is_loopback(first):
        if around.has_first_rank and name.partition(".")[0] == around.host.partition(".")[0]:
            remedy = 'network.resolve = "ipv4" in the site\'s profile, or an /etc/hosts without this line'
            return poor(f"{name} is {first} on {around.host} itself", remedy, master_address=first)
        remedy = "export MASTER_ADDR with the address of rank 0's network interface; 127.x is each node's own"
        return bad(f"{name} is {first} on {around.host}: every node would meet itself", remedy, master_address=first)
    suffix = around.site.network.host_suffix
    named = not name.replace(".", "").isdigit() and ":" not in name
    if around.several_nodes and suffix and named and not name.partition(".")[0].endswith(suffix):
        remedy = f"export MASTER_ADDR={name.partition('.')[0]}{suffix}"
        said = f"{name} is {first}: on {around.site.name} the fast network's name ends in {suffix}"
        return poor(said, remedy, master_address=first)
    if ":" in first:
        remedy = "export MASTER_ADDR with an IPv4 address; many libraries meet by IPv4 alone"
        return poor(f"{name} has no IPv4 address, only {first}", remedy, master_address=first)
    return good(name if name == first else f"{name} is {first}", master_address=first)


def check_infiniband(around: MachineView) -> CheckResult:
    """Whether InfiniBand ports are active, as many and as fast as the profile says."""
    return judge_infiniband(around, around.fast_ports)


def judge_infiniband(around: MachineView, ports: tuple[Port, ...]) -> CheckResult:
    """A node may have ports without a cable; it is short of some only where the profile says how many it uses."""
    network, active = around.site.network, [port for port in ports if port.active]
    wanted = network.adapters_per_node or 0
    down = ", ".join(f"{port.device}/{port.port} {port.state or 'unknown'}" for port in ports if not port.active)
    remedy = f"leave this node out (Slurm: --exclude={around.host}) and tell the site's support"
    if not ports:
        return _judge_no_ports(around)
    if not active:
        return bad(f"no InfiniBand port is active: {down}", remedy)
    rates = sorted((port.rate_gbit_s for port in active), reverse=True)
    said = f"{len(active)} of {len(ports)} ports active, {' '.join(f'{rate:g}' for rate in rates)} Gbit/s"
    if len(active) < wanted:
        return bad(f"{said}; the profile has {wanted}: {down or 'the others are not there'}", remedy)
    expected = _expected_gbit_s(around)
    if expected and rates[max(wanted, 1) - 1] < 0.9 * expected:
        return poor(f"{said}, where the profile has {expected:g}", remedy)
    return good(said)


def _judge_no_ports(around: MachineView) -> CheckResult:
    link = around.site.network.link or ""
    if around.several_nodes and link.startswith(("hdr", "ndr", "edr", "xdr")):
        remedy = "in a container: bind /dev/infiniband and /sys into it; otherwise leave this node out"
        return poor(f"no InfiniBand adapter is visible, and {around.site.name} has {link}", remedy)
    return unknown("no InfiniBand here")


def _expected_gbit_s(around: MachineView) -> float | None:
    link = load_links().get(around.site.network.link or "")
    rate = link.bandwidth_bytes_per_s if link else None
    return rate * 8 / 1e9 if rate else None
