"""Loops that take turns, one step each, on ranks of their own: what a noisy machine does meets all of them alike.

Invariant: a loop runs in processes of its own, so that nothing that it changes there reaches another, and while one is
timed all others wait for a message; a loop whose first losses are not those of the others is never timed.

A loop is a function of a module, named "module:function", that takes a `Task` and yields the loss of each step (of this
rank's samples, or of all). Its ranks start each step together; the time of a step is that of rank 0, and a round is one
step of every loop, in an order that is drawn anew. Ratios are taken within rounds. The CPU time of a step, of all its
ranks together, is what other processes of the machine do not add to; it leaves out waiting.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

TOLERANCE = 1e-4
"""How far the first losses of two loops may differ, relative, for their times to be compared."""
START_S = 600.0


@dataclass(frozen=True)
class Task:
    """What a loop is to do: the words of a run file, this rank and all ranks, and a folder for what it writes."""

    words: tuple[str, ...]
    rank: int
    ranks: int
    folder: str


@dataclass(frozen=True)
class Step:
    """What a rank says of a step."""

    seconds: float
    cpu_seconds: float
    loss: float


@dataclass
class Loop:
    """A loop on its ranks as the process that gives turns sees it; `reason` says why it does not take part."""

    name: str
    processes: list[multiprocessing.process.BaseProcess] = field(default_factory=list)
    wires: list[Connection] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    reason: str = ""

    def take_step(self) -> None:
        """One step on all ranks: its times, and the mean of its losses over the ranks."""
        if self.reason:
            return
        for wire in self.wires:
            wire.send("step")
        answers = [_receive(wire) for wire in self.wires]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            self.leave(errors[0])
            return
        self.seconds.append(answers[0].seconds)
        self.cpu_seconds.append(sum(answer.cpu_seconds for answer in answers))
        self.losses.append(statistics.fmean(answer.loss for answer in answers))

    def leave(self, reason: str) -> None:
        """End its ranks; it takes part no more."""
        self.reason = reason
        self.close()

    def close(self) -> None:
        """End its ranks."""
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def started(loops: Mapping[str, str], words: Sequence[str], ranks: int) -> Iterator[list[Loop]]:
    """The loops (name -> "module:function"), each on ranks of its own, ready for their first step."""
    folder, running = tempfile.mkdtemp(), [Loop(name) for name in loops]
    try:
        for loop in running:
            _start(loop, loops[loop.name], tuple(words), ranks, os.path.join(folder, str(len(loop.name)), loop.name))
        yield running
    finally:
        for loop in running:
            loop.close()
        shutil.rmtree(folder, ignore_errors=True)


def compare_losses(loops: Sequence[Loop], steps: int) -> None:
    """Take the first steps, and leave out every loop whose losses are not those of the first one; all stay where that
    one takes no part itself."""
    for _ in range(steps):
        for loop in loops:
            loop.take_step()
    expected = loops[0].losses
    if loops[0].reason:
        return
    for loop in loops[1:]:
        if loop.reason:
            continue
        worst = max(abs(a - b) / abs(b) for a, b in zip(loop.losses, expected, strict=True))
        if not worst <= TOLERANCE:
            loop.leave(f"not comparable: its first {steps} losses differ from those of {loops[0].name} by {worst:.1e}")


def take_turns(loops: Sequence[Loop], rounds: int, warm_up: int) -> None:
    """`rounds` timed rounds after `warm_up` others."""
    dice = random.Random(0)
    for number in range(warm_up + rounds):
        if number == warm_up:
            for loop in loops:
                loop.seconds.clear()
                loop.cpu_seconds.clear()
        for loop in dice.sample(list(loops), len(loops)):
            loop.take_step()


@dataclass(frozen=True)
class Ratio:
    """Speed of one loop over that of another: the median of all rounds, where it lies with 95 % confidence, and the
    quartiles of the rounds."""

    median: float
    low: float
    high: float
    first_quartile: float
    third_quartile: float
    rounds: int


def compare_speed(one: Loop, other: Loop) -> Ratio:
    """How fast `one` is, `other` being 1."""
    return _compare(one.seconds, other.seconds)


def compare_work(one: Loop, other: Loop) -> Ratio:
    """The same by CPU time."""
    return _compare(one.cpu_seconds, other.cpu_seconds)


def _compare(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    low, high = _interval_of_median(len(ratios))
    first, _, third = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], first, third, len(ratios))


def _interval_of_median(count: int) -> tuple[int, int]:
    """Between which two of `count` sorted values the median lies with 95 % confidence (normal approximation of the
    binomial; Conover, Practical Nonparametric Statistics, section 3.2)."""
    half = 0.98 * math.sqrt(count)
    return max(0, math.floor(count / 2 - half) - 1), min(count - 1, math.ceil(count / 2 + half))


def _start(loop: Loop, place: str, words: tuple[str, ...], ranks: int, folder: str) -> None:
    context, port = multiprocessing.get_context("spawn"), _free_port()
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        task = Task(words, rank, ranks, folder)
        process = context.Process(target=_run_rank, args=(place, task, port, theirs), daemon=True)
        process.start()
        theirs.close()
        loop.processes.append(process)
        loop.wires.append(ours)
    refused = [answer for answer in (_receive(wire) for wire in loop.wires) if answer != "ready"]
    if refused:
        loop.leave(str(refused[0]))


def _receive(wire: Connection) -> Any:
    try:
        return wire.recv() if wire.poll(START_S) else f"gave no answer in {START_S:g} s"
    except EOFError:
        return "its process ended"


def _run_rank(place: str, task: Task, port: int, wire: Connection) -> None:
    """What every rank does: make its loop, then a step for each message."""
    os.dup2(2, 1)  # stdout is for the table; some libraries print what they do
    os.environ |= {
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "WORLD_SIZE": str(task.ranks),
        "LOCAL_WORLD_SIZE": str(task.ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own calls, at every step
        module, _, function = place.partition(":")
        steps = getattr(importlib.import_module(module), function)(task)
        wire.send("ready")
        while wire.recv() == "step":
            if dist.is_initialized():
                dist.barrier()
            wire.send(_time(steps))
    except ImportError as error:
        wire.send(f"not installed here ({error})")
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        wire.send(f"failed: {type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})")


def _time(steps: Iterator[float]) -> Step:
    import torch

    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    loss = next(steps)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what one loop leaves for the device to do is not the next one's
    return Step(time.perf_counter() - seconds, time.process_time() - cpu_seconds, float(loss))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
