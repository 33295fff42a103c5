"""Measures one device within a given time: products over shapes and formats, copies, attention, starts, the disk.

Invariants:
- Each kind of measurement has a share of the time; what one does not use is left to those after it. What does not fit
  is left out, larger shapes first, and named in the report.
- What memory does not hold, and a disk that fails, are left out too: what else was measured is not lost.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from shardway.bench.bandwidth import list_sizes
from shardway.bench.device_report import DeviceReport, ShapeSearch
from shardway.bench.disk import DISK_BYTES, measure_disk
from shardway.bench.kernels import (
    ATTENTION_BACKENDS,
    LEAST_CALLS,
    PEAK_COPY,
    ProductTimes,
    count_attention_flops,
    count_layer_flops,
    list_formats,
    time_attention,
    time_copy,
    time_launches,
    time_layer,
    time_product,
    time_transfer,
)
from shardway.errors import Problem, check_no_problems
from shardway.hardware.catalogue import Dtype
from shardway.hardware.limits import read_memory_left
from shardway.units import render_bytes


@dataclass(frozen=True)
class DeviceRequest:
    """What is measured: formats and bytes of copies (None: those of the device), a folder whose disk is (None: none),
    about how many seconds it may take."""

    formats: tuple[Dtype, ...] | None = None
    sizes: tuple[int, ...] | None = None
    disk: Path | None = None
    seconds: float = 40.0


COPY_SIZES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"cpu": list_sizes(2**14, PEAK_COPY["cpu"]), "cuda": list_sizes(2**20, PEAK_COPY["cuda"])}
)

SHARES: Mapping[str, float] = MappingProxyType(
    {"products": 0.5, "layers": 0.12, "copies": 0.1, "transfers": 0.06, "attention": 0.15, "launches": 0.02}
)
"""The part of the time for each kind of measurement; what is left of all of it is the disk's."""


@dataclass
class TimeBudget:
    """Seconds that are shared by what is measured one after the other."""

    seconds: float
    now: Callable[[], float] = time.perf_counter
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.now()

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - (self.now() - self.started))

    def share(self, name: str, later: Sequence[str]) -> float:
        """Seconds for a kind of measurement, of what is left for it and those after it."""
        weights = {each: SHARES.get(each, 0.1) for each in (name, *later)}
        return self.left * weights[name] / sum(weights.values())


def measure_device(device: torch.device, request: DeviceRequest) -> DeviceReport:
    """Measure what `request` names on a device. Raises UserError for a format that it does not have, and for a copy
    that its memory does not hold."""
    budget = TimeBudget(request.seconds)
    formats = _choose_formats(device, request.formats)
    _check_memory(device, request.sizes)
    report = DeviceReport(device.type, _find_name(device), _describe_software(), torch.get_num_threads())
    bench: dict[str, Callable[[float], None]] = {
        "products": lambda seconds: _search_products(report, device, formats, seconds),
        "layers": lambda seconds: _measure_layers(report, device, formats, seconds),
        "copies": lambda seconds: _measure_copies(report, device, request.sizes, seconds),
        "transfers": lambda seconds: _measure_transfers(report, device, seconds),
        "attention": lambda seconds: _measure_attention(report, device, formats, seconds),
        "launches": lambda seconds: report.launches.extend(time_launches(device, seconds)),
        "disk": lambda seconds: _measure_disk(report, request.disk, seconds),
    }
    if device.type == "cpu":
        del bench["transfers"]
    if request.disk is None:
        del bench["disk"]
    names = list(bench)
    for index, name in enumerate(names):
        bench[name](budget.share(name, names[index + 1 :]))
    report.seconds = budget.now() - budget.started
    return report


def _choose_formats(device: torch.device, wanted: Sequence[Dtype] | None) -> tuple[Dtype, ...]:
    found = list_formats(device)
    lacking = [name for name in wanted or () if name not in found]
    if lacking:
        what = f"{_find_name(device)} has no products in {', '.join(lacking)} here"
        check_no_problems("the command line", [Problem("--formats", what, "command line", ", ".join(found))])
    return tuple(wanted) if wanted else found


