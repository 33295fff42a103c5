"""What the accelerators of a job do: NVIDIA's through NVML and its GPM metrics, AMD's through amdsmi.

A reader lists the devices that the job may use, asks each once for everything, and from then on reads what was
answered; what was refused is in `missing` with the reason. SHARDWAY_NVML names a module to use in place of pynvml.

Invariants:
- No call of a driver's library ends a run, and a refused value is NaN, never 0.
- Devices that the job may not use are not read. Which these are is said by CUDA_VISIBLE_DEVICES (AMD:
  ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES), and by the control group, which hides others from the library.
- A library that hangs holds up the thread that asks it alone (`DeviceThread`).

Units: NVML gives milliwatts, millijoules, KiB of NVLink, KB/s of PCIe; GPM gives percent and MiB/s.

Sources: NVML API Reference Guide ("Device Queries", "Field Value Enums", "GPM Functions", "Multi Instance GPU
Management"); CUDA C++ Programming Guide, "CUDA Environment Variables"; AMD SMI Python library reference.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardway.telemetry.store import DeviceInfo

NVML_VARIABLE = "SHARDWAY_NVML"
NAN = math.nan
SLICES_FROM = 1000
"""A MIG slice has the index SLICES_FROM + 100 * (index of its GPU) + (number of its GPU instance)."""

Values = Sequence[float]
Read = Callable[[float], Values]
"""Takes the time (s, of a clock that is never set) and returns a value for each series of a probe."""


class DeviceReader(Protocol):
    """Reads all devices of one maker. `series` are the names of what `read` returns."""

    devices: tuple[DeviceInfo, ...]
    series: tuple[str, ...]
    missing: dict[str, str]

    def read(self, now: float, job: Collection[int]) -> list[float]:
        """A value for each series; `job` has the ids of the job's processes."""
        ...

    def close(self) -> None: ...


@dataclass
class _Probe:
    """Some series of one device that one call gives. After `MOST_FAILURES` failures in a row it is in `missing`, and is
    tried again with every sample."""

    names: tuple[str, ...]
    read: Read
    failures: int = 0


MOST_FAILURES = 5
GPM = ("sm_percent", "tensor_percent", "dram_percent", "occupancy_percent")
PCIE = ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")
NVLINK = ("nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s")
PROCESSES_EVERY_S = 5.0


