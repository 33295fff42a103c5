from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_nvml
import pytest

from shardway.telemetry.devices import GPM, AmdReader, DeviceThread, NvidiaReader, find_visible, open_devices

H100 = {
    "name": "NVIDIA H100",
    "uuid": "GPU-aa",
    "pids": [11],
    "values": {
        "use_percent": 97,
        "memory_bytes": 6e10,
        "power_w": 650,
        "sm_percent": 71,
        "tensor_percent": 33,
        "nvlink_rx_bytes_per_s": 2e9,
        "nvlink_tx_bytes_per_s": 1e9,
        "pcie_rx_bytes_per_s": 3e8,
        "pcie_tx_bytes_per_s": 1e8,
    },
}
A100 = {**H100, "name": "NVIDIA A100", "uuid": "GPU-bb", "gpm": False}
Open = Callable[..., NvidiaReader]


@pytest.fixture
def open_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """A reader of pretended devices, from 100 s after the machine's start on."""

    def open_reader(
        *devices: Mapping[str, Any], environ: Mapping[str, str] | None = None, at: float = 100
    ) -> NvidiaReader:
        script = tmp_path / "nvml.json"
        script.write_text(json.dumps({"start": 1.0, "devices": devices}))
        monkeypatch.setenv("SHARDWAY_FAKE_NVML", str(script))
        set_clock(at, monkeypatch)
        return NvidiaReader(fake_nvml, environ or {})

    return open_reader


def set_clock(at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_nvml, "clock", lambda: 1.0 + at)


def read(reader: NvidiaReader | AmdReader, now: float) -> dict[str, float]:
    return dict(zip(reader.series, reader.read(now, {11}), strict=True))


