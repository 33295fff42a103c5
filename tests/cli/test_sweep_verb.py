"""`shardway sweep`: what is submitted, and what status, compare, stop and resume do with the folder of many runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import Ended, Shardway
from test_submit import make_slurm

from golden_files import Golden
from runs import lone_rank, train_tiny
from shardway.rundir.attempts import Ending, Result
from shardway.rundir.directory import RunDir

SQUEUE = """#!/bin/bash
[ ! -e {0}/taken ] || while read -r task; do echo "$task|$task|PENDING|N/A|N/A||Priority|x"; done < {0}/queue
"""
SWEEP = ("sweep", "--on", "./tiny.toml", "site.venv=none", "run.device=cpu", "site.ranks_per_node=1", "run.name=my")
SIX = ("optim.lr=1e-3,3e-3", "train.seed=0..2", "--max-parallel", "2")
PAGE = Path(__file__).parents[2] / "docs/sweep.md"
MARK = "<!-- run by tests/cli/test_sweep_verb.py -->"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that takes every job, and in whose queue are the tasks that the file `queue` names."""
    folder = make_slurm(tmp_path, monkeypatch)
    (folder / "tools/squeue").write_text(SQUEUE.format(folder))
    (folder / "tools/scancel").write_text(f'#!/bin/bash\necho "$@" >> {folder}/cancelled\n')
    (folder / "tools/scancel").chmod(0o755)
    (folder / "queue").write_text("".join(f"1_{index}\n" for index in range(6)))
    return folder


def refuse(ended: Ended) -> str:
    """What a command says that has to be refused."""
    assert (ended.code, ended.out) == (2, "")
    return ended.err


def end(folder: Path, *states: str) -> None:
    """Let the first attempts of members have ended so, and leave the queue."""
    (folder / "queue").write_text("")
    for index, state in enumerate(states):
        attempt = RunDir(folder / f"runs/my/{index:03d}").attempt(1)
        attempt.write_result(Result(Ending(state), f"it is {state}", job=f"1_{index}", by="rank 0"))


def test_many_runs_are_one_array(slurm: Path, shardway: Shardway) -> None:
    told = json.loads(shardway(*SWEEP, *SIX, "--json").out)
    assert [each["job"] for each in told["members"]] == [f"1_{index}" for index in range(6)]
    assert told["members"][4] == {
        "name": "004",
        "values": {"optim.lr": "3e-3", "train.seed": "1"},
        "run": str(slurm / "runs/my/004"),
        "job": "1_4",
    }
    assert (slurm / "taken").read_text() == "x\n"
    record = json.loads((slurm / "runs/my/sweep.json").read_text())
    assert (record["format"], record["search"], record["at_once"]) == (1, "grid", 2)
    assert record["axes"] == {"optim.lr": "1e-3,3e-3", "train.seed": "0..2"}
    member = (slurm / "runs/my/004/attempts/0001/run.toml").read_text()
    assert "lr = 0.003" in member
    assert "seed = 1" in member


def test_a_dry_run_prints_the_members_and_the_script_and_makes_nothing(
    slurm: Path, shardway: Shardway, golden: Golden
) -> None:
    ended = shardway(*SWEEP, *SIX, "--dry-run")
    assert ended.code == 0
    assert "#SBATCH --array=0-5%2" in ended.out
    golden(ended.err, "sweep/dry-run.txt")
    assert not (slurm / "runs").exists()


def test_the_same_sweep_again_submits_what_is_missing_and_nothing_twice(slurm: Path, shardway: Shardway) -> None:
    assert shardway(*SWEEP, *SIX).code == 0
    assert "all 6 runs of this sweep were submitted before (6 queued)" in refuse(shardway(*SWEEP, *SIX))
    other = refuse(shardway(*SWEEP, "optim.lr=1e-3,4e-3"))
    assert "holds another sweep: its runs have other values (optim.lr=1e-3,3e-3 train.seed=0..2)" in other
    changed = refuse(shardway(*SWEEP, "train.steps=5", *SIX))
    assert "holds another sweep: it has" in changed
    assert (slurm / "taken").read_text() == "x\n"


def test_random_trials_may_become_more(slurm: Path, shardway: Shardway) -> None:
    words = ("optim.lr=log:1e-5..1e-2", "--seed", "3", "--trials")
    assert shardway(*SWEEP, *words, "2").code == 0
    told = json.loads(shardway(*SWEEP, *words, "5", "--json").out)
    assert [each["job"] for each in told["members"]] == ["", "", "2_0", "2_1", "2_2"]


