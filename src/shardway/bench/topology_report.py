"""What each link of a node should be, which one is wrong, which pairs are slowest: judged from its topology alone.

A link is wrong where it contradicts its own kind on this node (the majority of pairs of the same accelerator) or the
catalogue. It is uneven where it is slower than others and some machines are built so. A machine that is built without
NVLink has nothing wrong; its slowest pairs are named all the same.

Invariants:
- Without torch. A rate that neither the catalogue, the driver nor the width of a PCIe link gives is None, shown as n/a.
- Every finding has what was found; one that is wrong or uneven has the command that repairs it or looks further.
- Rates are bytes per second in one direction.

Sources: NVIDIA, "NCCL troubleshooting" (ACS and IOMMU); NVIDIA Fabric Manager User Guide; nvidia-smi(1); NVIDIA, "Xid
Errors" (74: NVLink, 79: a GPU that left the bus); PCI Express Base Specification on link training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Literal

from shardway.bench.bandwidth import format_rate
from shardway.bench.comm_report import LinkLimit
from shardway.bench.topology import (
    NVLINK,
    P2P_REASONS,
    PATHS,
    SYS,
    XGMI,
    AdapterPlace,
    NodeTopology,
    PairPath,
    TopologyDevice,
    list_pairs,
    parse_cpus,
)
from shardway.errors import list_some
from shardway.hardware.catalogue import Accelerator, Link, find_accelerator, load_accelerators, load_links
from shardway.sites.schema import CPU, SiteProfile
from shardway.units import render_plural

Pair = tuple[int, int]
Level = Literal["wrong", "uneven", "note"]
_FAST = (NVLINK, XGMI)
_SLOW_SHARE = 0.6
"""Below this part of what a path should reach, or of the median of its kind, a measured copy is slow."""


@dataclass(frozen=True)
class LinkFinding:
    """One thing found: `what` it is, what it `should` be, and the command that repairs it or looks further (`remedy`);
    the pairs, devices and adapters it is about."""

    level: Level
    what: str
    should: str = ""
    remedy: str = ""
    pairs: tuple[Pair, ...] = ()
    devices: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlowestPairs:
    """The pairs with the farthest path, what it allows (None where it is not known), and the groups of devices that are
    nearer to each other."""

    label: str
    pairs: tuple[Pair, ...]
    limit: LinkLimit | None
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CopyRates:
    """Measured copies: bytes per second and seconds before the first byte from one device to another, and bytes per
    second from the host's pinned memory to a device."""

    pairs: Mapping[Pair, float] = field(default_factory=dict)
    latencies: Mapping[Pair, float] = field(default_factory=dict)
    from_host: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TopologyReport:
    """A node with what was found. `slowest` is None where no pair is slower than another."""

    topology: NodeTopology
    findings: tuple[LinkFinding, ...]
    slowest: SlowestPairs | None
    site: SiteProfile | None = None
    copies: CopyRates | None = None

    @property
    def bad_pairs(self) -> frozenset[Pair]:
        """Pairs that are wrong or uneven."""
        return frozenset(pair for each in self.findings if each.level != "note" for pair in each.pairs)


def judge_topology(
    topology: NodeTopology, site: SiteProfile | None = None, copies: CopyRates | None = None
) -> TopologyReport:
    """Everything that can be said of a node; of the site's profile the number of devices, their link and the adapters
    are compared."""
    found = [
        *_judge_presence(topology, site),
        *_judge_fast_links(topology, site),
        *_judge_link_states(topology, site),
        *_judge_pcie(topology),
        *_judge_far_neighbours(topology),
        *_judge_peer_access(topology),
        *_judge_adapters(topology, site),
        *_judge_binding(topology),
        *(_judge_copies(topology, site, copies) if copies is not None else ()),
        *(LinkFinding("note", note) for note in topology.notes),
    ]
    order: tuple[Level, ...] = ("wrong", "uneven", "note")
    findings = tuple(sorted(found, key=lambda each: order.index(each.level)))
    return TopologyReport(topology, findings, find_slowest(topology, site), site, copies)


