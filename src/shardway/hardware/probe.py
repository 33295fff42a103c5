"""This machine: cores, memory, accelerators, network interfaces and InfiniBand ports, and the same as labelled text.

Invariants:
- `probe_machine` never raises for what a machine lacks; what cannot be read is `None` or empty.
- A GPU library that hangs costs `limit_s` seconds once; a field that the driver does not support is missing and affects
  no other.
- Unknown values show as "n/a".

Sources: netdevice(7) on IFF_RUNNING; Linux, Documentation/ABI/stable/sysfs-class-infiniband; nvidia-smi(1), `nvidia-smi
--help-query-gpu`, `nvidia-smi --help-query-remapped-rows`; NVML API reference, "NvmlClocksEventReasons"; Linux,
drivers/gpu/drm/amd/amdkfd (topology in sysfs).
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardway.hardware.command import run_command, run_commands
from shardway.hardware.limits import read_cgroup_limits, read_or_empty

# --- The network of this machine as the kernel shows it: interfaces and InfiniBand ports


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
        return self.name != "lo" and not self.name.startswith(("docker", "veth", "virbr", "br-", "cni", "podman"))


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
        return self.state == "ACTIVE"


def list_interfaces() -> tuple[Interface, ...]:
    """Every network interface of this process's network namespace, those with an address first; /sys may show those
    of another one."""
    import psutil

    try:
        found, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError:
        return ()
    interfaces = []
    for name in dict.fromkeys((*addresses, *found)):
        if name in found:
            held = [each for each in addresses.get(name, ()) if each.family in (socket.AF_INET, socket.AF_INET6)]
            plain = tuple(each.address.partition("%")[0] for each in held)
            interfaces.append(Interface(name, bool(found[name].isup), int(found[name].mtu), plain))
    return tuple(interfaces)


def list_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """Every port of every adapter below /sys/class/infiniband, by name; some drivers refuse to be read."""
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, layer, rate = (read_or_empty(folder / name) for name in ("state", "link_layer", "rate"))
        device = folder.parents[1].name
        ports.append(Port(device, folder.name, state.rpartition(": ")[2], layer, parse_rate(rate)))
    return tuple(ports)


def parse_rate(text: str) -> float:
    """Gbit/s from "200 Gb/sec (4X HDR)"; 0 for anything else."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    return float(match[1]) if match else 0.0


# --- This machine: cores, memory, accelerators (by nvidia-smi and the kernel's lists), and the same as labelled
# text


@dataclass(frozen=True)
class Device:
    """One accelerator as its driver lists it; `memory_bytes` is the whole of its memory, `capability` its CUDA compute
    capability."""

    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalMachine:
    """The machine this process runs on.

    `physical_cores` are those of the machine; `usable_cores` (hardware threads) and `memory_bytes` are what
    affinity and control group leave to this process. `accelerators` are the NVIDIA devices that the driver
    lists, in its order: CUDA_VISIBLE_DEVICES is not applied.
    """

    hostname: str
    cpu_model: str | None
    physical_cores: int | None
    usable_cores: int
    memory_bytes: int | None
    accelerators: tuple[Device, ...]
    python: str
    os: str
    cudnn: str = ""  # a cuDNN in LD_LIBRARY_PATH, which is loaded in place of the one that torch brings


