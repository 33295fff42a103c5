"""[pipeline] of a run file: what `submit` makes of its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Ended, Shardway
from test_submit import make_slurm

from shardway.cli.then import read_before, read_then
from shardway.errors import UserError
from shardway.launch.hosts import LocalHost
from shardway.launch.runs.followers import find_followed
from shardway.launch.runs.job_status import read_ledger
from shardway.rundir.attempts import Ending, Result
from shardway.rundir.directory import RunDir

FILE = """\
[data]
kind = "tokens"
path = "/nowhere/tokens"
[model]
vocab = 320
[site]
name = "./tiny.toml"
venv = "none"
ranks_per_node = 1
[run]
device = "cpu"
[pipeline]
before = ["data prepare {here}/corpus.txt {here}/tokens --tokenizer bytes", "site.walltime=5m -- python check.py {run}"]
then = ["evaluate --limit 3", "-- python plot.py {run}"]
"""
STEPS = ("my-data-prepare", "my-check", "my", "my-evaluate", "my-plot")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_slurm(tmp_path, monkeypatch)
    (folder / "my.toml").write_text(FILE)
    for name in ("check.py", "plot.py"):
        (folder / name).write_text("print(1)\n")
    return folder


def followed(folder: Path, name: str) -> str:
    """The run that this one waits for; "" where it waits for none."""
    found = find_followed(read_ledger(LocalHost(), folder / "runs" / name))
    return found.name if found is not None else ""


def refuse(ended: Ended) -> str:
    assert (ended.code, ended.out) == (2, "")
    return ended.err


def test_one_submission_is_a_row_of_runs(slurm: Path, shardway: Shardway) -> None:
    """Data that a step makes need not be there."""
    told = json.loads(shardway("submit", "my.toml", "--json").out)
    assert [each["job"] for each in told["before"]] == ["1", ""]
    assert [followed(slurm, name) for name in STEPS] == ["", *STEPS[:-1]]
    assert (slurm / "taken").read_text() == "x\n"
    orders = [json.loads((slurm / f"runs/{name}/attempts/0001/order.json").read_text())["command"] for name in STEPS]
    assert orders[0][:4] == ["shardway", "data", "prepare", f"{slurm}/corpus.txt"]
    assert orders[1] == ["python", "check.py", f"{slurm}/runs/my"]
    assert orders[3] == ["shardway", "evaluate", f"{slurm}/runs/my", "--limit", "3"]
    assert orders[4] == ["python", "plot.py", f"{slurm}/runs/my"]
    assert "#SBATCH --time=0-00:05:00" in RunDir(slurm / "runs/my-check").attempt(1).job_script.read_text()


def test_a_step_that_fails_is_the_reason_why_the_rest_waits(slurm: Path, shardway: Shardway) -> None:
    assert shardway("submit", "my.toml").code == 0
    (slurm / "tools/squeue").write_text("#!/bin/bash\n")
    first = RunDir(slurm / "runs/my-data-prepare").attempt(1)
    first.write_result(Result(Ending.CRASHED, "the corpus is not there", job="1", by="job script", exit_code=2))
    shown = shardway("status", "runs/my-check").out
    assert "which has no job now: crashed, the corpus is not there (shardway resume" in shown


def test_what_is_finished_is_not_done_again(slurm: Path, shardway: Shardway) -> None:
    for name in STEPS[:2]:
        run = RunDir(slurm / "runs" / name)
        run.attempt(1).make()
        run.attempt(1).write_result(Result(Ending.FINISHED, "it is done", by="job script"))
    (slurm / "tokens").mkdir()
    ended = shardway("submit", "my.toml", f"data.path={slurm}/tokens", "--json")
    told = json.loads(ended.out)
    assert (told["before"], told["job"], told["waits_for"]) == ([], "1", "")
    assert ended.err.count("is finished, from before") == 2


def test_all_is_checked_before_the_first_step_is_submitted(slurm: Path, shardway: Shardway) -> None:
    for word, says in {
        'pipeline.before=["data prepare x"]': "pipeline.before 'data prepare x': Missing argument",
        'pipeline.before=["fetch x"]': "does not begin with a verb that a job may run",
        'pipeline.before=["data prepare a b", "data prepare a c"]': "as another step does",
        'pipeline.then=["chat"]': "does not begin with a verb that takes a finished run",
        "optim.lr=fast": "optim.lr",
    }.items():
        assert says in refuse(shardway("submit", "my.toml", word))
    assert not (slurm / "runs").exists()


def test_words_before_a_command_are_keys_of_its_job() -> None:
    assert read_then("site.nodes=2 -- python x.py --lr=3").keys == ("site.nodes=2",)
    assert read_before("-- python x.py site.nodes=2").words == ("python", "x.py", "site.nodes=2")
    for read in (read_then, read_before):
        with pytest.raises(UserError, match="stands before `--`"):
            read("evaluate -- python x.py")
