"""The hardware of a run as figures and totals: samples of all nodes on the time axis of the report.

Invariants:
- A bin without a sample has no value (NaN): it is a gap in every figure and in no mean. Bins keep the smallest and the
  largest sample beside the mean.
- Energy is the difference of the device's own counter where there is one, otherwise the integral of power over sampled
  time; which of them is always stated. Both are of the accelerators alone.
- A quantity that never moved is left out, and named among those left out; idle accelerators are always shown.
- Rows are folded only where a busy one stays visible: a row of several cores or ranks shows the largest of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardway.plain_arrays import find_arrays
from shardway.telemetry.store import DeviceInfo, HostTelemetry
from shardway.watch.advice.evidence import find_rise, mean, quantile
from shardway.watch.hosts import shorten_hosts
from shardway.watch.report.axis import TimeAxis
from shardway.watch.report.ranks import is_waiting

if TYPE_CHECKING:
    from shardway.watch.advice.findings import GpuVerdict

BINS = 480  # maximum bins of a colour map over time
CELLS = 40_000  # maximum cells of one colour map
FOLDED_ROWS = 64  # maximum rows of cores or ranks, where there are no more nodes
_LONGEST_HOST = 10  # letters of a host in a label
_GIB, _MB, _GB = 2.0**30, 1e6, 1e9
_KWH = 3.6e6

# --- samples in bins


@dataclass(frozen=True)
class Panel:
    """One quantity over rows (GPUs, nodes, cores or ranks) and time. `means`: float64 (rows, bins), NaN for a gap;
    `least` and `most` over all rows and samples of a bin, `middle` the mean over rows: (bins,). `row_means`: (rows,);
    `mean`: of all. `top`: end of the scale of the map, `strip_top` of the strip over it; both begin at 0. `is_main`:
    shown openly. `group`: what it belongs to, one of GROUPS."""

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
    mean: float
    top: float
    strip_top: float
    is_main: bool
    group: str


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows: of each "gpu", "node", "core" or "rank", from series whose names match a pattern, added up
    and changed by `change`. `top`: end of the scale by a device or node (None: the largest value). `moved`: the
    smallest maximum that is worth a figure, of samples or, for a share of time, of means over a row; None for one that
    is always shown."""

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
    change: Callable[[HostTelemetry, Any], Any] | None = None


def _memory_gib(host: HostTelemetry, device: DeviceInfo | None) -> float | None:
    return (host.info.memory_limit_bytes or host.info.memory_bytes or 0) / _GIB or None


def _hundred(host: HostTelemetry, device: DeviceInfo | None) -> float:
    return 100.0