def test_a_hopper_gives_everything(open_nvidia: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_nvidia(H100)
    set_clock(102, monkeypatch)
    values = read(reader, 2.0)
    assert reader.missing == {}
    assert reader.devices[0].memory_bytes == 80 << 30
    assert values["gpu/0/use_percent"] == 97
    assert values["gpu/0/sm_percent"] == 71
    assert values["gpu/0/tensor_percent"] == 33
    assert values["gpu/0/energy_j"] == pytest.approx(1300, abs=1)
    assert values["gpu/0/nvlink_rx_bytes_per_s"] == pytest.approx(2e9)
    assert values["gpu/0/pcie_tx_bytes_per_s"] == pytest.approx(1e8)
    assert values["gpu/0/job_processes"] == 1


def test_an_ampere_names_what_it_lacks(open_nvidia: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_nvidia(A100)
    read(reader, 1.0)
    set_clock(102, monkeypatch)
    values = read(reader, 3.0)
    assert {name: "Hopper" in why for name, why in reader.missing.items()} == {f"gpu/0/{name}": True for name in GPM}
    assert values["gpu/0/nvlink_rx_bytes_per_s"] == pytest.approx(2e9, rel=1e-3), "from counters"
    assert values["gpu/0/pcie_rx_bytes_per_s"] == pytest.approx(3e8, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({**H100, "denied": {"gpm": 4}}, "administrators"),
        ({**H100, "denied": {"gpm": 3}}, "Hopper"),
        ({**H100, "driver_lacks_gpm": True}, "too old"),
    ],
)
def test_gpm_that_is_refused_costs_its_series_alone(open_nvidia: Open, device: dict[str, Any], words: str) -> None:
    reader = open_nvidia(device)
    assert words in reader.missing["gpu/0/sm_percent"]
    assert "gpu/0/sm_percent" not in reader.series
    assert "gpu/0/pcie_rx_bytes_per_s" in reader.series
    assert read(reader, 1.0)["gpu/0/power_w"] == 650


def test_what_is_denied_is_named_and_the_rest_goes_on(open_nvidia: Open) -> None:
    reader = open_nvidia({**H100, "denied": {"power_w": 4, "ecc_errors": 3, "temperature_c": 999}})
    assert reader.missing["gpu/0/power_w"] == "the driver lets administrators alone read it"
    assert reader.missing["gpu/0/ecc_errors"] == "this GPU does not say it"
    assert "NVML" in reader.missing["gpu/0/temperature_c"]
    assert read(reader, 1.0)["gpu/0/use_percent"] == 97


def test_a_gpu_that_is_lost_is_nan_and_then_named(open_nvidia: Open) -> None:
    reader = open_nvidia(H100)
    fake_nvml._devices[0].given["denied"] = dict.fromkeys(H100["values"], 15)  # type: ignore[call-overload]
    for now in range(1, 8):
        value = read(reader, float(now))["gpu/0/use_percent"]
        assert value != value
    assert "lost" in reader.missing["gpu/0/use_percent"]


def test_devices_of_others_are_left_out(open_nvidia: Open) -> None:
    four = [{**H100, "uuid": f"GPU-{letter}{letter}"} for letter in "abcd"]
    for named, indices in (("2,0", [2, 0]), ("GPU-bb", [1]), ("GPU-c", [2]), ("1,9,2", [1]), ("", []), ("-1", [])):
        reader = open_nvidia(*four, environ={"CUDA_VISIBLE_DEVICES": named})
        assert [device.index for device in reader.devices] == indices, named
    assert "CUDA_VISIBLE_DEVICES" in reader.missing["gpu/*"]
    assert len(open_nvidia(*four).devices) == 4


def test_slices_of_a_gpu_have_numbers_of_their_own(open_nvidia: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"memory_bytes": 1e9, "sm_percent": 12}
    slices = [{"uuid": f"MIG-{number}", "instance": number + 3, "values": values} for number in range(2)]
    cut = {**H100, "mig": slices}
    assert [device.index for device in open_nvidia(cut).devices] == [1003, 1004]
    reader = open_nvidia(A100, cut, environ={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert [device.index for device in reader.devices] == [1104]
    set_clock(102, monkeypatch)
    assert read(reader, 2.0)["gpu/1104/sm_percent"] == 12
    assert "MIG" in reader.missing["gpu/1104/power_w"]


def test_words_that_name_devices() -> None:
    assert find_visible(None, 4) is None
    assert find_visible("3, 1,3", 4) == [3, 1]
    assert find_visible("GPU-1,MIG-2", 4) == ["GPU-1", "MIG-2"]


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, missing = open_devices({"SHARDWAY_NVML": "no_such_module"})
    assert readers == []
    assert "no_such_module" in missing["gpu/*"]


def test_a_driver_that_hangs_costs_its_values_alone(open_nvidia: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    open_nvidia({**H100, "hangs": {"temperature_c": [100.5, 0.4]}}, at=0).close()
    monkeypatch.setattr(fake_nvml, "clock", lambda: 1.0 + 100.0 + (time.monotonic() - begun))
    begun = time.monotonic()
    thread = DeviceThread({"SHARDWAY_NVML": "fake_nvml"})
    thread.start(time.monotonic(), 5.0)
    time.sleep(max(0.0, 0.55 - (time.monotonic() - begun)))
    thread.ask(time.monotonic(), frozenset())
    asked = time.monotonic()
    assert thread.collect(0.05) is None
    assert time.monotonic() - asked < 0.3
    thread.ask(time.monotonic(), frozenset())  # does nothing
    assert thread.hangs_s(time.monotonic()) > 0.04
    values = thread.collect(5.0)
    assert values is not None
    assert len(values) == len(thread.state.series)
    thread.end()


# --- AMD


def pretend_amd(**changed: Any) -> ModuleType:
    """amdsmi with one device; "N/A" stands where a card has nothing."""
    kinds = {
        "AmdSmiClkType": "GFX MEM",
        "AmdSmiTemperatureType": "HOTSPOT JUNCTION",
        "AmdSmiTemperatureMetric": "CURRENT",
    }
    functions = {
        "init": lambda: None,
        "shut_down": lambda: None,
        "get_processor_handles": lambda: ["a"],
        "get_gpu_asic_info": lambda h: {"market_name": "AMD Instinct MI300X"},
        "get_gpu_device_uuid": lambda h: "uuid",
        "get_gpu_vram_usage": lambda h: {"vram_total": 192 << 10, "vram_used": 1000},
        "get_power_cap_info": lambda h: {"power_cap": 750_000_000},
        "get_gpu_activity": lambda h: {"gfx_activity": 88, "umc_activity": 21},
        "get_power_info": lambda h: {"current_socket_power": "N/A", "average_socket_power": 510},
        "get_clock_info": lambda h, kind: {"clk": 2100 if kind == "GFX" else 1300},
        "get_temp_metric": lambda h, kind, metric: 61,
        "get_energy_count": lambda h: {"energy_accumulator": 10**9, "counter_resolution": 15.3},
        "get_gpu_total_ecc_count": lambda h: {"uncorrectable_count": 0},
        "get_gpu_process_list": lambda h: [{"pid": 11}],
        **changed,
    }
    module = ModuleType("amdsmi")
    for name, function in functions.items():
        setattr(module, f"amdsmi_{name}", function)
    for name, members in kinds.items():
        setattr(module, name, SimpleNamespace(**{member: member for member in members.split()}))
    return module


def test_an_amd_device() -> None:
    reader = AmdReader(pretend_amd(), {})
    values = read(reader, 1.0)
    assert (reader.devices[0].maker, reader.devices[0].power_limit_w) == ("amd", 750.0)
    assert values["gpu/0/use_percent"] == 88
    assert values["gpu/0/power_w"] == 510
    assert values["gpu/0/memory_bytes"] == 1000 << 20
    assert values["gpu/0/energy_j"] == 0
    assert values["gpu/0/job_processes"] == 1
    assert set(reader.missing) == {f"gpu/0/{name}" for name in GPM}


def test_what_an_amd_device_lacks_is_named() -> None:
    reader = AmdReader(pretend_amd(get_gpu_activity=lambda h: {"gfx_activity": "N/A", "umc_activity": 3}), {})
    assert "N/A" in reader.missing["gpu/0/use_percent"]
    assert read(reader, 1.0)["gpu/0/temperature_c"] == 61
