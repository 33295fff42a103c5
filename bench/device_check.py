"""The peaks of a CPU as `shardway bench device` measures them, beside plain loops of NumPy: fp32 products and copies.

python bench/device_check.py [--turns 60] [--seconds 0.1] [--threads 1]

Both take short turns in one process, so that a machine that others use disturbs them alike. A rate is that of the 10th
percentile of the times of a turn. The exit code is 1 if the ratio of the rates of a turn is more than 10 % away from 1
at the median of all turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

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
    device, drawn = torch.device("cpu"), np.random.default_rng(0)
    a, b = (drawn.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    source = drawn.standard_normal(COPY // 4, dtype=np.float32)
    target = np.zeros_like(source)
    ways: dict[str, tuple[Callable[[], float], Callable[[], float], float, str]] = {
        "product fp32": (
            lambda: 2 * SIDE**3 / time_product(device, "fp32", SIDE, SIDE, SIDE, options.seconds).times.p10_s,
            lambda: 2 * SIDE**3 / loop_seconds(lambda: np.matmul(a, b, out=out), options.seconds),
            1e9,
            "GFLOP/s",
        ),
        "copy": (
            lambda: 2 * COPY / time_copy(device, COPY, options.seconds).times.p10_s,
            lambda: 2 * COPY / loop_seconds(lambda: np.copyto(target, source), options.seconds),
            1e9,
            "GB/s",
        ),
    }
    worst = 0.0
    for name, (ours, plain, unit, shown) in ways.items():
        found: list[tuple[float, float]] = []
        for turn in range(options.turns):
            order = (ours, plain) if turn % 2 == 0 else (plain, ours)
            rates = {way: way() for way in order}
            found.append((rates[ours], rates[plain]))
        best, loop = (max(column) for column in zip(*found, strict=True))
        ratio = statistics.median(each / other for each, other in found)
        worst = max(worst, abs(ratio - 1))
        print(
            f"{name}: {best / unit:.1f} {shown}, NumPy's loop {loop / unit:.1f} in the best of {options.turns} turns; "
            f"ratio within a turn {ratio:.3f} at the median, of the best turns {best / loop:.3f}"
        )
    return int(worst > MOST)


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