def _check_memory(device: torch.device, sizes: Sequence[int] | None) -> None:
    largest = max(sizes or (0,))
    left = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_memory_left()
    if 2 * largest > left:
        about = render_bytes(left // 2**20 * 2**20)
        what = f"a copy of {render_bytes(largest)} needs twice that, and about {about} are left"
        allowed = f"up to {render_bytes(left // 2 // 2**20 * 2**20)}"
        check_no_problems("the command line", [Problem("--sizes", what, "command line", allowed)])


def _find_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _describe_software() -> str:
    built = [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    built += [f"ROCm {torch.version.hip}"] if torch.version.hip else []
    return ", ".join([f"torch {torch.__version__}", *built])


@contextmanager
def _without(report: DeviceReport, what: str) -> Iterator[None]:
    """What memory does not hold is left out of the report."""
    try:
        yield
    except torch.OutOfMemoryError:
        report.left_out.append(f"{what}, for lack of memory")
        torch.cuda.empty_cache()


# --- products

_SIDES: Mapping[str, tuple[int, ...]] = MappingProxyType({"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)})
"""The coarse grid: each of m, n and k is one of these."""
_GRAIN: Mapping[str, int] = MappingProxyType({"cpu": 16, "cuda": 64})
"""Sides of the fine grid are multiples of this: tiles of the device's products."""
_STEPS = (0.875, 1.125, 0.75, 1.25)
"""The fine grid: one side at a time is made so much longer."""
_COARSE, _FINE = 0.55, 0.3
"""The parts of the time of a search for the two grids; what is left is for the best shape alone."""

Shape = tuple[int, int, int]


def search_shapes(
    measure: Callable[[Shape, float], ProductTimes | None],
    coarse: Sequence[Shape],
    grain: int,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> ShapeSearch | None:
    """The fastest shape: of the coarse grid first, then of neighbours of the best one, of theirs once one is better. It
    is measured again in the end, since the best of many measurements is partly luck. `measure` times a shape for so
    many seconds, or returns None where memory does not hold it. None if nothing was measured."""
    began, tried, left_out = now(), dict[Shape, ProductTimes](), 0
    last: ProductTimes | None = None
    grid = sorted(coarse, key=lambda each: each[0] * each[1] * each[2])
    for index, shape in enumerate(grid):
        left = _COARSE * seconds - (now() - began)
        least = 2 * shape[0] * shape[1] * shape[2] / last.flops_per_s * LEAST_CALLS if last is not None else 0.0
        if last is not None and least > left:
            left_out += len(grid) - index
            break
        found = measure(shape, max(0.0, left) / (len(grid) - index))
        if found is None:
            left_out += 1
        else:
            tried[shape] = last = found
    if not tried:
        return None
    each_s = _FINE * seconds / (3 * len(_STEPS))
    while True:
        best = max(tried.values(), key=lambda each: each.flops_per_s)
        around = [each for each in list_neighbours((best.m, best.n, best.k), grain) if each not in tried]
        left = (_COARSE + _FINE) * seconds - (now() - began)
        if not around or left < max(each_s, LEAST_CALLS * best.times.median_s):
            break
        found = measure(around[0], each_s)
        if found is None:
            left_out += 1
            break
        tried[around[0]] = found
    again = measure((best.m, best.n, best.k), max(0.0, seconds - (now() - began)))
    return ShapeSearch(again or best, len(tried), left_out)


def list_neighbours(shape: Shape, grain: int) -> Iterator[Shape]:
    """Shapes with one side a little shorter or longer, a multiple of `grain`."""
    for factor, side in itertools.product(_STEPS, range(3)):
        changed = list(shape)
        changed[side] = max(grain, round(changed[side] * factor / grain) * grain)
        yield changed[0], changed[1], changed[2]


def _search_products(report: DeviceReport, device: torch.device, formats: Sequence[Dtype], seconds: float) -> None:
    budget = TimeBudget(seconds)
    for index, name in enumerate(formats):

        def measure(shape: Shape, share_s: float, name: Dtype = name) -> ProductTimes | None:
            try:
                return time_product(device, name, *shape, share_s)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                return None

        sides = _SIDES[device.type]
        grid = [(m, n, k) for m in sides for n in sides for k in sides]
        share = budget.left / (len(formats) - index)
        found = search_shapes(measure, grid, _GRAIN[device.type], share)
        if found is None:
            report.left_out.append(f"products in {name}, for lack of memory")
        else:
            report.searches.append(found)


def _measure_layers(report: DeviceReport, device: torch.device, formats: Sequence[Dtype], seconds: float) -> None:
    budget, flops = TimeBudget(seconds), count_layer_flops(device)
    for index, name in enumerate(formats):
        what, share = f"the products of a layer in {name}", budget.left / (len(formats) - index)
        if _has_time(report, what, _expect_products(report, name, flops), share):
            with _without(report, what):
                report.layers.append(time_layer(device, name, share))


_PATIENCE, _SHORT_S = 4, 0.05
"""What is expected to take more than so many times its share of the time, and more seconds, is left out."""


def _has_time(report: DeviceReport, what: str, expected_s: float, share_s: float) -> bool:
    fits = expected_s <= max(_PATIENCE * share_s, _SHORT_S)
    if not fits:
        report.left_out.append(f"{what}, for lack of time (--seconds)")
    return fits


def _expect_products(report: DeviceReport, name: Dtype, flops: float) -> float:
    """Seconds of the shortest measurement of so many FLOPs at the rate of the best shape; 0 where none is known."""
    rate = next((each.best.flops_per_s for each in report.searches if each.best.format == name), math.inf)
    return LEAST_CALLS * flops / rate


# --- copies, attention, the disk


def _measure_copies(report: DeviceReport, device: torch.device, sizes: Sequence[int] | None, seconds: float) -> None:
    budget, wanted = TimeBudget(seconds), sorted(set(sizes or COPY_SIZES[device.type]))
    expected = 0.0
    for index, size in enumerate(wanted):
        what, share = f"a copy of {render_bytes(size)}", budget.left / (len(wanted) - index)
        if report.copies:
            last = report.copies[-1]
            expected = LEAST_CALLS * last.times.median_s * size / last.size
        if _has_time(report, what, expected, share):
            with _without(report, what):
                report.copies.append(time_copy(device, size, share))


def _measure_transfers(report: DeviceReport, device: torch.device, seconds: float) -> None:
    for direction, pinned in itertools.product(("to", "from"), (True, False)):
        with _without(report, f"a copy {direction} the device"):
            report.transfers.append(time_transfer(device, direction, seconds / 4, pinned=pinned))


def _measure_attention(report: DeviceReport, device: torch.device, formats: Sequence[Dtype], seconds: float) -> None:
    """In bf16 or fp16 on a GPU, the formats that fused kernels have; in fp32 on a CPU."""
    wanted: tuple[Dtype, ...] = ("bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")
    name = next((each for each in wanted if each in formats), None)
    if name is None:
        report.left_out.append(f"attention, which is measured in {' or '.join(wanted)}")
        return
    budget, expected = TimeBudget(seconds), _expect_products(report, name, count_attention_flops(device))
    for index, backend in enumerate(ATTENTION_BACKENDS):
        share = budget.left / (len(ATTENTION_BACKENDS) - index)
        if not _has_time(report, f"attention by {backend}", expected, share):
            continue
        with _without(report, f"attention by {backend}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has one for each thing that a backend does not take
            try:
                report.attention.append(time_attention(device, backend, name, share))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                report.refused.append((backend, first.partition(". ")[0].rstrip(".")))


def _measure_disk(report: DeviceReport, folder: Path | None, seconds: float) -> None:
    if folder is None:
        return
    try:
        report.disk = measure_disk(folder, seconds, DISK_BYTES)
    except OSError as error:
        report.left_out.append(f"the disk of {folder}: {error.strerror}")
