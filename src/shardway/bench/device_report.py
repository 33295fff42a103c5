"""What a measurement of one device found, beside what the catalogue rates it at: as tables, in words, as facts.

Invariants:
- Without torch. A rate that no source states is "n/a", never guessed.
- Every sentence of the verdict follows from numbers that the facts hold too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from shardway.bench.bandwidth import format_rate
from shardway.bench.disk import DiskTimes
from shardway.hardware.catalogue import Accelerator, Dtype, find_accelerator
from shardway.hardware.mounts import IN_MEMORY
from shardway.units import render_bytes, render_plural
from shardway.watch.words import align_cells

if TYPE_CHECKING:  # they are built where torch is
    from shardway.bench.kernels import (
        AttentionTimes,
        CopyTimes,
        KernelTimes,
        LaunchTimes,
        LayerTimes,
        ProductTimes,
        TransferTimes,
    )

# --- what was measured


@dataclass(frozen=True)
class ShapeSearch:
    """The fastest product of a format among `tried` shapes; `left_out` more had no time or no memory."""

    best: ProductTimes
    tried: int
    left_out: int


MEMORY_COPY = 2**28
"""Bytes from which on a copy is taken for the memory's: no GPU has larger caches."""


@dataclass
class DeviceReport:
    """All that was measured. `name` is the driver's, "CPU" for a CPU; `threads` are those of a CPU; `refused` are
    backends of attention that the device does not take, with the reason; `left_out` is what there was no time or no
    memory for; `seconds` is how long it took."""

    kind: str
    name: str
    software: str
    threads: int
    searches: list[ShapeSearch] = field(default_factory=list)
    layers: list[LayerTimes] = field(default_factory=list)
    copies: list[CopyTimes] = field(default_factory=list)
    transfers: list[TransferTimes] = field(default_factory=list)
    attention: list[AttentionTimes] = field(default_factory=list)
    launches: list[LaunchTimes] = field(default_factory=list)
    disk: DiskTimes | None = None
    refused: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def part(self) -> Accelerator | None:
        """The device in the catalogue; None where it is not there."""
        return find_accelerator(self.name) if self.kind != "cpu" else None

    @property
    def memory_copy(self) -> CopyTimes | None:
        """The largest copy; None if it may be a cache's."""
        return max((each for each in self.copies if each.size >= MEMORY_COPY), key=lambda each: each.size, default=None)

    @property
    def best_attention(self) -> AttentionTimes | None:
        """The backend that takes the least time for both passes."""
        return min(self.attention, key=lambda each: each.forward.median_s + each.backward.median_s, default=None)

    def rate_product(self, name: Dtype) -> float | None:
        """What the catalogue rates products in a format at, FLOP/s."""
        return self.part.peak(name) if self.part is not None else None

    @property
    def rated_memory(self) -> float | None:
        """What the catalogue rates the memory at, bytes per second."""
        return self.part.memory_bandwidth_bytes_per_s if self.part is not None else None

    def find_ridge(self, search: ShapeSearch) -> float | None:
        """FLOPs for each byte at which the product of a search and a copy take the same time."""
        return search.best.flops_per_s / self.memory_copy.bytes_per_s if self.memory_copy is not None else None


@dataclass(frozen=True)
class RankDevice:
    """What one rank of a launch measured of its own device."""

    rank: int
    host: str
    report: DeviceReport

    def list_rates(self) -> Iterator[tuple[str, float]]:
        """What devices of one kind have alike: products of a layer by format, FLOP/s, and the memory, bytes per
        second."""
        for layer in self.report.layers:
            yield f"{layer.format} products of a layer", layer.flops_per_s
        if (copy := self.report.memory_copy) is not None:
            yield "memory", copy.bytes_per_s


SLOW_DEVICE = 0.9
"""A device below this part of the median of all ranks is slow."""


# --- how it is shown

LOW_PRODUCT, LOW_COPY = 0.6, 0.75
"""Below these parts of what is rated the verdict says that it is little. Published searches reach 0.80 to 0.87 of the
rated products of A100, H100 and H200 (ml-engineering, compute/accelerator), and copies about 0.9 of their memory."""


