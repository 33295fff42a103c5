"""`shardway report` and `shardway compare`: which run a word means, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Shardway

from shardway.rundir.attempts import AttemptStart, Submission
from shardway.rundir.directory import RunDir


def _train(folder: Path, seconds: float) -> RunDir:
    run = RunDir(folder)
    run.create()
    run.write_status(state="finished", step=50)
    with run.event_writer(0) as events:
        events.write("started", step=0, world=1, device="cpu", total_steps=50, tokens_per_step=64, samples_per_step=8)
        for step in range(1, 51):
            events.write("step", step=step, loss=3.0 / step, seconds=seconds, tokens_per_s=1.0, samples_per_s=1.0)
        events.write("finished", step=50, reason="")
    return run


def _submit(folder: Path, job: str) -> RunDir:
    run = RunDir(folder)
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission("slurm", "token", job, submitted=1.7e9))
    attempt.write_started(AttemptStart(job, "n1", "n1", 1.7e9))
    return run


def test_a_run_is_found_by_its_job(shardway: Shardway, tmp_path: Path) -> None:
    _submit(tmp_path / "runs/mine", "29084.server")
    _submit(tmp_path / "runs/other", "123_4")
    for word, name in (("29084.server", "mine"), ("29084", "mine"), ("123_4", "other"), ("other", "other")):
        ended = shardway("report", word)
        assert (ended.code, ended.out) == (0, f"runs/{name}/report.html\n")
    page = (tmp_path / "runs/mine/report.html").read_text()
    assert "<td>29084.server</td>" in page
    facts = json.loads(shardway("report", "29084", "--json").out)
    assert facts["report"] == "runs/mine/report.html"
    assert (facts["gpus"], facts["jobs"][0]["job"]) == ([], "29084.server")


def test_a_run_that_cannot_be_written_to_is_reported_elsewhere(shardway: Shardway, tmp_path: Path) -> None:
    run = _train(tmp_path / "runs/a", 1.0)
    run.report_path.mkdir()  # stands for a folder of others, which a test as root could write
    ended = shardway("report", "runs/a")
    assert ended.code == 4
    assert "runs/a/report.html cannot be written" in ended.err
    assert "--page FILE" in ended.err
    facts = shardway("report", "runs/a", "--json")
    assert (facts.code, json.loads(facts.out)["report"], json.loads(facts.out)["summary"]["step"]) == (0, None, 50)
    assert "cannot be written" in facts.err
    assert shardway("report", "runs/a", "--page", "mine.html").out == "mine.html\n"
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    assert shardway("report", "runs/a", "--page", "runs").code == 4


def test_the_table_for_a_proposal_is_printed(shardway: Shardway, tmp_path: Path) -> None:
    _train(tmp_path / "runs/a", 1.0)
    ended = shardway("report", "runs/a", "--proposal")
    assert ended.code == 0
    assert "No GPU was sampled, so there is no table of them." in ended.out
    assert not (tmp_path / "runs/a/report.html").exists()
    assert json.loads(shardway("report", "runs/a", "--proposal", "--json").out)["gpu_hours"] is None


def test_two_runs_are_compared(shardway: Shardway, tmp_path: Path) -> None:
    _train(tmp_path / "runs/a", 1.0)
    _train(tmp_path / "runs/b", 0.5)
    ended = shardway("compare", "runs/a", "runs/b", "--page", "both.html")
    assert ended.code == 0
    assert ended.out.startswith("b is 100 % (100 to 100 %) faster a step than a.\n")
    assert (tmp_path / "both.html").read_text().startswith("<!doctype html>")
    facts = json.loads(shardway("compare", "runs/a", "runs/b", "--json").out)
    assert [each["run"] for each in facts["runs"]] == ["runs/a", "runs/b"]
    one = shardway("compare", "runs/a")
    assert (one.code, one.err.splitlines()[0]) == (2, "shardway: one run (runs/a) cannot be compared.")
