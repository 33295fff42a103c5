"""How many calls lie between `shardway submit` and the job script on the disk: a recipe is read from top to bottom."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner

import shardway
from shardway.cli.main import app

OURS = str(Path(shardway.__file__).parent)
MOST_FRAMES = 8
WRITES = ("open", "replace")
PROFILE = (
    'format = 1\nname = "tiny"\ntitle = "Tiny"\nscheduler = "slurm"\n[[queues]]\nname = "cpu"\nmax_walltime = "2h"\n'
)


def list_frames(frame: FrameType | None) -> list[str]:
    """Functions of the package from `submit` to this frame."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            names.insert(0, frame.f_code.co_name)
            if Path(frame.f_code.co_filename).name == "submit.py" and frame.f_code.co_name == "submit":
                return names
        frame = frame.f_back
    return []


def test_few_calls_lie_between_the_command_and_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools").mkdir()
    for name, text in {"sbatch": "echo 1", "squeue": "", "sacct": "", "stat": "echo lustre"}.items():
        (tmp_path / "tools" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "tools" / name).chmod(stat.S_IRWXU)
    (tmp_path / "tiny.toml").write_text(PROFILE)
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:/usr/bin:/bin")
    monkeypatch.setattr("shardway.launch.submission.host_checks._OF_ONE_NODE", ())  # where tests write
    monkeypatch.chdir(tmp_path)
    seen: dict[str, list[list[str]]] = {"job.sh": [], "lib.sh": []}

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in WRITES:
            path = frame.f_locals.get("path")
            written = isinstance(path, Path) and re.fullmatch(r"(\w+\.sh)|\.(\w+\.sh)\.\w+\.tmp", path.name)
            if written and (name := written[1] or written[2]) in seen:
                seen[name].append(list_frames(frame))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        words = ["submit", "--on", "./tiny.toml", "--dir", "run", "site.venv=none", "--", "/bin/true"]
        ended = CliRunner().invoke(app, words)
    finally:
        sys.setprofile(before)
    assert ended.exit_code == 0, ended.output
    for name, stacks in seen.items():
        assert (tmp_path / "run/attempts/0001" / name).is_file()
        assert len(stacks) == len(WRITES)
        for stack in stacks:
            assert 2 < len(stack) <= MOST_FRAMES, stack