def test_a_refused_sweep_leaves_nothing_behind(slurm: Path, shardway: Shardway) -> None:
    (slurm / "refuse").write_text("sbatch: error: Invalid account or account/partition combination specified\n")
    assert "Nothing was submitted" in refuse(shardway(*SWEEP, *SIX))
    assert not (slurm / "runs/my").exists()
    wrong = refuse(shardway(*SWEEP, "optim.lr=1e-3,fast", "--max-parallel", "2"))
    assert "optim.lr" in wrong
    assert not (slurm / "runs/my").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train.steps=5",), "no key varies, so this is one run"),
        (("optim.lr=1,2", "--search", "list"), "no file is named"),
        (("optim.lr=1,2", "--search", "random"), "--search random needs --trials"),
        (("optim.lr=1,2", "--rows", "x.csv"), "the file has the values of each run"),
        (("optim.lr=1,2", "--search", "bayes"), "Allowed: grid, list, random, optuna"),
        (("optim.lr=1,2", "--metric", "loss"), "--metric goes with --search optuna"),
        (("optim.lr=1,2", "--max-attempts", "3"), "goes with --until-done"),
        (("optim.lr=1,2", 'pipeline.then=["report"]'), "a sweep runs the training alone"),
        (("optim.lr=1,2", "--", "python", "train.py"), "a sweep is of a run file"),
    ],
)
def test_what_is_no_sweep_is_refused(slurm: Path, shardway: Shardway, words: tuple[str, ...], says: str) -> None:
    assert says in refuse(shardway(*SWEEP, *words))
    assert not (slurm / "runs").exists()


def test_a_run_is_no_folder_for_many(slurm: Path, shardway: Shardway) -> None:
    RunDir(slurm / "runs/my").attempt(1).make()
    assert "is a run, and no folder for many" in refuse(shardway(*SWEEP, *SIX))


def test_status_has_the_values_and_marks_the_best(slurm: Path, shardway: Shardway) -> None:
    assert shardway(*SWEEP, *SIX).code == 0
    for index, seed in ((0, 1), (1, 2)):
        words = ("train.validate_every=5 steps", f"train.seed={seed}")
        train_tiny(slurm / f"runs/my/{index:03d}", lone_rank(), *words)
    told = json.loads(shardway("status", "my", "--json").out)
    values = {each["name"]: each["value"] for each in told["members"]}
    assert told["by_validation"] is True
    assert told["best"] == min(("000", "001"), key=lambda name: values[name])
    assert values["002"] is None
    shown = shardway("status", "runs/my").out
    (line,) = [line for line in shown.splitlines() if line.endswith("  best")]
    assert line.split()[:3] == [told["best"], "1e-3", str(int(told["best"]))]
    assert f"best  {told['best']} (lr 1e-3, seed " in shown
    assert shardway("compare", "my").code == 0
    assert "it chooses the best run of a sweep" in refuse(shardway("status", "--metric", "loss"))
    assert 'allowed: "max banana"' in refuse(shardway("status", "my", "--metric", "banana"))


def test_stop_takes_all_that_wait_out_of_the_queue(slurm: Path, shardway: Shardway) -> None:
    assert shardway(*SWEEP, *SIX).code == 0
    told = json.loads(shardway("stop", "runs/my", "--json").out)
    assert told["cancelled"] == [f"1_{index}" for index in range(6)]
    assert (slurm / "cancelled").read_text() == "1_0 1_1 1_2 1_3 1_4 1_5\n"


def test_resume_goes_on_with_what_is_not_finished(slurm: Path, shardway: Shardway) -> None:
    assert shardway(*SWEEP, *SIX).code == 0
    end(slurm, "finished", "node_failure", "finished", "crashed", "finished", "stopped")
    assert "to do: shardway resume" in shardway("status", "runs/my").out
    told = json.loads(shardway("resume", "runs/my", "train.steps=9", "--json").out)
    assert [each["job"] for each in told["members"]] == ["", "2_0", "", "2_1", "", "2_2"]
    again = RunDir(slurm / "runs/my/003").attempt(2)
    assert 'steps = "9 steps"' in again.run_file.read_text()
    (slurm / "queue").write_text("2_0\n2_1\n2_2\n")
    assert "none of its 6 runs has to go on (3 finished, 3 queued)" in refuse(shardway("resume", "runs/my"))


def test_a_damaged_record_is_reported_and_its_runs_are_as_they_were(slurm: Path, shardway: Shardway) -> None:
    assert shardway(*SWEEP, *SIX).code == 0
    (slurm / "runs/my/sweep.json").write_text('{"format": 1')
    ended = shardway("status", "runs/my")
    assert (ended.code, "sweep.json is damaged" in ended.err) == (4, True)
    assert shardway("status", "runs/my/003").code == 0


def test_the_commands_of_the_page(slurm: Path, shardway: Shardway) -> None:
    keys = '[site]\nname = "./tiny.toml"\nvenv = "none"\nranks_per_node = 1\n[run]\ndevice = "cpu"\n'
    (slurm / "my.toml").write_text(keys)
    (block,) = re.findall(rf"{re.escape(MARK)}\n```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    said = []
    for line in block.splitlines():
        dollar, program, *words = shlex.split(line)
        assert (dollar, program) == ("$", "shardway")
        ended = shardway(*words)
        assert ended.code == 0, (line, ended.err)
        said.append(ended.out)
    assert "#SBATCH --array=0-5%2" in said[0]
    assert said[1].startswith("jobs           1_0 to 1_5, at most 2 at once\n")
    assert "6 queued" in said[2]
    assert said[4].startswith("taken out of the queue: 000 (job 1_0), 001")