# --- what a path allows


def find_part(topology: NodeTopology) -> Accelerator | None:
    """The catalogue's part, where all devices are the same one."""
    names = {device.name for device in topology.devices}
    return find_accelerator(names.pop()) if len(names) == 1 and "" not in names else None


def find_link(device: TopologyDevice, site: SiteProfile | None) -> Link | None:
    """The link of a device by the site's profile, else by the catalogue for its driver's name, or for the site's
    accelerator where no name is known."""
    stated = load_accelerators().get(site.node.accelerator or "") if site is not None else None
    part = find_accelerator(device.name) if device.name else stated
    key = site.node.link if site is not None and site.node.link else part.link if part is not None else None
    return load_links().get(key or "")


def rate_pair(topology: NodeTopology, pair: Pair, path: PairPath, site: SiteProfile | None = None) -> LinkLimit | None:
    """What a path between two devices allows; through PCIe at most, since it is shared and crosses the host."""
    ends = [topology.device(index) for index in pair]
    links = [find_link(device, site) for device in ends]
    link = links[0] if links[0] == links[1] else None
    if path.kind == NVLINK:
        return _rate_nvlinks(path.links, link, ends)
    if path.kind == XGMI:
        rate = link.peer_bandwidth_bytes_per_s if link is not None and link.key.startswith("xgmi") else None
        return LinkLimit(rate, link.name) if rate and link is not None and path.hops == 1 else None
    return _rate_pcie(link, ends)


def _rate_nvlinks(count: int, link: Link | None, ends: Sequence[TopologyDevice]) -> LinkLimit | None:
    if link is not None and link.key.startswith("nvlink"):
        if link.links and link.bandwidth_bytes_per_s:
            return LinkLimit(count * link.bandwidth_bytes_per_s / link.links, link.name)
        if link.peer_bandwidth_bytes_per_s:
            return LinkLimit(link.peer_bandwidth_bytes_per_s, link.name)
    rates = [device.link_rate for device in ends if device.link_rate]
    return LinkLimit(count * min(rates), "NVLink, as the driver rates it") if len(rates) == len(ends) else None


def _rate_pcie(link: Link | None, ends: Sequence[TopologyDevice]) -> LinkLimit | None:
    most = [device.pcie_most for device in ends if device.pcie_most is not None]
    if len(most) == len(ends):
        slower = min(most, key=lambda each: each.bytes_per_s or 0.0)
        return LinkLimit(slower.bytes_per_s, str(slower)) if slower.bytes_per_s else None
    if link is not None and link.key.startswith("pcie") and link.bandwidth_bytes_per_s:
        return LinkLimit(link.bandwidth_bytes_per_s, link.name)
    return None


def render_limit(limit: LinkLimit | None) -> str:
    """ "300 GB/s each way (NVLink 3 with NVSwitch)"; "n/a" for None."""
    return "n/a" if limit is None else f"{format_rate(limit.rate)} GB/s each way ({limit.name})"


# --- the slowest pairs


def find_slowest(topology: NodeTopology, site: SiteProfile | None = None) -> SlowestPairs | None:
    """The pairs whose path is farthest; None where all are alike."""
    known = dict(list_pairs(topology))
    if len({path.label for path in known.values()}) < 2:
        return None
    farthest = max(path.distance for path in known.values())
    pairs = tuple(pair for pair, path in known.items() if path.distance == farthest)
    path = known[pairs[0]]
    near = {pair for pair, each in known.items() if each.kind in _FAST}
    if not near or len(near) == len(known):
        near = {pair for pair, each in known.items() if each.distance < farthest}
    groups = tuple(group_near(sorted(device.index for device in topology.devices), near))
    return SlowestPairs(path.label, pairs, rate_pair(topology, pairs[0], path, site), groups)


def group_near(devices: Sequence[int], near: Iterable[Pair]) -> Iterator[tuple[int, ...]]:
    """Sets of devices in which each is near to each, in order of their first device; those of two and more."""
    pairs, left = set(near), list(devices)
    while left:
        group: list[int] = []
        for each in left:
            if all((other, each) in pairs for other in group):
                group.append(each)
        left = [each for each in left if each not in group]
        if len(group) > 1:
            yield tuple(group)


