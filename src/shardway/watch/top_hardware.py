"""What the accelerators and cores of a run do now, by the end of its telemetry: for `shardway status`, `shardway top`
and the live view.

Invariants:
- Reading never raises: what cannot be read is in `error`, and what was read before stays.
- A refresh reads what was appended since the last one; memory is bounded by `window_s` seconds of a few series.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardway.plain_arrays import find_arrays
from shardway.telemetry.store import DeviceInfo, NodeInfo, TelemetryFollower
from shardway.watch.facts import whole
from shardway.watch.hosts import order_of_host

METRICS: Mapping[str, str] = {
    "use": "use_percent",
    "memory": "memory_bytes",
    "power": "power_w",
    "SM": "sm_percent",
    "tensor": "tensor_percent",
}
"""Name of a metric of an accelerator -> its series. All are shown in percent: memory and power of their limits."""

CORES = "cores"
"""The metric that is of cores, not of accelerators: the use of each core that the job may use."""

WINDOW_S = 600.0
"""Over so many seconds before the last sample use is averaged."""
_NOW_S = 10.0  # the last seconds that a current value is the mean of
_USED_PERCENT = 1.0  # from this use on, at any moment of the window, an accelerator counts as used
_NO_CAPACITY = math.nan


@dataclass(frozen=True)
class GpuNow:
    """One accelerator: each metric in percent now, NaN where it has no value; `use_mean` and `use_max` over the
    window."""

    host: str
    index: int
    device: DeviceInfo | None
    now: Mapping[str, float]
    use_mean: float = math.nan
    use_max: float = math.nan

    @property
    def is_used(self) -> bool | None:
        """None where its use is not known."""
        return None if math.isnan(self.use_max) else self.use_max >= _USED_PERCENT


@dataclass(frozen=True)
class HardwareUse:
    """All accelerators of a run, in order of host and index, and the hosts' cores. `newest` is the time of the last
    sample; `cpu_percent` the mean of the hosts' allowed cores, NaN where unknown; `missing`: series -> why not;
    `cores`: of each host the use of its allowed cores now in percent."""

    gpus: tuple[GpuNow, ...]
    newest: float
    cpu_percent: float = math.nan
    hosts: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def used(self) -> int:
        return sum(gpu.is_used is True for gpu in self.gpus)

    @property
    def use_mean(self) -> float:
        """Mean use of all accelerators in the window, those that idle included."""
        return _mean([gpu.use_mean for gpu in self.gpus])


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def render_use(use: HardwareUse, asked: int | None = None) -> str:
    """ "3/4 GPUs 71 %, cores 12 %": used of those that were asked for, or that are sampled."""
    parts = []
    if use.gpus:
        total = max(asked or 0, len(use.gpus))
        mean = "" if math.isnan(use.use_mean) else f" {use.use_mean:.0f} %"
        parts.append(f"{use.used}/{total} GPU{'s' if total != 1 else ''}{mean}")
    if not math.isnan(use.cpu_percent):
        parts.append(f"cores {use.cpu_percent:.0f} %")
    return ", ".join(parts)


def count_gpus(asked: Mapping[str, Any]) -> int | None:
    """How many accelerators a job asked for on all its nodes; None where it did not say."""
    gpus, nodes = whole(asked, "accelerators"), whole(asked, "nodes")
    return None if gpus is None else gpus * (nodes or 1)


class _HostTail:
    """The window of one host."""

    def __init__(self, path: Path) -> None:
        self._follower = TelemetryFollower(path)
        self._parts: deque[tuple[Any, dict[str, Any]]] = deque()
        self.info: NodeInfo | None = None
        self.newest = -math.inf
        self._devices: dict[int, DeviceInfo | None] = {}
        self._shown: tuple[list[GpuNow], float, tuple[float, ...]] | None = None  # until there are new samples

    def refresh(self, window_s: float) -> None:
        for info, times, columns in self._follower.new_samples():
            if self.info is None or info.started >= self.info.started:
                self.info = info
            kept = {name: values for name, values in columns.items() if _is_shown(name)}
            self._parts.append((times, kept))
            self.newest = max(self.newest, float(times.max()))
            names = (name.split("/") for name in kept if name.startswith("gpu/"))
            found = {int(parts[1]) for parts in names if len(parts) == 3 and parts[1].isdecimal()}
            self._devices |= {index: None for index in found if index not in self._devices}
            self._devices |= {device.index: device for device in info.devices}
            self._shown = None
        while self._parts and float(self._parts[0][0].max()) < self.newest - window_s:
            self._parts.popleft()

    def values(self, series: str, since: float) -> Any:
        """The values of a series since a time, of which some may be NaN."""
        np = find_arrays()

        parts = [part for part in self._parts if part[0][-1] >= since]  # of the others all is older
        found = [columns[series][times >= since] for times, columns in parts if series in columns]
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def describe(self, window_s: float) -> tuple[list[GpuNow], float, tuple[float, ...]]:
        """Its accelerators, and the use of its cores now in percent: of all, and of each."""
        if self._shown is None:
            cpu = _mean_of(self.values("cpu/use_percent", self.newest - _NOW_S))
            allowed = self.info.allowed_cores if self.info else ()
            since = self.newest - _NOW_S
            each = tuple(_mean_of(self.values(f"core/{core}/use_percent", since)) for core in allowed)
            self._shown = self._list_gpus(window_s), cpu, each
        return self._shown

    def _list_gpus(self, window_s: float) -> list[GpuNow]:
        host = self.info.host if self.info else ""
        gpus = []
        for index, device in sorted(self._devices.items()):
            now = {}
            for metric, name in METRICS.items():
                value = _mean_of(self.values(f"gpu/{index}/{name}", self.newest - _NOW_S))
                now[metric] = value * _scale(metric, device)
            use = self.values(f"gpu/{index}/use_percent", self.newest - window_s)
            use = use[use == use]
            most = float(use.max()) if len(use) else math.nan
            gpus.append(GpuNow(host, index, device, now, _mean_of(use), most))
        return gpus


def _is_shown(name: str) -> bool:
    return (
        name == "cpu/use_percent"
        or name.startswith("core/")
        or (name.startswith("gpu/") and name.rpartition("/")[2] in METRICS.values())
    )


def _scale(metric: str, device: DeviceInfo | None) -> float:
    """What a value is multiplied by to be in percent."""
    if metric not in ("memory", "power"):
        return 1.0
    capacity = None if device is None else device.memory_bytes if metric == "memory" else device.power_limit_w
    return 100.0 / capacity if capacity else _NO_CAPACITY


def _mean_of(values: Any) -> float:
    known = values[values == values]
    return float(known.mean()) if len(known) else math.nan


class HardwareTail:
    """Follows the telemetry of one run."""

    def __init__(self, folder: Path, window_s: float = WINDOW_S) -> None:
        self._folder, self._window_s = folder, window_s
        self._hosts: dict[str, _HostTail] = {}
        self.error = ""

    def refresh(self) -> HardwareUse | None:
        """What it does now; None where no host has a sample."""
        self.error = ""
        try:
            names = sorted(os.listdir(self._folder), key=order_of_host)
        except FileNotFoundError:
            names = []
        except OSError as error:
            names, self.error = [*self._hosts], f"{self._folder} cannot be read: {error.strerror}"
        for name in [*self._hosts]:
            if name not in names:
                del self._hosts[name]
        for name in names:
            host = self._hosts.setdefault(name, _HostTail(self._folder / name))
            try:
                host.refresh(self._window_s)
            except IsADirectoryError:
                continue
            except OSError as error:
                self.error = f"{self._folder / name} cannot be read: {error.strerror}"
        return self._describe()

    def _describe(self) -> HardwareUse | None:
        hosts = sorted(self._hosts.items(), key=lambda item: order_of_host(item[0]))
        known = [host for _, host in hosts if host.info is not None and host.newest > 0]
        if not known:
            return None
        newest = max(host.newest for host in known)
        # A host that stopped long before the others belongs to an attempt that ended, as a run may go on elsewhere.
        known = [host for host in known if host.newest >= newest - self._window_s]
        described = [host.describe(self._window_s) for host in known]
        cpu = [percent for _, percent, _ in described]
        gpus = [gpu for listed, _, _ in described for gpu in listed]
        cores = tuple(
            (host.info.host, each) for host, (_, _, each) in zip(known, described, strict=True) if host.info and each
        )
        missing: dict[str, str] = {}
        for host in known:
            missing |= host.info.missing if host.info else {}
        return HardwareUse(tuple(gpus), newest, _mean(cpu), len(known), missing, cores)


def look_at_hardware(folder: Path) -> HardwareUse | None:
    """One look at the end of a run's telemetry; None where there is none."""
    with contextlib.suppress(OSError):
        return HardwareTail(folder).refresh()
    return None
