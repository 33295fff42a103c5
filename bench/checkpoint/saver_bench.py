"""What the ways of saving in `save.py` share: one state, one folder on one disk, and how their times are taken."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from shardway.checkpoint.manager import Staging
from shardway.checkpoint.state import Tensors, Trained
from shardway.rundir.directory import RunDir

WIDTH = 1024
"""A layer is 4 MiB, and 12 with its two moments."""


@dataclass
class Bench:
    """One state on one disk; `seconds` holds what each way took, round by round, `cpu` the CPU time of this thread.

    Other processes of the machine add to the first and hardly to the second, which leaves waiting for the disk out.
    """

    folder: Path
    trained: Trained
    device: torch.device
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
        self.settle()
        started, began = time.perf_counter(), time.thread_time()
        yield
        self.settle()
        self.note(way, time.perf_counter() - started, time.thread_time() - began)

    def settle(self) -> None:
        """Wait for what the device has yet to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, way: str, seconds: float, cpu: float) -> None:
        """What a way took."""
        self.seconds.setdefault(way, []).append(seconds)
        self.cpu.setdefault(way, []).append(cpu)

    def fresh(self, name: str) -> Path:
        """A folder that is not there."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def make_trained(mib: int, device: torch.device) -> Trained:
    """Layers with AdamW's state, about so many MiB together."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(max(1, round(mib / 12)))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(torch.ones(1, WIDTH, device=device)).sum().backward()
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
