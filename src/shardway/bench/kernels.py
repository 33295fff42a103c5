"""What one device does in a second: products of matrices, copies, attention, starts of kernels, timed call by call.

Invariants:
- Operands are random, never zeros: products of zeros draw less power, so a device that is limited by power is faster.
- A product on a GPU finds nothing in the caches that the one before left there. A copy finds what fits in them, so a
  copy that is to show the memory's rate is larger than they are.
- A rate follows from the median time. What it means is judged elsewhere.

Source of the search by shapes, and of flushing the cache: S. Bekman, Machine Learning Engineering, "Maximum Achievable
Matmul FLOPS Finder", https://github.com/stas00/ml-engineering
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from shardway.bench.bandwidth import percentile
from shardway.hardware.catalogue import Dtype

# --- clocks


class CallTimer(Protocol):
    """Times calls that may only be queued."""

    def seconds(self, call: Callable[[], object], align: Callable[[], None], count: int) -> list[float]:
        """The seconds of each of `count` calls, with `align` before each, which does not count."""


class HostTimer:
    """Calls that have ended when they return."""

    def seconds(self, call: Callable[[], object], align: Callable[[], None], count: int) -> list[float]:
        """As `CallTimer`, by the clock of this process."""
        found = []
        for _ in range(count):
            align()
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        return found


class DeviceTimer:
    """Calls that are queued on the current stream of a CUDA device; the host waits once, at the end."""

    def seconds(self, call: Callable[[], object], align: Callable[[], None], count: int) -> list[float]:
        """As `CallTimer`, by events in the stream."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for started, ended in events:
            align()
            started.record()
            call()
            ended.record()
        torch.cuda.synchronize()
        return [max(1e-9, started.elapsed_time(ended) / 1e3) for started, ended in events]  # its steps are 0.5 us


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of one call, over `count` samples: median and 10th percentile."""

    count: int
    median_s: float
    p10_s: float


_FLUSH_BYTES = 2**29
"""More than the caches of a GPU hold (MI300X: 256 MiB); writing it also gives the host a lead over the device."""
_SAMPLE_S = 2e-4
"""A sample of calls that may find their data in caches lasts about so long, so that starting it counts little."""
_TRIALS, _LEAST_SAMPLES, _MOST_SAMPLES, _MOST_BATCH = 2, 3, 200, 1000
LEAST_CALLS = 5
"""Calls that the shortest measurement of a product makes."""


class Stopwatch:
    """Times calls on one device: by CUDA events on a GPU, else by this process' clock. `timer` may be another one in
    tests."""

    def __init__(self, device: torch.device, timer: CallTimer | None = None) -> None:
        self.device = device
        self._timer = timer or (DeviceTimer() if device.type == "cuda" else HostTimer())
        self._flushed: torch.Tensor | None = None

    def measure(self, call: Callable[[], object], seconds: float, *, cold: bool = False) -> KernelTimes:
        """Time a call for about so many seconds, warm-up included, but three times at least. `cold`: on a GPU its
        caches are flushed before each call; else calls that are short are timed several at a time."""
        on_gpu, began = self.device.type == "cuda", time.perf_counter()
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            call()
            if time.perf_counter() - began < seconds / 4:
                call()
            batch = 1
            if not (cold and on_gpu):
                trial = min(self._timer.seconds(lambda: _repeat(call, 1), self._flush, 1))
                batch = max(1, min(_MOST_BATCH, round(_SAMPLE_S / trial)))

            def align() -> None:
                self._flush()
                if on_gpu and not cold:
                    call()

            asked = time.perf_counter()
            times = self._timer.seconds(lambda: _repeat(call, batch), align, _TRIALS)
            now = time.perf_counter()
            each = max((now - asked) / _TRIALS, 1e-9)
            more = max(_LEAST_SAMPLES - _TRIALS, min(_MOST_SAMPLES - _TRIALS, int((began + seconds - now) / each)))
            times += self._timer.seconds(lambda: _repeat(call, batch), align, more)
        return KernelTimes(len(times), median(times) / batch, percentile(times, 0.1) / batch)

    def _flush(self) -> None:
        if self.device.type != "cuda":
            return
        if self._flushed is None:
            self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._flushed.zero_()


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


# --- products

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = MappingProxyType(
    {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
    }
)
"""The format of the operands of a product by the catalogue's name."""


