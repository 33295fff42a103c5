"""How the accelerators and network adapters of this machine are joined: NVML, rocm-smi and the kernel's lists.

Invariants:
- Nothing here raises for what a machine lacks or a driver refuses; that is None, empty or absent, and `notes` says why
  a library could not be used.
- SHARDWAY_NVML names a module in place of pynvml, and `root` stands for "/", so that a test has a machine of its own.

Sources: NVML API Reference Guide ("Device Queries", "NvLink Methods", "Fabric"); Linux, Documentation/ABI:
testing/sysfs-bus-pci (numa_node, local_cpulist), stable/sysfs-devices-node, testing/sysfs-class-net.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardway.bench.topology import (
    NVLINK,
    SYS,
    AdapterPlace,
    NodeTopology,
    PairPath,
    PcieLink,
    TopologyDevice,
    parse_cpus,
    read_recorded,
)
from shardway.errors import SiteError
from shardway.hardware.command import run_command
from shardway.hardware.limits import read_or_empty
from shardway.hardware.probe import Port, count_amd, has_nvidia_driver, list_ports
from shardway.ranks.launcher import find_job, find_placement
from shardway.telemetry.devices import NVML_VARIABLE, find_visible

_NVIDIA, _ACCELERATOR_CLASSES = "0x10de", ("0x0300", "0x0302")
_BUSY_PERCENT = 50
_ROCM = ("rocm-smi", "--showtopo", "--showproductname")


def read_machine(environ: Mapping[str, str], root: Path = Path("/"), limit_s: float = 20.0) -> NodeTopology:
    """This machine; asks rocm-smi, where there are AMD devices, for at most `limit_s` seconds."""
    found = NodeTopology(socket.gethostname())
    if environ.get(NVML_VARIABLE) or has_nvidia_driver(root):
        found = _read_nvml(found, environ, root)
    if not found.devices and count_amd(root):
        found = _read_rocm(found, limit_s)
    adapters = tuple(_list_adapters(root, found.devices))
    return replace(
        found,
        adapters=adapters,
        numa=dict(_list_numa_nodes(root)),
        bound=_find_bound(root),
        own=_find_own(environ, found),
    )


# --- NVIDIA: devices, pairs, the state of links


def _read_nvml(found: NodeTopology, environ: Mapping[str, str], root: Path) -> NodeTopology:
    try:
        nvml = importlib.import_module(environ.get(NVML_VARIABLE) or "pynvml")
        nvml.nvmlInit()
    except Exception as error:  # no library, a driver that does not fit it, a container without devices
        return replace(found, notes=(f"NVIDIA's library cannot be used: {error or type(error).__name__}",))
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        read = [_NvmlDevice(nvml, handle, index, root) for index, handle in enumerate(handles)]
        devices = tuple(each.device for each in read)
        pairs = {
            (first, second): path
            for first in range(len(read))
            for second in range(first + 1, len(read))
            if (path := _find_pair(nvml, read[first], read[second])) is not None
        }
        known = {device.bus for device in devices}
        given = not find_job(environ)  # a job may have been given fewer
        hidden = [bus for bus in _list_pci_accelerators(root) if bus not in known] if given and known - {""} else []
        return replace(found, devices=devices, pairs=pairs, hidden=tuple(hidden))
    except Exception as error:  # a driver that fails half-way
        return replace(found, notes=(f"NVML: {error or type(error).__name__}",))
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


class _NvmlDevice:
    """One GPU, what NVML says of it, and where its NVLinks lead: addresses of GPUs, and how many to switches."""

    def __init__(self, nvml: Any, handle: Any, index: int, root: Path) -> None:
        self.handle = handle
        self._nvml = nvml
        bus = _short_bus(_text(self._ask("nvmlDeviceGetPciInfo", "busId") or ""))
        folder = root / "sys/bus/pci/devices" / bus
        self.to_gpus: dict[str, int] = {}
        self.to_switches = 0
        states = dict(self._list_links())
        name = self._ask("nvmlDeviceGetName")
        self.device = TopologyDevice(
            index,
            _text(name or ""),
            bus,
            _read_numa(folder) if bus else None,
            read_or_empty(folder / "local_cpulist") if bus else "",
            self._pcie("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth"),
            self._pcie("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"),
            busy=(self._ask("nvmlDeviceGetUtilizationRates", "gpu") or 0) >= _BUSY_PERCENT,
            nvlinks=sum(states.values()) if states else None,
            inactive=tuple(link for link, active in states.items() if not active),
            link_rate=self._link_rate() if any(states.values()) else None,
            fabric=self._fabric(),
            slices=self._count_slices(),
            uuid=_text(self._ask("nvmlDeviceGetUUID") or ""),
        )

    def _ask(self, function: str, part: str = "") -> Any:
        """The answer of a call, or a field of it; None where it is refused or not in this library."""
        try:
            answer = getattr(self._nvml, function)(self.handle)
            return getattr(answer, part) if part else answer
        except Exception:  # whatever a driver's library raises
            return None

    def _pcie(self, generation: str, lanes: str) -> PcieLink | None:
        values = self._ask(generation), self._ask(lanes)
        return PcieLink(int(values[0]), int(values[1])) if all(values) else None

    def _list_links(self) -> Iterator[tuple[int, bool]]:
        """Each NVLink and whether it is active; counts where the active ones lead."""
        nvml = self._nvml
        for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
            try:
                active = bool(nvml.nvmlDeviceGetNvLinkState(self.handle, link))
            except Exception:  # this GPU has no such link
                continue
            yield link, active
            if active:
                self._follow(link)

    def _follow(self, link: int) -> None:
        nvml = self._nvml
        kind = getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
        with suppress(Exception):  # in a virtual machine the other end may not be shown
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(self.handle, link) == kind:
                self.to_switches += 1
                return
        try:
            bus = _short_bus(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(self.handle, link).busId))
        except Exception:
            self.to_switches += 1  # as NCCL takes it: what is not shown is a switch
            return
        self.to_gpus[bus] = self.to_gpus.get(bus, 0) + 1

    def _link_rate(self) -> float | None:
        """Bytes per second of one NVLink."""
        nvml = self._nvml
        with suppress(Exception):
            [answer] = nvml.nvmlDeviceGetFieldValues(self.handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
            if not answer.nvmlReturn and answer.value.uiVal:
                return float(answer.value.uiVal) * 1e6
        return None

    def _fabric(self) -> str:
        nvml = self._nvml
        with suppress(Exception):
            state = nvml.nvmlDeviceGetGpuFabricInfo(self.handle).state
            words = ("NOT_STARTED", "not started"), ("IN_PROGRESS", "in progress"), ("COMPLETED", "completed")
            of = {getattr(nvml, f"NVML_GPU_FABRIC_STATE_{name}", None): said for name, said in words}
            return of.get(state, "")
        return ""

    def _count_slices(self) -> int:
        nvml, count = self._nvml, 0
        with suppress(Exception):
            if nvml.nvmlDeviceGetMigMode(self.handle)[0]:
                for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(self.handle))):
                    with suppress(Exception):
                        nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number)
                        count += 1
        return count


def _find_pair(nvml: Any, first: _NvmlDevice, second: _NvmlDevice) -> PairPath | None:
    path = None
    links = first.to_gpus.get(second.device.bus, 0) if second.device.bus else 0
    links = links or min(first.to_switches, second.to_switches)
    if links:
        path = PairPath(NVLINK, links)
    else:
        with suppress(Exception):
            level = nvml.nvmlDeviceGetTopologyCommonAncestor(first.handle, second.handle)
            path = PairPath(_LEVELS[int(level)])
    status = ""
    with suppress(Exception):
        code = int(nvml.nvmlDeviceGetP2PStatus(first.handle, second.handle, _P2P_READ))
        status = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")[code]
    return None if path is None else replace(path, p2p=status)


_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: SYS}
"""NVML's levels; 0 is two GPUs of one board."""
_P2P_READ = 0
"""pynvml's constant of this name is a tuple."""


