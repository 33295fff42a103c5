"""What sampling a node costs: CPU time of the process, bytes of its file, and how much it slows the steps of a job.

    python bench/watch/sampler.py [--children 16] [--threads 1] [--seconds 120] [--pairs 60] [--against TREE]

CPU time is that of the sampling process alone (/proc/PID/schedstat), without its start, so that the time of other
programs on the machine does not count. They still make it larger: they empty its caches between two samples, and each
process that they start is looked at. A core that has halted in between may make it larger too. So turns of ten seconds
follow each other in which loops of the lowest priority keep the cores awake, and in which nothing does; quartiles of
both are printed, with the load.
`--against` runs the sampler of another tree (its folder with `src`) beside, half an interval later, for a comparison of
both in the same seconds. Beside them a Python process sleeps as long and does nothing else: what waking costs on this
machine. Calls of the kernel are counted where `strace` is installed: this figure does not depend on the machine's load,
but for the processes that others start.

The slow-down is of pairs of windows of one program: in one window of each pair the sampler is stopped (SIGSTOP), in the
other it goes on; which comes first is drawn. Steps are timed by the program's own clock, so that other programs make
the interval wider. Goals: 0.1 % of a core at 1 Hz with 16 children, 1 % at 10 Hz; 40 MB in 24 h of 4 GPUs at 1 Hz;
0.2 % of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardway.telemetry.devices import GPM, NAN, NVLINK, PCIE
from shardway.telemetry.host import OF_PROCESSES
from shardway.telemetry.sampler import PROCESSES_EACH
from shardway.telemetry.store import DeviceInfo, NodeInfo, TelemetryWriter, read_telemetry

CHILD = """
import sys, threading, time
for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
while True: time.sleep(0.05)
"""
LOOP = "import os\nos.nice(19)\nwhile True: pass"
SLEEP = "import sys, time\nwhile True: time.sleep(float(sys.argv[1]))"
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


TURN_S = 10.0


def start_sampler(folder: str, every_s: float, top: int, tree: str = "") -> subprocess.Popen[bytes]:
    words = [f"into={folder}/telemetry", f"every_s={every_s}", f"top={top}"]
    environ = {**os.environ, "PYTHONPATH": f"{tree}/src"} if tree else None
    command = [sys.executable, "-m", "shardway.telemetry.sampler", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ)


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def started_children(count: int, threads: int) -> Iterator[None]:
    """So many processes that sleep most of the time, with so many threads each."""
    processes = [subprocess.Popen([sys.executable, "-c", CHILD, str(threads)]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def started_loops() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A stopped process of the lowest priority for each core, which computes without an end once it goes on."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in os.sched_getaffinity(0)]
    for loop in loops:
        loop.send_signal(signal.SIGSTOP)
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure_cost(
    children: int, threads: int, every_s: float, seconds: float, trees: Sequence[str]
) -> tuple[dict[bool, list[list[float]]], float]:
    """CPU milliseconds a sample in each turn, of the sampler of each tree and of a process that only wakes, while cores
    are kept awake and while they are not; bytes a sample in the file of the first."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(started_children(children, threads))
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in trees]
        samplers = []
        for folder, tree in zip(folders, trees, strict=True):
            samplers.append(start_sampler(folder, every_s, os.getpid(), tree))
            time.sleep(every_s / (len(trees) + 1))
        samplers.append(subprocess.Popen([sys.executable, "-c", SLEEP, str(every_s)]))
        time.sleep(11)  # the processes of the machine have then been looked at twice
        loops = stack.enter_context(started_loops())
        costs: dict[bool, list[list[float]]] = {awake: [[] for _ in samplers] for awake in (True, False)}
        for awake in (True, False) * max(1, round(seconds / TURN_S)):
            for loop in loops:
                loop.send_signal(signal.SIGCONT if awake else signal.SIGSTOP)
            before, begun = [cpu_s(sampler.pid) for sampler in samplers], time.monotonic()
            time.sleep(TURN_S)
            samples = (time.monotonic() - begun) / every_s
            for cost, early, sampler in zip(costs[awake], before, samplers, strict=True):
                cost.append(1000 * (cpu_s(sampler.pid) - early) / samples)
        for sampler in samplers:
            sampler.kill()
            sampler.wait()
        telemetry = read_telemetry(Path(folders[0], "telemetry"))[0]
        size = sum(path.stat().st_size for path in Path(folders[0], "telemetry").iterdir())
    return costs, size / len(telemetry.times)


def show_costs(every_s: float, costs: Sequence[Sequence[float]], against: str) -> None:
    """A line for each tree, and one for what only sleeps."""
    *of_trees, of_waking = costs
    for name, each in zip(("this tree", against), of_trees, strict=False):
        show_cost(name, every_s, each)
    show_cost("a process that only sleeps", every_s, of_waking)
    if against:
        shares = sorted(ours / theirs for ours, theirs in zip(*of_trees, strict=True))
        print(f"  this tree takes {statistics.median(shares):.2f} of the other's in the median of the turns")