def render_report(report: DeviceReport, ranks: Sequence[RankDevice] = ()) -> str:
    """The tables and the verdict, without a newline at the end; `ranks` are all of a launch, of which the report is
    the first one's."""
    threads = f", {render_plural(report.threads, 'thread')}" if report.kind == "cpu" else ""
    head = f"{report.name}{threads}, {report.software}; {report.seconds:.1f} s"
    tables = (_list_products(report), _list_copies(report), _list_attention(report), _list_launches(report))
    blocks = [[head], *(align_cells(rows, to_the_right=True) for rows in tables if len(rows) > 1)]
    blocks.append(["Verdict", *list_verdict(report, ranks)])
    return "\n\n".join(map("\n".join, blocks))


def _list_products(report: DeviceReport) -> list[list[str]]:
    rows = [["product", "m x n x k", "samples", "median us", "TFLOP/s", "should be", "reached"]]
    for search in report.searches:
        best = search.best
        name = f"{best.format}, best of {render_plural(search.tried, 'shape')}"
        rows.append([name, _render_shape(best), *_list_rate(report, best.format, best.flops_per_s, best.times)])
    for layer in report.layers:
        shapes = render_plural(len(layer.shapes), "shape")
        name = f"{layer.format}, a layer forward and back"
        rows.append([name, shapes, *_list_rate(report, layer.format, layer.flops_per_s, layer.times)])
    return rows


def _list_rate(report: DeviceReport, name: Dtype, rate: float, times: KernelTimes) -> list[str]:
    rated = report.rate_product(name)
    cells = _list_share(rate, rated, 1e12)
    return [str(times.count), _render_us(times), format_rate(rate, 1e12), *cells]


def _list_copies(report: DeviceReport) -> list[list[str]]:
    rows = [["copy", "bytes", "samples", "median us", "GB/s", "should be", "reached"]]
    for copy in report.copies:
        rated = report.rated_memory if copy is report.memory_copy else None
        cells = _list_share(copy.bytes_per_s, rated, 1e9)
        rate = format_rate(copy.bytes_per_s)
        place = "on the device, read and written"
        rows.append([place, render_bytes(copy.size), str(copy.times.count), _render_us(copy.times), rate, *cells])
    for each in report.transfers:
        place = f"{each.direction} the device, {'pinned' if each.pinned else 'pageable'}"
        rate = format_rate(each.bytes_per_s)
        rows.append([place, render_bytes(each.size), str(each.times.count), _render_us(each.times), rate, "n/a", "n/a"])
    if report.disk is not None:
        disk = report.disk
        for what, seconds, speed in (
            ("write", disk.write_s, disk.write_bytes_per_s),
            ("read", disk.read_s, disk.read_bytes_per_s),
        ):
            cells = [render_bytes(disk.size), "1", f"{seconds * 1e6:.0f}", format_rate(speed), "n/a", "n/a"]
            rows.append([f"{disk.folder}, {what}", *cells])
    return rows


def _list_attention(report: DeviceReport) -> list[list[str]]:
    rows = [["attention", "batch x heads x length x width", "pass", "median us", "TFLOP/s", "of the rated"]]
    for each in report.attention:
        shape = f"{each.batch} x {each.heads} x {each.seq} x {each.width}"
        for side, times, rate in (
            ("forward", each.forward, each.forward_flops_per_s),
            ("backward", each.backward, each.backward_flops_per_s),
        ):
            share = _list_share(rate, report.rate_product(each.format), 1e12)[1]
            cells = [shape, side, _render_us(times), format_rate(rate, 1e12), share]
            rows.append([f"{each.backend}, {each.format}", *cells])
    return rows


def _list_launches(report: DeviceReport) -> list[list[str]]:
    rows = [["start of", "samples", "median us", "10th percentile us"]]
    for each in report.launches:
        count, times = str(each.times.count), each.times
        rows.append([_STARTS[each.what], count, f"{times.median_s * 1e6:.2f}", f"{times.p10_s * 1e6:.2f}"])
    return rows


_STARTS = {
    "kernel": "an empty kernel",
    "operator": "an operator on one number",
    "operator and wait": "an operator on one number, and its end",
}


def _list_share(rate: float, rated: float | None, unit: float) -> list[str]:
    return [format_rate(rated, unit), f"{rate / rated:.0%}"] if rated else ["n/a", "n/a"]


def _render_us(times: KernelTimes) -> str:
    return f"{times.median_s * 1e6:.1f}"


def _render_shape(product: ProductTimes) -> str:
    return f"{product.m} x {product.n} x {product.k}"


# --- the verdict


