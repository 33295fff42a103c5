"""What `shardway submit` and `shardway plan` show of data that nodes will copy to their disks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import Shardway

SUBMIT = ("submit", "--on", "dgx-slurm", "--walltime", "1h", "--dry-run", "site.account=a")


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    np.save(tmp_path / "t.npy", np.zeros(1937, np.uint16))
    text = f'[data]\nkind = "tokens"\npath = "{tmp_path / "t.npy"}"\n[model]\nvocab = 64\n'
    (tmp_path / "run.toml").write_text(text)
    return "run.toml"


def test_submit_shows_bytes_and_place(shardway: Shardway, run_file: str) -> None:
    ended = shardway(*SUBMIT, run_file, "data.stage=$TMPDIR")
    assert ended.code == 0, ended.err
    assert (
        "data.stage copies 4002B of data to $TMPDIR of each node before the first step (room there: n/a; time: about "
        in ended.err
    )
    assert "data.stage" not in shardway(*SUBMIT, run_file, "data.stage=off").err
    assert "data.stage" not in shardway(*SUBMIT, run_file).err  # /raid is for data that nodes share


def test_submit_for_this_machine_looks_at_its_disk(shardway: Shardway, run_file: str, tmp_path: Path) -> None:
    ended = shardway("submit", "--dry-run", run_file, f"data.stage={tmp_path / 'disk'}")
    assert ended.code == 0, ended.err
    assert "data.stage copies 4002B of data" in ended.err
    assert ", enough; time: about 1 s at " in ended.err


def test_plan_shows_it_among_what_it_leaves_out(shardway: Shardway, run_file: str) -> None:
    ended = shardway("plan", run_file, "data.stage=/raid", "--on", "dgx-slurm", "--json")
    assert ended.code == 0, ended.err
    assert any(
        each.startswith("data.stage copies 4002B of data to /raid of each node")
        for each in json.loads(ended.out)["assumed"]
    )
    staging = json.loads(ended.out)["staging"]
    assert (staging["folder"], staging["bytes"], staging["room_bytes"]) == ("/raid", 4002, None)
    assert staging["seconds"] == 4002 / staging["bytes_per_second"]
    assert "staging" not in json.loads(shardway("plan", run_file, "--on", "dgx-slurm", "--json").out)


def test_nodes_may_save_on_the_disk_of_the_profile(shardway: Shardway, run_file: str) -> None:
    ended = shardway(*SUBMIT, run_file, "checkpoint.local_every=10 steps")
    assert ended.code == 0, ended.err