class ProbedReader(ABC):
    """Devices that are read by probes, each with a library's call; one that failed MOST_FAILURES times in a row is
    missing, with the reason."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self._job: Collection[int] = ()
        self._probes: list[_Probe] = []

    @abstractmethod
    def _why(self, error: Exception) -> str:
        """The reason of a refusal, in a sentence."""

    def read(self, now: float, job: Collection[int]) -> list[float]:
        self._job = job
        values: list[float] = []
        for probe in self._probes:
            try:
                values += probe.read(now)
                probe.failures = 0
            except Exception as error:  # whatever a driver's library raises
                probe.failures += 1
                values += (NAN,) * len(probe.names)
                if probe.failures == MOST_FAILURES:
                    self.missing.update(dict.fromkeys(probe.names, self._why(error)))
        return values


# --- NVIDIA


def find_visible(named: str | None, count: int) -> list[int | str] | None:
    """The devices that CUDA_VISIBLE_DEVICES names, indices or UUIDs (of MIG too); None for all. As in CUDA, what
    follows the first invalid index is not visible."""
    if named is None:
        return None
    found: list[int | str] = []
    for word in (word.strip() for word in named.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            found.append(word)
        elif word.isdecimal() and int(word) < count:
            found.append(int(word))
        else:
            break
    return list(dict.fromkeys(found))


class NvidiaReader(ProbedReader):
    """NVIDIA's devices. Raises the library's error, or ImportError, where it cannot be used at all."""

    def __init__(self, nvml: Any, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._nvml = nvml
        nvml.nvmlInit()
        self._driver = "unknown"
        with suppress(Exception):
            self._driver = _text(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for handle in self._list_handles(environ.get("CUDA_VISIBLE_DEVICES")):
            device = _NvidiaDevice(nvml, handle)
            devices.append(device.info)
            for names, read in device.calls(lambda: self._job):
                self._try(f"gpu/{device.info.index}/", device.is_slice, names, read)
            self._open_gpm(device)
        self.devices = tuple(devices)
        if not self.devices:
            named = environ.get("CUDA_VISIBLE_DEVICES")
            self.missing["gpu/*"] = (
                "the driver lists no NVIDIA device" if named is None else f'CUDA_VISIBLE_DEVICES is "{named}"'
            )
        self.series = tuple(name for probe in self._probes for name in probe.names)

    def close(self) -> None:
        with suppress(Exception):
            self._nvml.nvmlShutdown()

    def _list_handles(self, named: str | None) -> Iterator[Any]:
        """A GPU that is cut into slices stands for its slices."""
        nvml = self._nvml
        count = int(nvml.nvmlDeviceGetCount())
        visible = find_visible(named, count)
        if visible is None:
            for index in range(count):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                yield from self._list_slices(handle) or [handle]
            return
        for each in visible:
            with suppress(nvml.NVMLError):
                if isinstance(each, int):
                    handle = nvml.nvmlDeviceGetHandleByIndex(each)
                    yield (self._list_slices(handle) or [handle])[0]  # CUDA shows the first slice alone
                else:
                    yield self._find_uuid(each, count)

    def _list_slices(self, handle: Any) -> list[Any]:
        nvml, slices = self._nvml, list[Any]()
        with suppress(nvml.NVMLError, AttributeError):
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
                    with suppress(nvml.NVMLError):
                        slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        return slices

    def _find_uuid(self, uuid: str, count: int) -> Any:
        """A device by its UUID, or the beginning of one. Raises NVMLError."""
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            for index in range(count):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(uuid):
                    return handle
            raise

    def _try(self, prefix: str, is_slice: bool, names: Sequence[str], read: Read) -> bool:
        """Keep a call if it works now; else the reason."""
        full = tuple(prefix + name for name in names)
        try:
            read(-math.inf)
        except Exception as error:  # whatever a driver's library raises
            self.missing.update(dict.fromkeys(full, self._why(error, is_slice=is_slice)))
            return False
        for name in full:  # a second way to the same series may work where the first did not
            self.missing.pop(name, None)
        self._probes.append(_Probe(full, read))
        return True

    def _open_gpm(self, device: _NvidiaDevice) -> None:
        """GPM's metrics where the device has them, and PCIe and NVLink with them; else by slower ways."""
        prefix = f"gpu/{device.info.index}/"
        try:
            gpm = _GpmMetrics(self._nvml, device, self._refuse)
            gpm.take()
        except Exception as error:  # whatever a driver's library raises
            why = self._why(error, is_slice=device.is_slice, of_gpm=True)
            self.missing.update({prefix + name: why for name in GPM})
            for names, read in device.traffic_calls():
                self._try(prefix, device.is_slice, names, read)
            return
        self._probes.append(_Probe(tuple(prefix + name for name in gpm.names), gpm.read))
        if gpm.names == GPM:
            for names, read in device.traffic_calls():
                self._try(prefix, device.is_slice, names, read)

    def _refuse(self, name: str, code: int) -> None:
        """GPM answers for each of its metrics."""
        self.missing[name] = self._why(self._nvml.NVMLError(code))

    def _why(self, error: Exception, *, is_slice: bool = False, of_gpm: bool = False) -> str:
        """The reason of a refusal, in a sentence."""
        code, said = getattr(error, "value", None), str(error) or type(error).__name__
        is_unsupported = isinstance(error, _Unsupported) or code == getattr(self._nvml, "NVML_ERROR_NOT_SUPPORTED", 3)
        if code == getattr(self._nvml, "NVML_ERROR_NO_PERMISSION", 4):
            return "the driver lets administrators alone read it"
        if isinstance(error, AttributeError) or code == getattr(self._nvml, "NVML_ERROR_FUNCTION_NOT_FOUND", 13):
            return f"the driver ({self._driver}) or its Python library is too old"
        if is_unsupported and is_slice:
            return "of a slice of a GPU (MIG) the driver does not say it"
        if is_unsupported and of_gpm:
            return "GPUs before Hopper give it to administrators alone (DCGM)"
        if is_unsupported:
            return "this GPU does not say it"
        return f"NVML: {said}"


class _Unsupported(Exception):
    """A device answers that it does not have something."""


