"""The search over shapes, its time, and a whole measurement of this CPU with small sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from device_reports import take
from shardway.bench import device, kernels
from shardway.bench.device import (
    SHARES,
    DeviceRequest,
    Shape,
    TimeBudget,
    list_neighbours,
    measure_device,
    search_shapes,
)
from shardway.bench.device_report import DeviceReport, ShapeSearch
from shardway.bench.kernels import CopyTimes, ProductTimes
from shardway.errors import UserError

CPU = torch.device("cpu")
GRID = [(m, n, k) for m in (256, 512) for n in (256, 512) for k in (256, 512)]


@dataclass
class FakeDevice:
    """Products run at a rate by their shape; a measurement takes as long as it is given, or as its calls."""

    rate: Callable[[Shape], float]
    clock: float = 0.0
    holds: int = 2**60
    asked: list[Shape] = field(default_factory=list)

    def now(self) -> float:
        return self.clock

    def measure(self, shape: Shape, seconds: float) -> ProductTimes | None:
        m, n, k = shape
        self.asked.append(shape)
        if m * n * k > self.holds:
            return None
        each = 2 * m * n * k / self.rate(shape)
        self.clock += max(seconds, 3 * each)
        return ProductTimes("bf16", m, n, k, take(each))


def test_the_best_shape_may_be_beside_the_grid() -> None:
    fake = FakeDevice(lambda shape: 1e12 - 1e8 * abs(shape[0] - 576) - 1e8 * abs(shape[2] - 384))
    found = search_shapes(fake.measure, GRID, 64, 10.0, fake.now)
    assert found is not None
    assert (found.best.m, found.best.k) == (576, 384)
    assert (found.best.m, found.best.n, found.best.k) not in GRID
    assert fake.asked[: len(GRID)] == sorted(GRID, key=lambda each: each[0] * each[1] * each[2])
    assert fake.asked[-1] == (found.best.m, found.best.n, found.best.k)  # measured again
    assert found.tried == len(set(fake.asked))
    assert found.left_out == 0


def test_shapes_that_take_too_long_are_left_out() -> None:
    fake = FakeDevice(lambda shape: 1e7)
    found = search_shapes(fake.measure, GRID, 64, 20.0, fake.now)
    assert found is not None
    assert found.left_out == len(GRID) - found.tried > 0
    assert fake.clock < 100  # and not the time of all


def test_shapes_that_memory_does_not_hold_are_left_out() -> None:
    fake = FakeDevice(lambda shape: 1e12, holds=256 * 256 * 512)
    found = search_shapes(fake.measure, GRID, 64, 10.0, fake.now)
    assert found is not None
    assert found.left_out >= 4
    nothing = FakeDevice(lambda shape: 1e12, holds=0)
    assert search_shapes(nothing.measure, GRID, 64, 10.0, nothing.now) is None


def test_neighbours_change_one_side() -> None:
    near = list(list_neighbours((1024, 512, 64), 64))
    assert len(near) == 12
    assert all(sum(a != b for a, b in zip(each, (1024, 512, 64), strict=True)) <= 1 for each in near)
    assert all(side % 64 == 0 and side > 0 for each in near for side in each)


def test_what_one_kind_does_not_use_is_left_to_the_others() -> None:
    times = iter([0.0, 0.0, 1.0, 1.0])
    budget = TimeBudget(10.0, lambda: next(times))
    first = budget.share("products", ["copies"])
    assert first == pytest.approx(10 * SHARES["products"] / (SHARES["products"] + SHARES["copies"]))
    assert budget.share("copies", []) == pytest.approx(9.0)
    assert sum(SHARES.values()) < 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    for module, name, value in (
        (kernels, "LAYER_SIZES", (16, 32, 16, 32)),
        (kernels, "ATTENTION_SIZES", (1, 1, 16, 16)),
        (device, "_SIDES", (32, 64)),
    ):
        monkeypatch.setattr(module, name, MappingProxyType({"cpu": value}))
    monkeypatch.setattr(device, "DISK_BYTES", 2**23)


@pytest.mark.usefixtures("small")
def test_all_of_a_cpu_is_measured(tmp_path: Path) -> None:
    report = measure_device(CPU, DeviceRequest(sizes=(4096, 16384), disk=tmp_path, seconds=0.5))
    assert (report.kind, report.name, report.part) == ("cpu", "CPU", None)
    assert [each.best.format for each in report.searches] == ["fp32", "bf16"]
    assert [each.format for each in report.layers] == ["fp32", "bf16"]
    assert [each.size for each in report.copies] == [4096, 16384]
    assert report.transfers == []
    assert {each.backend for each in report.attention} == {"flash", "math"}
    assert [backend for backend, _ in report.refused] == ["cudnn", "efficient"]
    assert [each.what for each in report.launches] == ["operator"]
    assert report.disk is not None
    assert report.disk.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert report.left_out == []


@pytest.mark.usefixtures("small")
def test_a_disk_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(device, "measure_disk", fail)
    report = measure_device(CPU, DeviceRequest(formats=("fp32",), sizes=(4096,), disk=tmp_path, seconds=0.1))
    assert (report.disk, report.left_out) == (None, [f"the disk of {tmp_path}: No space left on device"])


@pytest.mark.usefixtures("small")
def test_only_what_is_named_is_measured() -> None:
    report = measure_device(CPU, DeviceRequest(formats=("bf16",), sizes=(4096,), seconds=0.1))
    assert [each.best.format for each in report.searches] == ["bf16"]
    assert report.attention[0].format == "bf16"
    assert report.disk is None


def test_a_format_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"--formats \(command line\): CPU has no products in tf32, fp8 here") as caught:
        measure_device(CPU, DeviceRequest(formats=("tf32", "fp8", "bf16"), seconds=0.1))
    assert "allowed: fp32, bf16" in str(caught.value)


def test_a_copy_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "read_memory_left", lambda: 2**30)
    with pytest.raises(UserError, match=r"a copy of 1GiB needs twice that, and about 1GiB are left") as caught:
        measure_device(CPU, DeviceRequest(sizes=(2**30,), seconds=0.1))
    assert "allowed: up to 512MiB" in str(caught.value)


def test_what_takes_much_longer_than_its_share_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = DeviceReport("cpu", "CPU", "", 1)
    report.searches.append(ShapeSearch(ProductTimes("fp32", 8, 8, 8, take(1.0)), 1, 0))  # 1024 FLOP/s
    monkeypatch.setattr(device, "time_copy", lambda where, size, seconds: CopyTimes(size, take(size / 1e6)))
    device._measure_layers(report, CPU, ("fp32",), 1.0)
    device._measure_attention(report, CPU, ("fp32",), 1.0)
    device._measure_copies(report, CPU, (2**28, 2**10, 2**14), 1.0)
    assert (report.layers, report.attention, report.refused) == ([], [], [])
    assert [copy.size for copy in report.copies] == [2**10, 2**14]
    assert report.left_out == [
        f"{what}, for lack of time (--seconds)"
        for what in (
            "the products of a layer in fp32",
            *(f"attention by {backend}" for backend in kernels.ATTENTION_BACKENDS),
            "a copy of 256MiB",
        )
    ]
