"""Ranks under NVIDIA's ft_launcher: killed and stopped for real, started again by it, and nothing of it in the losses.

Runs where nvidia-resiliency-ext is installed (the extra `nvidia`); docs/nodes.md has the details.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from commands import PATIENCE_S, Command, Start, training_commands
from runs import TINY, read_column, read_named
from shardway.launch.hosts.local import LocalHost
from shardway.launch.launchers import MODULE
from shardway.launch.schedulers.local import ThisMachine
from shardway.ranks import ft_launcher_client
from shardway.rundir.attempts import Ending, Result
from shardway.rundir.directory import RunDir
from shardway.telemetry.activity import Activity

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("nvidia_resiliency_ext") is None, reason="nvidia-resiliency-ext is not installed"),
]

OPTIONS = ("--local-addr=127.0.0.1", "--ft-workload-check-interval=1", "--ft-enable-nic-monitor=false")
LAUNCHER = ("-m", MODULE, "--standalone", "--nproc-per-node=2", "--max-restarts=3", *OPTIONS)
LONG = (*TINY, "checkpoint.every=20 steps", "train.steps=160", "model.dropout=0.1")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("name", *words)` in a folder of that name."""
    with training_commands(tmp_path) as go:
        yield go


def ranks_of(launcher: psutil.Process) -> dict[int, psutil.Process]:
    """The ranks of this moment; its monitors are forks of the launcher, and bear no rank."""
    environs = {child: child.environ() for child in launcher.children()}
    return {
        int(environ["RANK"]): child for child, environ in environs.items() if "FT_RANK_MONITOR_IPC_SOCKET" in environ
    }


def kill(rank: psutil.Process) -> None:
    rank.send_signal(signal.SIGKILL)


def stop(rank: psutil.Process) -> None:
    rank.send_signal(signal.SIGSTOP)


def disturb(command: Command, fault: Callable[[psutil.Process], None], rank: int) -> None:
    """Do it to a rank once there is a checkpoint."""
    command.wait_for_step(30)
    command.wait_until(lambda: bool(command.run.checkpoint_steps()))
    fault(ranks_of(psutil.Process(command.process.pid))[rank])


def test_a_monitor_that_does_not_answer_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer

    for name, value in {"FT_RANK_MONITOR_IPC_SOCKET": str(tmp_path / "socket"), "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ft_launcher_client, "ANSWER_S", 0.5)
    fork = multiprocessing.get_context("fork")
    config = FaultToleranceConfig(enable_nic_monitor=False)
    process = RankMonitorServer.run_in_subprocess(config, str(tmp_path / "socket"), mp_ctx=fork)
    try:
        page = ft_launcher_client.open_monitor()
        assert page is not None
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        for number in range(20):
            page.write(Activity.SAVE, number, began + number)
        assert 0.4 < time.monotonic() - began < 5.0
    finally:
        process.kill()
        process.join()


def test_ranks_save_and_leave_when_ft_launcher_is_killed(start: Start) -> None:
    """Its monitors do not, for which nothing here can be done; they go with the job."""
    command = start("run", *LONG, "train.steps=1000000", "checkpoint.every=off", launcher=LAUNCHER)
    command.wait_for_step(5)
    ranks = list(ranks_of(psutil.Process(command.process.pid)).values())
    kill(psutil.Process(command.process.pid))
    command.process.wait()
    assert psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []
    status = command.run.read_status()
    assert (status["state"], status["reason"]) == ("stopped", "a signal asked for a stop")
    assert command.run.checkpoint_steps() == [status["step"]]
    for left in command.seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by our own agent."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_commands(folder) as go:
        go("run", "--nproc", "2", *LONG).finish()
    return folder / "run"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "said"), [(kill, "failed (exitcode: -9)"), (stop, "Did not get subsequent heartbeat")]
)
def test_the_run_comes_out_the_same_to_the_bit(
    fault: Callable[[psutil.Process], None], said: str, rank: int, start: Start, undisturbed: Path
) -> None:
    command = start("run", *LONG, "run.hang_timeout=4s", launcher=LAUNCHER)
    disturb(command, fault, rank)
    command.note_processes()
    code, printed = command.end()
    assert code == 0, printed
    assert said in printed
    started = read_named(command.folder, "started")
    assert [event["launcher"] for event in started] == ["ft_launcher"] * 2
    assert 20 <= started[1]["step"] < 160
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(command.folder, column) == read_column(undisturbed, column)
    assert command.left_alive() == []


# --- as a job of this machine, whose script `shardway submit` writes

Job = Callable[..., RunDir]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """`job(*words)`: the run directory of a job with two ranks, which is ended with the test."""
    jobs = []

    def go(*words: str) -> RunDir:
        asked = ("--on", "laptop", "site.launcher=ft_launcher", "site.ranks_per_node=2", "site.walltime=10m")
        command = [sys.executable, "-m", "shardway", "submit", "--json", "--dir", str(tmp_path / "run"), *asked, *words]
        environ = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        jobs.append(json.loads(done.stdout)["job"])
        return RunDir(tmp_path / "run")

    yield go
    LocalHost().run_many(ThisMachine().cancel(jobs))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def kill_a_rank(run: RunDir) -> None:
    """The rank that records itself as rank 1, once there is a checkpoint."""
    wait_until(lambda: bool(run.checkpoint_steps()))
    started = next(event for event in run.events(0) if event["event"] == "started")
    kill(ranks_of(psutil.Process(psutil.Process(started["pid"]).ppid()))[1])


def end_of(run: RunDir) -> Result:
    """How the attempt ended, once its script has."""
    log = run.attempt(1).job_log
    wait_until(lambda: "shardway: attempt 0001: " in log.read_text())
    result = run.attempt(1).read_result()
    assert result is not None
    return result


def test_a_job_whose_rank_is_killed_is_finished_in_the_same_attempt(job: Job, undisturbed: Path) -> None:
    run = job(*LONG)
    kill_a_rank(run)
    result = end_of(run)
    log = run.attempt(1).job_log.read_text()
    assert (result.state, result.exit_code, result.by) == (Ending.FINISHED, 0, "rank 0"), log
    assert len(read_named(run.path, "started")) == 2
    assert read_column(run.path) == read_column(undisturbed)


def test_a_job_that_may_not_start_again_says_how_it_failed(job: Job) -> None:
    run = job(*LONG, "run.max_restarts=0")
    kill_a_rank(run)
    result = end_of(run)
    assert (result.state, result.by) == (Ending.CRASHED, "rank 0"), run.attempt(1).job_log.read_text()
    assert "lost contact" in result.reason
    assert len(read_named(run.path, "started")) == 1


def test_a_job_stops_when_it_is_asked_to(job: Job) -> None:
    """A good end is none that starts again."""
    run = job(*LONG, "train.steps=1000000", "checkpoint.every=off")
    wait_until(lambda: any(event["event"] == "step" for event in run.events(0)))
    run.request_stop()
    result = end_of(run)
    assert (result.state, result.by) == (Ending.STOPPED, "rank 0"), run.attempt(1).job_log.read_text()
    assert run.checkpoint_steps() == [result.step]
