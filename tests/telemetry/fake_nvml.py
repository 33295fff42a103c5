"""NVML as a module with pynvml's functions, for tests: `SHARDWAY_NVML=fake_nvml` names it, and SHARDWAY_FAKE_NVML a
JSON file that describes its devices and what they do over time:

    {"driver": "580.0", "start": 0, "init_error": 0,
     "devices": [{"name": "NVIDIA H100", "uuid": "GPU-0", "memory_bytes": 8.5e10, "power_limit_w": 700,
                  "gpm": true, "mig": [], "pids": [], "denied": {"power_w": 4}, "hangs": {"use_percent": [5, 60]},
                  "values": {"use_percent": 97, "power_w": {"steps": [[0, 80], [10, 650]]}}}]}

`values`: a series (without `gpu/i/`) -> what it is at a time: a number, {"steps": [[from_s, value], ...]},
{"line": [[at_s, value], ...]} (straight between), {"wave": [mean, amplitude, period_s]}, each with "noise": sd beside
it. Times are seconds after `start` (Unix seconds; 0: when the module was imported). Counters (bytes, energy) are the
integral of the rate or power, in steps of a second. `denied`: series, or "gpm" -> the code that NVML returns. `hangs`:
series -> from when on its call hangs, and for how many seconds. A test may replace `clock`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

clock = time.time
_BEGAN = time.time()

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 1, 2, 3, 4
NVML_ERROR_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 6, 9, 13, 15
NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
NVML_GPM_METRICS_GET_VERSION, NVML_GPM_SUPPORT_VERSION = 1, 1
NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY = 2, 3
NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10
NVML_GPM_METRIC_PCIE_TX_PER_SEC, NVML_GPM_METRIC_PCIE_RX_PER_SEC = 20, 21
NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC = 60, 61
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3

_WORDS = {
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    13: "Function Not Found",
    15: "GPU is lost",
}


class NVMLError(Exception):
    """As pynvml's: `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(_WORDS.get(value, "Unknown Error"))
        self.value = value


# --- the script


def _load() -> dict[str, Any]:
    return json.loads(Path(os.environ["SHARDWAY_FAKE_NVML"]).read_text(encoding="utf-8"))


class Device:
    """One device, or a slice of one; NVML's handle."""

    def __init__(self, index: int, given: dict[str, Any], start: float, parent: Device | None = None) -> None:
        self.index, self.given, self.start, self.parent = index, given, start, parent
        self.slices = [Device(number, each, start, self) for number, each in enumerate(given.get("mig", ()))]
        self._sums: dict[str, tuple[float, float]] = {}
        self._random = random.Random(f"{given.get('uuid')} {given.get('seed', 0)}")

    def read(self, name: str, default: float | None = None) -> float:
        """The value of a series now. Raises NVMLError where it is denied or unknown; hangs where it is to hang."""
        self.check(name)
        value = self.given.get("values", {}).get(name, default)
        if value is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return self._at(value, clock() - self.start)

    def check(self, name: str) -> None:
        """Raise what the script wants of this call, or hang."""
        if name in (hangs := self.given.get("hangs", {})):
            from_s, for_s = hangs[name]
            passed = clock() - self.start
            if from_s <= passed < from_s + for_s:
                time.sleep(from_s + for_s - passed)
        if code := self.given.get("denied", {}).get(name, 0):
            raise NVMLError(code)

    def total(self, name: str) -> float:
        """The integral of a series since the start."""
        self.check(name)
        if (value := self.given.get("values", {}).get(name)) is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        at, so_far = self._sums.get(name, (0.0, 0.0))
        now = clock() - self.start
        while at < now:
            step = min(1.0, now - at)
            so_far += step * self._at(value, at + step / 2)
            at += step
        self._sums[name] = at, so_far
        return so_far

    def _at(self, value: Any, t: float) -> float:
        if not isinstance(value, dict):
            return float(value)
        result = 0.0
        if "steps" in value:
            result = next(
                (float(v) for since, v in reversed(value["steps"]) if t >= since), float(value["steps"][0][1])
            )
        elif "line" in value:
            points = value["line"]
            result = float(points[0][1] if t < points[0][0] else points[-1][1])
            for (t0, v0), (t1, v1) in itertools.pairwise(points):
                if t0 <= t < t1:
                    result = v0 + (v1 - v0) * (t - t0) / (t1 - t0)
        elif "wave" in value:
            mean, amplitude, period = value["wave"]
            result = mean + amplitude * math.sin(2 * math.pi * t / period)
        return result + self._random.gauss(0.0, 1.0) * value.get("noise", 0.0)


