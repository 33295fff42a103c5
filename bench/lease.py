"""What the lease of a run directory costs its holder: a beat, which is also a confirm, and a check.

python bench/lease.py [FOLDER]      in a temporary folder there (default: where temporary files go)

Invariant: the calls are those of a run, whose thread beats beside them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardway.rundir.directory import RunDir


def measure(call: Callable[[], None], times: int) -> str:
    """Median and 99th percentile of a call, and its CPU time."""
    cpu, taken = time.process_time(), []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    cpu = (time.process_time() - cpu) / times
    most = statistics.quantiles(taken, n=100)[-1]
    return f"median {statistics.median(taken) * 1e6:.1f} us, 99 % {most * 1e6:.1f} us, CPU {cpu * 1e6:.1f} us"


def main() -> None:
    """Measure in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        run = RunDir(Path(folder))
        run.create()
        lock = run.writer_lock()
        lock.acquire()
        print(f"beat, confirm  {measure(lock.lease.confirm, 2000)}")
        print(f"check          {measure(lock.lease.check, 20000)}")
        lock.release()


if __name__ == "__main__":
    main()
