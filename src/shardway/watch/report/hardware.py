"""The hardware of a run as figures and totals: samples of all nodes on the time axis of the report.

Invariants:
- A bin without a sample has no value (NaN): it is a gap in every figure and in no mean. Bins keep the smallest and the
  largest sample beside the mean.
- Energy is the difference of the device's own counter where there is one, otherwise the integral of power over sampled
  time; which of them is always stated. Both are of the accelerators alone.
- A quantity that never moved is left out, and named among those left out; idle accelerators are always shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardway.telemetry.store import DeviceInfo, HostTelemetry
from shardway.watch.evidence import find_rise, mean, quantile
from shardway.watch.report.axis import TimeAxis

if TYPE_CHECKING:
    from shardway.watch.findings import GpuVerdict

BINS = 480  # maximum bins of a colour map over time
CELLS = 40_000  # maximum cells of one colour map
_GIB, _MB, _GB = 2.0**30, 1e6, 1e9
_KWH = 3.6e6

# --- samples in bins


@dataclass(frozen=True)
class Panel:
    """One quantity over rows (GPUs or nodes) and time. `means`: float64 (rows, bins), NaN for a gap; `least` and `most`
    over all rows and samples of a bin, `middle` the mean over rows: (bins,). `row_means`: (rows,). `top`: end of the
    scale, which begins at 0. `is_main`: shown openly."""

    name: str
    title: str
    unit: str
    note: str
    rows: tuple[str, ...]
    means: Any
    least: Any
    middle: Any
    most: Any
    row_means: Any
    top: float
    is_main: bool

    @property
    def mean(self) -> float:
        return _mean(self.row_means)


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows: of each "gpu" or "node", from series whose names match a pattern, added up. `top`: end of the
    scale by a device or node (None: the largest value). `moved`: the smallest maximum that is worth a figure; None for
    one that is always shown."""

    name: str
    title: str
    unit: str
    of: str
    pattern: str
    scale: float = 1.0
    top: Callable[[HostTelemetry, DeviceInfo | None], float | None] = lambda host, device: None
    moved: float | None = 1e-9
    is_main: bool = True
    note: str = ""


def _hundred(host: HostTelemetry, device: DeviceInfo | None) -> float:
    return 100.0