def _short_bus(bus: str) -> str:
    """The kernel's form of a PCI address: "00000000:07:00.0" is "0000:07:00.0"."""
    domain, colon, rest = bus.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if colon else ""


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# --- AMD


def _read_rocm(found: NodeTopology, limit_s: float) -> NodeTopology:
    answer = run_command(_ROCM, limit_s)
    if not answer.ok:
        why = "did not answer" if answer.hung else answer.first_line or f"ended with {answer.code}"
        return replace(found, notes=(*found.notes, f"{' '.join(_ROCM)}: {why}"))
    try:
        [read] = read_recorded({found.title: answer.out})
    except ValueError as error:
        return replace(found, notes=(*found.notes, f"{' '.join(_ROCM)}: {error}"))
    return replace(read, notes=(*found.notes, *read.notes))


# --- the kernel's lists: PCI, NUMA, network adapters


def _read_numa(folder: Path) -> int | None:
    """The NUMA node of a PCI device; the kernel has -1 where the firmware names none."""
    text = read_or_empty(folder / "numa_node")
    return int(text) if text.isdecimal() else None


def _list_pci_accelerators(root: Path) -> Iterator[str]:
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_display = read_or_empty(folder / "class").startswith(_ACCELERATOR_CLASSES)
        if is_display and read_or_empty(folder / "vendor") == _NVIDIA:
            yield folder.name


