"""`shardway submit -- COMMAND`: programs of a person, unedited, as they were typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.rundir.directory import RunDir

TRAIN = """import json, os, sys, time
from model import name
STATE = "model.pt"
here = os.path.dirname(os.path.abspath(__file__))
epoch = json.load(open(STATE))["epoch"] if os.path.exists(STATE) else 0
print("interpreter", sys.executable, "of", name, "goes on from", epoch, flush=True)
open(os.path.join(here, "beside.txt"), "a").write(f"{epoch}\\n")
while epoch < 4:
    epoch += 1
    json.dump({"epoch": epoch, "pid": os.getpid()}, open(STATE + ".new", "w"))
    os.replace(STATE + ".new", STATE)
    while epoch == 2 and not os.path.exists("beside.txt.go") and open("beside.txt").read() == "0\\n":
        time.sleep(0.05)
"""
"""It keeps its state beside itself as scripts of others do, and waits in the second epoch of its first start."""


def wait_until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of code, from where commands are typed; the home folder is another one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "model.py").write_text('name = "it"\n')
    monkeypatch.chdir(folder)
    return folder


def test_a_script_of_others_goes_on_in_its_next_attempt(project: Path, shardway: Shardway, tmp_path: Path) -> None:
    """With another interpreter than the environment's, named by its path; killed in its first attempt."""
    monkey_python = tmp_path / "other/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    os.chdir(project)  # the fixture of the command line has left it
    run = RunDir(tmp_path / "run")
    words = ("submit", "--dir", str(run.path), "site.ranks_per_node=1", "--walltime", "10min")
    ended = shardway(*words, "--", str(monkey_python), "train.py")
    assert ended.code == 0, ended.err
    assert f"works in       {run.work}, for all attempts" in ended.out
    state = run.work / "model.pt"
    wait_until(lambda: state.exists() and json.loads(state.read_text())["epoch"] == 2)
    os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: run.attempt(1).read_result() is not None)
    (project / "model.py").write_text('name = "newer code"\n')
    wait_until(lambda: "is still" not in (again := shardway("resume", str(run.path))).err and again.code == 0)
    wait_until(lambda: run.attempt(2).read_result() is not None)
    result, said = run.attempt(2).read_result(), run.attempt(2).job_log.read_text()
    assert result is not None
    assert (result.state, json.loads(state.read_text())["epoch"]) == ("finished", 4), said
    assert f"interpreter {monkey_python} of newer code goes on from 2" in said
    assert (run.work / "beside.txt").read_text() == "0\n2\n"
    assert sorted(path.name for path in project.iterdir()) == ["model.py", "train.py"]
