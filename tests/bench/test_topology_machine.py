"""This machine by NVML, rocm-smi and the kernel's lists, with a driver and a tree of files that a test makes up."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recorded_launchers import RECORDED
from recorded_topologies import read_text
from shardway.bench.peer_copies import LITTLE, SIZE, map_devices, measure_copies
from shardway.bench.topology import PairPath, PcieLink, TopologyDevice
from shardway.bench.topology_machine import read_machine
from shardway.bench.topology_report import judge_topology

FABRIC = {"not started": 1, "in progress": 2, "completed": 3}


class NVMLError(Exception):
    """As pynvml's."""


@dataclass
class PretendedGpu:
    """One GPU: its NVLinks are the bus of the other end, "switch", or "" for an inactive one."""

    bus: str
    links: list[str] = field(default_factory=list)
    name: str = "NVIDIA A100-SXM4-40GB"
    pcie: tuple[int, int, int, int] = (4, 16, 4, 16)
    use: int = 0
    fabric: str = ""
    uuid: str = ""


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: list[PretendedGpu], **given: Any) -> dict[str, str]:
    """A module with the functions of pynvml that are called; the environment that names it. `given`: pair of indices as
    "p0_1" -> its level, "status0_1" -> its code of peer access."""

    def link(gpu: PretendedGpu, number: int) -> str:
        if number >= len(gpu.links):
            raise NVMLError("Invalid Argument")
        return gpu.links[number]

    def remote(gpu: PretendedGpu, number: int) -> SimpleNamespace:
        if link(gpu, number) == "hidden":
            raise NVMLError("Not Supported")
        return SimpleNamespace(busId=f"0000{link(gpu, number)}")

    def kind(gpu: PretendedGpu, number: int) -> int:
        if link(gpu, number) == "hidden":
            raise NVMLError("Not Supported")
        return 2 if link(gpu, number) == "switch" else 0

    def fabric(gpu: PretendedGpu) -> SimpleNamespace:
        if not gpu.fabric:
            raise NVMLError("Not Supported")
        return SimpleNamespace(state=FABRIC[gpu.fabric])

    def of_pair(prefix: str, first: PretendedGpu, second: PretendedGpu, usual: int) -> int:
        return int(given.get(f"{prefix}{gpus.index(first)}_{gpus.index(second)}", usual))

    def fields(gpu: PretendedGpu, wanted: list[int]) -> list[SimpleNamespace]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=25000))]

    module = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON=90,
        NVML_GPU_FABRIC_STATE_NOT_STARTED=1,
        NVML_GPU_FABRIC_STATE_IN_PROGRESS=2,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=f"0000{gpu.bus.upper()}".encode()),
        nvmlDeviceGetCurrPcieLinkGeneration=lambda gpu: gpu.pcie[0],
        nvmlDeviceGetCurrPcieLinkWidth=lambda gpu: gpu.pcie[1],
        nvmlDeviceGetMaxPcieLinkGeneration=lambda gpu: gpu.pcie[2],
        nvmlDeviceGetMaxPcieLinkWidth=lambda gpu: gpu.pcie[3],
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=gpu.use),
        nvmlDeviceGetNvLinkState=lambda gpu, number: int(bool(link(gpu, number))),
        nvmlDeviceGetNvLinkRemoteDeviceType=kind,
        nvmlDeviceGetNvLinkRemotePciInfo=remote,
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetGpuFabricInfo=fabric,
        nvmlDeviceGetMigMode=lambda gpu: [0, 0],
        nvmlDeviceGetTopologyCommonAncestor=lambda first, second: of_pair("p", first, second, 50),
        nvmlDeviceGetP2PStatus=lambda first, second, index: of_pair("status", first, second, 0),
    )
    monkeypatch.setitem(sys.modules, "pretended_nvml", module)
    return {"SHARDWAY_NVML": "pretended_nvml"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def add_pci(root: Path, chain: str, numa: int, kind: str = "0x030200", vendor: str = "0x10de") -> Path:
    """A PCI device at the end of a chain of bridges below a root."""
    folder = root / "sys/devices" / chain
    write(folder / "numa_node", str(numa))
    write(folder / "local_cpulist", "0-3" if numa == 0 else "4-7")
    write(folder / "class", kind)
    write(folder / "vendor", vendor)
    listed = root / "sys/bus/pci/devices" / folder.name
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.symlink_to(folder)
    return folder


def add_adapter(
    root: Path, name: str, folder: Path, state: str = "4: ACTIVE", rate: str = "200 Gb/sec (4X HDR)"
) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    write(port / "state", state)
    write(port / "rate", rate)
    write(port / "link_layer", "InfiniBand")
    (root / "sys/class/infiniband" / name / "device").symlink_to(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sockets of two GPUs each: the first two below one switch with an adapter, the others at their own ports."""
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    add_pci(tmp_path, f"{switch}/0000:02:00.0/0000:03:00.0", 0)
    add_pci(tmp_path, f"{switch}/0000:02:08.0/0000:04:00.0", 0)
    near = add_pci(tmp_path, f"{switch}/0000:02:10.0/0000:05:00.0", 0, "0x020700", "0x15b3")
    add_pci(tmp_path, "pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    add_pci(tmp_path, "pci0000:80/0000:80:03.0/0000:82:00.0", 1)
    far = add_pci(tmp_path, "pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1, "0x020700", "0x15b3")
    add_adapter(tmp_path, "mlx5_0", near)
    add_adapter(tmp_path, "mlx5_1", far, "1: DOWN", "10 Gb/sec (4X SDR)")
    for name, folder in (("ib0", near), ("eth0", far)):  # the network side of an adapter, and of another port
        write(tmp_path / "sys/class/net" / name / "operstate", "up")
        (tmp_path / "sys/class/net" / name / "device").symlink_to(folder)
    card = add_pci(tmp_path, "pci0000:80/0000:80:05.0/0000:83:00.0", 1, "0x020000", "0x8086")
    write(tmp_path / "sys/class/net/eno1/operstate", "up")
    write(tmp_path / "sys/class/net/eno1/speed", "10000")
    (tmp_path / "sys/class/net/eno1/device").symlink_to(card)
    write(tmp_path / "sys/class/net/lo/operstate", "unknown")
    for node, cpus in ((0, "0-3"), (1, "4-7"), (2, "")):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", cpus)
    return tmp_path


BUSES = ("0000:03:00.0", "0000:04:00.0", "0000:81:00.0", "0000:82:00.0")


def test_direct_nvlinks_pcie_numa_and_adapters(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        PretendedGpu(bus, [other for other in BUSES if other != bus for _ in range(4)], uuid=f"GPU-{bus}")
        for bus in BUSES
    ]
    gpus[3].links[-1] = gpus[2].links[-1] = ""
    gpus[1].pcie = (1, 8, 4, 16)
    environ = pretend(monkeypatch, gpus, status0_1=1)
    node = read_machine(environ, root)
    assert [(device.bus, device.numa, device.cpus) for device in node.devices] == [
        ("0000:03:00.0", 0, "0-3"),
        ("0000:04:00.0", 0, "0-3"),
        ("0000:81:00.0", 1, "4-7"),
        ("0000:82:00.0", 1, "4-7"),
    ]
    assert [(device.nvlinks, device.inactive) for device in node.devices] == [
        (12, ()),
        (12, ()),
        (11, (11,)),
        (11, (11,)),
    ]
    assert node.device(0).link_rate == 25e9
    assert (node.device(1).pcie, node.device(1).pcie_most) == (PcieLink(1, 8), PcieLink(4, 16))
    assert node.pairs[0, 1] == PairPath("NV", 4, p2p="CNS")
    assert node.pairs[2, 3] == PairPath("NV", 3, p2p="OK")
    assert node.numa == {0: "0-3", 1: "4-7"}
    first, second, card = node.adapters
    assert (first.name, first.numa, first.state, first.rate_gbit_s) == ("mlx5_0", 0, "ACTIVE", 200.0)
    assert first.paths == {0: "PIX", 1: "PIX", 2: "SYS", 3: "SYS"}
    assert (second.name, second.state, second.paths) == ("mlx5_1", "DOWN", {0: "SYS", 1: "SYS", 2: "NODE", 3: "NODE"})
    assert (card.name, card.rate_gbit_s, card.paths[2], card.has_rdma) == ("eno1", 10.0, "PHB", False)
    assert node.hidden == ()
    wrong = [each.what for each in judge_topology(node).findings if each.level == "wrong"]
    assert [each for each in wrong if each.startswith("NVLink 11 of GPU2 inactive: 11 of 12")] != []
    assert [each for each in wrong if each.startswith("GPU1 runs at PCIe 1 x8")] != []
    assert [each for each in wrong if "peer-to-peer is off between GPU0-GPU1" in each] != []


def test_switches_also_where_a_virtual_machine_hides_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        PretendedGpu(bus, ["switch" if number else "hidden"] * 12, fabric="in progress")
        for number, bus in enumerate(BUSES)
    ]
    node = read_machine(pretend(monkeypatch, gpus), root)
    assert {path.label for path in node.pairs.values()} == {"NV12"}
    assert node.device(0).fabric == "in progress"


def test_levels_of_pcie_and_devices_that_the_driver_lacks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [PretendedGpu(bus, name="NVIDIA L40S") for bus in BUSES[:3]]
    node = read_machine(pretend(monkeypatch, gpus, p0_1=20, p0_2=50, p1_2=30), root)
    assert {pair: path.label for pair, path in node.pairs.items()} == {(0, 1): "PXB", (0, 2): "SYS", (1, 2): "PHB"}
    assert [device.nvlinks for device in node.devices] == [None] * 3
    assert node.hidden == (BUSES[3],)
    assert read_machine({**pretend(monkeypatch, gpus), "SLURM_JOB_ID": "7"}, root).hidden == ()


def test_the_device_of_a_rank(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = pretend(monkeypatch, [PretendedGpu(bus) for bus in BUSES])
    assert read_machine(environ, root).own is None
    second = {**environ, **RECORDED["torchrun"][1]}
    assert read_machine(second, root).own == 1
    assert read_machine({**second, "CUDA_VISIBLE_DEVICES": "3,2"}, root).own == 2
    assert read_machine({**second, "CUDA_VISIBLE_DEVICES": "3"}, root).own == 3


def test_cpus_that_this_process_may_not_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = pretend(monkeypatch, [PretendedGpu(bus) for bus in BUSES])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    write(root / "sys/devices/system/cpu/online", "0-7")
    assert read_machine(environ, root).bound == {0, 1}
    write(root / "sys/devices/system/cpu/online", "0-1")
    assert read_machine(environ, root).bound is None


def test_a_library_that_cannot_be_used_is_a_note(root: Path) -> None:
    node = read_machine({"SHARDWAY_NVML": "no_such_module"}, root)
    assert node.devices == ()
    assert node.notes == ("NVIDIA's library cannot be used: No module named 'no_such_module'",)
    assert [each.name for each in node.adapters] == ["mlx5_0", "mlx5_1", "eno1"]


def test_a_driver_that_fails_half_way_is_a_note(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = pretend(monkeypatch, [PretendedGpu(BUSES[0])])

    def lost(index: int) -> PretendedGpu:
        raise NVMLError("GPU is lost")

    monkeypatch.setattr(sys.modules["pretended_nvml"], "nvmlDeviceGetHandleByIndex", lost)
    assert read_machine(environ, root).notes == ("NVML: GPU is lost",)


def test_amd_devices_by_rocm_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}/properties", "simd_count 440")
    program = tmp_path / "bin" / "rocm-smi"
    write(tmp_path / "out.txt", read_text("mi300a-4"))
    write(program, f"#!/bin/sh\ncat {tmp_path}/out.txt")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    node = read_machine({}, tmp_path)
    assert {path.label for path in node.pairs.values()} == {"XGMI"}
    write(program, "#!/bin/sh\necho ERROR: no driver >&2\nexit 2")
    assert read_machine({}, tmp_path).notes == ("rocm-smi --showtopo --showproductname: ERROR: no driver",)
    write(program, "#!/bin/sh\necho nothing")
    assert "has no topology" in read_machine({}, tmp_path).notes[0]


# --- copies, with a pretended timer


def test_copies_in_both_directions_and_from_the_host() -> None:
    def time_copy(source: int | None, target: int, size: int) -> float:
        if source == 1 and target == 0 and size == SIZE:
            raise RuntimeError("out of memory")
        rate = 25e9 if source is None else 300e9 / (1 + target)
        return 2e-6 + (size / rate if size > LITTLE else 0.0)

    copies = measure_copies({0: 4, 1: 6}, time_copy)
    assert copies.pairs == {(4, 6): pytest.approx(SIZE / (2e-6 + SIZE / 150e9))}
    assert copies.latencies == {(4, 6): 2e-6}
    assert copies.from_host == {4: pytest.approx(25e9, rel=0.01), 6: pytest.approx(25e9, rel=0.01)}


def test_devices_of_torch_are_found_by_their_uuid() -> None:
    devices = tuple(TopologyDevice(index, uuid=f"GPU-{index}") for index in range(4))
    node = SimpleNamespace(devices=devices)
    assert map_devices(node, {0: "GPU-3", 1: "GPU-1"}) == {0: 3, 1: 1}  # type: ignore[arg-type]
    assert map_devices(node, {0: "GPU-9", 1: "GPU-1"}) == {0: 0, 1: 1}  # type: ignore[arg-type]