_script: dict[str, Any] | None = None
_devices: list[Device] = []


def _begun() -> list[Device]:
    if _script is None:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    return _devices


# --- pynvml's functions


def nvmlInit() -> None:
    global _script, _devices
    script = _load()
    if code := script.get("init_error", 0):
        raise NVMLError(code)
    start = float(script.get("start", 0)) or _BEGAN
    _script, _devices = script, [Device(index, each, start) for index, each in enumerate(script["devices"])]


def nvmlShutdown() -> None:
    global _script
    _script = None


def nvmlSystemGetDriverVersion() -> str:
    _begun()
    return str((_script or {}).get("driver", "580.65"))


def nvmlDeviceGetCount() -> int:
    return len(_begun())


def nvmlDeviceGetHandleByIndex(index: int) -> Device:
    if not 0 <= index < len(_begun()):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return _devices[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> Device:
    for device in _begun():
        for each in (device, *device.slices):
            if each.given.get("uuid") == (uuid.decode() if isinstance(uuid, bytes) else uuid):
                return each
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetIndex(handle: Device) -> int:
    return handle.index


def nvmlDeviceGetName(handle: Device) -> str:
    return str(handle.given.get("name", "NVIDIA Fake"))


def nvmlDeviceGetUUID(handle: Device) -> str:
    return str(handle.given.get("uuid", f"GPU-{handle.index}"))


def nvmlDeviceGetMigMode(handle: Device) -> tuple[int, int]:
    on = int(bool(handle.slices))
    return on, on


def nvmlDeviceGetMaxMigDeviceCount(handle: Device) -> int:
    return 7 if handle.slices else 0


def nvmlDeviceGetMigDeviceHandleByIndex(device: Device, index: int) -> Device:
    if index >= len(device.slices):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return device.slices[index]


def nvmlDeviceIsMigDeviceHandle(handle: Device) -> int:
    return int(handle.parent is not None)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: Device) -> Device:
    if handle.parent is None:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return handle.parent


def nvmlDeviceGetGpuInstanceId(handle: Device) -> int:
    return int(handle.given.get("instance", handle.index + 1))


def nvmlDeviceGetMemoryInfo(handle: Device) -> SimpleNamespace:
    total = int(handle.given.get("memory_bytes", 80 << 30))
    used = int(handle.read("memory_bytes", 0))
    return SimpleNamespace(total=total, used=used, free=total - used)


def _no_slice(handle: Device) -> None:
    if handle.parent is not None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetUtilizationRates(handle: Device) -> SimpleNamespace:
    _no_slice(handle)
    gpu = min(100, max(0, round(handle.read("use_percent", 0))))
    return SimpleNamespace(gpu=gpu, memory=min(100, max(0, round(handle.read("memory_use_percent", 0)))))


def nvmlDeviceGetPowerUsage(handle: Device) -> int:
    _no_slice(handle)
    return round(handle.read("power_w", 70) * 1000)


def nvmlDeviceGetEnforcedPowerLimit(handle: Device) -> int:
    _no_slice(handle)
    return round(float(handle.given.get("power_limit_w", 700)) * 1000)


def nvmlDeviceGetTotalEnergyConsumption(handle: Device) -> int:
    _no_slice(handle)
    handle.check("energy_j")
    return round(1e9 + handle.total("power_w") * 1000)  # mJ since the driver was loaded


def nvmlDeviceGetTemperature(handle: Device, sensor: int) -> int:
    _no_slice(handle)
    return round(handle.read("temperature_c", 40))


def nvmlDeviceGetClockInfo(handle: Device, kind: int) -> int:
    _no_slice(handle)
    name, usual = ("sm_clock_mhz", 1980) if kind == NVML_CLOCK_SM else ("memory_clock_mhz", 2619)
    return round(handle.read(name, usual))


