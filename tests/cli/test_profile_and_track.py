"""`shardway profile` and `shardway track`: what they write, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

from command_line import Shardway

from event_files import read_scalars
from runs import TINY, lone_rank, train_tiny


def test_a_profile_is_a_short_run_of_its_own(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("profile", *TINY, "run.name=my", "--steps", "2", "--after", "3", "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found["traces"] == ["runs/my-profile/traces/steps-4-7-rank-0.json.gz"]  # one more at either edge
    assert (tmp_path / found["traces"][0]).is_file()
    assert found["analysis"]["steps"] == 2
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["my-profile"]
    assert list((tmp_path / "runs/my-profile/checkpoints").iterdir()) == []
    [event] = found["events"]
    assert (event["event"], event["step"]) == ("profiled", 7)


def test_fewer_steps_than_asked_have_their_reason(shardway: Shardway) -> None:
    ended = shardway("profile", *TINY, "run.name=my", "train.steps=6", "--steps", "3", "--after", "2")
    assert ended.code == 0
    assert "2 steps, 2 at the edges left out" in ended.out
    assert ended.out.splitlines()[-1] == "2 of 3 steps are analysed: the run ended with step 6 (train.steps)."


def test_a_range_is_refused_in_words(shardway: Shardway) -> None:
    ended = shardway("train", "--dry-run", "train.profile=steps 1-3")
    assert ended.code == 2
    assert 'train.profile (command line): "steps 1-3" begins before step 2' in ended.err


def test_a_run_is_sent_after_the_fact(shardway: Shardway, tmp_path: Path) -> None:
    train_tiny(tmp_path / "run", lone_rank(), "train.steps=4")
    first = shardway("track", "run", "--to", "tensorboard,openmetrics", "--set", "tensorboard.folder=all", "--json")
    assert [(each["tracker"], each["events"]) for each in json.loads(first.out)] == [
        ("tensorboard", 4),
        ("openmetrics", 4),
    ]
    again = shardway("track", "run", "--to", "tensorboard")
    assert (again.code, again.out.split(" ->")[0]) == (0, "tensorboard: nothing is new")
    [path] = (tmp_path / "all/run").iterdir()
    assert [step for step, values in read_scalars(path) if "loss" in values] == [1, 2, 3, 4]
    assert 'shardway_running{run="run"} 0' in (tmp_path / "run/metrics.prom").read_text()


def test_a_missing_library_of_a_tracker_is_installed_here(shardway: Shardway, tmp_path: Path) -> None:
    train_tiny(tmp_path / "run", lone_rank(), "train.steps=4")
    with patch("shardway.watch.trackers.base.find_spec", lambda module: None):
        ended = shardway("track", "run", "--to", "tensorboard,mlflow")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[1] == (
        "  To do: pip install mlflow, or give this command on a machine that has it and sees the run; nothing was sent."
    )
    assert not (tmp_path / "run/tensorboard").exists()


def test_what_is_no_tracker_or_no_setting_is_refused(shardway: Shardway, tmp_path: Path) -> None:
    train_tiny(tmp_path / "run", lone_rank(), "train.steps=4")
    wrong = {
        ("--to", "wand"): '--to: "wand" is no tracker.\n  Allowed: tensorboard, openmetrics, wandb, mlflow, trackio.',
        ("--to", "tensorboard", "--set", "folder=x"): '--set: "folder=x" is no setting of a tracker that --to names.',
        ("--to", "tensorboard", "--set", "tensorboard.place=x"): 'there is no setting "place"',
    }
    for words, said in wrong.items():
        ended = shardway("track", "run", *words)
        assert (ended.code, said in ended.err) == (2, True), ended.err
