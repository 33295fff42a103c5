"""Scripts of one's own, killed at three random moments: started again, each ends with the same bits.

The scripts of killed_scripts/ are as a person writes them. Each runs once undisturbed, and once with kills that are
drawn from a seed: at any time since its start, after some step, within a save, or within a validation. Other moments:

    SHARDWAY_TEST_KILLS=7 python -m pytest tests/train/test_killed_scripts.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from example_scripts import torchrun
from runs import read_steps
from shardway.checkpoint.catalog import PARTS, find_checkpoint
from shardway.checkpoint.reader import TensorReader, find_differences
from shardway.rundir.directory import RunDir
from speed import picked

SCRIPTS = Path(__file__).parent / "killed_scripts"
SEED = int(os.environ.get("SHARDWAY_TEST_KILLS", "0"))
KILLS = 3
PATIENCE_S = 300.0
RANKS = {"f1": 2}
KINDS = sorted(path.stem for path in SCRIPTS.glob("*.py"))
WORDS = ("run.device=cpu", "run.threads=1")


@dataclass
class Attempt:
    """One start of a script, and its run."""

    process: subprocess.Popen[str]
    run: RunDir
    began: float
    ranks: int

    def wait_until(self, holds: Callable[[], bool], pause_s: float = 0.001) -> None:
        """Until it holds, or the script has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds() and self.process.poll() is None:
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(pause_s)

    def kill(self, at: slice = slice(None)) -> bool:
        """End its processes at once, as the machine would, or those `at` some places (the first was started first) and
        wait for the others; whether the script had not ended by itself."""
        processes = []
        with contextlib.suppress(psutil.Error):
            script = psutil.Process(self.process.pid)
            processes = [script, *script.children(recursive=True)]
        was_alive = self.process.poll() is None
        for process in processes[at]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.communicate(timeout=PATIENCE_S)
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not alive
        return was_alive

    def steps_seen(self) -> int:
        """The number of the last step that was recorded, by whichever attempt."""
        return max((event["step"] for event in self.run.all_events(names=("step",))), default=0)

    def in_save(self) -> bool:
        return bool(self.run.partial_checkpoints())


@pytest.fixture
def scripts(warm_starts: None) -> Iterator[Callable[[str, Path], Attempt]]:
    """`scripts("gan", folder)` starts one in a folder."""
    started: list[Attempt] = []

    def start(name: str, folder: Path) -> Attempt:
        folder.mkdir(exist_ok=True)
        script, ranks = SCRIPTS / f"{name}.py", RANKS.get(name, 1)
        words = (str(script), *WORDS) if ranks == 1 else torchrun(ranks, script, *WORDS)
        command, pipe = [sys.executable, *words], subprocess.PIPE
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)
        started.append(Attempt(process, RunDir(folder / "run"), time.monotonic(), ranks))
        return started[-1]

    yield start
    for attempt in started:
        attempt.kill()


def finish(attempt: Attempt) -> float:
    """Wait for its good end; the seconds that it took."""
    out, errors = attempt.process.communicate(timeout=PATIENCE_S)
    assert attempt.process.returncode == 0, out + errors
    return time.monotonic() - attempt.began


@dataclass
class Moments:
    """Draws when a script is killed, from what its undisturbed run was like."""

    chance: random.Random
    seconds: float
    steps: int
    validations: tuple[int, ...]

    def kill(self, attempt: Attempt) -> tuple[bool, str]:
        """Kill it at some moment: whether it was alive then, and the moment, to be told where a test fails."""
        kinds = ("time", "step", "step", "save", *(("validation",) if self.validations else ()))
        kind, reached, delay = self.chance.choice(kinds), attempt.steps_seen(), self.chance.uniform(0, 0.004)
        left = self.steps - reached
        step = reached + self.chance.randint(1, max(1, left * 2 // 3))
        if left <= 0 or kind == "time":
            kind, delay = "time", self.chance.uniform(0, self.seconds if left > 0 else self.seconds / 3)
            attempt.wait_until(lambda: time.monotonic() - attempt.began > delay)
        else:
            if kind == "validation":
                step = self.chance.choice([each for each in self.validations if each > reached] or [step])
            attempt.wait_until(lambda: attempt.steps_seen() >= step)
            if kind == "save":
                attempt.wait_until(attempt.in_save, pause_s=0.0002)
            time.sleep(delay)
        victims = self.chance.choice((slice(None), slice(1), slice(-1, None)))  # all, torchrun, or a rank
        # A rank whose torchrun is killed while it starts waits for it as long as run.start_timeout.
        was_alive = attempt.kill(victims if attempt.ranks > 1 and kind != "time" else slice(None))
        after = f"step {step}" if kind != "time" else "its start"
        return was_alive, f"{kind}: {delay:.4f} s after {after}, at step {attempt.steps_seen()}"


def read_results(folder: Path) -> Any:
    """All that a script leaves: losses and learning rates of its steps, its validations, its own results."""
    names = ("step", "loss", "losses", "grad_norm", "lr")
    steps = [{name: event.get(name) for name in names} for event in read_steps(folder / "run")]
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    best = torch.load(folder / "best.pt") if (folder / "best.pt").exists() else {}
    return steps, results, {name: each.numpy().tobytes() for name, each in best.items()}


@pytest.mark.parametrize("name", picked(KINDS, "gan"))
def test_a_script_that_is_killed_three_times_ends_with_the_same_bits(
    scripts: Callable[[str, Path], Attempt], tmp_path: Path, name: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    seconds = finish(scripts(name, whole))
    expected = read_results(whole)
    validations = RunDir(whole / "run").all_events(names=("validation",))
    moments = Moments(
        random.Random(f"{name} {SEED}"), seconds, len(expected[0]), tuple(each["step"] for each in validations)
    )
    told: list[str] = []
    while len(told) < KILLS:
        was_alive, moment = moments.kill(scripts(name, killed))
        told += [moment] if was_alive else []
    finish(scripts(name, killed))
    found = read_results(killed)
    assert found[0] == expected[0], told
    assert found[1:] == expected[1:], told
    last = [find_checkpoint(folder / "run").folder for folder in (whole, killed)]
    assert last[0].name == last[1].name
    assert find_differences(*map(TensorReader, last), PARTS) == [], told
