"""A run under ZeRO that died goes on with the same bits; its checkpoint is of Shardway outside, of DeepSpeed inside."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from zero_runs import UNEVEN, needs_deepspeed, stage

from pool import RankPool, ranks
from runs import Died, die_at, pool_ranks, read_column, read_named, train_tiny
from shardway.checkpoint.catalog import verify_checkpoint
from shardway.errors import JobError, UserError
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun
from speed import picked

pytestmark = needs_deepspeed

RUN = ("checkpoint.every=2 steps", "model.dropout=0.2")


def train(directory: Path, *words: str, last: int | None = None) -> None:
    """To the end, or until all ranks die after step `last`."""
    with contextlib.suppress(Died):
        train_tiny(directory, pool_ranks(), *RUN, *words, base=UNEVEN, before_step=die_at(last) if last else None)


@pytest.mark.parametrize("number", picked([3, 1, 2], 3))
@ranks(2, timeout_s=180.0)
def test_a_run_that_died_goes_on_with_the_same_bits(rank: int, tmp_path: Path, number: int) -> None:
    train(tmp_path / "through", *stage(number))
    train(tmp_path / "died", *stage(number), last=3)
    train(tmp_path / "died", *stage(number))
    if rank == 0:
        assert [event["step"] for event in read_named(tmp_path / "died", "started")] == [0, 2]
        for column in ("step", "loss", "grad_norm", "lr"):
            assert read_column(tmp_path / "died", column) == read_column(tmp_path / "through", column), column


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [2, 3])
@ranks(2, timeout_s=180.0)
def test_settings_of_the_optimizer_are_those_of_today(rank: int, tmp_path: Path, number: int) -> None:
    train(tmp_path, *stage(number), last=3)
    seen: list[dict[str, Any]] = []

    def look(run: LiveRun, step: int) -> None:
        seen.append(
            {
                name: value
                for name, value in run._held.optimizers[0].optimizer.param_groups[0].items()
                if name != "params"
            }
        )

    words = ("optim.weight_decay=0.5", "optim.betas=[0.5, 0.6]")
    train_tiny(tmp_path, pool_ranks(), *RUN, *stage(number), *words, base=UNEVEN, before_step=look)
    assert len(seen) == 2
    assert {(each["weight_decay"], tuple(each["betas"])) for each in seen} == {(0.5, (0.5, 0.6))}


def convert(checkpoint: Path, out: Path) -> None:
    """DeepSpeed's own tool, as a user calls it."""
    command = [sys.executable, "zero_to_fp32.py", ".", str(out)]
    subprocess.run(command, cwd=checkpoint, check=True, capture_output=True, timeout=170)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [3, 1, 2])
@ranks(2, timeout_s=240.0)
def test_the_tool_of_deepspeed_reads_a_checkpoint(rank: int, tmp_path: Path, number: int) -> None:
    weights: list[dict[str, torch.Tensor]] = []

    def look(run: LiveRun, step: int) -> None:
        weights[:] = [run._held.models[0].parallel.module.state_dict()]

    train_tiny(tmp_path / "torch", pool_ranks(), *RUN, base=UNEVEN, before_step=look)
    train(tmp_path / "zero", *stage(number))
    if rank:
        return
    directory = RunDir(tmp_path / "zero")
    assert directory.checkpoint_steps() == [2, 4]
    assert directory.partial_checkpoints() == []
    checkpoint = directory.checkpoint_path(4)
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert files == {*verify_checkpoint(directory, 4).files, "manifest.json"}
    convert(checkpoint, tmp_path / "out")
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert found.keys() == weights[0].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@ranks(2, timeout_s=180.0)
def test_a_damaged_file_of_deepspeed_is_passed_over(rank: int, tmp_path: Path) -> None:
    train(tmp_path, *stage(2))
    [file] = (RunDir(tmp_path).checkpoint_path(4) / "zero").glob("*rank_1*optim*")
    torch.distributed.barrier()
    if rank == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()
    train(tmp_path, *stage(2), "train.steps=5")
    (told,) = (event for event in RunDir(tmp_path).events(0) if event["event"] == "checkpoint_quarantined")
    assert told["step"] == 2
    assert told["reason"] == f"the content of zero/{file.name} has changed (its checksum is another)"
    assert RunDir(tmp_path).checkpoint_steps()[-1] == 5


def train_on_two(rank: int, directory: Path) -> None:
    """What one rank cannot go on with."""
    train(directory, *stage(2))


def test_another_number_of_ranks_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_on_two, 2, {"directory": tmp_path}, 180.0)
    rank_pool.run(refuse_to_go_on, 1, {"directory": tmp_path}, 180.0)


def refuse_to_go_on(rank: int, directory: Path) -> None:
    """On one rank what two have saved."""
    with pytest.raises(JobError, match="saved by 2 ranks, and ZeRO's parts of it fit 2 ranks alone; there are 1"):
        train(directory, *stage(2), "train.steps=5")


@pytest.mark.parametrize("words", [("train.engine=torch",), stage(3)])
@ranks(2, timeout_s=180.0)
def test_another_engine_or_stage_is_refused(rank: int, tmp_path: Path, words: tuple[str, ...]) -> None:
    train(tmp_path, *stage(2), last=2)
    with pytest.raises(UserError, match="was started with"):
        train(tmp_path, *words)