# --- what is here at all


def _judge_presence(topology: NodeTopology, site: SiteProfile | None) -> Iterator[LinkFinding]:
    count, here = len(topology.devices), render_plural(len(topology.devices), "device")
    if topology.hidden:
        lost = ", ".join(topology.hidden)
        yield LinkFinding(
            "uneven",
            f"{render_plural(len(topology.hidden), 'device')} on the PCI bus that the driver does not list: {lost}",
            "every device of the bus, unless this container was given fewer",
            "dmesg | grep -i xid (79: it left the bus); leave this node out and tell the site's support",
        )
    for device in topology.devices:
        if device.slices:
            slices = render_plural(device.slices, "slice")
            yield LinkFinding("note", f"{device.label} is cut into {slices} (MIG), which do not reach other devices")
    if site is None:
        return
    wanted, part = site.node.accelerators_per_node, find_part(topology)
    if wanted is not None and count < wanted:
        yield LinkFinding(
            "uneven",
            f"{here} here, and {site.name} has {wanted} a node",
            f"{render_plural(wanted, 'device')}, unless the job was given fewer",
            "request the whole node (--gpus-per-node, --exclusive); else leave it out and tell the site's support",
        )
    key = site.node.accelerator
    expected = load_accelerators().get(key) if key and key != CPU else None
    if expected is not None and part is not None and part.key != expected.key:
        what = f"the devices are {part.name}, and {site.name} has {expected.name}"
        yield LinkFinding("note", f"{what}: is this one of its nodes?")


# --- NVLink and XGMI between pairs


def _judge_fast_links(topology: NodeTopology, site: SiteProfile | None) -> Iterator[LinkFinding]:
    """Pairs with fewer links than the other pairs of the same accelerator, or none."""
    for name in dict.fromkeys(device.name for device in topology.devices):
        alike = [device.index for device in topology.devices if device.name == name]
        found = list(_compare_with_majority(topology, alike, site))
        if not found:
            for island in _find_islands(topology, alike):
                found += _compare_with_majority(topology, island, site)
        found = found or list(_compare_totals(topology, alike, site))
        yield from found
        named = {index for each in found for index in each.devices}
        yield from _compare_with_catalogue(topology, alike, named, site)


def _pairs_of(topology: NodeTopology, devices: Sequence[int]) -> dict[Pair, PairPath]:
    pairs = {pair: topology.pair(*pair) for pair in combinations(devices, 2)}
    return {pair: path for pair, path in pairs.items() if path is not None}


def _find_islands(topology: NodeTopology, devices: Sequence[int]) -> Iterator[list[int]]:
    """Devices that NVLink or XGMI joins, directly or over others; all of them together are none."""
    left = list(devices)
    while left:
        island, fresh = [left[0]], [left[0]]
        while fresh:
            each = fresh.pop()
            for other in left:
                path = topology.pair(each, other) if other not in island else None
                if path is not None and path.kind in _FAST:
                    island.append(other)
                    fresh.append(other)
        left = [each for each in left if each not in island]
        if 2 < len(island) < len(devices):
            yield sorted(island)