def nvmlDeviceGetCurrentClocksEventReasons(handle: Device) -> int:
    _no_slice(handle)
    return round(handle.read("throttle_bits", 0))


def nvmlDeviceGetTotalEccErrors(handle: Device, error: int, counter: int) -> int:
    _no_slice(handle)
    return round(handle.read("ecc_errors", 0))


def nvmlDeviceGetPcieThroughput(handle: Device, counter: int) -> int:
    _no_slice(handle)
    name = "pcie_tx_bytes_per_s" if counter == NVML_PCIE_UTIL_TX_BYTES else "pcie_rx_bytes_per_s"
    return round(handle.read(name, 0) / 1024)  # KB/s


def nvmlDeviceGetComputeRunningProcesses(handle: Device) -> list[SimpleNamespace]:
    handle.check("job_processes")
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=None) for pid in handle.given.get("pids", ())]


_FIELDS = {138: "nvlink_tx_bytes_per_s", 139: "nvlink_rx_bytes_per_s"}


def nvmlDeviceGetFieldValues(handle: Device, fields: list[Any]) -> list[SimpleNamespace]:
    values = []
    for field in fields:
        number = field[0] if isinstance(field, tuple) else field
        value, code = 0, NVML_SUCCESS
        try:
            _no_slice(handle)
            if number not in _FIELDS:
                raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
            value = round(handle.total(_FIELDS[number]) / 1024)  # KiB
        except NVMLError as error:
            code = error.value
        held = SimpleNamespace(ullVal=value, uiVal=value, ulVal=value, sllVal=value, dVal=float(value), siVal=value)
        values.append(
            SimpleNamespace(fieldId=number, nvmlReturn=code, valueType=NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, value=held)
        )
    return values


# --- GPM: two samples, and the means between them


_METRICS = {
    NVML_GPM_METRIC_SM_UTIL: ("sm_percent", 1.0),
    NVML_GPM_METRIC_SM_OCCUPANCY: ("occupancy_percent", 1.0),
    NVML_GPM_METRIC_ANY_TENSOR_UTIL: ("tensor_percent", 1.0),
    NVML_GPM_METRIC_DRAM_BW_UTIL: ("dram_percent", 1.0),
    NVML_GPM_METRIC_PCIE_TX_PER_SEC: ("pcie_tx_bytes_per_s", 2.0**-20),
    NVML_GPM_METRIC_PCIE_RX_PER_SEC: ("pcie_rx_bytes_per_s", 2.0**-20),
    NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: ("nvlink_tx_bytes_per_s", 2.0**-20),
    NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: ("nvlink_rx_bytes_per_s", 2.0**-20),
}


class c_nvmlGpmMetricsGet_t:
    """As pynvml's structure."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(500)]


def nvmlGpmQueryDeviceSupport(device: Device) -> SimpleNamespace:
    if (device.parent or device).given.get("driver_lacks_gpm"):
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND)
    return SimpleNamespace(version=1, isSupportedDevice=int(bool((device.parent or device).given.get("gpm", True))))


def nvmlGpmSampleAlloc() -> SimpleNamespace:
    return SimpleNamespace(device=None)


def nvmlGpmSampleFree(sample: SimpleNamespace) -> None:
    sample.device = None


def nvmlGpmSampleGet(device: Device, sample: SimpleNamespace) -> SimpleNamespace:
    device.check("gpm")
    sample.device = device
    return sample


def nvmlGpmMigSampleGet(device: Device, instance: int, sample: SimpleNamespace) -> SimpleNamespace:
    device.check("gpm")
    sample.device = next(each for each in device.slices if nvmlDeviceGetGpuInstanceId(each) == instance)
    return sample


def nvmlGpmMetricsGet(request: c_nvmlGpmMetricsGet_t) -> c_nvmlGpmMetricsGet_t:
    for metric in request.metrics[: request.numMetrics]:
        name, factor = _METRICS.get(metric.metricId, ("", 1.0))
        try:
            metric.value, metric.nvmlReturn = request.sample2.device.read(name, 0.0) * factor, NVML_SUCCESS
        except NVMLError as error:
            metric.value, metric.nvmlReturn = 0.0, error.value
    return request
