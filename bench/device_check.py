"""The peaks of a CPU as `shardway bench device` measures them, beside plain loops: fp32 products and copies.

python bench/device_check.py [--turns 60] [--seconds 0.1] [--threads 1]

Copies are timed against NumPy's. Products are timed against `sgemm` of the library that torch multiplies with, called
by its address, since libraries differ in their kernels: NumPy's, of another one as a rule, is only shown beside it.
All take short turns in one process, so that a machine that others use disturbs them alike. A rate is that of the 10th
percentile of the times of a turn. The exit code is 1 if the ratio of the rates of a turn is more than 10 % away from 1
at the median of all turns.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

SIDE, COPY = 1024, 2**28
MOST = 0.10


def main() -> int:
    """Measure in turns and print the best of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one measurement in a turn")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries are loaded
        os.environ[name] = str(options.threads)
    import numpy as np
    import torch

    from shardway.bench.kernels import time_copy, time_product

    torch.set_num_threads(options.threads)
    device, drawn, seconds = torch.device("cpu"), np.random.default_rng(0), options.seconds
    a, b = (drawn.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    source = drawn.standard_normal(COPY // 4, dtype=np.float32)
    target = np.zeros_like(source)
    library = product_call(a, b, out)
    found = measure_turns(
        options.turns,
        {
            "ours": lambda: 2 * SIDE**3 / time_product(device, "fp32", SIDE, SIDE, SIDE, seconds).times.p10_s,
            "the library's loop": lambda: 2 * SIDE**3 / loop_seconds(library, seconds),
            "NumPy's": lambda: 2 * SIDE**3 / loop_seconds(lambda: np.matmul(a, b, out=out), seconds),
        },
    )
    worst = show("product fp32", found, 1e9, "GFLOP/s")
    found = measure_turns(
        options.turns,
        {
            "ours": lambda: 2 * COPY / time_copy(device, COPY, seconds).times.p10_s,
            "NumPy's loop": lambda: 2 * COPY / loop_seconds(lambda: np.copyto(target, source), seconds),
        },
    )
    return int(max(worst, show("copy", found, 1e9, "GB/s")) > MOST)


def measure_turns(turns: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The rates of each way by turn, in an order that turns around from one to the next."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(ways[name]())
    return found


def show(what: str, found: dict[str, list[float]], unit: float, shown: str) -> float:
    """Print the best rate of each way and the ratio of ours to it; how far that to the second way is from 1."""
    ours, *others = found.items()
    parts, ratios = [f"{max(ours[1]) / unit:.1f} {shown}"], list[float]()
    for name, rates in others:
        ratios.append(statistics.median(mine / other for mine, other in zip(ours[1], rates, strict=True)))
        parts.append(f"{name} {max(rates) / unit:.1f} (ratio within a turn {ratios[-1]:.3f} at the median)")
    print(f"{what}: {', '.join(parts)} in the best of {len(ours[1])} turns")
    return abs(ratios[0] - 1)


def product_call(a: ndarray, b: ndarray, out: ndarray) -> Callable[[], None]:
    """A call of the library's own `sgemm` that writes the product of two square matrices to `out`. Its columns are our
    rows, so the factors change places. Exits where torch's build does not have that function under that name."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(library, "sgemm_"):
        sys.exit(f"libtorch_cpu.so of torch {torch.__version__} has no sgemm_: products cannot be checked with it.")
    side, one, zero = ctypes.c_int(len(a)), ctypes.c_float(1), ctypes.c_float(0)
    second, first, product = (matrix.ctypes.data_as(ctypes.c_void_p) for matrix in (b, a, out))
    n, plain = ctypes.byref(side), ctypes.c_char_p(b"N")
    factors = (ctypes.byref(one), second, n, first, n, ctypes.byref(zero), product, n)

    def call() -> None:
        library.sgemm_(plain, plain, n, n, n, *factors)

    call()
    if abs(out - a @ b).max() > 1e-3:
        sys.exit("sgemm_ of torch's library gave another product than NumPy: it is called wrongly here.")
    return call


def loop_seconds(call: Callable[[], object], seconds: float) -> float:
    """The 10th percentile of the times of a call that is repeated for so many seconds."""
    call()
    began, times = time.perf_counter(), list[float]()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 10]


if __name__ == "__main__":
    sys.exit(main())