def _compare_with_majority(
    topology: NodeTopology, devices: Sequence[int], site: SiteProfile | None
) -> Iterator[LinkFinding]:
    """Where more than half of the pairs have the same links, the others lack some."""
    pairs = _pairs_of(topology, devices)
    counts = Counter(_kind_of(path) for path in pairs.values() if path.kind in _FAST)
    if not counts or len(pairs) < 3:
        return
    usual, count = counts.most_common(1)[0]
    if count * 2 <= len(pairs):
        return
    of_usual = next(path for path in pairs.values() if _kind_of(path) == usual)
    bad = {pair: path for pair, path in pairs.items() if path.kind not in _FAST or path.links < of_usual.links}
    apart = Counter(index for pair, path in bad.items() if path.kind not in _FAST for index in pair)
    if len(apart) == len(devices) and len(set(apart.values())) == 1 and apart[devices[0]] > 1:
        return  # a cube, in which each device is joined to as many others
    limit = rate_pair(topology, (devices[0], devices[1]), of_usual, site)
    should = usual if limit is None else f"{usual}, {render_limit(limit)}"
    cut = [each for each in devices if sum(each in pair for pair in bad) == len(devices) - 1]
    for device in cut:
        mine = tuple(pair for pair in bad if device in pair)
        paths = " and ".join(dict.fromkeys(bad[pair].label for pair in mine))
        what = f"GPU{device} has {paths} to every other device, and {count} of {len(pairs)} pairs have {usual}"
        yield LinkFinding("wrong", what, should, _repair_links(topology, (device,)), mine, (device,))
    for pair, path in bad.items():
        if set(pair) & set(cut):
            continue
        what = f"{_name_pair(pair)} have {path.label}, and {count} of {len(pairs)} pairs have {usual}"
        yield LinkFinding("wrong", what, should, _repair_links(topology, pair), (pair,), pair)


def _kind_of(path: PairPath) -> str:
    """NVLinks are compared by their number; the XGMI links of a module's dies differ by design."""
    return path.label if path.kind == NVLINK else path.kind


def _compare_totals(topology: NodeTopology, devices: Sequence[int], site: SiteProfile | None) -> Iterator[LinkFinding]:
    """Where pairs differ by design (rings, cubes), devices have the same number of links in all."""
    pairs = {pair: path for pair, path in _pairs_of(topology, devices).items() if path.kind == NVLINK}
    totals = {each: sum(path.links for pair, path in pairs.items() if each in pair) for each in devices}
    most = max(totals.values(), default=0)
    none = [each for each in devices if not totals[each]]
    # one device without a partner is no fault; two may be a pair that lost its bridge
    lacking = [each for each in devices if totals[each] < most and (totals[each] or len(none) == 2)]
    if len(lacking) < 2:
        return
    link = find_link(topology.device(devices[0]), site)
    level: Level = "wrong" if link is not None and link.links == most else "uneven"
    full = [each for each in devices if totals[each] == most]
    for pair in combinations(lacking, 2):
        path = topology.pair(*pair)
        links = path.links if path is not None else 0
        if path is None or links >= max(each.links for each in pairs.values()):
            continue
        if len(lacking) > 2 and not links and any(set(other) <= set(lacking) for other in pairs):
            continue  # another pair of these has a link that may be the worse half of two
        what = (
            f"{_name_pair(pair)} have {path.label}: {totals[pair[0]]} and {totals[pair[1]]} NVLinks in all, where "
            f"{_name_devices(full)} have {most}"
        )
        should = f"{most} NVLinks each" + ("" if level == "wrong" else ", unless the machine is built so")
        yield LinkFinding(level, what, should, _repair_links(topology, pair), (pair,), pair)


def _compare_with_catalogue(
    topology: NodeTopology, devices: Sequence[int], named: Container[int], site: SiteProfile | None
) -> Iterator[LinkFinding]:
    """Devices with NVLink on their board of which all lack it, some have none (those not `named` yet), or all have too
    few."""
    link, pairs = find_link(topology.device(devices[0]), site), _pairs_of(topology, devices)
    if link is None or not _is_on_board(link) or not pairs or topology.pcie_alone:
        return
    every = tuple(pairs)
    if all(path.kind not in _FAST for path in pairs.values()):
        yield LinkFinding(
            "wrong",
            f"no pair has NVLink, which these devices have by the catalogue ({link.name})",
            link.name,
            "systemctl status nvidia-fabricmanager; nvidia-smi nvlink -s; in a virtual machine or a container: whether "
            "NVLink is passed through",
            every,
            tuple(devices),
        )
        return
    for device in devices:
        mine = tuple(pair for pair in pairs if device in pair)
        if device not in named and all(pairs[pair].kind not in _FAST for pair in mine):
            what = f"GPU{device} has no NVLink to another device, and has it by the catalogue ({link.name})"
            yield LinkFinding("wrong", what, link.name, _repair_links(topology, (device,)), mine, (device,))
    counts = {path.links for path in pairs.values()}
    count, others = max(counts), len(devices) - 1
    is_switched = link.links is not None and count * others > link.links
    if len(counts) == 1 and is_switched and link.links is not None and count < link.links:
        should = f"NV{link.links}, {render_limit(_rate_nvlinks(link.links, link, ()))}"
        what = f"every pair has NV{count}, and these devices have {link.links} NVLinks by the catalogue"
        yield LinkFinding("wrong", what, should, _repair_links(topology, devices), every, tuple(devices))