THROTTLED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""Bits of `throttle_bits` that hold clocks back: power cap, slow-down by hardware, heat (software, hardware), power
brake (NVML, clocks event reasons). Others are no loss: idle, a clock that was asked for, a display."""

_QUANTITIES = (
    _Quantity("use", "GPU use", "%", "gpu", "gpu/{i}/use_percent", top=_hundred, moved=None,
              note="share of the time in which at least one kernel ran, however small"),
    _Quantity("sm", "SM activity", "%", "gpu", "gpu/{i}/sm_percent", top=_hundred,
              note="share of the multiprocessors that had work"),
    _Quantity("tensor", "Tensor cores", "%", "gpu", "gpu/{i}/tensor_percent", top=_hundred,
              note="share of the cycles in which the tensor cores worked; 40 to 60 % is good"),
    _Quantity("memory", "GPU memory", "GiB", "gpu", "gpu/{i}/memory_bytes", 1 / _GIB,
              lambda host, device: device.memory_bytes / _GIB if device and device.memory_bytes else None, None),
    _Quantity("power", "GPU power", "W", "gpu", "gpu/{i}/power_w",
              top=lambda host, device: device.power_limit_w if device else None, moved=None),
    _Quantity("throttled", "Clocks held back", "% of the time", "gpu", "gpu/{i}/throttle_bits", top=_hundred,
              moved=0.5, note="by the power cap, by heat or by the power supply"),
    _Quantity("cpu", "CPU use", "%", "node", "cpu/use_percent", top=_hundred, moved=None,
              note="of the cores that the job may use"),
    _Quantity("job_memory", "Memory of the job", "GiB", "node", "memory/job_bytes", 1 / _GIB,
              lambda host, device: (host.info.memory_limit_bytes or host.info.memory_bytes or 0) / _GIB or None, None),
    _Quantity("read", "Read from storage", "MB/s", "node", "io/read_bytes_per_s", 1 / _MB, moved=0.05),
    _Quantity("written", "Written to storage", "MB/s", "node", "io/write_bytes_per_s", 1 / _MB, moved=0.05),
    _Quantity("network", "Network, in and out", "MB/s", "node", r"net/(?!lo/)[^/]+/[rt]x_bytes_per_s", 1 / _MB,
              moved=0.05),
    _Quantity("infiniband", "InfiniBand, in and out", "GB/s", "node", r"ib/[^/]+/[rt]x_bytes_per_s", 1 / _GB,
              moved=1e-4),
    _Quantity("lustre", "Lustre, read and written", "MB/s", "node", r"lustre/[^/]+/(read|write)_bytes_per_s", 1 / _MB,
              moved=0.05),
    _Quantity("dram", "GPU memory bandwidth", "%", "gpu", "gpu/{i}/dram_percent", top=_hundred, is_main=False),
    _Quantity("occupancy", "Occupancy of the SMs", "%", "gpu", "gpu/{i}/occupancy_percent", top=_hundred,
              is_main=False),
    _Quantity("temperature", "GPU temperature", "°C", "gpu", "gpu/{i}/temperature_c", is_main=False),
    _Quantity("clock", "SM clock", "MHz", "gpu", "gpu/{i}/sm_clock_mhz", is_main=False),
    _Quantity("nvlink", "NVLink, in and out", "GB/s", "gpu", r"gpu/{i}/nvlink_[rt]x_bytes_per_s", 1 / _GB, moved=1e-3,
              is_main=False),
    _Quantity("pcie", "PCIe, in and out", "GB/s", "gpu", r"gpu/{i}/pcie_[rt]x_bytes_per_s", 1 / _GB, moved=1e-3,
              is_main=False),
    _Quantity("ecc", "ECC errors", "errors", "gpu", "gpu/{i}/ecc_errors", moved=0.5, is_main=False),
    _Quantity("job_cores", "Cores busy with the job", "cores", "node", "cpu/job_cores",
              top=lambda host, device: float(len(host.info.allowed_cores)) or None, is_main=False),
    _Quantity("calls_read", "Read by calls, caches included", "MB/s", "node", "io/rchar_bytes_per_s", 1 / _MB,
              moved=0.05, is_main=False),
    _Quantity("opens", "Files opened on Lustre", "a second", "node", r"lustre/[^/]+/opens_per_s", moved=0.05,
              is_main=False),
)  # fmt: skip


def make_panels(hosts: Sequence[HostTelemetry], axis: TimeAxis) -> tuple[list[Panel], list[str]]:
    """The figures that there is something to see in, and the titles of quantities that were sampled and never moved."""
    panels, still = [], []
    for quantity in _QUANTITIES:
        found = list(_find_rows(quantity, hosts))
        if not found:
            continue
        panel = _make_panel(quantity, found, axis)
        highest = _largest(panel.most)
        if quantity.moved is not None and not highest >= quantity.moved:
            still.append(quantity.title)
        elif math.isfinite(highest):
            panels.append(panel)
    return panels, still


def _find_rows(
    quantity: _Quantity, hosts: Sequence[HostTelemetry]
) -> Iterator[tuple[str, HostTelemetry, Any, float | None]]:
    """Label, host, samples and end of the scale of each row that has any."""
    names = shorten_hosts([host.host for host in hosts])
    for host, name in zip(hosts, names, strict=True):
        devices = list_devices(host) if quantity.of == "gpu" else [(None, None)]
        for index, device in devices:
            samples = _add_series(host, quantity.pattern.replace("{i}", str(index)))
            if samples is None:
                continue
            if quantity.name == "throttled":
                samples = _is_throttled(samples)
            label = name if index is None else f"{name}:{index}"
            yield label, host, samples * quantity.scale, quantity.top(host, device)


def list_devices(host: HostTelemetry) -> list[tuple[int, DeviceInfo | None]]:
    """Each accelerator of a node by its index, whether its sampler described it or only series mention it."""
    known = {device.index: device for info in host.infos for device in info.devices}
    named = {int(found[1]) for name in host.series if (found := re.match(r"gpu/(\d+)/", name))}
    return [(index, known.get(index)) for index in sorted(known.keys() | named)]


def shorten_hosts(names: Sequence[str]) -> list[str]:
    """Without the domain, if the names differ without it."""
    short = [name.partition(".")[0] for name in names]
    return short if len(set(short)) == len(short) else list(names)


def _add_series(host: HostTelemetry, pattern: str) -> Any:
    """The sum of series that match; NaN where none has a value, None where none matches."""
    import numpy as np

    matched = [host.series[name] for name in host.series if name == pattern or re.fullmatch(pattern, name)]
    if not matched:
        return None
    if len(matched) == 1:
        return np.asarray(matched[0], dtype=np.float64)
    stacked = np.asarray(matched, dtype=np.float64)
    known = np.isfinite(stacked)
    return np.where(known.any(axis=0), np.where(known, stacked, 0).sum(axis=0), np.nan)


def _is_throttled(bits: Any) -> Any:
    import numpy as np

    known = np.isfinite(bits)
    return np.where(known, 100.0 * ((np.where(known, bits, 0).astype(np.int64) & THROTTLED) != 0), np.nan)


def _make_panel(
    quantity: _Quantity, found: Sequence[tuple[str, HostTelemetry, Any, float | None]], axis: TimeAxis
) -> Panel:
    import numpy as np

    every = max(host.info.every_s for _, host, _, _ in found)
    bins = int(max(1, min(BINS, CELLS // len(found), axis.alive_s / max(2 * every, 1e-3))))
    edges = axis.time(np.linspace(0, 1, bins + 1))
    edges[-1] += 1e-3  # the last sample belongs to the last bin
    parts = [bin_samples(host.times, samples, edges) for _, host, samples, _ in found]
    least, means, most = (np.array([part[which] for part in parts]) for which in range(3))
    tops = [top for *_, top in found if top]
    largest = _largest(most)
    return Panel(
        quantity.name,
        quantity.title,
        quantity.unit,
        quantity.note,
        tuple(label for label, *_ in found),
        means,
        _fold(np.fmin, least),
        _mean_over_rows(means),
        _fold(np.fmax, most),
        np.array([_mean(samples) for _, _, samples, _ in found]),
        max(tops) if tops and max(tops) >= 0.98 * largest else max(largest, 1e-9) if math.isfinite(largest) else 1.0,
        quantity.is_main,
    )


def bin_samples(times: Any, samples: Any, edges: Any) -> tuple[Any, Any, Any]:
    """Smallest, mean and largest sample of each bin between two edges; NaN for a bin without a value."""
    import numpy as np

    count = len(edges) - 1
    empty = np.full(count, np.nan)
    at = np.searchsorted(times, edges)
    known = np.isfinite(samples)
    if not len(samples) or not known.any():
        return empty, empty, empty
    filled = at[:-1] < at[1:]
    starts = at[:-1][filled]
    inside = slice(0, at[-1])
    values, found = samples[inside], known[inside]
    if not len(starts):
        return empty, empty, empty
    least, means, most = empty.copy(), empty.copy(), empty.copy()
    numbers = np.add.reduceat(found.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(found, values, 0.0), starts)
    means[filled] = np.divide(sums, numbers, out=np.full(len(starts), np.nan), where=numbers > 0)
    least[filled] = np.fmin.reduceat(np.where(found, values, np.nan), starts)
    most[filled] = np.fmax.reduceat(np.where(found, values, np.nan), starts)
    return least, means, most


def _fold(function: Any, table: Any) -> Any:
    return function.reduce(table, axis=0)


def _mean_over_rows(table: Any) -> Any:
    import numpy as np

    known = np.isfinite(table)
    numbers = known.sum(axis=0)
    sums = np.where(known, table, 0.0).sum(axis=0)
    return np.divide(sums, numbers, out=np.full(table.shape[1], np.nan), where=numbers > 0)


def _mean(samples: Any) -> float:
    import numpy as np

    known = samples[np.isfinite(samples)]
    return float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _largest(samples: Any) -> float:
    import numpy as np

    known = samples[np.isfinite(samples)]
    return float(known.max()) if len(known) else math.nan


# --- totals of each accelerator and node

COUNTER, INTEGRAL = "the device's energy counter", "power integrated over the samples"


@dataclass(frozen=True)
class GpuTotals:
    """One accelerator over all samples of all starts; None where it was not sampled. `energy_from` states how the
    energy was found. `sampled_s`: seconds that samples stand for. `verdict`: as `shardway.watch.findings.GpuVerdict`,
    of the newest start: `start` of `starts`; "unknown" and None where it had no part in it."""

    host: str
    index: int
    name: str
    verdict: str
    use_mean: float | None
    use_max: float | None
    sm_mean: float | None
    tensor_mean: float | None
    memory_mean_bytes: float | None
    memory_max_bytes: float | None
    memory_bytes: int | None
    power_mean_w: float | None
    power_max_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    energy_from: str
    sampled_s: float
    start: int | None = None
    starts: int | None = None

    @property
    def energy_kwh(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / _KWH

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "energy_kwh": self.energy_kwh}


def total_gpus(hosts: Sequence[HostTelemetry], verdicts: Sequence[GpuVerdict]) -> list[GpuTotals]:
    """Every accelerator of every node, by node and index."""
    known = {(each.host, each.index): each for each in verdicts}
    return [
        _total_gpu(host, index, device, known.get((host.host, index)))
        for host in hosts
        for index, device in list_devices(host)
    ]


def _total_gpu(host: HostTelemetry, index: int, device: DeviceInfo | None, judged: GpuVerdict | None) -> GpuTotals:
    def mean_of(name: str) -> float | None:
        return mean(host.series.get(f"gpu/{index}/{name}"))

    def most_of(name: str) -> float | None:
        return quantile(host.series.get(f"gpu/{index}/{name}"), 1.0)

    energy, source = _find_energy(host, index)
    return GpuTotals(
        host.host,
        index,
        device.name if device else "",
        judged.verdict if judged else "unknown",
        mean_of("use_percent"),
        most_of("use_percent"),
        mean_of("sm_percent"),
        mean_of("tensor_percent"),
        mean_of("memory_bytes"),
        most_of("memory_bytes"),
        device.memory_bytes if device else None,
        mean_of("power_w"),
        most_of("power_w"),
        device.power_limit_w if device else None,
        energy,
        source,
        find_sampled_s(host),
        judged.start if judged else None,
        judged.starts if judged else None,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _intervals(host: HostTelemetry) -> Any:
    """Seconds that each sample stands for: since the one before it; one interval where that is more than five ago."""
    import numpy as np

    every = max(host.info.every_s, 1e-3)
    passed = np.diff(host.times, prepend=host.times[0] - every) if len(host.times) else np.zeros(0)
    return np.where((passed >= 0) & (passed <= 5 * every), passed, every)


def find_sampled_s(host: HostTelemetry) -> float:
    """Seconds that the samples of a node stand for."""
    return float(_intervals(host).sum())


def _find_energy(host: HostTelemetry, index: int) -> tuple[float | None, str]:
    """Joules, and how they were found; steps back of the counter (a driver that was loaded again) count as zero."""
    import numpy as np

    if joules := find_rise(host.series.get(f"gpu/{index}/energy_j")):
        return joules, COUNTER
    power = host.series.get(f"gpu/{index}/power_w")
    if power is not None and np.isfinite(power).any():
        return _integrate(host, np.asarray(power, dtype=np.float64)), INTEGRAL
    return None, ""


def _integrate(host: HostTelemetry, rate: Any) -> float:
    import numpy as np

    return float(np.where(np.isfinite(rate), rate * _intervals(host), 0.0).sum())


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind on one node: all of them, and the largest rate."""

    host: str
    what: str
    read_bytes: float
    written_bytes: float
    read_most: float
    write_most: float


