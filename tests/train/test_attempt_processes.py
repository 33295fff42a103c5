"""`shardway train` as the command of a job: two ranks, a wall-time that is too short, and what the job is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from commands import find_ranks, pacing
from runs import TINY, read_named
from shardway.rundir.attempts import VARIABLE, Attempt, AttemptStart, Ending, Result
from shardway.rundir.directory import RunDir

pytestmark = pytest.mark.usefixtures("warm_starts")

ENDLESS = (*TINY, "train.steps=1000000")
PATIENCE_S = 120.0

Job = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """`job(number, left_s, *words)`: the command of an attempt, its deadline so many seconds ahead; its steps take long
    enough not to keep a machine busy."""
    begun: list[subprocess.Popen[str]] = []

    def go(number: int, left_s: float, *words: str) -> subprocess.Popen[str]:
        attempt = RunDir(tmp_path / "run").attempt(number)
        attempt.make()
        now = time.time()
        attempt.write_started(AttemptStart(str(number), started=now, deadline=now + left_s if left_s else 0.0))
        command = [sys.executable, "-m", "shardway", "train", "--json", "--dir", str(tmp_path / "run"), *words]
        environ = {**os.environ, **pacing(0.05), VARIABLE: str(attempt.path)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environ, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        begun.append(process)
        return process

    yield go
    for process in begun:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


def result_of(folder: Path, number: int) -> Result:
    result = RunDir(folder).attempt(number).read_result()
    assert result is not None
    return result


def test_two_ranks_stop_before_their_wall_time_ends(job: Job, tmp_path: Path) -> None:
    """Where they start slowly, the first wall-time is too short: one step is taken, and the next attempt goes on."""
    steps = [0]
    for number, left in enumerate((8.0, 15.0, 30.0, 60.0), start=1):
        began = time.time()
        process = job(number, left, "--nproc", "2", "parallel.dp_shard=2", *ENDLESS)
        out, said = process.communicate(timeout=PATIENCE_S)
        in_time = time.time() < began + left
        assert process.returncode == 0, said
        result = result_of(tmp_path / "run", number)
        assert (result.state, result.exit_code, result.by) == (Ending.DEADLINE, 0, "rank 0")
        assert json.loads(out)["step"] == result.step
        assert RunDir(tmp_path / "run").checkpoint_steps()[-1] == result.step
        told = read_named(tmp_path / "run", "deadline")
        assert len(told) == number
        assert 0 < told[-1]["margin_s"] < left
        steps.append(result.step)
        if in_time and steps[-1] > steps[-2] + 1:
            break
    else:
        raise AssertionError(f"no attempt ended in time: {steps}")
    assert sorted(set(steps)) == steps


def wait_for_step(run: RunDir, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not any(event["step"] >= step for event in run.all_events() if event["event"] == "step"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_is_killed_is_told_by_its_agent_and_what_fails_alike_signs_alike(job: Job, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    process = job(1, 0.0, "--nproc", "2", "run.max_restarts=0", *ENDLESS)
    wait_for_step(run, 3, process)
    victim = find_ranks(psutil.Process(process.pid).children(recursive=True))[1]
    victim.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 4
    result = result_of(tmp_path / "run", 1)
    assert (result.state, result.exit_code, result.by) == (Ending.CRASHED, 4, "shardway train")
    assert result.failure.startswith("JobError: rank # (process #) was ended by SIGKILL")


def test_a_signal_to_the_agent_leaves_it_to_the_scheduler_what_it_meant(job: Job, tmp_path: Path) -> None:
    """It is no person's wish, which would end a chain: a job that is preempted gets SIGTERM as well."""
    process = job(1, 0.0, "--nproc", "2", *ENDLESS)
    wait_for_step(RunDir(tmp_path / "run"), 3, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    result = result_of(tmp_path / "run", 1)
    assert (result.state, result.failure, result.reason) == (Ending.STOPPED, "signal", "a signal asked for a stop")


def test_a_mistake_in_the_run_file_is_told_by_the_command(job: Job, tmp_path: Path) -> None:
    process = job(1, 0.0, "--nproc", "2", "train.stps=5")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    result = result_of(tmp_path / "run", 1)
    assert (result.state, result.exit_code, result.by) == (Ending.CRASHED, 2, "shardway train")
    assert result.failure.startswith("UserError: # problem")


def test_a_command_without_its_attempt_folder_trains_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, VARIABLE: str(tmp_path / "none")}
    command = [sys.executable, "-m", "shardway", "train", *ENDLESS]
    ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 3
    assert ended.stderr.startswith("shardway: SHARDWAY_ATTEMPT_DIR names ")
    assert Attempt(tmp_path / "none").read_result() is None