def _is_on_board(link: Link) -> bool:
    """Whether it needs no bridge between cards, which may be absent."""
    return link.key.startswith("nvlink") and not link.key.endswith("bridge")


def _repair_links(topology: NodeTopology, devices: Sequence[int]) -> str:
    if any(path.kind == XGMI for path in topology.pairs.values()):
        return "rocm-smi --showtopo --showxgmierr; leave this node out and tell the site's support"
    them = ",".join(map(str, devices))
    return (
        f"nvidia-smi nvlink -s -i {them} (which links are inactive), nvidia-smi nvlink -e -i {them} (errors), dmesg | "
        "grep -i xid (74: NVLink). Administrators: drain the node, systemctl restart nvidia-fabricmanager (with "
        f"NVSwitch), nvidia-smi -r -i {them}"
    )


# --- the state of single links


def _judge_link_states(topology: NodeTopology, site: SiteProfile | None) -> Iterator[LinkFinding]:
    for device in topology.devices:
        if device.fabric in ("in progress", "not started"):
            yield LinkFinding(
                "wrong",
                f"the registration of {device.label} at the NVSwitches is {device.fabric}",
                "completed",
                "systemctl status nvidia-fabricmanager (with NVLink racks: nvidia-imex); nvidia-smi -q -i "
                f"{device.index} | grep -A 3 Fabric",
                devices=(device.index,),
            )
        if not device.inactive or device.nvlinks is None:
            continue
        alike = [each.nvlinks or 0 for each in topology.devices if each.name == device.name]
        link = find_link(device, site)
        rated = link.links or 0 if link is not None and _is_on_board(link) else 0
        wanted = max(rated, *alike)
        if device.nvlinks < wanted:
            which = list_some([str(number) for number in device.inactive], 6)
            noun = "NVLink" if len(device.inactive) == 1 else "NVLinks"
            yield LinkFinding(
                "wrong",
                f"{noun} {which} of {device.label} inactive: {device.nvlinks} of {wanted} are active",
                f"{wanted} active NVLinks",
                _repair_links(topology, (device.index,)),
                devices=(device.index,),
            )


# --- PCIe


def _judge_pcie(topology: NodeTopology) -> Iterator[LinkFinding]:
    idle = [
        device
        for device in topology.devices
        if device.pcie is not None
        and device.pcie_most is not None
        and device.pcie.generation < device.pcie_most.generation
    ]
    for device in topology.devices:
        now, most = device.pcie, device.pcie_most
        if now is None or most is None:
            continue
        is_narrow, is_slow = now.lanes < most.lanes, device in idle and device.busy
        if is_narrow or is_slow:
            yield LinkFinding(
                "wrong",
                f"{device.label} runs at {now}, its slot and the device allow {most}",
                _render_pcie(topology, device),
                f"{_look_at_slot(device)}; reseat the card or its riser, and look at the slot's lanes in the BIOS",
                devices=(device.index,),
            )
        alike = [each.pcie_most for each in topology.devices if each.name == device.name and each.pcie_most is not None]
        usual, count = Counter(alike).most_common(1)[0]
        if count * 2 > len(alike) and (most.bytes_per_s or 0) < (usual.bytes_per_s or 0):
            yield LinkFinding(
                "wrong",
                f"{device.label} is in a slot of {most}, {count} of its kind in one of {usual}",
                str(usual),
                f"{_look_at_slot(device)}; another slot, or its setting in the BIOS",
                devices=(device.index,),
            )
    resting = [device for device in idle if not device.busy]
    if resting:
        first = resting[0]
        yield LinkFinding(
            "note",
            f"{_name_devices([device.index for device in resting])} at {first.pcie} of {first.pcie_most}: links slow "
            "down when idle; look again under load",
            remedy="nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv",
            devices=tuple(device.index for device in resting),
        )