_TRAFFIC: Mapping[str, tuple[str, str]] = {
    "storage": ("io/read_bytes_per_s", "io/write_bytes_per_s"),
    "calls, caches included": ("io/rchar_bytes_per_s", "io/wchar_bytes_per_s"),
    "InfiniBand, in and out": (r"ib/[^/]+/rx_bytes_per_s", r"ib/[^/]+/tx_bytes_per_s"),
    "network, in and out": (r"net/(?!lo/)[^/]+/rx_bytes_per_s", r"net/(?!lo/)[^/]+/tx_bytes_per_s"),
}


def total_traffic(hosts: Sequence[HostTelemetry]) -> list[Traffic]:
    """What each node read and wrote, by kind and file system."""
    found = []
    for host in hosts:
        names = (re.match(r"lustre/([^/]+)/", name) for name in host.series)
        lustre = {
            f"Lustre {match[1]}": tuple(re.escape(f"lustre/{match[1]}/{way}_bytes_per_s") for way in ("read", "write"))
            for match in names
            if match
        }
        for what, (incoming, outgoing) in {**_TRAFFIC, **lustre}.items():
            rates = [_add_series(host, pattern) for pattern in (incoming, outgoing)]
            if all(rate is None for rate in rates):
                continue
            totals = [0.0 if rate is None else _integrate(host, rate) for rate in rates]
            peaks = [0.0 if rate is None else max(0.0, _known(_largest(rate)) or 0.0) for rate in rates]
            if sum(totals) > 0:
                found.append(Traffic(host.host, what, *totals, *peaks))
    return found


def list_missing(hosts: Sequence[HostTelemetry]) -> dict[str, str]:
    """What was not sampled, and why: series or pattern -> reason."""
    return {name: reason for host in hosts for info in host.infos for name, reason in info.missing.items()}
