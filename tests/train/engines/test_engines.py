"""The table of engines, and how DeepSpeed starts: alone, with settings that it does not take, not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from zero_runs import UNEVEN, needs_deepspeed, stage

from pool import ranks
from runs import pool_ranks, read_column, train_tiny
from shardway.errors import UserError
from shardway.runfile.schema import TrainSection
from shardway.train.engines import ENGINES

pytestmark = pytest.mark.usefixtures("warm_starts")


def test_every_name_of_the_run_file_is_an_engine() -> None:
    assert set(get_args(TrainSection.model_fields["engine"].annotation)) == set(ENGINES)


def test_a_package_that_is_missing_is_named() -> None:
    ENGINES["torch"].check_installed()
    with pytest.raises(UserError, match=r"needs the package no_such_engine, which is not installed"):
        replace(ENGINES["deepspeed"], package="no_such_engine").check_installed()


def test_the_table_loads_no_engine() -> None:
    code = "import sys, shardway.train.engines; print('deepspeed' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == "False"


@needs_deepspeed
@ranks(2, timeout_s=180.0)
def test_settings_that_deepspeed_does_not_take(rank: int, tmp_path: Path) -> None:
    before = dict(os.environ)
    with pytest.raises(UserError, match=r"DeepSpeed \d+\S* does not start: .*no_such_setting"):
        train_tiny(
            tmp_path,
            pool_ranks(),
            *stage(2),
            "deepspeed.settings={zero_optimization={no_such_setting=1}}",
            base=UNEVEN,
        )
    assert dict(os.environ) == before


@needs_deepspeed
@ranks(2, timeout_s=180.0)
def test_settings_reach_deepspeed(rank: int, tmp_path: Path) -> None:
    words = ("train.steps=4", "deepspeed.settings={zero_optimization={sub_group_size=4321}}")
    train_tiny(tmp_path, pool_ranks(), *stage(3), *words, base=UNEVEN)
    written = json.loads((tmp_path / "ds_config.json").read_text())
    assert written["zero_optimization"]["sub_group_size"] == 4321


@needs_deepspeed
def test_a_process_alone_trains_quietly(tmp_path: Path) -> None:
    words = (*UNEVEN, *stage(1), "train.steps=4")
    command = [sys.executable, "-m", "shardway", "train", "--dir", str(tmp_path / "run"), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=170)
    assert ended.returncode == 0, ended.stderr
    assert len(read_column(tmp_path / "run")) == 4
    assert "DeepSpeed" not in ended.stdout + ended.stderr
    assert "Warning" not in ended.stderr