def _look_at_slot(device: TopologyDevice) -> str:
    return f"sudo lspci -vv -s {device.bus or 'BUS_ID'} | grep -E 'LnkCap|LnkSta'"


def _render_pcie(topology: NodeTopology, device: TopologyDevice) -> str:
    rate = device.pcie_most.bytes_per_s if device.pcie_most is not None else None
    return str(device.pcie_most) + (f", {format_rate(rate)} GB/s each way" if rate else "")


def _judge_far_neighbours(topology: NodeTopology) -> Iterator[LinkFinding]:
    """SYS is the path between sockets, so within one NUMA node it is wrong, or hidden by a virtual machine."""
    near = {
        pair: path
        for pair, path in topology.pairs.items()
        if topology.device(pair[0]).place and topology.device(pair[0]).place == topology.device(pair[1]).place
        if path.kind not in _FAST
    }
    far = tuple(sorted(pair for pair, path in near.items() if path.kind == SYS))
    if far and len(far) < len(near):
        usual = Counter(path.label for path in near.values() if path.kind != SYS).most_common(1)[0][0]
        for pair in far:
            yield LinkFinding(
                "wrong",
                f"{_name_pair(pair)} have SYS, and both are at {topology.device(pair[0]).place}",
                f"{usual}, as other pairs of one NUMA node",
                "lspci -tv (the root of each), cat /sys/bus/pci/devices/*/numa_node; NUMA in the BIOS (NPS, SNC)",
                (pair,),
                pair,
            )
    elif far:
        places = ", ".join(dict.fromkeys(topology.device(pair[0]).place for pair in far))
        yield LinkFinding(
            "note",
            f"every pair at {places} has SYS: a virtual machine may hide how they are joined (NCCL_TOPO_FILE has it "
            "where the provider ships one)",
            pairs=far,
        )


# --- access of one device to another's memory


def _judge_peer_access(topology: NodeTopology) -> Iterator[LinkFinding]:
    stated = {pair: path.p2p for pair, path in list_pairs(topology) if path.p2p}
    off = {pair: code for pair, code in stated.items() if code not in ("OK", "U")}
    on = {topology.pairs[pair].label for pair, code in stated.items() if code == "OK"}
    for code in dict.fromkeys(off.values()):
        pairs = tuple(pair for pair, each in off.items() if each == code)
        paths = [topology.pairs[pair] for pair in pairs]
        is_wrong = code == "DR" or any(path.kind in _FAST or path.label in on for path in paths)
        is_wrong = is_wrong or (code == "CNS" and find_part(topology) is not None)  # GeForce cards have none
        yield LinkFinding(
            "wrong" if is_wrong else "note",
            f"peer-to-peer is off between {_name_pairs(pairs)}: {P2P_REASONS[code]}; NCCL copies through the host's "
            "memory",
            "on" if is_wrong else "",
            _P2P_REMEDIES.get(code, _ACS) if is_wrong else "",
            pairs if is_wrong else (),
        )


_ACS = (
    "nvidia-smi topo -p2p r; sudo lspci -vvv | grep ACSCtl (SrcValid+: ACS sends copies over the CPU). Administrators: "
    "IOMMU off or iommu=pt, ACS off in the BIOS, or setpci -s BRIDGE ECAP_ACS+6.w=0 at each boot"
)
_P2P_REMEDIES = {"DR": "grep -r RmForceDisableP2P /etc/modprobe.d; cat /proc/driver/nvidia/params"}


# --- network adapters