def probe_machine(root: Path = Path("/")) -> LocalMachine:
    """Look at this machine; `root` stands for "/" in what is read from files (the control group, the CPU)."""
    import psutil

    limits = read_cgroup_limits(root)
    # Only Linux has affinity masks; macOS and Windows give every process all cores.
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory().total
    model = None  # as on Arm, where no line says it
    with suppress(OSError), (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        pairs = (line.partition(":") for line in lines)
        model = next((value.strip() for label, _, value in pairs if label.strip() == "model name"), None)
    return LocalMachine(
        hostname=socket.gethostname(),
        cpu_model=model,
        physical_cores=psutil.cpu_count(logical=False),
        usable_cores=affine if limits.cores is None else max(1, min(affine, int(limits.cores))),
        memory_bytes=memory if limits.memory_bytes is None else min(memory, limits.memory_bytes),
        accelerators=_list_nvidia_devices() if has_nvidia_driver(root) else (),
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cudnn=find_other_cudnn(os.environ.get("LD_LIBRARY_PATH", "")) if has_nvidia_driver(root) else "",
    )


def find_other_cudnn(library_path: str) -> str:
    """A libcudnn in the folders of LD_LIBRARY_PATH, outside of Python's packages; "" where there is none."""
    for folder in filter(None, library_path.split(os.pathsep)):
        with suppress(OSError):
            found = sorted(name for name in os.listdir(folder) if name.startswith("libcudnn.so"))
            if found and "site-packages" not in folder:
                return f"{found[-1]} in {folder} (LD_LIBRARY_PATH)"
    return ""


def has_nvidia_driver(root: Path) -> bool:
    """Whether the kernel shows a driver; without one the import of its library would only cost time."""
    return any((root / sign).exists() for sign in ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg"))


def _list_nvidia_devices() -> tuple[Device, ...]:
    # Any failure means "no device that we can see": a missing library, a driver that does not fit it, a
    # container without /dev/nvidia*. A probe must not end a run because of it.
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return tuple(_read_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return ()


def _read_device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, memory, capability = nvml.nvmlDeviceGetName(handle), None, None
    with suppress(nvml.NVMLError):  # a GPU without memory of its own shares the CPU's
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    with suppress(nvml.NVMLError, AttributeError):  # the driver, or a library older than 11.5, does not say it
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    # Releases of nvidia-ml-py before 11.5 return bytes.
    return Device(name.decode() if isinstance(name, bytes) else name, memory, capability)


# --- NVIDIA and AMD GPUs without driver libraries

QUERIES = {
    "driver": ("gpu", "driver_version"),
    "memory_used_mib": ("gpu", "memory.used"),
    "compute_mode": ("gpu", "compute_mode"),
    "mig": ("gpu", "mig.mode.current"),
    "throttle": ("gpu", "clocks_throttle_reasons.active"),
    "throttle_now": ("gpu", "clocks_event_reasons.active"),  # its name since driver 535
    "ecc_volatile": ("gpu", "ecc.errors.uncorrected.volatile.total"),
    "ecc_aggregate": ("gpu", "ecc.errors.uncorrected.aggregate.total"),
    "rows_pending": ("remapped-rows", "remapped_rows.pending"),
    "rows_failed": ("remapped-rows", "remapped_rows.failure"),
}
"""Our name of a column -> option of nvidia-smi (--query-...), and its field. One field a call: an unknown one makes
the whole call fail."""

_LISTED = re.compile(r"^GPU \d+: (?P<name>.+?) \(UUID: \S+\)", re.MULTILINE)
_SLICE = re.compile(r"^\s+MIG ", re.MULTILINE)


@dataclass(frozen=True)
class NvidiaState:
    """The answers of nvidia-smi. `columns`: name of `QUERIES` -> a text for each GPU, as far as it knows."""

    answer: Literal["absent", "ok", "hung", "failed"]
    said: str = ""
    names: tuple[str, ...] = ()
    slices: int = 0
    """Slices that GPUs are cut into (MIG); a process sees these instead of the GPU."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def visible(self) -> int:
        """Devices that a process can have: GPUs, or slices of them."""
        return self.slices or len(self.names)

    def numbers(self, column: str) -> list[float]:
        """A column as numbers, those left out that are none ("[N/A]")."""
        numbers = []
        for text in self.columns.get(column, ()):
            with suppress(ValueError):
                numbers.append(float(int(text, 16)) if text.lower().startswith("0x") else float(text))
        return numbers


def read_nvidia(limit_s: float = 20.0) -> NvidiaState:
    """Ask nvidia-smi: first for its list, then, if that came, for each column. Never raises."""
    listed = run_command(("nvidia-smi", "-L"), limit_s)
    if listed.missing:
        return NvidiaState("absent")
    if listed.hung:
        return NvidiaState("hung", f"nvidia-smi -L did not answer within {limit_s:g} s")
    if not listed.ok:
        return NvidiaState("failed", listed.first_line or f"nvidia-smi -L ended with {listed.code}")
    names, slices = parse_list(listed.out)
    if not names:
        return NvidiaState("ok", listed.first_line)
    form = "--format=csv,noheader,nounits"
    answers = run_commands([("nvidia-smi", f"--query-{kind}={name}", form) for kind, name in QUERIES.values()], limit_s)
    told = dict(zip(QUERIES, answers, strict=True))
    if hung := [name for name, answer in told.items() if answer.hung]:
        said = f"nvidia-smi lists the GPUs, but did not tell {hung[0]} within {limit_s:g} s"
        return NvidiaState("hung", said, names, slices)
    columns = {name: parse_column(answer.out) for name, answer in told.items() if answer.ok and answer.out}
    return NvidiaState("ok", "", names, slices, columns)


def parse_list(text: str) -> tuple[tuple[str, ...], int]:
    """Names of GPUs, and how many MIG slices there are, from `nvidia-smi -L`."""
    return tuple(match["name"] for match in _LISTED.finditer(text)), len(_SLICE.findall(text))


def parse_column(text: str) -> tuple[str, ...]:
    """One value a line, from a query of one field without header."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def count_amd(root: Path = Path("/")) -> int:
    """AMD devices that the kernel's compute driver lists; nodes of its topology without SIMD units are CPUs."""
    found = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(bool(re.search(r"^simd_count [1-9]", read_or_empty(path), re.MULTILINE)) for path in found)


def has_device_files(root: Path = Path("/")) -> bool:
    """Whether the kernel shows NVIDIA devices here, whatever nvidia-smi says."""
    return any((root / "dev").glob("nvidia[0-9]*"))


# --- labelled text

UNKNOWN = "n/a"


@dataclass(frozen=True)
class ReportFact:
    """One line of a report."""

    label: str
    value: str


def render_machine(machine: LocalMachine) -> tuple[ReportFact, ...]:
    """The machine, most important facts first."""
    parts = Counter(f"{device.name} ({_render_gib(device.memory_bytes)})" for device in machine.accelerators)
    physical = UNKNOWN if machine.physical_cores is None else machine.physical_cores
    facts = {
        "host": machine.hostname,
        "accelerators": ", ".join(f"{count} x {text}" for text, count in parts.items()) or "none",
        "cpu": machine.cpu_model or UNKNOWN,
        "cores": f"{machine.usable_cores} usable, {physical} physical",
        "memory": _render_gib(machine.memory_bytes),
        "os": machine.os,
        "python": machine.python,
        **({"cudnn": machine.cudnn} if machine.cudnn else {}),
    }
    return tuple(ReportFact(label, value) for label, value in facts.items())


def _render_gib(count_bytes: int | None) -> str:
    return UNKNOWN if count_bytes is None else f"{count_bytes / 2**30:.1f} GiB"
