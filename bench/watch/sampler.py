"""What sampling a node costs: CPU time of the process, bytes of its file, and how much it slows the steps of a job.

    python bench/watch/sampler.py [--children 16] [--seconds 60] [--pairs 60]

CPU time is that of the sampling process alone (/proc/PID/schedstat), without its start, so that other programs on the
machine do not count. The slow-down is of pairs of windows of one program: in one window of each pair the sampler is
stopped (SIGSTOP), in the other it goes on; which comes first is drawn. Steps are timed by the program's own clock, so
that other programs make the interval wider. Goals: 0.1 % of a core at 1 Hz with 16 children, 1 % at 10 Hz; 40 MB in
24 h of 4 GPUs at 1 Hz; 0.2 % of a step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardway.telemetry.devices import GPM, NVLINK, PCIE
from shardway.telemetry.store import DeviceInfo, NodeInfo, TelemetryWriter

CHILD = "import time\nwhile True: time.sleep(0.05)"
WORK = """
import sys, time
import numpy as np
a = np.random.default_rng(0).standard_normal((256, 256))
while True:
    at = time.perf_counter()
    for _ in range(8):
        a @ a
    print(time.monotonic(), time.perf_counter() - at, flush=True)
"""


def start_sampler(folder: str, every_s: float, top: int) -> subprocess.Popen[bytes]:
    words = [f"into={folder}/telemetry", f"every_s={every_s}", f"top={top}"]
    return subprocess.Popen([sys.executable, "-m", "shardway.telemetry.sampler", *words], stdin=subprocess.DEVNULL)


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure_cost(children: int, every_s: float, seconds: float) -> tuple[float, float]:
    """CPU milliseconds of a sample, and bytes of a sample in the file."""
    processes = [subprocess.Popen([sys.executable, "-c", CHILD]) for _ in range(children)]
    with tempfile.TemporaryDirectory() as folder:
        sampler = start_sampler(folder, every_s, os.getpid())
        time.sleep(5)
        before, begun = cpu_s(sampler.pid), time.monotonic()
        time.sleep(seconds)
        used, passed = cpu_s(sampler.pid) - before, time.monotonic() - begun
        size = sum(path.stat().st_size for path in Path(folder, "telemetry").iterdir())
        sampler.kill()
        sampler.wait()
    for process in processes:
        process.kill()
        process.wait()
    return 1000 * used / (passed / every_s), size / ((passed + 5) / every_s)


def measure_size(gpus: int = 4, cores: int = 64, samples: int = 3600) -> float:
    """Bytes of a sample of series that vary as those of a training do."""
    rng = random.Random(0)
    names = [f"core/{core}/use_percent" for core in range(cores)]
    steady = ("memory_bytes", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "throttle_bits", "ecc_errors")
    parts = ("use_percent", "memory_use_percent", "power_w", "energy_j", *GPM, *PCIE, *NVLINK, *steady)
    names += [f"gpu/{gpu}/{name}" for gpu in range(gpus) for name in (*parts, "job_processes")]
    ways = [f"{way}_bytes_per_s" for way in ("rx", "tx")]
    names += [f"net/eth0/{way}" for way in ways] + [f"ib/mlx5_{n}:1/{way}" for n in range(4) for way in ways]
    names += ["cpu/use_percent", "cpu/job_cores", "cpu/threads", "cpu/load", "memory/used_bytes", "memory/job_bytes"]
    names += [f"io/{kind}_bytes_per_s" for kind in ("read", "write", "rchar", "wchar")]
    device = DeviceInfo(0, "NVIDIA H100", "GPU-0", 80 << 30, 700.0, "nvidia")
    info = NodeInfo("n1", 0, "1", 1, 1e9, 1.0, cores, tuple(range(cores)), 1 << 39, None, (device,) * gpus, {})
    with tempfile.TemporaryDirectory() as folder:
        writer = TelemetryWriter(Path(folder), info, names, block_s=3600)
        for second in range(samples):
            writer.append(1e9 + second, [_draw(name, second, rng) for name in names])
            if second % 20 == 19:
                writer.flush()
        writer.close()
        return writer.path.stat().st_size / samples


def _draw(name: str, second: int, rng: random.Random) -> float:
    last = name.rpartition("/")[2]
    if last == "energy_j":
        return 620.0 * second
    if last.endswith("_per_s"):
        return abs(rng.gauss(2e9, 5e8))
    means = {"power_w": (620, 30), "temperature_c": (62, 0.5), "sm_clock_mhz": (1900, 20), "memory_bytes": (6e10, 0)}
    means |= {"memory_clock_mhz": (2619, 0), "throttle_bits": (4, 0), "ecc_errors": (0, 0), "job_processes": (1, 0)}
    means |= {
        "threads": (900, 2),
        "load": (40, 1),
        "job_cores": (30, 2),
        "used_bytes": (2e11, 1e8),
        "job_bytes": (1e11, 1e8),
    }
    mean, deviation = means.get(last, (45, 15))
    return max(0.0, rng.gauss(mean, deviation))


def measure_slow_down(pairs: int, window_s: float, every_s: float) -> tuple[float, float, float]:
    """The median over pairs of the percent by which steps take longer with the sampler, and its 95 % interval."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        program = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        sampler = start_sampler(folder, every_s, program.pid)
        end = time.monotonic() + 3
        steps: list[tuple[float, float]] = []

        def read(until: float) -> list[float]:
            steps.clear()
            for line in program.stdout or ():
                at, took = map(float, line.split())
                if at > until - window_s + 0.1:
                    steps.append((at, took))
                if at > until:
                    return [took for _, took in steps]
            return []

        read(end)
        ratios = []
        for _ in range(pairs):
            medians = {}
            for is_on in rng.sample((True, False), 2):
                sampler.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
                medians[is_on] = statistics.mean(read(time.monotonic() + window_s))
            ratios.append(100 * (medians[True] / medians[False] - 1))
        for process in (sampler, program):
            process.kill()
            process.wait()
    draws = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), draws[50], draws[1949]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    for every_s in (1.0, 0.1):
        cost_ms, size = measure_cost(options.children, every_s, options.seconds)
        share = cost_ms / 10 / every_s
        print(
            f"every {every_s:g} s, {options.children} children: {cost_ms:.3f} ms CPU a sample, {share:.3f} % of a core"
        )
        print(f"  {size:.0f} bytes a sample (host values of this machine alone)")
    size = measure_size()
    print(f"4 GPUs, 64 cores, drawn: {size:.0f} bytes a sample, {size * 86400 / 1e6:.1f} MB in 24 h at 1 Hz")
    median, low, high = measure_slow_down(options.pairs, 2.0, 1.0)
    print(f"a step at 1 Hz: {median:+.3f} % in the median of {options.pairs} pairs ({low:+.3f} to {high:+.3f} %)")


if __name__ == "__main__":
    main()
