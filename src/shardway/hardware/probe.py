"""What this machine is: cores, memory and accelerators that this process may use.

Invariant: `probe_machine` never raises for what a machine lacks; what cannot be read is `None` or empty. This
module must not import torch, nor import psutil or NVML before they are needed.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.hardware.cgroup import CgroupLimits, read_cgroup_limits


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


def probe_machine(root: Path = Path("/")) -> LocalMachine:
    """Look at this machine; `root` stands for "/" in what is read from files (the control group, the CPU)."""
    limits = read_cgroup_limits(root)
    return LocalMachine(
        hostname=socket.gethostname(),
        cpu_model=_read_cpu_model(root / "proc/cpuinfo"),
        physical_cores=_count_physical_cores(),
        usable_cores=_count_usable_cores(limits),
        memory_bytes=_find_memory_bytes(limits),
        accelerators=_list_nvidia_devices() if has_nvidia_driver(root) else (),
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _read_cpu_model(cpuinfo: Path) -> str | None:
    """The "model name" line; None where there is none, as on Arm."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                label, _, value = line.partition(":")
                if label.strip() == "model name":
                    return value.strip()
    except OSError:
        return None
    return None


def _count_physical_cores() -> int | None:
    import psutil

    return psutil.cpu_count(logical=False)


def _count_usable_cores(limits: CgroupLimits) -> int:
    """The cores of the affinity mask, or fewer where a quota is tighter; at least one."""
    # Only Linux has affinity masks; macOS and Windows give every process all cores.
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return affine if limits.cores is None else max(1, min(affine, int(limits.cores)))


def _find_memory_bytes(limits: CgroupLimits) -> int | None:
    import psutil

    total = psutil.virtual_memory().total
    return total if limits.memory_bytes is None else min(total, limits.memory_bytes)


def has_nvidia_driver(root: Path) -> bool:
    """Whether the kernel shows a driver; without one the import of its library would only cost time."""
    return any((root / sign).exists() for sign in ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg"))


def _list_nvidia_devices() -> tuple[Device, ...]:
    # Any failure means "no device that we can see": a missing library, a driver that does not fit it, a
    # container without /dev/nvidia*. A probe must not end a run because of it.
    try:
        with _open_nvml() as nvml:
            return tuple(_read_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except Exception:
        return ()


@contextmanager
def _open_nvml() -> Iterator[Any]:
    """The `pynvml` module between `nvmlInit` and `nvmlShutdown`."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _read_device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    # Releases of nvidia-ml-py before 11.5 return bytes.
    name = name.decode() if isinstance(name, bytes) else name
    return Device(name, _read_memory_bytes(nvml, handle), _read_capability(nvml, handle))


def _read_capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """None where the driver, or a library older than 11.5, does not say it."""
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except (nvml.NVMLError, AttributeError):
        return None
    return int(major), int(minor)


def _read_memory_bytes(nvml: Any, handle: Any) -> int | None:
    """The device's memory; None where it has none of its own, as on GPUs that share the CPU's."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return None