def list_verdict(report: DeviceReport, ranks: Sequence[RankDevice] = ()) -> list[str]:
    """Sentences: what was reached of what is rated, what is little, where the ridge is, what starts and transfers cost,
    what was left out, and which of several devices is slow."""
    unknown = [] if report.part is not None else [_describe_unknown(report)]
    parts = (_judge_products, _judge_memory, _judge_attention, _judge_launches, _judge_transfers, _judge_disk)
    judged = (line for judge in parts for line in judge(report))
    return [*unknown, *judged, *_list_left_out(report), *_judge_ranks(ranks)]


def _describe_unknown(report: DeviceReport) -> str:
    why = "no catalogue rates CPUs" if report.kind == "cpu" else f"the catalogue does not have {report.name}"
    return f"what should be reached is n/a ({why})"


def _judge_products(report: DeviceReport) -> Iterator[str]:
    layers = {layer.format: layer for layer in report.layers}
    for search in report.searches:
        best, rated = search.best, report.rate_product(search.best.format)
        text = f"{best.format}: {_tflops(best.flops_per_s)} by {_render_shape(best)}{_of(best.flops_per_s, rated)}"
        if (layer := layers.get(best.format)) is not None:
            text += f"; products of a layer, one after the other, {_tflops(layer.flops_per_s)}"
            text += _of(layer.flops_per_s, rated)
        yield text
        if rated and best.flops_per_s < LOW_PRODUCT * rated:
            yield (
                f"this is little: {best.format} products reach {best.flops_per_s / rated:.0%} of the rated "
                f"{_tflops(rated)}; look at the clock, the power limit and other programs on the device: "
                f"`{'rocm-smi' if report.part and report.part.vendor == 'amd' else 'nvidia-smi -q -d PERFORMANCE'}`, "
                "`shardway doctor`"
            )


def _judge_memory(report: DeviceReport) -> Iterator[str]:
    copy, rated = report.memory_copy, report.rated_memory
    if copy is None:
        if report.copies:
            least = render_bytes(MEMORY_COPY)
            yield f"memory: n/a, caches may hold what was copied; --sizes with {least} or more shows its rate"
        return
    yield (
        f"memory: a copy of {render_bytes(copy.size)} moves {format_rate(copy.bytes_per_s)} GB/s, read and "
        f"written{_of(copy.bytes_per_s, rated, 1e9, ' GB/s')}"
    )
    if rated and copy.bytes_per_s < LOW_COPY * rated:
        yield (
            f"this is little: the copy reaches {copy.bytes_per_s / rated:.0%} of the rated "
            f"{format_rate(rated)} GB/s; look for memory errors and other programs: `shardway doctor`"
        )
    ridges = [
        f"{ridge:.0f} FLOP/B in {each.best.format}"
        for each in report.searches
        if (ridge := report.find_ridge(each)) is not None
    ]
    if ridges:
        yield (
            f"ridge of the roofline: {', '.join(ridges)}; an operator with fewer FLOPs for each byte that it moves is "
            "limited by memory"
        )


def _judge_attention(report: DeviceReport) -> Iterator[str]:
    best = report.best_attention
    if best is not None:
        yield (
            f"attention: {best.backend} ({best.operator}) takes the least time, {_tflops(best.forward_flops_per_s)} "
            f"forward and {_tflops(best.backward_flops_per_s)} backward in {best.format}"
        )
    for backend, why in report.refused:
        yield f"attention: {backend} is not taken here ({why})"


def _judge_launches(report: DeviceReport) -> Iterator[str]:
    operator = next((each for each in report.launches if each.what == "operator"), None)
    if operator is None:
        return
    seconds, copy = operator.times.median_s, report.memory_copy
    text = f"an operator costs the host {seconds * 1e6:.1f} us"
    if copy is not None and report.kind != "cpu":
        moved = copy.bytes_per_s * seconds
        text += f": the device waits for the host where operators move less than {moved / 1e6:.1f} MB each"
    yield text


def _judge_transfers(report: DeviceReport) -> Iterator[str]:
    rates = {(each.direction, each.pinned): each.bytes_per_s for each in report.transfers}
    for direction in ("to", "from"):
        pinned, pageable = rates.get((direction, True)), rates.get((direction, False))
        if pinned and pageable:
            yield (
                f"{direction} the device: {pinned / 1e9:.1f} GB/s with pinned memory of the host, "
                f"{pageable / pinned:.0%} of that with pageable memory"
            )


