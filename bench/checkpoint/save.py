"""Saving and loading one state in several ways that take turns: what a noisy disk does meets all of them alike.

    python bench/checkpoint/save.py [--mib 256] [--rounds 9] [--folder FOLDER]

Ratios are taken within rounds. A round times each way once, in an order that is drawn anew, on one rank and on the disk
of the folder; what is read was dropped from the page cache before. "write" and "read" are the bytes of the state in one
file, from first to last, with fsync; "copy" is the state copied into memory that was touched before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardway.checkpoint.flight import Flight
from shardway.checkpoint.load import load_latest
from shardway.checkpoint.place import shared_place
from shardway.checkpoint.save import collect_content, save_checkpoint, write_checkpoint
from shardway.checkpoint.staging import Staging
from shardway.checkpoint.state import Tensors, Trained
from shardway.ranks.launcher import Placement
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir

ALONE = Ranks(Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "none"), torch.device("cpu"), grouped=False)
BLOCK = 2**22
WIDTH = 1024
"""A layer is 4 MiB, and 12 with its two moments."""

RATIOS = (
    ("save", "write", "at most 1.25"),
    ("load", "read", "at most 1.25"),
    ("stall", "copy", "at most 1.5"),
    ("save", "torch.save", "at most 1"),
    ("save", "dcp.save", "at most 1"),
    ("load", "torch.load", ""),
    ("load", "dcp.load", ""),
    ("stall", "dcp.async_save", "at most 1"),
    ("step beside a save", "step", ""),
)
"""What is divided by what, and what is aimed at."""


@dataclass
class Bench:
    """One state on one disk; `seconds` holds what each way took, round by round, `cpu` the CPU time of this thread.

    Other processes of the machine add to the first and hardly to the second, which leaves waiting for the disk out.
    """

    folder: Path
    trained: Trained
    staging: Staging = field(default_factory=Staging)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @property
    def directory(self) -> RunDir:
        """Where checkpoints of ours are."""
        return RunDir(self.folder / "run")

    @property
    def tensors(self) -> Tensors:
        """The state, nested."""
        return self.trained.collect()

    @contextlib.contextmanager
    def timed(self, way: str) -> Iterator[None]:
        """Note what a way took."""
        started, began = time.perf_counter(), time.thread_time()
        yield
        self.note(way, time.perf_counter() - started, time.thread_time() - began)

    def note(self, way: str, seconds: float, cpu: float) -> None:
        """What a way took."""
        self.seconds.setdefault(way, []).append(seconds)
        self.cpu.setdefault(way, []).append(cpu)

    def fresh(self, name: str) -> Path:
        """A folder that is not there."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def make_trained(mib: int) -> Trained:
    """Layers with AdamW's state, about so many MiB together."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(mib / 12)))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    return Trained(model, optimizer)


def flatten(tensors: Tensors) -> Iterator[torch.Tensor]:
    """Every tensor of a nested state."""
    for value in tensors.values():
        if isinstance(value, dict):
            yield from flatten(value)
        elif isinstance(value, torch.Tensor):
            yield value


def evict(path: Path) -> None:
    """Drop a file, or all files of a folder, from the page cache."""
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.is_file():
            descriptor = os.open(each, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@dataclass
class Paced:
    """Steps of one round, of which the median counts."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def take(self, step: Callable[[], None]) -> None:
        """Time one step."""
        started, began = time.perf_counter(), time.thread_time()
        step()
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(time.thread_time() - began)

    def note(self, bench: Bench, way: str) -> None:
        """Note the median."""
        bench.note(way, statistics.median(self.seconds), statistics.median(self.cpu))


# --- the ways


def plain(bench: Bench) -> None:
    """The state's bytes in one file."""
    path, tensors = bench.folder / "plain", flatten(bench.tensors)
    parts = [tensor.detach().numpy().data.cast("B") for tensor in tensors if tensor.ndim]
    path.unlink(missing_ok=True)
    with bench.timed("write"), open(path, "wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())
    evict(path)
    block = bytearray(BLOCK)
    with bench.timed("read"), open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    path.unlink()


def ours(bench: Bench) -> None:
    """Save, wait until it is complete; compare and load."""
    bench.fresh("run")
    bench.directory.create()
    with bench.timed("save"):
        save_checkpoint(bench.directory, ALONE, bench.trained, 1, {"step": 1})
    evict(bench.directory.checkpoints)
    with bench.timed("load"):
        load_latest(bench.directory, ALONE, bench.trained)
    bench.fresh("run")


def background(bench: Bench) -> None:
    """What a save in the background holds the run up for; steps beside it; a copy, and steps without it."""
    bench.fresh("run")
    bench.directory.create()
    buffers = [torch.zeros_like(tensor) for tensor in flatten(bench.tensors)]
    with bench.timed("copy"):
        for buffer, tensor in zip(buffers, flatten(bench.tensors), strict=True):
            buffer.copy_(tensor)
    step, alone = make_step(), Paced()
    for _ in range(10):
        alone.take(step)
    alone.note(bench, "step")
    with bench.timed("stall"):
        content = collect_content(ALONE, bench.trained, 1, {"step": 1})
        copied = replace(content, tensors=bench.staging.stage(content.tensors))
        flight = Flight(1, ALONE, lambda: write_checkpoint(shared_place(bench.directory, ALONE), ALONE, copied))
    beside = Paced()
    while not flight.has_landed:
        beside.take(step)
    beside.note(bench, "step beside a save")
    if flight.landing is None or flight.landing.error is not None:
        raise SystemExit(f"the save failed: {flight.landing}")
    bench.fresh("run")


def make_step() -> Callable[[], None]:
    """A small training step."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    optimizer, inputs = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(256, 256)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs(bench: Bench) -> None:
    """torch.save with fsync, torch.load."""
    path, tensors = bench.folder / "torch", bench.tensors
    with bench.timed("torch.save"), open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    evict(path)
    with bench.timed("torch.load"):
        torch.load(path)
    path.unlink()


def dcps(bench: Bench) -> None:
    """dcp.save and dcp.load, one file a rank."""
    path, tensors = bench.fresh("dcp"), bench.tensors
    with bench.timed("dcp.save"):
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    evict(path)
    with bench.timed("dcp.load"):
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    bench.fresh("dcp")


def dcps_async(bench: Bench) -> None:
    """What dcp.async_save holds a loop up for."""
    path, tensors = bench.fresh("dcp"), bench.tensors
    with bench.timed("dcp.async_save"):
        future = dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    future.result()  # type: ignore[union-attr]
    bench.fresh("dcp")


WAYS = (plain, ours, background, torchs, dcps, dcps_async)


# --- what came out


def take_rounds(bench: Bench, rounds: int) -> None:
    """Each way once a round; the first round warms up and is thrown away."""
    for number in range(rounds + 1):
        for way in random.sample(WAYS, len(WAYS)):
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
        print(
            f"| {above} / {below} | {ratios(bench.seconds, above, below)} | {ratios(bench.cpu, above, below)} | {aim} |"
        )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to measure; default: that for temporary files"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), make_trained(arguments.mib))
        take_rounds(bench, arguments.rounds)
        print_table(bench)


if __name__ == "__main__":
    main()