def _text(value: Any) -> str:
    """Releases of nvidia-ml-py before 11.5 return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _NvidiaDevice:
    """One GPU, or a slice of one."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle, self.parent, self.instance = nvml, handle, handle, None
        self.is_slice = False
        with suppress(nvml.NVMLError, AttributeError):
            self.is_slice = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
        if self.is_slice:
            self.parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            self.instance = int(nvml.nvmlDeviceGetGpuInstanceId(handle))
        index = int(nvml.nvmlDeviceGetIndex(self.parent))
        if self.instance is not None:
            index = SLICES_FROM + 100 * index + self.instance
        memory, limit = None, None
        with suppress(nvml.NVMLError):  # a GPU without memory of its own shares the CPU's
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        with suppress(nvml.NVMLError, AttributeError):
            limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
        self.info = DeviceInfo(index, name, uuid, memory, limit, "nvidia")

    def calls(self, job: Callable[[], Collection[int]]) -> list[tuple[tuple[str, ...], Read]]:
        """Every call but those of GPM and of traffic."""
        nvml, handle = self.nvml, self.handle

        def use(now: float) -> Values:
            rates = nvml.nvmlDeviceGetUtilizationRates(handle)
            return rates.gpu, rates.memory

        def reasons(now: float) -> Values:  # the name since driver 535, and the one before
            of_events = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            if of_events is not None:
                with suppress(nvml.NVMLError):
                    return (of_events(handle),)
            return (nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)

        energy = _Counted()
        volatile, uncorrected = nvml.NVML_VOLATILE_ECC, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        sensor, sm, memory = nvml.NVML_TEMPERATURE_GPU, nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        return [
            (("use_percent", "memory_use_percent"), use),
            (("memory_bytes",), lambda now: (nvml.nvmlDeviceGetMemoryInfo(handle).used,)),
            (("power_w",), lambda now: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,)),
            (("temperature_c",), lambda now: (nvml.nvmlDeviceGetTemperature(handle, sensor),)),
            (("sm_clock_mhz",), lambda now: (nvml.nvmlDeviceGetClockInfo(handle, sm),)),
            (("memory_clock_mhz",), lambda now: (nvml.nvmlDeviceGetClockInfo(handle, memory),)),
            (("throttle_bits",), reasons),
            (("energy_j",), lambda now: (energy.add(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000,)),
            (("ecc_errors",), lambda now: (nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile),)),
            (("job_processes",), _ProcessCount(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), job).read),
        ]

    def traffic_calls(self) -> list[tuple[tuple[str, ...], Read]]:
        """PCIe and NVLink without GPM. NVML measures PCIe for 20 ms in each direction while the caller waits."""
        nvml, handle = self.nvml, self.handle
        fields = [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
        ]
        rates = [_Rate(), _Rate()]

        def links(now: float) -> Values:
            answers = nvml.nvmlDeviceGetFieldValues(handle, fields)
            for answer in answers:
                if answer.nvmlReturn:
                    raise nvml.NVMLError(answer.nvmlReturn)
            return [rate.of(now, each.value.ullVal * 1024) for rate, each in zip(rates, answers, strict=False)]

        def pcie(now: float) -> Values:
            received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            return received * 1024, nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1024

        return [(NVLINK, links), (PCIE, pcie)]


ALL_LINKS = 0xFFFFFFFF
"""The scope of a field value: the sum over all links of a GPU."""


class _GpmMetrics:
    """What a GPU did between two samples of GPM."""

    def __init__(self, nvml: Any, device: _NvidiaDevice, refuse: Callable[[str, int], None]) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(device.parent).isSupportedDevice:
            raise _Unsupported
        self._nvml, self._device, self._refuse = nvml, device, refuse
        self._refused = set[str]()
        percent = {
            "sm_percent": nvml.NVML_GPM_METRIC_SM_UTIL,
            "tensor_percent": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "dram_percent": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
            "occupancy_percent": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
        }
        rates = {
            "pcie_rx_bytes_per_s": nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
            "pcie_tx_bytes_per_s": nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
            "nvlink_rx_bytes_per_s": nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
            "nvlink_tx_bytes_per_s": nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
        }
        asked = percent if device.is_slice else {**percent, **rates}
        self.names = tuple(asked)
        self._factors = [1.0 if name in percent else 2.0**20 for name in asked]
        self._before, self._now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(asked)
        for number, metric in enumerate(asked.values()):
            self._request.metrics[number].metricId = metric

    def take(self) -> None:
        """One sample, for the next one to be compared with."""
        if self._device.is_slice:
            self._nvml.nvmlGpmMigSampleGet(self._device.parent, self._device.instance, self._now)
        else:
            self._nvml.nvmlGpmSampleGet(self._device.handle, self._now)
        self._before, self._now = self._now, self._before

    def read(self, now: float) -> Values:
        earlier = self._before
        self.take()
        request = self._request
        request.sample1, request.sample2 = earlier, self._before
        self._nvml.nvmlGpmMetricsGet(request)
        values = []
        for number, (name, factor) in enumerate(zip(self.names, self._factors, strict=True)):
            metric = request.metrics[number]
            values.append(NAN if metric.nvmlReturn else metric.value * factor)
            if metric.nvmlReturn and name not in self._refused:
                self._refused.add(name)
                self._refuse(f"gpu/{self._device.info.index}/{name}", metric.nvmlReturn)
        return values


