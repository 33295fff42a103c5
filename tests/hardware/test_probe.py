"""The probe of this machine: with laid-out files, with a stand-in for NVML, and as it is."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shardway.hardware import probe
from shardway.hardware.probe import Device, has_nvidia_driver, probe_machine

GIB = 2**30
RootWith = Callable[[str, str], Path]


@pytest.fixture
def root_with(lay_out: Callable[[Mapping[str, str]], Path]) -> RootWith:
    """Lays out a machine whose control group has this cpu.max and memory.max."""

    def write(cpu_max: str, memory_max: str) -> Path:
        return lay_out(
            {
                "proc/self/cgroup": "0::/job",
                "proc/cpuinfo": "processor\t: 0\nmodel name\t: Testium 9000 @ 1 GHz\nflags\t: fpu",
                "sys/fs/cgroup/job/cpu.max": cpu_max,
                "sys/fs/cgroup/job/memory.max": memory_max,
            }
        )

    return write


@pytest.fixture(autouse=True)
def a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests below stand in for the driver's library, so the driver itself must seem to be there."""
    monkeypatch.setattr(probe, "has_nvidia_driver", lambda root: True)


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


def stand_in_nvml(devices: list[tuple[Any, int | None]]) -> SimpleNamespace:
    """A module like pynvml with these (name, memory) devices; memory None is "not supported"."""
    calls: list[str] = []

    def memory_info(index: int) -> SimpleNamespace:
        total = devices[index][1]
        if total is None:
            raise NvmlError("Not Supported")
        return SimpleNamespace(total=total)

    return SimpleNamespace(
        calls=calls,
        NVMLError=NvmlError,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: devices[index][0],
        nvmlDeviceGetMemoryInfo=memory_info,
    )


def test_the_compute_capability_is_read_where_the_driver_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = stand_in_nvml([("NVIDIA H100 80GB HBM3", 80 * GIB), ("an old one", GIB)])

    def capability(index: int) -> tuple[int, int]:
        if index:
            raise NvmlError("Not Supported")
        return 9, 0

    nvml.nvmlDeviceGetCudaComputeCapability = capability
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [device.capability for device in probe_machine().accelerators] == [(9, 0), None]


def test_a_control_group_limits_cores_and_memory(root_with: RootWith) -> None:
    machine = probe_machine(root_with("100000 100000", str(GIB)))
    assert machine.usable_cores == 1
    assert machine.memory_bytes == GIB


def test_less_than_a_core_is_one_core(root_with: RootWith) -> None:
    assert probe_machine(root_with("20000 100000", "max")).usable_cores == 1


def test_a_limit_above_the_machine_changes_nothing(root_with: RootWith) -> None:
    machine = probe_machine(root_with("99900000 100000", str(2**62)))
    assert machine.usable_cores == len(os.sched_getaffinity(0))
    assert machine.memory_bytes == psutil.virtual_memory().total


def test_the_affinity_mask_limits_cores(root_with: RootWith, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert probe_machine(root_with("max 100000", "max")).usable_cores == 3
    assert probe_machine(root_with("200000 100000", "max")).usable_cores == 2


def test_the_cpu_model_is_read_or_unknown(root_with: RootWith) -> None:
    root = root_with("max", "max")
    assert probe_machine(root).cpu_model == "Testium 9000 @ 1 GHz"
    (root / "proc/cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 2000.00\n", encoding="utf-8")
    assert probe_machine(root).cpu_model is None
    (root / "proc/cpuinfo").unlink()
    assert probe_machine(root).cpu_model is None


def test_devices_come_from_nvml_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = stand_in_nvml([("NVIDIA H100 80GB HBM3", 80 * GIB), (b"NVIDIA A40", 45 * GIB), ("NVIDIA GB10", None)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert probe_machine().accelerators == (
        Device("NVIDIA H100 80GB HBM3", 80 * GIB),
        Device("NVIDIA A40", 45 * GIB),
        Device("NVIDIA GB10", None),
    )
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlShutdown"])
def test_a_driver_that_fails_is_no_accelerator(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: object) -> None:
        raise NvmlError("driver/library version mismatch")

    nvml = stand_in_nvml([("NVIDIA H100 80GB HBM3", 80 * GIB)])
    setattr(nvml, failing, fail)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert probe_machine().accelerators == ()


def test_a_missing_nvml_package_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probe_machine().accelerators == ()


def test_this_machine_is_described() -> None:
    machine = probe_machine()
    assert machine.hostname == platform.node()
    assert machine.python == platform.python_version()
    assert 1 <= machine.usable_cores <= len(os.sched_getaffinity(0))
    assert machine.memory_bytes is not None
    assert 0 < machine.memory_bytes <= psutil.virtual_memory().total


def test_the_probe_is_quick_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seconds = list[float]()
    while len(seconds) < 30 and (not seconds or min(seconds) >= 0.05):  # other work may share the machine for a while
        start = time.perf_counter()
        probe_machine()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("sign", ["proc/driver/nvidia", "dev/nvidiactl", "dev/dxg"])
def test_a_driver_shows_in_the_file_system(tmp_path: Path, sign: str) -> None:
    assert not has_nvidia_driver(tmp_path)
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    assert has_nvidia_driver(tmp_path)
