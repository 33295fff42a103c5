"""Measurements of a device that were not made: what an H100 would show, by rates that are given."""

from __future__ import annotations

from collections.abc import Mapping

from shardway.bench.device_report import DeviceReport, ShapeSearch
from shardway.bench.disk import DiskTimes
from shardway.bench.kernels import (
    ATTENTION_BACKENDS,
    ATTENTION_SIZES,
    BACKWARD_FLOPS,
    LAYER_SIZES,
    AttentionTimes,
    CopyTimes,
    KernelTimes,
    LaunchTimes,
    LayerTimes,
    ProductTimes,
    TransferTimes,
    list_layer_shapes,
)
from shardway.hardware.catalogue import Dtype

H100 = "NVIDIA H100 80GB HBM3"

SEARCHED: Mapping[Dtype, float] = {"bf16": 794e12, "fp16": 760e12, "tf32": 400e12, "fp32": 52e12, "fp8": 1403e12}
"""FLOP/s of the best shape."""
IN_A_LAYER: Mapping[Dtype, float] = {"bf16": 690e12, "fp16": 680e12, "tf32": 370e12, "fp32": 50e12, "fp8": 1150e12}
COPIED = {2**24: 4.1e12, 2**30: 3.05e12}
"""Bytes per second, read and written, by size."""
ATTENDED = {"flash": (420e12, 330e12), "cudnn": (600e12, 480e12)}
"""FLOP/s forward and backward."""


def take(seconds: float, count: int = 60) -> KernelTimes:
    """Times of calls that all take as long."""
    return KernelTimes(count, seconds, seconds)


def make_device_report(
    searched: Mapping[Dtype, float] = SEARCHED,
    in_a_layer: Mapping[Dtype, float] = IN_A_LAYER,
    copied: Mapping[int, float] = COPIED,
) -> DeviceReport:
    """One H100 with these rates."""
    report = DeviceReport("cuda", H100, "torch 2.13.0, CUDA 13.0", 16, seconds=38.6)
    shape = (8192, 8192, 8192)
    for name, rate in searched.items():
        best = ProductTimes(name, *shape, take(2 * 8192**3 / rate))
        report.searches.append(ShapeSearch(best, 34, 9 if name == "fp8" else 0))
    shapes = list_layer_shapes(*LAYER_SIZES["cuda"])
    flops = sum(2 * m * n * k for m, n, k in shapes)
    report.layers += [LayerTimes(name, shapes, take(flops / rate)) for name, rate in in_a_layer.items()]
    report.copies += [CopyTimes(size, take(2 * size / rate)) for size, rate in copied.items()]
    for direction, rates in (("to", (55e9, 12e9)), ("from", (54e9, 9e9))):
        report.transfers += [
            TransferTimes(direction, pinned, 2**28, take(2**28 / rate, 20))
            for pinned, rate in zip((True, False), rates, strict=True)
        ]
    batch, heads, seq, width = ATTENTION_SIZES["cuda"]
    flops_of_pass = 4 * batch * heads * width * seq * (seq + 1) / 2
    for backend, (forward, backward) in ATTENDED.items():
        times = take(flops_of_pass / forward), take(BACKWARD_FLOPS * flops_of_pass / backward)
        operator = ATTENTION_BACKENDS[backend][1]
        report.attention.append(AttentionTimes(backend, operator, "bf16", batch, heads, seq, width, *times))
    report.refused.append(("efficient", "an invented reason"))
    for what, seconds in (("kernel", 2.1e-6), ("operator", 4.2e-6), ("operator and wait", 11.5e-6)):
        report.launches.append(LaunchTimes(what, take(seconds, 200)))
    report.disk = DiskTimes("/scratch/me", "lustre", 2**31, True, 0.9, 0.7)
    return report