class _Counted:
    """A counter from its first value on; where a device was reset it counts from 0 again."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._sum = 0.0

    def add(self, value: float) -> float:
        if self._before is not None:
            self._sum += value - self._before if value >= self._before else value
        self._before = value
        return self._sum


class _Rate:
    """The rate of a counter; NaN for its first value, and where it was reset."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def of(self, now: float, value: float) -> float:
        before, self._before = self._before, None if now == -math.inf else (now, value)
        if before is None or value < before[1] or now <= before[0]:
            return NAN
        return (value - before[1]) / (now - before[0])


class _ProcessCount:
    """How many processes of the job a device has, looked up every PROCESSES_EVERY_S. NaN where the driver's process ids
    are not those of this machine, as in a container with ids of its own."""

    def __init__(self, list_processes: Callable[[], Sequence[Any]], job: Callable[[], Collection[int]]) -> None:
        self._list, self._job = list_processes, job
        self._at, self._value = -math.inf, NAN

    def read(self, now: float) -> Values:
        if now == -math.inf or now - self._at >= PROCESSES_EVERY_S:
            found = [each["pid"] if isinstance(each, dict) else each.pid for each in self._list()]
            job = self._job()
            own = sum(pid in job for pid in found)
            known = own or not found or any(os.path.exists(f"/proc/{pid}") for pid in found)
            self._value, self._at = (float(own) if known else NAN), now
        return (self._value,)


# --- AMD


