"""Products and copies on one device: what is counted, how often a call is timed, what operands are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from shardway.bench import kernels
from shardway.bench.kernels import (
    ATTENTION_SIZES,
    LAYER_SIZES,
    PEAK_COPY,
    PEAK_SIDES,
    HostTimer,
    Stopwatch,
    list_formats,
    list_layer_shapes,
    make_product,
    measure_peaks,
    time_attention,
    time_copy,
    time_launches,
    time_layer,
    time_product,
)
from shardway.hardware.catalogue import Dtype

CPU = torch.device("cpu")


@dataclass
class FakeTimer:
    """Calls take `call_s` each; `samples` are how many of them each sample had, as far as `count_call` is what is
    called."""

    call_s: float
    calls: int = 0
    samples: list[int] = field(default_factory=list)

    def count_call(self) -> None:
        self.calls += 1

    def seconds(self, call: Callable[[], None], align: Callable[[], None], count: int) -> list[float]:
        found = []
        for _ in range(count):
            align()
            before = self.calls
            call()
            self.samples.append(max(1, self.calls - before))
            found.append(self.samples[-1] * self.call_s)
        return found


@pytest.mark.parametrize("shape", [(16, 32, 48), (64, 64, 64), (48, 16, 80)])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_flops_of_a_product(shape: tuple[int, int, int], name: Dtype) -> None:
    m, n, k = shape
    product = time_product(CPU, name, m, n, k, 0.0, Stopwatch(CPU, FakeTimer(3e-3)))
    assert product.flops == 2 * m * n * k
    assert product.flops_per_s == pytest.approx(2 * m * n * k / 3e-3, rel=1e-12)


@pytest.mark.parametrize("size", [4096, 2**20])
def test_bytes_of_a_copy_are_read_and_written(size: int) -> None:
    copy = time_copy(CPU, size, 0.0, Stopwatch(CPU, FakeTimer(7e-4)))
    assert (copy.size, copy.moved) == (size, 2 * size)
    assert copy.bytes_per_s == pytest.approx(2 * size / 7e-4, rel=1e-12)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_by_threads_copies_all(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(kernels, "_SPLIT_BYTES", 64)
    buffers: list[torch.Tensor] = []

    def keep(array: np.ndarray) -> torch.Tensor:
        buffers.append(torch.as_tensor(array))
        return buffers[-1]

    monkeypatch.setattr(torch, "from_numpy", keep)
    assert time_copy(CPU, 4 * 1001, 0.0, Stopwatch(CPU, FakeTimer(1e-3))).size == 4 * 1001
    source, target = buffers
    assert torch.equal(source, target)
    assert len(source.unique()) > 900


def test_short_calls_are_timed_several_at_a_time() -> None:
    timer = FakeTimer(1e-6)
    times = Stopwatch(CPU, timer).measure(timer.count_call, 0.0)
    assert times.median_s == pytest.approx(1e-6, rel=1e-12)
    assert times.p10_s == pytest.approx(1e-6, rel=1e-12)
    assert timer.samples[-1] == 200  # of which a sample takes 200 us
    long = FakeTimer(1.0)
    Stopwatch(CPU, long).measure(long.count_call, 0.0)
    assert set(long.samples) == {1}


@pytest.mark.parametrize(("cold", "in_a_sample"), [(True, 1), (False, 20)])
def test_caches_of_a_gpu_are_flushed_before_each_sample(
    cold: bool, in_a_sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a device that is pretended: a call that may find its data in caches is made once more after the flush."""
    timer, flushes = FakeTimer(1e-5), list[int]()
    watch = Stopwatch(torch.device("cuda", 0), timer)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(watch, "_flush", lambda: flushes.append(timer.calls))
    times = watch.measure(timer.count_call, 0.0, cold=cold)
    assert timer.samples[-times.count :] == [in_a_sample] * times.count
    assert len(flushes) == len(timer.samples)
    apart = {after - before for before, after in pairwise(flushes[-times.count :])}
    assert apart == {in_a_sample + (0 if cold else 1)}


def test_a_call_is_timed_a_few_times_whatever_the_budget() -> None:
    timer = FakeTimer(1.0)
    assert Stopwatch(CPU, timer).measure(timer.count_call, 0.0).count == 3


def test_a_budget_is_used() -> None:
    found = Stopwatch(CPU, HostTimer()).measure(lambda: torch.ones(2).sum(), 0.05)
    assert 3 <= found.count <= 200
    assert 0 < found.p10_s <= found.median_s


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_operands_are_random(name: Dtype) -> None:
    result = make_product(CPU, name, 32, 48, 64)()
    assert result.shape == (32, 48)
    assert result.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    assert len(result.float().unique()) > 100