def _list_numa_nodes(root: Path) -> Iterator[tuple[int, str]]:
    """NUMA nodes with CPUs; others are memory alone."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda each: int(each.name[4:])):
        if cpus := read_or_empty(folder / "cpulist"):
            yield int(folder.name[4:]), cpus


def _list_adapters(root: Path, devices: tuple[TopologyDevice, ...]) -> Iterator[AdapterPlace]:
    """InfiniBand and RoCE adapters, then Ethernet cards of other PCI devices."""
    ports: dict[str, list[Port]] = {}
    for port in list_ports(root):
        ports.setdefault(port.device, []).append(port)
    seen = set()
    for name, held in ports.items():
        folder = root / "sys/class/infiniband" / name / "device"
        seen.add(_resolve(folder))
        best = max(held, key=lambda port: (port.active, port.rate_gbit_s))
        yield _place_adapter(name, folder, root, devices, best.state, best.link_layer, best.rate_gbit_s)
    for card in sorted((root / "sys/class/net").glob("*")):
        folder = card / "device"
        if not (folder / "vendor").exists() or _resolve(folder) in seen:
            continue  # no PCI device, or the Ethernet side of an adapter above
        state, speed = read_or_empty(card / "operstate"), read_or_empty(card / "speed")
        rate = int(speed) / 1000 if speed.isdecimal() else 0.0
        said = {"up": "ACTIVE", "down": "DOWN"}.get(state, state.upper())
        placed = _place_adapter(card.name, folder, root, devices, said, "Ethernet", rate)
        yield replace(placed, has_rdma=False)


def _place_adapter(
    name: str,
    folder: Path,
    root: Path,
    devices: tuple[TopologyDevice, ...],
    state: str,
    layer: str,
    rate: float,
) -> AdapterPlace:
    numa, own = _read_numa(folder), _resolve(folder)
    paths = {}
    for device in devices:
        if device.bus:
            other = _resolve(root / "sys/bus/pci/devices" / device.bus)
            if kind := _compare_places(own, other, numa, device.numa):
                paths[device.index] = kind
    return AdapterPlace(name, numa, state, layer, rate, paths)


def _resolve(folder: Path) -> tuple[str, ...]:
    """The bridges from a PCI root to a device, and the device: ("pci0000:80", "0000:80:01.0", "0000:81:00.0")."""
    parts = folder.resolve().parts
    start = next((place for place, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[start:]


def _compare_places(
    first: tuple[str, ...], second: tuple[str, ...], numa: int | None, other_numa: int | None
) -> str | None:
    """The kind of the path between two PCI devices; None where it is not known."""
    if not first or not second:
        return None
    shared = sum(1 for _ in _common(first, second))
    if shared > 1:  # a bridge below the root: the ends are a port and a device away from the same switch
        return "PIX" if max(len(first), len(second)) - shared <= 2 else "PXB"
    if shared:
        return "PHB"
    if numa is None or other_numa is None:
        return None
    return "NODE" if numa == other_numa else SYS


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[str]:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


def _find_bound(root: Path) -> frozenset[int] | None:
    """The CPUs of this process, where it may not use all."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    here = frozenset(os.sched_getaffinity(0))
    online = parse_cpus(read_or_empty(root / "sys/devices/system/cpu/online"))
    return here if online - here else None


def _find_own(environ: Mapping[str, str], found: NodeTopology) -> int | None:
    """The device of this rank of a launch: that with its local rank among those that it may use."""
    try:
        placement = find_placement(environ)
    except SiteError:
        return None
    count = len(found.devices)
    visible = find_visible(environ.get("CUDA_VISIBLE_DEVICES"), count)
    indices = list(range(count)) if visible is None else [each for each in visible if isinstance(each, int)]
    if placement.launcher == "none" or not indices:
        return None
    return indices[placement.local_rank % len(indices)]