@dataclass(frozen=True)
class ProductTimes:
    """A product of an m x k and a k x n matrix in a format."""

    format: Dtype
    m: int
    n: int
    k: int
    times: KernelTimes

    @property
    def flops(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * self.m * self.n * self.k

    @property
    def flops_per_s(self) -> float:
        """By the median time."""
        return self.flops / self.times.median_s


def list_formats(device: torch.device) -> tuple[Dtype, ...]:
    """The formats in which this device has products: those of its capability on a GPU, each of them tried; on a CPU
    fp32 and bf16."""
    if device.type != "cuda":
        return ("fp32", "bf16")
    capability = torch.cuda.get_device_capability(device)
    wanted: list[Dtype] = ["fp16", "fp32"]
    if capability >= (8, 0):  # parts of AMD have 9.0 and more
        wanted.insert(0, "bf16")
        if torch.version.hip is None:
            wanted.append("tf32")
    if capability >= (8, 9):
        wanted.append("fp8")
    return tuple(name for name in wanted if _has_product(device, name))


def _has_product(device: torch.device, name: Dtype) -> bool:
    try:
        make_product(device, name, 64, 64, 64)()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def make_product(device: torch.device, name: Dtype, m: int, n: int, k: int) -> Callable[[], torch.Tensor]:
    """A product of random matrices, as a call. In fp8 as a training scales it: one factor for each operand, the result
    in bf16; all sizes are multiples of 16 there. Raises RuntimeError where the device has none, or no memory for it."""
    a, b = (_draw(device, rows, columns) for rows, columns in ((m, k), (n, k)))
    dtype = TORCH_DTYPES[name]
    if name == "fp8":
        low, scale = (a.to(dtype), b.to(dtype).t()), torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            *low, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    left, right = a.to(dtype), b.to(dtype).t()  # as the product of a layer with its weight
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


def _draw(device: torch.device, *shape: int) -> torch.Tensor:
    """Random numbers, a block of them repeated: to draw all would take a CPU longer than their product."""
    count = math.prod(shape)
    return torch.randn(_DRAWN, device=device).repeat(-(-count // _DRAWN))[:count].view(shape)


_DRAWN = 2**18


@contextmanager
def fp32_products(device: torch.device, name: Dtype) -> Iterator[None]:
    """Products of fp32 numbers run in TF32 for "tf32", else in fp32 to the last bit; as it was before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_product(
    device: torch.device, name: Dtype, m: int, n: int, k: int, seconds: float, watch: Stopwatch | None = None
) -> ProductTimes:
    """Time a product for about so many seconds. Raises RuntimeError as `make_product`."""
    call = make_product(device, name, m, n, k)
    with fp32_products(device, name):
        return ProductTimes(name, m, n, k, (watch or Stopwatch(device)).measure(call, seconds, cold=True))


@dataclass(frozen=True)
class LayerTimes:
    """The products of a layer of a transformer, forward and for both gradients, one after the other, in a format: the
    shapes (m, n, k) of a round, and the seconds of a round."""

    format: Dtype
    shapes: tuple[tuple[int, int, int], ...]
    times: KernelTimes

    @property
    def flops(self) -> int:
        """Of one round."""
        return sum(2 * m * n * k for m, n, k in self.shapes)

    @property
    def flops_per_s(self) -> float:
        """By the median time."""
        return self.flops / self.times.median_s


LAYER_SIZES: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {"cpu": (256, 1024, 256, 2048), "cuda": (8192, 4096, 1024, 14336)}
)
"""Tokens, width, width of keys and of values, and width of the feed-forward part by type of device. On a GPU those of
Llama 3 8B (arXiv:2407.21783)."""


def list_layer_shapes(tokens: int, width: int, kv_width: int, ffn: int) -> tuple[tuple[int, int, int], ...]:
    """Shapes of the products with the weights of a layer (queries, keys, gate, and back from the gate's width): of
    each the forward one, and those for the gradients of its inputs and of its weights."""
    weights = ((width, width), (width, kv_width), (width, ffn), (ffn, width))  # inputs, outputs
    return tuple(
        shape
        for inputs, outputs in weights
        for shape in ((tokens, outputs, inputs), (tokens, inputs, outputs), (inputs, outputs, tokens))
    )


def count_layer_flops(device: torch.device) -> int:
    """Of a round of the products that `time_layer` times."""
    return sum(2 * m * n * k for m, n, k in list_layer_shapes(*LAYER_SIZES[device.type]))


def time_layer(device: torch.device, name: Dtype, seconds: float, watch: Stopwatch | None = None) -> LayerTimes:
    """Time the products of a layer for about so many seconds without a pause, as a training does, so that the clock of
    the device is that of a training too. Raises RuntimeError as `make_product`."""
    shapes = list_layer_shapes(*LAYER_SIZES[device.type])
    calls = [make_product(device, name, *shape) for shape in shapes]
    with fp32_products(device, name):
        times = (watch or Stopwatch(device)).measure(lambda: [call() for call in calls], seconds, cold=True)
    return LayerTimes(name, shapes, times)


# --- copies


@dataclass(frozen=True)
class CopyTimes:
    """A copy of `size` bytes on a device, from one buffer to another."""

    size: int
    times: KernelTimes

    @property
    def moved(self) -> int:
        """Bytes that are read and written: twice the size."""
        return 2 * self.size

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written in a second, by the median time."""
        return self.moved / self.times.median_s


def time_copy(device: torch.device, size: int, seconds: float, watch: Stopwatch | None = None) -> CopyTimes:
    """Time a copy of so many bytes (a multiple of 4) for about so many seconds. On a CPU it shows what memory gives:
    the C library copies, by as many threads as torch has, between buffers of NumPy, which asks for huge pages. A copy
    of torch's reads the lines of memory that it writes first, in small pages, and reaches about half."""
    watch, count = watch or Stopwatch(device), max(1, size // 4)
    if device.type == "cuda":
        there, here = torch.empty(count, device=device), torch.randn(count, device=device)
        return CopyTimes(here.nbytes, watch.measure(lambda: there.copy_(here), seconds))
    source, target = (torch.from_numpy(np.empty(count, np.float32)) for _ in range(2))
    block = _draw(device, min(count, _DRAWN))
    for part in source.split(len(block)):
        part.copy_(block[: len(part)])
    target.zero_()
    threads = torch.get_num_threads() if source.nbytes >= _SPLIT_BYTES else 1
    parts = [
        (there.data_ptr(), here.data_ptr(), here.nbytes)
        for there, here in zip(target.chunk(threads), source.chunk(threads), strict=True)
    ]
    with ThreadPoolExecutor(threads) as pool:
        call = (lambda: _move(parts[0])) if threads == 1 else (lambda: list(pool.map(_move, parts)))
        return CopyTimes(source.nbytes, watch.measure(call, seconds))


_SPLIT_BYTES = 2**22
"""Copies from here on are split among threads; it takes longer to start these than a smaller copy takes."""


def _move(part: tuple[int, int, int]) -> None:
    ctypes.memmove(*part)  # which holds no lock of Python


@dataclass(frozen=True)
class TransferTimes:
    """A copy of `size` bytes between the host and a GPU, "to" it or "from" it, from and to memory of the host that is
    `pinned` (the device reads it directly) or not."""

    direction: str
    pinned: bool
    size: int
    times: KernelTimes

    @property
    def bytes_per_s(self) -> float:
        """By the median time, one direction."""
        return self.size / self.times.median_s


TRANSFER_BYTES = 2**28


def time_transfer(
    device: torch.device, direction: str, seconds: float, *, pinned: bool, watch: Stopwatch | None = None
) -> TransferTimes:
    """Time a copy between the host and a GPU for about so many seconds, each to its end, by the clock of the host."""
    there = torch.randn(TRANSFER_BYTES // 4, device=device)
    host = torch.empty(TRANSFER_BYTES // 4, pin_memory=pinned)
    host.copy_(there)
    source, target = (host, there) if direction == "to" else (there, host)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    times = (watch or Stopwatch(torch.device("cpu"))).measure(copy, seconds)
    return TransferTimes(direction, pinned, TRANSFER_BYTES, times)


# --- attention

ATTENTION_BACKENDS: Mapping[str, tuple[SDPBackend, str]] = MappingProxyType(
    {
        "flash": (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
        "efficient": (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
        "math": (SDPBackend.MATH, "bmm"),
    }
)
"""Backends of torch's attention, each with the start of the operator's name that shows that it ran."""

ATTENTION_SIZES: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {"cpu": (1, 8, 1024, 64), "cuda": (2, 32, 4096, 128)}
)
"""Batch, heads, sequence, width of a head."""

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass over those of the forward pass: five products to two (Dao, arXiv:2307.08691)."""


@dataclass(frozen=True)
class AttentionTimes:
    """Causal attention by a backend; `operator` is what ran."""

    backend: str
    operator: str
    format: Dtype
    batch: int
    heads: int
    seq: int
    width: int
    forward: KernelTimes
    backward: KernelTimes

    @property
    def flops(self) -> float:
        """Of the forward pass; a position is scored with itself and those before it."""
        return _count_causal_flops(self.batch, self.heads, self.seq, self.width)

    @property
    def forward_flops_per_s(self) -> float:
        """By the median time."""
        return self.flops / self.forward.median_s

    @property
    def backward_flops_per_s(self) -> float:
        """By the median time."""
        return BACKWARD_FLOPS * self.flops / self.backward.median_s


def _count_causal_flops(batch: int, heads: int, seq: int, width: int) -> float:
    return 4.0 * batch * heads * width * seq * (seq + 1) / 2


def count_attention_flops(device: torch.device) -> float:
    """Of both passes that `time_attention` times."""
    return (1 + BACKWARD_FLOPS) * _count_causal_flops(*ATTENTION_SIZES[device.type])


class _OperatorNames(TorchDispatchMode):
    """The names of operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def time_attention(
    device: torch.device, backend: str, name: Dtype, seconds: float, watch: Stopwatch | None = None
) -> AttentionTimes:
    """Time forward and backward pass of causal attention by one backend. Raises RuntimeError where the device does not
    take it, has no memory for it, or another operator ran than that of the backend."""
    batch, heads, seq, width = ATTENTION_SIZES[device.type]
    kind, start = ATTENTION_BACKENDS[backend]
    shape, dtype = (batch, heads, seq, width), TORCH_DTYPES[name]
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    gradient, watch = torch.randn(shape, device=device).to(dtype), watch or Stopwatch(device)
    with sdpa_kernel(kind):

        def call() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        with _OperatorNames() as seen:
            result = call()
        operator = next((each for each in seen.names if each.startswith(start)), None)
        if operator is None:
            raise RuntimeError(f"{', '.join(dict.fromkeys(seen.names))} ran in its place")
        forward = watch.measure(call, seconds * 0.3, cold=True)

        def back() -> object:
            return torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True)

        backward = watch.measure(back, seconds * 0.7, cold=True)
    return AttentionTimes(backend, operator, name, batch, heads, seq, width, forward, backward)


# --- starts of kernels


@dataclass(frozen=True)
class LaunchTimes:
    """Seconds of the host for a start of `what`: "kernel" (an empty one, the next one is started at once), "operator"
    (one that adds to a single number, likewise), or "operator and wait" (until the device has done it)."""

    what: str
    times: KernelTimes


def time_launches(device: torch.device, seconds: float, watch: Stopwatch | None = None) -> list[LaunchTimes]:
    """Time starts for about so many seconds in all; on a CPU there are only operators."""
    number = torch.zeros((), device=device)
    calls: dict[str, Callable[[], object]] = {"operator": lambda: number.add_(1)}
    if device.type == "cuda":

        def wait() -> None:
            number.add_(1)
            torch.cuda.synchronize(device)

        calls = {"kernel": lambda: torch.cuda._sleep(0), **calls, "operator and wait": wait}
    watch = watch or Stopwatch(torch.device("cpu"))
    return [LaunchTimes(what, watch.measure(call, seconds / len(calls))) for what, call in calls.items()]


# --- the two ceilings of a roofline

PEAK_SIDES: Mapping[str, tuple[int, ...]] = MappingProxyType({"cpu": (1024, 2048), "cuda": (4096, 8192)})
"""Sides of square products that reach about all that a device does."""
PEAK_COPY: Mapping[str, int] = MappingProxyType({"cpu": 2**28, "cuda": 2**30})
"""Bytes of a copy that no cache holds."""


@dataclass(frozen=True)
class DevicePeaks:
    """The best product of each format, and a copy through the memory."""

    products: Mapping[Dtype, ProductTimes]
    copy: CopyTimes


def measure_peaks(
    device: torch.device, names: Sequence[Dtype], seconds: float, watch: Stopwatch | None = None
) -> DevicePeaks:
    """What a device reaches in about so many seconds: larger products are left out where they do not fit into these. A
    search over shapes (`shardway bench device`) finds a little more. Raises RuntimeError as `make_product`."""
    watch, (first, *larger), began = watch or Stopwatch(device), PEAK_SIDES[device.type], time.perf_counter()
    share = seconds / (len(names) * (1 + len(larger)) + 1)
    products = {name: time_product(device, name, first, first, first, share, watch) for name in names}
    copy = time_copy(device, PEAK_COPY[device.type], share, watch)
    for side in larger:
        for name, best in products.items():
            left = began + seconds - time.perf_counter()
            if LEAST_CALLS * 2 * side**3 / best.flops_per_s <= left:
                found = time_product(device, name, side, side, side, min(share, left), watch)
                products[name] = max(best, found, key=lambda each: each.flops_per_s)
    return DevicePeaks(MappingProxyType(products), copy)
