"""Saving and loading one state in several ways that take turns: what a noisy disk does meets all of them alike.

    python bench/checkpoint/save.py [--mib 256] [--rounds 9] [--folder FOLDER] [--device cuda]

Ratios are taken within rounds. A round times each way once, in an order that is drawn anew, on one rank and on the disk
of the folder; what is read was dropped from the page cache before. "write" and "read" are the bytes of the state in one
file, from first to last, with fsync; "copy" is the state copied into memory that was touched before.

With Lightning's and Accelerate's savers as well, in an environment of its own:

    bench/peers.sh /tmp/peers && /tmp/peers/bin/python bench/checkpoint/save.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
from saver_bench import Bench, flatten, make_trained
from saver_peers import find_ways
from saver_ways import WAYS

RATIOS = (
    ("save", "write", "at most 1.25"),
    ("load", "read", "at most 1.25"),
    ("load", "read in place", ""),
    ("stall", "copy", "at most 1.5"),
    ("save", "torch.save", "at most 1"),
    ("save", "dcp.save", "at most 1"),
    ("save", "Fabric.save with fsync", "at most 1"),
    ("save", "Fabric.save", ""),
    ("save", "Accelerate.save_state with fsync", "at most 1"),
    ("save", "Accelerate.save_state", ""),
    ("load", "torch.load", ""),
    ("load", "dcp.load", ""),
    ("load", "Fabric.load", ""),
    ("load", "Accelerate.load_state", ""),
    ("stall", "dcp.async_save", "at most 1"),
    ("step beside a save", "step", ""),
)
"""What is divided by what, where both were timed, and what is aimed at."""


def take_rounds(bench: Bench, rounds: int) -> None:
    """Each way once a round; the first round warms up and is thrown away."""
    ways = (*WAYS, *find_ways())
    for number in range(rounds + 1):
        for way in random.sample(ways, len(ways)):
            way(bench)
        if number == 0:
            bench.seconds.clear()
            bench.cpu.clear()


def middle_half(values: list[float]) -> str:
    """The median, and between what the middle half of the values lies."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return f"{statistics.median(ordered):.2f} ({ordered[quarter]:.2f} to {ordered[-1 - quarter]:.2f})"


def ratios(times: dict[str, list[float]], above: str, below: str) -> str:
    """Of two ways, within rounds."""
    return middle_half([one / other for one, other in zip(times[above], times[below], strict=True)])


def print_table(bench: Bench) -> None:
    """Seconds of each way, then the ratios within rounds."""
    size, rounds = sum(t.numel() * t.element_size() for t in flatten(bench.tensors)), len(bench.seconds["save"])
    print(f"{size / 2**20:.0f} MiB, {rounds} rounds, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| way | seconds, median | least | most | CPU seconds, median |\n|---|---:|---:|---:|---:|")
    for way, times in bench.seconds.items():
        cpu = statistics.median(bench.cpu[way])
        print(f"| {way} | {statistics.median(times):.4f} | {min(times):.4f} | {max(times):.4f} | {cpu:.4f} |")
    print("\n| ratio, median of rounds (middle half) | of seconds | of CPU seconds | aim |\n|---|---|---|---|")
    for above, below, aim in RATIOS:
        if below in bench.seconds:
            both = (ratios(times, above, below) for times in (bench.seconds, bench.cpu))
            print(f"| {above} / {below} | {' | '.join(both)} | {aim} |")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to measure; default: that for temporary files"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="what holds the state")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), make_trained(arguments.mib, device), device)
        take_rounds(bench, arguments.rounds)
        print_table(bench)


if __name__ == "__main__":
    main()
