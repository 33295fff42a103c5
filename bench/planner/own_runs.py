"""What the planner says of runs on one device of this machine, and what they take.

    python bench/planner/own_runs.py [--steps 30] [--json FILE] [--case NAME ...]

Each case is planned by `shardway plan` and trained by a process of its own: the median seconds of a step from the tenth
on, and the peaks that torch's allocator tells (what it holds for tensors, and what it took from the device). Nothing of
the planner is fitted to these runs. A case of another precision than its device can compute is an error of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardway.resolve.request import ResolveRequest
from shardway.rundir.directory import RunDir
from shardway.train.run import train

WARM_UP = 10
COMMON = (
    *("run.device=cuda", "data.kind=synthetic", "data.samples=4096", "train.validate_every=off"),
    *("checkpoint.every=off", "precision.compute=bf16", "precision.tf32=false", "train.compile=off"),
    "optim.warmup=5 steps",
)
SMALL = ("model.dim=768", "model.layers=12", "model.heads=12", "model.vocab=50304", "data.seq_len=1024")
LARGE = ("model.dim=2048", "model.layers=24", "model.heads=16", "model.vocab=32000", "data.seq_len=2048")
BATCH = ("train.global_batch=32", "train.micro_batch=16")
CASES: dict[str, tuple[str, ...]] = {
    "124M, 8 x 1,024": (*SMALL, "train.global_batch=8", "train.micro_batch=8"),
    "124M, 32 x 1,024": (*SMALL, *BATCH),
    "124M, 32 x 1,024, compiled": (*SMALL, "train.global_batch=32", "train.micro_batch=8", "train.compile=blocks"),
    "124M, 32 x 1,024, full recompute": (*SMALL, *BATCH, "recompute.mode=full"),
    "1.3B, 4 x 2,048": (*LARGE, "train.global_batch=4", "train.micro_batch=2"),
    "1.3B, 16 x 2,048 by 4": (*LARGE, "train.global_batch=16", "train.micro_batch=4"),
    "1.3B, 8 x 2,048, full recompute, compiled": (
        *(*LARGE, "train.global_batch=8", "train.micro_batch=4", "recompute.mode=full", "train.compile=blocks"),
    ),
}


def plan(words: Sequence[str]) -> dict[str, Any]:
    """The answer of `shardway plan` for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.touch()
        command = [sys.executable, "-m", "shardway", "plan", str(file), *words, "--gpus", "1", "--json"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.stderr)
    answer: dict[str, Any] = json.loads(told.stdout)["plan"]
    return answer


def measure(words: Sequence[str], steps: int) -> dict[str, float]:
    """Train in this process."""
    with tempfile.TemporaryDirectory() as folder:
        train(ResolveRequest(None, (*words, f"train.steps={steps}"), Path(folder) / "run"))
        events = [event for event in RunDir(Path(folder) / "run").events() if event["event"] == "step"]
    return {
        "step_s": statistics.median(event["seconds"] for event in events[WARM_UP:]),
        "allocated": float(torch.cuda.max_memory_allocated()),
        "reserved": float(torch.cuda.max_memory_reserved()),
    }


def in_a_process(name: str, steps: int) -> dict[str, float]:
    """`measure` where no other case has left anything."""
    command = [sys.executable, __file__, "--steps", str(steps), "--measure", name]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"{name} ended with exit code {told.returncode}")
    found: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return found


def print_rows(steps: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """A line for each case: seconds and GiB, planned and measured, and what the one is of the other."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {steps} steps\n")
    heads = ("case", "ms a step", "planned", "of it", "GiB of tensors", "planned", "of it", "GiB reserved", "planned")
    print(f"| {' | '.join((*heads, 'of it'))} |\n|---|{'---:|' * len(heads)}")
    rows = []
    for name in names:
        words = (*COMMON, *CASES[name])
        planned, found = plan(words), in_a_process(name, steps)
        rows.append({"case": name, "words": words, "planned": planned, "measured": found})
        seconds, peaks = planned["step_seconds"], planned["peak_bytes"]
        cells = [f"{1e3 * found['step_s']:.1f}", f"{1e3 * seconds:.1f}", f"{seconds / found['step_s']:.2f}"]
        for kind in ("allocated", "reserved"):
            cells += [f"{found[kind] / 2**30:.2f}", f"{peaks[kind] / 2**30:.2f}", f"{peaks[kind] / found[kind]:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return rows


def main() -> None:
    """Print the table, and keep the whole answers where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the rows in full")
    parser.add_argument("--case", action="append", choices=CASES, help="these alone; default: all")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure((*COMMON, *CASES[arguments.measure]), arguments.steps)))
        return
    rows = print_rows(arguments.steps, arguments.case or list(CASES))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
