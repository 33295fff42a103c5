"""The journeys of docs/design.md: the files that a person reads to follow `train`, `submit` and `plan`.

Invariant: what is listed is what is executed. `--renew-golden` writes the lists anew; `GOALS` are written by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from journey_tracer import read_trace
from page_tables import check_part

TRACER = Path(__file__).parent / "journey_tracer.py"

JOB = ("site.account=a", "site.walltime=1h", "site.ranks_per_node=4", "site.venv=none", "run.device=cuda")
JOURNEYS = {
    "train": ("train", "train.steps=2", "train.global_batch=2", "train.validation_samples=2", "run.telemetry=1h"),
    "submit": ("submit", "run.toml", "--on", "generic-slurm", "--dry-run", *JOB),
    "plan": ("plan", "run.toml", "--gpu", "h100"),
}
GOALS = {"train": 85, "submit": 42, "plan": 23}
"""The most files, a third of what they were when a file had a hundred lines: 256, 127, 70."""


def follow(words: tuple[str, ...], folder: Path) -> list[str]:
    """Modules that a verb executes in an empty project folder, on a machine without accelerators."""
    (folder / "run.toml").write_text("format = 1\n", encoding="utf-8")
    (folder / "pyproject.toml").touch()
    homes = {"HOME": str(folder / "home")}
    homes |= {f"XDG_{name}_HOME": str(folder / name) for name in ("CACHE", "CONFIG", "STATE")}
    environ = {**os.environ, **homes, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (folder / "home").mkdir()
    ended = subprocess.run(
        [sys.executable, str(TRACER), *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    code, modules = read_trace(ended.stdout)
    assert code == 0, ended.stderr
    return modules


def render(modules: list[str], goal: int) -> str:
    """Their number, and a line for each room."""
    missed = "" if len(modules) <= goal else f"; the goal, {goal}, is not reached yet"
    lines = [f"{len(modules)} files{missed}:", "", "```text"]
    for room, paths in groupby(modules, key=lambda path: path.partition("/")[0] if "/" in path else ""):
        names = " ".join(path.removeprefix(f"{room}/").removesuffix(".py") for path in paths)
        lines.append(f"{room}/  {names}" if room else names)
    return "\n".join([*lines, "```", ""])


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_is_what_is_listed(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, warm_starts: None
) -> None:
    check_part(request, "design.md", f"journey {name}", render(follow(JOURNEYS[name], tmp_path), GOALS[name]))
