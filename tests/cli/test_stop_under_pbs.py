"""`shardway stop --now` under PBS, with a qdel and a qstat that answer as recorded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import Shardway

from shardway.rundir.attempts import Submission
from shardway.rundir.directory import RunDir
from transcripts import Recorded, find, read_json, write_command


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs/mine")
    run.create()
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission("pbs", "x", job="118.pbshead"))
    return run


def answer(folder: Path, qdel: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """PBS says that the job runs, and this of its end."""
    write_command(folder / "qdel", qdel.done)
    write_command(folder / "qstat", find("pbs/qdel-ending", "qstat").done, out=read_json("pbs/state-R.json"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("case", "nth", "code"),
    [("qdel", 0, 0), ("qdel", 3, 35), ("qdel", 5, 153), ("qdel-ending", 0, 168), ("qdel-ending", 2, 35)],
    ids=["runs", "finished", "unknown", "ending", "ended"],
)
def test_a_job_that_ends_meanwhile_is_no_failure(
    case: str, nth: int, code: int, shardway: Shardway, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = find(f"pbs/{case}", "qdel", nth)
    assert recorded.done.code == code
    answer(tmp_path, recorded, monkeypatch)
    ended = shardway("stop", str(run.path), "--now", "--yes")
    assert ended.code == 0, ended.err
    assert "job 118.pbshead" in ended.out


@pytest.mark.parametrize("nth", [8, 15])
def test_a_qdel_that_is_refused_is_told(
    nth: int, shardway: Shardway, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = find("pbs/qdel", "qdel", nth)
    answer(tmp_path, recorded, monkeypatch)
    ended = shardway("stop", str(run.path), "--now", "--yes")
    assert ended.code == 3
    assert f"qdel could not end 118.pbshead: {recorded.done.err.strip()}" in ended.err
    assert "killed" not in ended.out
