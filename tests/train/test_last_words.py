"""What a rank says that is ended by its own second thread, with the exit code that follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardway.rundir.attempts import Attempt, Ending
from shardway.rundir.directory import RunDir

pytestmark = pytest.mark.usefixtures("warm_starts")

CODE = """
import os, signal, sys, time
from pathlib import Path
from shardway.ranks import stop
from shardway.ranks.heartbeat import Activity, Progress
from shardway.ranks.stop import SignalWatch
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.train import record
from shardway.train.record import ExitReport

stop.LEAVE_S = 0.1
record.REPORT_S = 60.0  # a busy disk is no part of these tests
progress = Progress()
progress.enter(Activity.STEP, 7)
attempt = Attempt(Path(sys.argv[2])) if sys.argv[2] else None
with SignalWatch() as signals:
    run, rank, limit_s = RunDir(Path(sys.argv[1])), int(sys.argv[3]), float(sys.argv[5])
    speaker = ExitReport(run, rank, limit_s, "command line", progress, attempt)
    with speaker.watchdog(signals):
        def stuck():
            for number in sys.argv[4].split(","):
                try:
                    os.kill(os.getpid(), signal.Signals[number])
                    time.sleep(0.05)
                except KeyboardInterrupt:
                    pass
            while True:
                time.sleep(3600)
        stuck()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.write_status(state="running", reason="", step=7, total_steps=9)
    run.checkpoint_path(5).mkdir()
    return run


def end(
    run: RunDir, *signals: str, rank: int = 0, attempt: Attempt | None = None, limit_s: float = 0.5
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", CODE, str(run.path), str(attempt.path if attempt else ""), str(rank)]
    return subprocess.run([*words, ",".join(signals), str(limit_s)], capture_output=True, text=True, timeout=120)


def test_a_stop_that_takes_too_long_is_a_failure_that_may_go_on(run: RunDir) -> None:
    run.request_stop()
    ended = end(run, "SIGTERM")
    assert ended.returncode == 4
    first, second, third = ended.stderr.splitlines()
    assert first == (
        "shardway: the stop took longer than run.stop_timeout = 500ms (command line), so rank 0 was ended in a step."
    )
    assert second.startswith("  It was at: stuck (<string>:")
    assert third == (
        "  Nothing that was saved has changed. To do: run the same command again: it goes on from the checkpoint of "
        "step 5. If its steps and saves take that long, raise run.stop_timeout."
    )
    (fault,) = run.all_events()
    assert (fault["event"], fault["kind"], fault["exit_code"]) == ("fault", "LateStop", 4)
    status = run.read_status()
    assert (status["state"], status["step"]) == ("failed", 7)
    assert f"shardway: {status['reason']}" == first
    assert not run.stop_requested(), "nobody is left to obey it"


def test_the_job_is_told_and_its_script_still_sees_that_a_stop_was_asked_for(run: RunDir) -> None:
    attempt = run.attempt(1)
    attempt.make()
    run.request_stop()
    assert end(run, "SIGUSR2", attempt=attempt).returncode == 4
    result = attempt.read_result()
    assert result is not None
    assert (result.state, result.exit_code, result.step, result.by) == (Ending.CRASHED, 4, 7, "rank 0")
    assert run.stop_requested()


def test_another_rank_leaves_the_status_alone(run: RunDir) -> None:
    assert end(run, "SIGTERM", rank=1).returncode == 4
    assert run.read_status()["state"] == "running"
    assert [event["kind"] for event in run.all_events(1)] == ["LateStop"]


def test_a_second_ctrl_c_that_nobody_obeys(run: RunDir) -> None:
    ended = end(run, "SIGINT", "SIGINT", limit_s=600.0)
    assert (ended.returncode, ended.stderr) == (130, "shardway: ended at once by a second signal\n")
    status = run.read_status()
    assert (status["state"], status["reason"]) == ("stopped", "a second signal ended the run at once")
    assert [event["event"] for event in run.all_events()] == ["stopped"]


def test_it_says_nothing_that_the_main_thread_has_said(run: RunDir) -> None:
    run.write_status(state="stopped", reason="a second signal ended the run at once", step=7)
    assert end(run, "SIGINT", "SIGINT", limit_s=600.0).returncode == 130
    assert list(run.all_events()) == []