def _judge_adapters(topology: NodeTopology, site: SiteProfile | None) -> Iterator[LinkFinding]:
    adapters = [each for each in topology.adapters if each.has_rdma]
    yield from _judge_ports(adapters, site)
    placed = [each for each in adapters if each.paths]
    if not placed:
        return
    far = [each for each in placed if each.nearest[0] == SYS]
    near = [each for each in placed if each.nearest[0] != SYS]
    if far and not near:
        yield LinkFinding(
            "note",
            f"{_name_adapters(far)}: on another socket than every device; each copy to the network crosses it",
            remedy="lspci -tv; a slot of the devices' socket, if the adapter can be moved",
            adapters=tuple(each.name for each in far),
        )
    elif far:
        names = ",".join(each.name for each in far)
        yield LinkFinding(
            "note",
            f"{_name_adapters(far)}: on another socket than every device, as those for storage often are",
            remedy=f"export NCCL_IB_HCA=^{names} if NCCL uses them",
            adapters=tuple(each.name for each in far),
        )
    yield from _compare_nearest(topology, placed)


def _compare_nearest(topology: NodeTopology, adapters: Sequence[AdapterPlace]) -> Iterator[LinkFinding]:
    """Each device's nearest kind of path to an adapter, and how many adapters it has there."""
    has: dict[int, tuple[str, int]] = {}
    for device in topology.devices:
        kinds = [each.paths[device.index] for each in adapters if device.index in each.paths]
        if len(kinds) == len(adapters):
            nearest = min(kinds, key=PATHS.index)
            # beyond a switch all adapters of a socket are alike, and which of them are used is not known
            count = kinds.count(nearest) if PATHS.index(nearest) <= PATHS.index("PXB") else 1
            has[device.index] = nearest, count
    best = min(has.values(), key=lambda each: (PATHS.index(each[0]), -each[1]), default=("", 0))
    usual = [index for index, each in has.items() if each == best]
    behind = {index: each for index, each in has.items() if each != best}
    if len(usual) < len(behind):
        return
    for each in dict.fromkeys(behind.values()):
        devices = tuple(index for index, other in behind.items() if other == each)
        is_odd = len(usual) > len(behind)  # half and half is how machines with few adapters are built
        yield LinkFinding(
            "uneven" if is_odd else "note",
            f"nearest adapter of {_name_devices(devices)}: {_render_nearest(each)}; of {_name_devices(usual)}: "
            f"{_render_nearest(best)}",
            f"{_render_nearest(best)}, unless the machine is built so" if is_odd else "",
            "ls -l /sys/class/infiniband (which adapters are here), lspci -tv (where)" if is_odd else "",
            devices=devices,
        )


def _render_nearest(nearest: tuple[str, int]) -> str:
    kind, count = nearest
    return f"{count} at {kind}" if count > 1 else kind


def _judge_ports(adapters: Sequence[AdapterPlace], site: SiteProfile | None) -> Iterator[LinkFinding]:
    stated = [each for each in adapters if each.state]
    fast = [each for each in stated if each.layer == "InfiniBand"] or stated
    active, down = [each for each in fast if each.state == "ACTIVE"], [each for each in fast if each.state != "ACTIVE"]
    wanted = site.network.adapters_per_node if site is not None else None
    names = ",".join(each.name for each in active)
    if down and active:
        is_short = wanted is not None and len(active) < wanted
        said = f", and {site.name} has {wanted} a node" if is_short and site is not None else ""
        yield LinkFinding(
            "wrong" if is_short else "note",
            f"{_name_adapters(down)}: {down[0].state.lower()}, {len(active)} others are active{said}",
            f"{wanted} active adapters" if is_short else "",
            f"ibstat {down[0].name}; its cable and switch port; until then export NCCL_IB_HCA={names}",
            adapters=tuple(each.name for each in down),
        )
    rates = Counter(each.rate_gbit_s for each in active if each.rate_gbit_s)
    if rates and fast[0].layer == "InfiniBand":
        usual = max(rates, key=lambda rate: (rates[rate], rate))
        for each in active:
            if 0 < each.rate_gbit_s < usual:
                yield LinkFinding(
                    "wrong",
                    f"{each.name} runs at {each.rate_gbit_s:g} Gb/s, the others at {usual:g}",
                    f"{usual:g} Gb/s ({format_rate(usual / 8 * 1e9)} GB/s) each way",
                    f"ibstat {each.name}; mlxlink -d {each.name} (its cable). If it belongs to another network: leave "
                    "it out with NCCL_IB_HCA",
                    adapters=(each.name,),
                )