def _judge_disk(report: DeviceReport) -> Iterator[str]:
    disk = report.disk
    if disk is None:
        return
    how = "past the page cache" if disk.direct else "synced, and its pages dropped before it was read"
    kind = f" ({disk.kind})" if disk.kind else ""
    yield (
        f"disk: {disk.folder}{kind} takes {disk.write_bytes_per_s / 1e9:.2f} GB/s and gives "
        f"{disk.read_bytes_per_s / 1e9:.2f} GB/s, {how}, one stream"
    )
    if disk.kind in IN_MEMORY:
        yield f"{disk.folder} is in memory ({disk.kind}): this is no disk"


def _list_left_out(report: DeviceReport) -> Iterator[str]:
    for search in report.searches:
        if search.left_out:
            shapes = render_plural(search.left_out, "shape")
            yield f"left out for lack of time (--seconds) or memory: {shapes} of {search.best.format}"
    yield from (f"left out: {each}" for each in report.left_out)


def _judge_ranks(ranks: Sequence[RankDevice]) -> Iterator[str]:
    rates: dict[str, list[tuple[float, RankDevice]]] = {}
    for each in ranks if len(ranks) > 1 else ():
        for name, rate in each.list_rates():
            rates.setdefault(name, []).append((rate, each))
    for name, found in rates.items():
        values = sorted(rate for rate, _ in found)
        usual, unit, shown = median(values), *((1e9, "GB/s") if name == "memory" else (1e12, "TFLOP/s"))
        low, middle, high = (format_rate(value, unit) for value in (values[0], usual, values[-1]))
        yield f"{name}: {low} to {high} {shown} over {render_plural(len(found), 'rank')}, {middle} the median"
        for rate, each in found:
            if rate < SLOW_DEVICE * usual:
                yield (
                    f"slow device: rank {each.rank} ({each.host}), {name} {format_rate(rate, unit)} {shown}, "
                    f"{rate / usual:.0%} of the median"
                )


def _tflops(rate: float) -> str:
    return f"{format_rate(rate, 1e12)} TFLOP/s"


def _of(rate: float, rated: float | None, unit: float = 1e12, name: str = "") -> str:
    return f", {rate / rated:.0%} of {format_rate(rated, unit)}{name}" if rated else ""


# --- as facts


def render_facts(report: DeviceReport, ranks: Sequence[RankDevice] = ()) -> Mapping[str, Any]:
    """Everything as JSON; times in seconds, rates in FLOP/s and bytes per second, None for what is not known."""
    part = report.part
    return {
        "format": 1,
        "device": report.name,
        "kind": report.kind,
        "part": part.key if part is not None else None,
        "software": report.software,
        "threads": report.threads,
        "seconds": report.seconds,
        "products": [
            {
                **_flatten(each.best),
                "tried": each.tried,
                "left_out": each.left_out,
                "flops_per_s": each.best.flops_per_s,
                "should_be_flops_per_s": report.rate_product(each.best.format),
                "ridge_flops_per_byte": report.find_ridge(each),
            }
            for each in report.searches
        ],
        "layers": [
            {
                **_flatten(each),
                "shapes": [list(shape) for shape in each.shapes],
                "flops_per_s": each.flops_per_s,
                "should_be_flops_per_s": report.rate_product(each.format),
            }
            for each in report.layers
        ],
        "copies": [
            {
                **_flatten(each),
                "bytes_per_s": each.bytes_per_s,
                "should_be_bytes_per_s": report.rated_memory if each is report.memory_copy else None,
            }
            for each in report.copies
        ],
        "transfers": [{**_flatten(each), "bytes_per_s": each.bytes_per_s} for each in report.transfers],
        "attention": [
            {
                **asdict(each),
                "forward_flops_per_s": each.forward_flops_per_s,
                "backward_flops_per_s": each.backward_flops_per_s,
            }
            for each in report.attention
        ],
        "launches": [_flatten(each) for each in report.launches],
        "disk": None if report.disk is None else asdict(report.disk),
        "refused": [{"backend": backend, "reason": why} for backend, why in report.refused],
        "left_out": list(report.left_out),
        "ranks": [
            {"rank": each.rank, "host": each.host, "device": each.report.name, "rates": dict(each.list_rates())}
            for each in ranks
        ],
        "verdict": list_verdict(report, ranks),
    }


def _flatten(each: Any) -> Mapping[str, Any]:
    """A measurement with the fields of its times beside its own."""
    facts = asdict(each)
    return {**{name: value for name, value in facts.items() if name != "times"}, **facts["times"]}
