"""Jobs and people who train by hand see each other before either gets in the other's way."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Shardway

from shardway.launch.hosts import LocalHost
from shardway.launch.runs.job_status import check_free_for_job, read_ledger
from shardway.launch.runs.stop import ASKED, ASKED_AT_ONCE
from shardway.rundir.attempts import Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.rundir.lease import Identity, Lease, LeaseFiles, LeaseOptions, WriterLock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs/mine")
    run.create()
    return run


@pytest.fixture
def job() -> Iterator[str]:
    """A job of this machine that only sleeps; its id."""
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        yield f"{process.pid}.{start}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def writer(run: RunDir) -> Iterator[WriterLock]:
    """Somebody who trains the run by hand: this process."""
    lock = run.writer_lock()
    lock.acquire()
    yield lock
    lock.release()


def submitted(run: RunDir, job: str, scheduler: str = "local") -> None:
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission(scheduler, "x", job=job))


def silence_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No controller answers."""
    for name in ("squeue", "sacct", "scancel"):
        (folder / name).write_text("#!/bin/sh\necho 'resolve_ctls_from_dns_srv: Unknown host' >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_nobody_trains_by_hand_what_a_job_is_at(shardway: Shardway, run: RunDir, job: str) -> None:
    submitted(run, job)
    ended = shardway("train", "--dir", str(run.path), "--fresh")
    assert ended.code == 2
    assert f"{run.path} has attempt 1 running as job {job}." in ended.err
    assert f"end it first with `shardway stop {run.path}`" in ended.err
    assert run.attempt(1).path.exists(), "it was not moved aside"


@pytest.mark.parametrize("how", ["it has ended", "it is its own job", "its scheduler is not here"])
def test_training_by_hand_gets_as_far_as_its_data(
    how: str, shardway: Shardway, run: RunDir, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run, "17" if "scheduler" in how else job, "slurm" if "scheduler" in how else "local")
    silence_slurm(run.path.parent, monkeypatch)
    if how == "it has ended":
        run.attempt(1).write_result(Result(Ending.FINISHED))
    if how == "it is its own job":
        monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(run.attempt(1).path))
    ended = shardway("train", "--dir", str(run.path), "data.path=gone.txt")
    assert (ended.code, "gone.txt" in ended.err) == (2, True)
    said = "whether job 17 of" in ended.err and "is not known here; it is trained all the same" in ended.err
    assert said == ("scheduler" in how)


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (ASKED, False),
        (ASKED_AT_ONCE, False),
        ("signal asked for a stop", False),
        ("deadline the wall-time is over", False),
        ("enough", True),
        ("", True),
    ],
)
def test_a_stop_of_an_earlier_start_stops_none_by_hand(
    words: str, stays: bool, shardway: Shardway, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is refused leaves it, since it changes nothing."""
    run.request_stop(words)
    assert shardway("train", "--dir", str(run.path), "data.path=gone.txt").code == 2
    assert run.stop_reason() == words
    seen: list[bool] = []

    def train(*_: object) -> dict[str, object]:
        seen.append(run.stop_requested())
        return {"directory": str(run.path), "state": "stopped", "reason": "", "step": 0}

    monkeypatch.setattr("shardway.cli.train._train_here", train)
    assert shardway("train", "--dir", str(run.path), "data.kind=synthetic").code == 0
    assert (seen, run.stop_requested()) == ([stays], stays)


def test_a_stop_that_was_written_without_room_is_of_its_time_too(
    shardway: Shardway, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full file system the stop file is a second name of a record, which has no words of its own."""
    run.write_status(state="failed", step=0)
    os.link(run.status_path, run.stop_path)
    assert shardway("train", "--dir", str(run.path), "data.path=gone.txt").code == 2
    assert run.stop_is_record()
    seen: list[bool] = []

    def train(*_: object) -> dict[str, object]:
        seen.append(run.stop_requested())
        return {"directory": str(run.path), "state": "stopped", "reason": "", "step": 0}

    monkeypatch.setattr("shardway.cli.train._train_here", train)
    assert shardway("train", "--dir", str(run.path), "data.kind=synthetic").code == 0
    assert seen == [False]


def test_a_stop_holds_for_ranks_that_a_launcher_starts_again(
    shardway: Shardway, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.request_stop(ASKED)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    shardway("train", "--dir", str(run.path), "data.path=gone.txt")
    assert run.stop_requested()


def test_a_stop_of_this_job_is_left_to_its_ranks(
    shardway: Shardway, run: RunDir, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run, job)
    run.request_stop(ASKED)
    monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(run.attempt(1).path))
    shardway("train", "--dir", str(run.path), "data.path=gone.txt")
    assert run.stop_requested()


def test_no_job_is_submitted_of_a_run_that_is_trained_by_hand(
    shardway: Shardway, run: RunDir, writer: WriterLock
) -> None:
    ended = shardway("submit", "--dir", str(run.path), "--walltime", "1h")
    assert ended.code == 2
    assert f"{run.path} is trained by hand now, by process {os.getpid()} on host" in ended.err
    assert f"`shardway stop {run.path} --wait 600`" in ended.err
    assert run.attempts() == []


def hold_elsewhere(run: RunDir, attempt: str) -> None:
    """The lease of somebody on another host who died a moment ago."""
    gone = LeaseOptions(Identity("n7", "boot", "pid:[1]", 4711, "1"), attempt)
    Lease(LeaseFiles(run.path / "lease"), str(run.path), gone).take(print)


def test_a_job_that_died_just_now_is_nobody_who_trains_by_hand(shardway: Shardway, run: RunDir) -> None:
    hold_elsewhere(run, "0001")
    assert run.find_writer() is not None
    check_free_for_job(LocalHost(), read_ledger(LocalHost(), run.path), print)
    assert shardway("stop", str(run.path)).out == f"{run.path} has no job that waits or runs\n"


def test_who_died_on_another_host_is_watched(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_elsewhere(run, "")
    watched: list[object] = []
    monkeypatch.setattr(RunDir, "writer_lock", lambda self: SimpleNamespace(await_free=watched.append))
    check_free_for_job(LocalHost(), read_ledger(LocalHost(), run.path), print)
    assert watched == [print]


def test_who_trains_beside_a_job_of_which_nobody_knows_is_told(
    shardway: Shardway, run: RunDir, writer: WriterLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run, "17", "slurm")
    silence_slurm(run.path.parent, monkeypatch)
    ended = shardway("stop", str(run.path))
    assert "asked to stop after its current step: job 17 (attempt 1)" in ended.out
    assert f"asked to stop after its current step: process {os.getpid()} on host" in ended.out


def test_a_scheduler_that_is_not_reached_has_killed_nobody(
    shardway: Shardway, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run, "17", "slurm")
    silence_slurm(run.path.parent, monkeypatch)
    ended = shardway("stop", str(run.path), "--now", "--yes")
    assert ended.code == 3
    assert "scancel could not end 17: resolve_ctls_from_dns_srv: Unknown host" in ended.err
    assert "killed" not in ended.out
    assert not run.stop_requested()


def test_a_stop_waits_for_who_trains_by_hand(shardway: Shardway, run: RunDir, writer: WriterLock) -> None:
    threading.Timer(0.5, writer.release).start()
    began = time.monotonic()
    ended = shardway("stop", str(run.path), "--wait", "60")
    assert time.monotonic() - began > 0.5
    assert ended.out.startswith(f"asked to stop after its current step: process {os.getpid()} on host")
    assert ended.out.count("\n") == 1
    assert run.stop_reason() == ASKED


def test_who_trains_by_hand_is_not_killed(shardway: Shardway, run: RunDir, writer: WriterLock) -> None:
    ended = shardway("stop", str(run.path), "--now", "--yes")
    asked = json.loads(shardway("stop", str(run.path), "--json").out)
    assert ended.out.startswith(f"no job, so not killed (Ctrl-C twice ends it): process {os.getpid()} on host")
    assert asked["writer"].startswith(f"process {os.getpid()} on host")