# --- this process


def _judge_binding(topology: NodeTopology) -> Iterator[LinkFinding]:
    """Whether this rank's device (all devices outside of a launch) is at the CPUs that this process may use."""
    if topology.bound is None or len(topology.numa) < 2:
        return
    away = [
        device
        for device in topology.devices
        if topology.own in (None, device.index)
        if device.numa is not None and device.numa in topology.numa
        if not topology.bound & parse_cpus(topology.numa[device.numa])
    ]
    here = [node for node, cpus in topology.numa.items() if topology.bound & parse_cpus(cpus)]
    if not away or not here:
        return
    node = away[0].numa
    yield LinkFinding(
        "wrong" if topology.own is not None else "note",
        f"this process may use CPUs of NUMA {', '.join(map(str, here))}, and {_name_devices([d.index for d in away])} "
        f"{'is' if len(away) == 1 else 'are'} at NUMA {', '.join(dict.fromkeys(str(d.numa) for d in away))}",
        "CPUs and memory of the device's NUMA node",
        f"numactl --cpunodebind={node} --membind={node} ...; srun --cpu-bind=map_ldom:{_list_numa(topology)} "
        "(--gpu-bind=closest hides the neighbours' GPUs from a rank)",
        devices=tuple(device.index for device in away),
    )


def _list_numa(topology: NodeTopology) -> str:
    """The NUMA node of each device, as srun takes them for the ranks of a node."""
    return ",".join("0" if device.numa is None else str(device.numa) for device in topology.devices)


# --- measured copies


def _judge_copies(topology: NodeTopology, site: SiteProfile | None, copies: CopyRates) -> Iterator[LinkFinding]:
    for (source, target), rate in copies.pairs.items():
        pair = (min(source, target), max(source, target))
        path = topology.pair(*pair)
        if path is None:
            continue
        limit = rate_pair(topology, pair, path, site)
        alike = [
            other
            for (first, second), other in copies.pairs.items()
            if (each := topology.pair(first, second)) is not None and each.label == path.label
        ]
        usual = median(alike)
        is_little = limit is not None and path.kind in _FAST and rate < _SLOW_SHARE * limit.rate
        if is_little or (len(alike) > 2 and rate < _SLOW_SHARE * usual):
            yield LinkFinding(
                "wrong",
                f"GPU{source} to GPU{target} copies {format_rate(rate)} GB/s over {path.label}, the median of its "
                f"kind is {format_rate(usual)}",
                render_limit(limit),
                _repair_links(topology, pair) if path.kind in _FAST else _ACS,
                (pair,),
                pair,
            )
    usual_host = median(copies.from_host.values()) if copies.from_host else 0.0
    for index, rate in copies.from_host.items():
        if len(copies.from_host) > 2 and rate < _SLOW_SHARE * usual_host:
            device = topology.device(index)
            yield LinkFinding(
                "wrong",
                f"the host copies {format_rate(rate)} GB/s to {device.label}, the median is {format_rate(usual_host)}",
                _render_pcie(topology, device) if device.pcie_most is not None else "n/a",
                f"nvidia-smi -q -i {index} | grep -A 12 'GPU Link Info' under load; bind to NUMA {device.numa}",
                devices=(index,),
            )


# --- names


def _name_pair(pair: Pair) -> str:
    return f"GPU{pair[0]} and GPU{pair[1]}"


def _name_pairs(pairs: Sequence[Pair]) -> str:
    return list_some([f"GPU{first}-GPU{second}" for first, second in pairs], 4)


def _name_devices(devices: Sequence[int]) -> str:
    return list_some([f"GPU{index}" for index in devices], 8)


def _name_adapters(adapters: Sequence[AdapterPlace]) -> str:
    return list_some([each.name for each in adapters], 6)
