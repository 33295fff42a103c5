"""What a run spends on being watched: its progress page, its guard, its events and status, as shares of a step.

    python bench/vigilance.py [--steps 200] [--agent-seconds 60] [--agent-ranks 2] [KEY=VALUE ...]

The model and batch of `shardway init`, one rank with one thread. Each part is a function of ours that is timed where it
is called, by the clock and by CPU time of that thread; parts hold no other part. Steps count from the tenth on. What
the agent takes is told as the share of one core, over some seconds after their first step (`shardway train
--nproc 2`).

A difference of two runs (`guard.py`) shows what the machine adds, some per cent here; these are the amounts themselves.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from plain_loops import QUIET, ours
from shardway.ranks.heartbeat import VARIABLE, Progress
from shardway.rundir.directory import RunDir
from shardway.train import step
from shardway.train.guard import Guard
from shardway.train.record import Recorder
from shardway.train.step import MutableParts
from turns import Task

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "progress page": ((Progress, "enter"),),
    "guard": ((MutableParts, "remember"), (Guard, "watch"), (Guard, "look_at"), (step, "is_finite")),
    "events and status": ((Recorder, "step"), (Recorder, "status")),
}
WARM_UP = 10


@dataclass
class Spent:
    """Seconds by part, of all steps that count."""

    clock: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def timing(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which notes what it took."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.clock[part] += time.perf_counter() - began
                self.cpu[part] += time.thread_time() - cpu

        return timed

    def clear(self) -> None:
        """Forget the steps before."""
        for seconds in (self.clock, self.cpu):
            seconds.update(dict.fromkeys(PARTS, 0.0))


def measure_parts(steps: int, words: Sequence[str]) -> None:
    """Print what each part takes of a step."""
    spent, seconds = Spent(), []
    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, spent.timing(part, getattr(owner, name)))
    with tempfile.TemporaryDirectory() as pages, tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = pages
        walk = ours(Task(tuple(words), 0, 1, folder))
        for _ in range(WARM_UP):
            next(walk)
        spent.clear()
        for _ in range(steps):
            began = time.perf_counter()
            next(walk)
            seconds.append(time.perf_counter() - began)
        if not list(Path(pages).iterdir()):
            raise SystemExit("the run has written no progress page")
        walk.close()
    print(f"{steps} steps, median {1e3 * statistics.median(seconds):.1f} ms\n")
    print("| part | us a step | CPU us a step | share of the time of all steps |\n| --- | ---: | ---: | ---: |")
    for part in PARTS:
        _print_row(part, spent.clock[part], spent.cpu[part], seconds)
    _print_row("together", sum(spent.clock.values()), sum(spent.cpu.values()), seconds)


def _print_row(part: str, clock: float, cpu: float, seconds: Sequence[float]) -> None:
    steps = len(seconds)
    print(f"| {part} | {1e6 * clock / steps:.0f} | {1e6 * cpu / steps:.0f} | {100 * clock / sum(seconds):.3f} % |")


def measure_agent(seconds: float, ranks: int, words: Sequence[str]) -> None:
    """Print the share of one core that the agent of so many ranks takes."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        command = [
            sys.executable,
            "-m",
            "shardway",
            "train",
            *QUIET,
            *words,
            "--nproc",
            str(ranks),
            "--dir",
            str(folder),
        ]
        agent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _await_step(RunDir(folder), agent)
            began, before = time.perf_counter(), _cpu(agent.pid)
            time.sleep(seconds)
            share = (_cpu(agent.pid) - before) / (time.perf_counter() - began)
        finally:
            agent.terminate()
            agent.wait()
    print(f"\nthe agent of {ranks} ranks: {100 * share:.2f} % of one core over {seconds:.0f} s")


def _await_step(run: RunDir, agent: subprocess.Popen[bytes]) -> None:
    while run.read_status().get("step", 0) < 1:
        if agent.poll() is not None:
            raise SystemExit("the run ended before its first step")
        time.sleep(0.5)


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--agent-seconds", type=float, default=60.0)
    parser.add_argument("--agent-ranks", type=int, default=2)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    measure_parts(arguments.steps, arguments.words)
    measure_agent(arguments.agent_seconds, arguments.agent_ranks, arguments.words)


if __name__ == "__main__":
    main()