THROTTLED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""Bits of `throttle_bits` that hold clocks back: power cap, slow-down by hardware, heat (software, hardware), power
brake (NVML, clocks event reasons). Others are no loss: idle, a clock that was asked for, a display."""


def _is_throttled(host: HostTelemetry, bits: Any) -> Any:
    np = find_arrays()

    return _share_of(bits, (np.nan_to_num(bits).astype(np.int64) & THROTTLED) != 0)


def _waits(host: HostTelemetry, activities: Any) -> Any:
    return _share_of(activities, is_waiting(activities))


def _share_of(samples: Any, flags: Any) -> Any:
    """100 where a flag is set, 0 where not, NaN where there is no sample."""
    np = find_arrays()

    return np.where(np.isfinite(samples), 100.0 * flags, np.nan)


def _a_core(host: HostTelemetry, load: Any) -> Any:
    return load / max(1, host.info.cores)


_TIME = "% of the time"

_QUANTITIES: Mapping[str, tuple[_Quantity, ...]] = {
    "GPUs": (
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
        _Quantity("throttled", "Clocks held back", _TIME, "gpu", "gpu/{i}/throttle_bits", top=_hundred,
                  moved=0.1, note="by the power cap, by heat or by the power supply", change=_is_throttled),
        _Quantity("dram", "GPU memory bandwidth", "%", "gpu", "gpu/{i}/dram_percent", top=_hundred, is_main=False),
        _Quantity("occupancy", "Occupancy of the SMs", "%", "gpu", "gpu/{i}/occupancy_percent", top=_hundred,
                  is_main=False),
        _Quantity("temperature", "GPU temperature", "°C", "gpu", "gpu/{i}/temperature_c", is_main=False),
        _Quantity("clock", "SM clock", "MHz", "gpu", "gpu/{i}/sm_clock_mhz", is_main=False),
        _Quantity("nvlink", "NVLink, in and out", "GB/s", "gpu", r"gpu/{i}/nvlink_[rt]x_bytes_per_s", 1 / _GB,
                  moved=1e-3, is_main=False),
        _Quantity("pcie", "PCIe, in and out", "GB/s", "gpu", r"gpu/{i}/pcie_[rt]x_bytes_per_s", 1 / _GB,
                  moved=1e-3, is_main=False),
        _Quantity("ecc", "ECC errors", "errors", "gpu", "gpu/{i}/ecc_errors", moved=0.5, is_main=False),
    ),
    "Cores, memory and ranks": (
        _Quantity("cores", "Use of each core", "%", "core", "core/{i}/use_percent", top=_hundred, moved=None,
                  note="all bright: no core is free; few bright: bound to too few, or one thread works"),
        _Quantity("cpu", "CPU use", "%", "node", "cpu/use_percent", top=_hundred, moved=None,
                  is_main=False, note="of the cores that the job may use"),
        _Quantity("load", "Load", "tasks a core", "node", "cpu/load", moved=1.2, change=_a_core,
                  note="tasks that want to run, of the whole node; above 1 they wait for each other"),
        _Quantity("waiting", "Ranks that wait for data", _TIME, "rank", "rank/{i}/activity", top=_hundred, moved=2.0,
                  note="the others wait for such a rank inside their steps", change=_waits),
        _Quantity("job_memory", "Memory of the job", "GiB", "node", "memory/job_bytes", 1 / _GIB, _memory_gib, None),
        _Quantity("job_cores", "Cores busy with the job", "cores", "node", "cpu/job_cores",
                  top=lambda host, device: float(len(host.info.allowed_cores)) or None, is_main=False),
    ),
    "Files and network": (
        _Quantity("read", "Read from storage", "MB/s", "node", "io/read_bytes_per_s", 1 / _MB, moved=0.05),
        _Quantity("written", "Written to storage", "MB/s", "node", "io/write_bytes_per_s", 1 / _MB, moved=0.05),
        _Quantity("lustre", "Lustre, read and written", "MB/s", "node", r"lustre/[^/]+/(read|write)_bytes_per_s",
                  1 / _MB, moved=0.05),
        _Quantity("network", "Network, in and out", "MB/s", "node", r"net/(?!lo/)[^/]+/[rt]x_bytes_per_s", 1 / _MB,
                  moved=0.05),
        _Quantity("infiniband", "InfiniBand, in and out", "GB/s", "node", r"ib/[^/]+/[rt]x_bytes_per_s", 1 / _GB,
                  moved=1e-4),
        _Quantity("calls_read", "Read by calls, caches included", "MB/s", "node", "io/rchar_bytes_per_s", 1 / _MB,
                  moved=0.05, is_main=False),
        _Quantity("opens", "Files opened on Lustre", "a second", "node", r"lustre/[^/]+/opens_per_s", moved=0.05,
                  is_main=False),
    ),
}  # fmt: skip
GROUPS = tuple(_QUANTITIES)
"""What panels belong to, in order."""


def make_panels(hosts: Sequence[HostTelemetry], axis: TimeAxis) -> tuple[list[Panel], list[str]]:
    """The figures that there is something to see in, and the titles of quantities that were sampled and never moved."""
    panels, still = [], []
    for group, quantity in ((group, each) for group, listed in _QUANTITIES.items() for each in listed):
        found = _find_rows(quantity, hosts)
        if not found:
            continue
        panel = _make_panel(group, quantity, found, axis)
        highest = _largest(panel.row_means if quantity.unit == _TIME else panel.most)
        if quantity.moved is not None and not highest >= quantity.moved:
            still.append(quantity.title)
        elif math.isfinite(highest):
            panels.append(panel)
    return panels, still


@dataclass(frozen=True)
class _PanelRow:
    """A row of a panel: one or several neighbours, each by the pattern of its series."""

    label: str
    host: HostTelemetry
    patterns: tuple[str, ...]
    top: float | None


def _find_rows(quantity: _Quantity, hosts: Sequence[HostTelemetry]) -> list[_PanelRow]:
    """The rows that have any samples."""
    names = shorten_hosts((host.host for host in hosts), _LONGEST_HOST)
    rows = []
    for host in hosts:
        name, numbers = names[host.host], _list_numbers(quantity, host)
        a_node = max(1, FOLDED_ROWS // len(hosts))
        fold = max(1, -(-len(numbers) // a_node)) if quantity.of in ("core", "rank") else 1
        for at in range(0, len(numbers), fold):
            part = numbers[at : at + fold]
            device = dict(list_devices(host)).get(part[0]) if quantity.of == "gpu" and part[0] is not None else None
            patterns = tuple(quantity.pattern.replace("{i}", str(number)) for number in part)
            if any(_list_series(host, pattern) for pattern in patterns):
                span = "" if part[0] is None else str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
                label = {
                    "node": name,
                    "gpu": f"{name}:{span}",
                    "core": f"core {span}" if len(hosts) == 1 else f"{name}:c{span}",
                    "rank": f"rank {span}",
                }[quantity.of]
                rows.append(_PanelRow(label, host, patterns, quantity.top(host, device)))
    return rows


def _list_numbers(quantity: _Quantity, host: HostTelemetry) -> list[int] | list[None]:
    """The numbers of the devices, cores or ranks of a node; one None for the node itself."""
    if quantity.of == "node":
        return [None]
    if quantity.of == "gpu":
        return [index for index, _ in list_devices(host)]
    matched = (re.match(rf"{quantity.of}/(\d+)/", name) for name in host.series)
    return sorted({int(found[1]) for found in matched if found})


def list_devices(host: HostTelemetry) -> list[tuple[int, DeviceInfo | None]]:
    """Each accelerator of a node by its index, whether its sampler described it or only series mention it."""
    known = {device.index: device for info in host.infos for device in info.devices}
    named = {int(found[1]) for name in host.series if (found := re.match(r"gpu/(\d+)/", name))}
    return [(index, known.get(index)) for index in sorted(known.keys() | named)]


def _add_series(host: HostTelemetry, pattern: str) -> Any:
    """The sum of series that match; NaN where none has a value, None where none matches."""
    np = find_arrays()

    matched = [host.series[name] for name in _list_series(host, pattern)]
    if not matched:
        return None
    if len(matched) == 1:
        return np.asarray(matched[0], dtype=np.float64)
    stacked = np.asarray(matched, dtype=np.float64)
    known = np.isfinite(stacked)
    return np.where(known.any(axis=0), np.where(known, stacked, 0).sum(axis=0), np.nan)


def _list_series(host: HostTelemetry, pattern: str) -> list[str]:
    """The series of a node that match."""
    if pattern in host.series:
        return [pattern]
    return [name for name in host.series if re.fullmatch(pattern, name)]


def _make_panel(group: str, quantity: _Quantity, found: Sequence[_PanelRow], axis: TimeAxis) -> Panel:
    """Rows of several neighbours show the largest of them; the strip and the mean are over all."""
    np = find_arrays()

    series, firsts = list[tuple[HostTelemetry, Any]](), list[int]()
    for row in found:
        firsts.append(len(series))
        for pattern in row.patterns:
            if (samples := _add_series(row.host, pattern)) is not None:
                series.append((row.host, samples if quantity.change is None else quantity.change(row.host, samples)))
    every = max(find_pace_s(host, np.isfinite(samples)) for host, samples in series)
    bins = int(max(1, min(BINS, CELLS // len(found), axis.alive_s / (2 * every))))
    edges = axis.time(np.linspace(0, 1, bins + 1))
    edges[-1] += 1e-3  # the last sample belongs to the last bin
    parts = [bin_samples(host.times, samples * quantity.scale, edges) for host, samples in series]
    over_time = [_mean(samples) * quantity.scale for _, samples in series]
    least, means, most = (np.array([part[which] for part in parts]) for which in range(3))
    shown = np.fmax.reduceat(means, firsts, axis=0)
    neighbours = max(len(row.patterns) for row in found)
    folded = f"; a row shows the largest of up to {neighbours} neighbours" if neighbours > 1 else ""
    top = max((row.top for row in found if row.top), default=0.0)
    return Panel(
        quantity.name,
        quantity.title,
        quantity.unit,
        f"{quantity.note}{folded}",
        tuple(row.label for row in found),
        shown,
        np.fmin.reduce(least, axis=0),
        _mean_over_rows(means),
        np.fmax.reduce(most, axis=0),
        np.fmax.reduceat(over_time, firsts),
        _mean(np.array(over_time)),
        _find_top(top, _largest(shown)),
        _find_top(top, _largest(most)),
        quantity.is_main,
        group,
    )


def _find_top(given: float, largest: float) -> float:
    """The end of a scale: the given one, unless values lie beyond it or none is given."""
    if not math.isfinite(largest):
        return given or 1.0
    return given if given and given >= 0.98 * largest else max(largest, 1e-9)


def bin_samples(times: Any, samples: Any, edges: Any) -> tuple[Any, Any, Any]:
    """Smallest, mean and largest sample of each bin between two edges; NaN for a bin without a value."""
    np = find_arrays()

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


def _mean_over_rows(table: Any) -> Any:
    np = find_arrays()

    known = np.isfinite(table)
    numbers = known.sum(axis=0)
    sums = np.where(known, table, 0.0).sum(axis=0)
    return np.divide(sums, numbers, out=np.full(table.shape[1], np.nan), where=numbers > 0)


def _mean(samples: Any) -> float:
    np = find_arrays()

    known = samples[np.isfinite(samples)]
    return float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _largest(samples: Any) -> float:
    np = find_arrays()

    known = samples[np.isfinite(samples)]
    return float(known.max()) if len(known) else math.nan


# --- totals of each accelerator and node

COUNTER, INTEGRAL = "the device's energy counter", "power integrated over the samples"


@dataclass(frozen=True)
class GpuTotals:
    """One accelerator over all samples of all starts; None where it was not sampled. `energy_from` states how the
    energy was found. `sampled_s`: seconds that samples stand for. `verdict`: that of a
    `shardway.watch.advice.findings.GpuVerdict`, of the newest start: `start` of `starts`; "unknown" and None where it
    had no part in it."""

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


def find_pace_s(host: HostTelemetry, known: Any) -> float:
    """Seconds from one value of a series to the next; `known`: whether a sample has one. Not each sample reads all."""
    np = find_arrays()

    places = np.flatnonzero(known)
    return max(host.info.every_s, 1e-3) * (float(np.median(np.diff(places))) if len(places) > 1 else 1.0)


def _intervals(host: HostTelemetry, known: Any) -> Any:
    """Seconds that each known sample stands for: since the one before it; the series' pace where that is more than five
    times as long ago."""
    np = find_arrays()

    times, pace = host.times[known], find_pace_s(host, known)
    passed = np.diff(times, prepend=times[0] - pace) if len(times) else np.zeros(0)
    return np.where((passed >= 0) & (passed <= 5 * pace), passed, pace)


def find_sampled_s(host: HostTelemetry) -> float:
    """Seconds that the samples of a node stand for."""
    np = find_arrays()

    return float(_intervals(host, np.ones(len(host.times), bool)).sum())


def _find_energy(host: HostTelemetry, index: int) -> tuple[float | None, str]:
    """Joules, and how they were found; steps back of the counter (a driver that was loaded again) count as zero."""
    np = find_arrays()

    if joules := find_rise(host.series.get(f"gpu/{index}/energy_j")):
        return joules, COUNTER
    power = host.series.get(f"gpu/{index}/power_w")
    if power is not None and np.isfinite(power).any():
        return _integrate(host, np.asarray(power, dtype=np.float64)), INTEGRAL
    return None, ""


def _integrate(host: HostTelemetry, rate: Any) -> float:
    np = find_arrays()

    known = np.isfinite(rate)
    return float((rate[known] * _intervals(host, known)).sum())


@dataclass(frozen=True)
class CoreTotals:
    """The cores of all nodes: how many there are, and how many the job may use; their mean use in percent; how many of
    them were busy more than half of the time; the mean load a core of the most loaded node, and which one it is."""

    cores: int
    allowed: int
    use: float
    busy: int | None
    load: float | None
    crowded: str


def total_cores(hosts: Sequence[HostTelemetry]) -> CoreTotals | None:
    """None where no node's cores were sampled."""
    known = [(host, use) for host in hosts if (use := mean(host.series.get("cpu/use_percent"))) is not None]
    if not known:
        return None
    allowed = [len(host.info.allowed_cores) for host, _ in known]
    weights = allowed if all(allowed) else [1] * len(known)
    use = math.fsum(each * weight for (_, each), weight in zip(known, weights, strict=True)) / sum(weights)
    names = [(host, name) for host, _ in known for name in host.series if name.startswith("core/")]
    busy = sum(_mean(host.series[name]) > 50 for host, name in names) if names else None
    loads = [
        (load / max(1, host.info.cores), host.host) for host, _ in known if (load := mean(host.series.get("cpu/load")))
    ]
    load, crowded = max(loads, default=(None, ""))
    return CoreTotals(sum(host.info.cores for host, _ in known), sum(allowed), use, busy, load, crowded)


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