def test_a_copy_draws_a_block_of_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw 256 MiB takes a CPU 8 s."""
    copied, move = list[np.ndarray](), kernels._move

    def look(part: tuple[int, int, int]) -> None:
        move(part)
        copied.append(np.frombuffer(ctypes.string_at(part[0], part[2]), np.float32))

    monkeypatch.setattr(kernels, "_DRAWN", 256)
    monkeypatch.setattr(kernels, "_move", look)
    time_copy(CPU, 4 * 1000, 0.0)
    assert (len(copied[0]), len(np.unique(copied[0]))) == (1000, 256)
    assert np.count_nonzero(copied[0]) == 1000


@pytest.mark.parametrize(("seconds", "side"), [(0.0, 32), (5.0, 64)])
def test_peaks_are_the_best_product_and_a_large_copy(
    seconds: float, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger product, which takes as long here with more to do, is left out where it does not fit into the time."""
    monkeypatch.setattr(kernels, "PEAK_SIDES", {"cpu": (32, 64)})
    monkeypatch.setattr(kernels, "PEAK_COPY", {"cpu": 2**12})
    peaks = measure_peaks(CPU, ("fp32",), seconds, Stopwatch(CPU, FakeTimer(1e-3)))
    assert (peaks.products["fp32"].m, peaks.copy.size) == (side, 2**12)


def test_each_device_has_sizes() -> None:
    assert set(PEAK_SIDES) == set(PEAK_COPY) == set(LAYER_SIZES) == set(ATTENTION_SIZES) == {"cpu", "cuda"}


def test_products_of_a_layer_are_forward_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LAYER_SIZES", {"cpu": (32, 64, 16, 96)})
    layer = time_layer(CPU, "fp32", 0.0, Stopwatch(CPU, FakeTimer(5e-3)))
    weights = 64 * 64 + 64 * 16 + 64 * 96 + 96 * 64
    assert layer.flops == 6 * 32 * weights  # as a training counts: 6 for each weight and token
    assert layer.flops_per_s == pytest.approx(6 * 32 * weights / 5e-3, rel=1e-12)
    assert set(list_layer_shapes(32, 64, 16, 96)) >= {(32, 96, 64), (32, 64, 96), (64, 96, 32)}


def test_flops_of_attention_and_the_operator_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ATTENTION_SIZES", {"cpu": (2, 3, 8, 16)})
    flash, plain = (
        time_attention(CPU, name, "fp32", 0.0, Stopwatch(CPU, FakeTimer(1e-2))) for name in ("flash", "math")
    )
    assert flash.operator == "_scaled_dot_product_flash_attention_for_cpu"
    assert plain.operator == "bmm"
    pairs = sum(range(1, 9))  # a position is scored with itself and those before it
    assert flash.flops == 2 * 2 * 2 * 3 * 16 * pairs
    assert flash.forward_flops_per_s == pytest.approx(flash.flops / 1e-2, rel=1e-12)
    assert flash.backward_flops_per_s == pytest.approx(2.5 * flash.flops / 1e-2, rel=1e-12)


def test_a_backend_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ATTENTION_SIZES", {"cpu": (1, 1, 8, 16)})
    with pytest.raises(RuntimeError, match="No"):
        time_attention(CPU, "cudnn", "fp32", 0.0)


def test_another_operator_than_that_of_the_backend_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ATTENTION_SIZES", {"cpu": (1, 1, 8, 16)})
    monkeypatch.setattr(
        kernels, "ATTENTION_BACKENDS", {"flash": (kernels.SDPBackend.MATH, "_scaled_dot_product_flash_attention")}
    )
    with pytest.raises(RuntimeError, match=r"bmm.* ran in its place"):
        time_attention(CPU, "flash", "fp32", 0.0)


def test_a_cpu_starts_operators() -> None:
    [launch] = time_launches(CPU, 0.0, Stopwatch(CPU, FakeTimer(2e-6)))
    assert (launch.what, launch.times.count) == ("operator", 3)


def test_precision_of_fp32_products_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    time_product(CPU, "tf32", 16, 16, 16, 0.0, Stopwatch(CPU, FakeTimer(1e-3)))
    assert torch.get_float32_matmul_precision() == before


def test_formats_of_a_cpu() -> None:
    assert list_formats(CPU) == ("fp32", "bf16")