class AmdReader(ProbedReader):
    """AMD's devices through amdsmi, whose values may be the text "N/A"."""

    def __init__(self, smi: Any, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._smi = smi
        smi.amdsmi_init()
        handles = list(smi.amdsmi_get_processor_handles())
        named = environ.get("ROCR_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
        chosen = range(len(handles)) if named is None else find_visible(named, len(handles)) or []
        devices = []
        for index in chosen:
            if isinstance(index, int):
                devices.append(self._describe(index, handles[index]))
                for names, read in self._calls(handles[index]):
                    full = tuple(f"gpu/{index}/{name}" for name in names)
                    try:
                        read(-math.inf)
                        self._probes.append(_Probe(full, read))
                    except Exception as error:  # whatever the library raises
                        self.missing.update(dict.fromkeys(full, self._why(error)))
        for device in devices:
            for name in GPM:
                self.missing[f"gpu/{device.index}/{name}"] = "AMD's library does not give it"
        self.devices = tuple(devices)
        self.series = tuple(name for probe in self._probes for name in probe.names)

    def _why(self, error: Exception) -> str:
        return f"amdsmi: {_first_line(error)}"

    def close(self) -> None:
        with suppress(Exception):
            self._smi.amdsmi_shut_down()

    def _describe(self, index: int, handle: Any) -> DeviceInfo:
        smi, name, uuid, memory, limit = self._smi, "AMD GPU", "", None, None
        with suppress(Exception):
            name = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
        with suppress(Exception):
            uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
        with suppress(Exception):
            memory = int(_number(smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"]) * MIB)
        with suppress(Exception):
            limit = _number(smi.amdsmi_get_power_cap_info(handle)["power_cap"]) / 1e6
        return DeviceInfo(index, name, uuid, memory, limit, "amd")

    def _calls(self, handle: Any) -> list[tuple[tuple[str, ...], Read]]:
        smi, energy = self._smi, _Counted()

        def use(now: float) -> Values:
            found = smi.amdsmi_get_gpu_activity(handle)
            return _number(found["gfx_activity"]), _number(found["umc_activity"])

        def power(now: float) -> Values:  # cards differ in which of the two they have
            found = smi.amdsmi_get_power_info(handle)
            names = ("current_socket_power", "average_socket_power", "socket_power")
            for name in names:
                with suppress(KeyError, ValueError):
                    return (_number(found[name]),)
            raise ValueError("it gives no power")

        def clock(kind: str) -> Read:
            def read(now: float) -> Values:
                found = smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, kind))
                return (_number(found["clk"] if "clk" in found else found["cur_clk"]),)

            return read

        def temperature(now: float) -> Values:
            kind, current = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
            hottest = kind.JUNCTION if hasattr(kind, "JUNCTION") else kind.HOTSPOT
            return (_number(smi.amdsmi_get_temp_metric(handle, hottest, current)),)

        def joules(now: float) -> Values:
            found = smi.amdsmi_get_energy_count(handle)
            count = found["energy_accumulator"] if "energy_accumulator" in found else found["power"]  # before 6.2
            return (energy.add(_number(count) * _number(found["counter_resolution"])) / 1e6,)

        def errors(now: float) -> Values:
            return (_number(smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"]),)

        def memory(now: float) -> Values:
            return (_number(smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"]) * MIB,)

        count = _ProcessCount(lambda: smi.amdsmi_get_gpu_process_list(handle), lambda: self._job)
        return [
            (("use_percent", "memory_use_percent"), use),
            (("memory_bytes",), memory),
            (("power_w",), power),
            (("temperature_c",), temperature),
            (("sm_clock_mhz",), clock("GFX")),
            (("memory_clock_mhz",), clock("MEM")),
            (("energy_j",), joules),
            (("ecc_errors",), errors),
            (("job_processes",), count.read),
        ]


MIB = 1 << 20


def _number(value: Any) -> float:
    """Raises ValueError for "N/A", which stands for what a card does not have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"it answers {value!r}")
    return float(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


# --- what this machine has


def open_devices(environ: Mapping[str, str]) -> tuple[list[DeviceReader], dict[str, str]]:
    """A reader for each maker whose devices are here, and why there is none for another."""
    readers, missing = list[DeviceReader](), dict[str, str]()
    named = environ.get(NVML_VARIABLE, "")
    if named or any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))):
        try:
            readers.append(NvidiaReader(importlib.import_module(named or "pynvml"), environ))
        except Exception as error:  # no library, a driver that does not fit it, a container without devices
            missing["gpu/*"] = f"NVIDIA's library cannot be used: {_first_line(error)}"
    if os.path.exists("/dev/kfd"):
        try:
            readers.append(AmdReader(importlib.import_module("amdsmi"), environ))
        except ImportError:
            missing["gpu/*"] = "AMD's devices need the Python package amdsmi, which belongs to ROCm"
        except Exception as error:  # as above
            missing["gpu/*"] = f"AMD's library cannot be used: {_first_line(error)}"
    if not readers and not missing:
        missing["gpu/*"] = "this machine shows no accelerator"
    return readers, missing


# --- a thread that a hanging library may hold up


@dataclass
class DeviceState:
    """What the thread has found so far. `version` grows with each change of devices, series or `missing`."""

    devices: tuple[DeviceInfo, ...] = ()
    series: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    version: int = 0


class DeviceThread:
    """Reads the devices in a thread of its own: ctypes and the drivers' libraries let other threads run meanwhile, so
    that what hangs in a driver costs the devices' values, and host values go on.

    `ask` starts a reading unless the one before has not returned; `collect` returns its values, NaN where they are not
    there in time. `hangs_s` is how long a call has not returned.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.state = DeviceState()
        self._environ = environ
        self._wanted, self._done = threading.Semaphore(0), threading.Event()
        self._now, self._job = 0.0, frozenset[int]()
        self._values: list[float] = []
        self._asked_at: float | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def start(self, now: float, wait_s: float) -> None:
        """Open the libraries, and wait that long for it."""
        self._asked_at = now
        self._thread.start()
        self._done.wait(wait_s)

    def ask(self, now: float, job: frozenset[int]) -> None:
        if not self._done.is_set():
            return
        self._done.clear()
        self._now, self._job, self._asked_at = now, job, now
        self._wanted.release()

    def collect(self, wait_s: float) -> list[float] | None:
        """Values for `state.series`; None if a call has not returned."""
        if not self._done.wait(wait_s):
            return None
        self._asked_at = None
        return self._values

    def hangs_s(self, now: float) -> float:
        return 0.0 if self._asked_at is None or self._done.is_set() else now - self._asked_at

    def end(self) -> None:
        """A thread that hangs is left behind; it ends with the process."""
        self._ends = True
        self._wanted.release()
        self._thread.join(0.5)

    def _run(self) -> None:
        readers, missing = open_devices(self._environ)
        self._describe(readers, missing)
        self._done.set()
        while True:
            self._wanted.acquire()
            if self._ends:
                break
            self._values = [value for reader in readers for value in reader.read(self._now, self._job)]
            if sum(len(reader.missing) for reader in readers) + len(missing) != len(self.state.missing):
                self._describe(readers, missing)
            self._done.set()
        for reader in readers:
            reader.close()

    def _describe(self, readers: Sequence[DeviceReader], missing: Mapping[str, str]) -> None:
        self.state = DeviceState(
            devices=tuple(device for reader in readers for device in reader.devices),
            series=tuple(name for reader in readers for name in reader.series),
            missing={**missing, **{name: why for reader in readers for name, why in reader.missing.items()}},
            version=self.state.version + 1,
        )