def show_cost(name: str, every_s: float, costs: Sequence[float]) -> None:
    low, middle, high = statistics.quantiles(costs, n=4) if len(costs) > 1 else [costs[0]] * 3
    print(f"  {name}: {middle:.3f} ms CPU a sample, {middle / 10 / every_s:.3f} % of a core, in the median of turns;")
    print(f"    quartiles {low:.3f} and {high:.3f}, least {min(costs):.3f}, mean {statistics.mean(costs):.3f} ms")


def count_calls(children: int, threads: int, tree: str, seconds: float = 30.0) -> tuple[float, float, float] | None:
    """Calls of the kernel a sample at 1 Hz: all, reads, and files opened; None without strace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with started_children(children, threads), tempfile.TemporaryDirectory() as folder:
        sampler = start_sampler(folder, 1.0, os.getpid(), tree)
        time.sleep(11)
        command = [strace, "-c", "-f", "-o", f"{folder}/calls", "-p", str(sampler.pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        sampler.kill()
        sampler.wait()
        counts: Counter[str] = Counter()
        for line in Path(folder, "calls").read_text().splitlines():
            words = line.split()
            if len(words) >= 5 and words[3].isdigit() and words[-1] != "total":
                counts[words[-1]] = int(words[3])
    if not counts:
        return None
    return counts.total() / seconds, counts["pread64"] / seconds, counts["openat"] / seconds


def measure_size(gpus: int = 4, cores: int = 64, samples: int = 3600) -> float:
    """Bytes of a sample of series that vary as those of a training do."""
    rng = random.Random(0)
    names = [f"core/{core}/use_percent" for core in range(cores)]
    steady = ("memory_bytes", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "throttle_bits", "ecc_errors")
    parts = ("use_percent", "memory_use_percent", "power_w", "energy_j", *GPM, *PCIE, *NVLINK, *steady)
    names += [f"gpu/{gpu}/{name}" for gpu in range(gpus) for name in (*parts, "job_processes")]
    ways = [f"{way}_bytes_per_s" for way in ("rx", "tx")]
    names += [f"net/eth0/{way}" for way in ways] + [f"ib/mlx5_{n}:1/{way}" for n in range(4) for way in ways]
    names += ["cpu/use_percent", "memory/job_bytes", *OF_PROCESSES]
    device = DeviceInfo(0, "NVIDIA H100", "GPU-0", 80 << 30, 700.0, "nvidia")
    info = NodeInfo("n1", 0, "1", 1, 1e9, 1.0, cores, tuple(range(cores)), 1 << 39, None, (device,) * gpus, {})
    with tempfile.TemporaryDirectory() as folder:
        writer = TelemetryWriter(Path(folder), info, names, block_s=3600)
        for second in range(samples):
            unread = OF_PROCESSES if second % PROCESSES_EACH else ()
            writer.append(1e9 + second, [NAN if name in unread else _draw(name, second, rng) for name in names])
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
        "runnable_threads": (40, 6),
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
    parser.add_argument("--threads", type=int, default=1, help="of each child")
    parser.add_argument("--seconds", type=float, default=120, help="of each kind of turn")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--against", default="")
    options = parser.parse_args()
    trees = ["", options.against] if options.against else [""]
    for every_s in (1.0, 0.1):
        costs, size = measure_cost(options.children, options.threads, every_s, options.seconds, trees)
        for awake, how in ((True, "kept awake"), (False, "that halt in between")):
            print(f"every {every_s:g} s, {options.children} children, cores {how}, load {os.getloadavg()[0]:.1f}:")
            show_costs(every_s, costs[awake], options.against)
        print(f"  {size:.0f} bytes a sample (host values of this machine alone)")
    for name, tree in zip(("this tree", options.against), trees, strict=False):
        if (calls := count_calls(options.children, options.threads, tree)) is not None:
            print(f"calls of the kernel a sample at 1 Hz, {name}: ", end="")
            print("{:.1f}, of them {:.1f} reads, {:.1f} files opened".format(*calls))
    size = measure_size()
    print(f"4 GPUs, 64 cores, drawn: {size:.0f} bytes a sample, {size * 86400 / 1e6:.1f} MB in 24 h at 1 Hz")
    if options.pairs:
        median, low, high = measure_slow_down(options.pairs, 2.0, 1.0)
        print(f"a step at 1 Hz: {median:+.3f} % in the median of {options.pairs} pairs ({low:+.3f} to {high:+.3f} %)")


if __name__ == "__main__":
    main()
