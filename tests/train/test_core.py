"""What must never break, in seconds: one curve whatever the layout, exact resume, each sample once, no damage loaded.

The other files of this folder and of `tests/checkpoint` go into each of these at length; they are slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pool import ranks
from runs import layout, lone_rank, pool_ranks, read_column, read_steps, train_alone, train_tiny, worst_difference
from shardway.errors import JobError
from shardway.rundir.directory import RunDir

SHORT = ("train.steps=10", "data.samples=40", "train.global_batch=6")


@pytest.mark.parametrize("shape", [pytest.param((2, 1), marks=pytest.mark.slow), (1, 2)], ids=["replicas", "shards"])
@ranks(2)
def test_two_ranks_give_the_curve_of_one(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    train_alone(rank, tmp_path / "alone", *SHORT)
    train_tiny(tmp_path / "together", pool_ranks(), *SHORT, *layout(*shape), "train.micro_batch=2")
    if rank == 0:
        alone, together = read_column(tmp_path / "alone"), read_column(tmp_path / "together")
        assert len(together) == 10
        assert worst_difference(together, alone) < 1e-5


@ranks(2)
def test_a_run_goes_on_bit_by_bit_and_uses_each_sample_once(rank: int, tmp_path: Path) -> None:
    words = (*SHORT, *layout(1, 2), "model.dropout=0.2", "data.record_ids=true", "optim.schedule=constant")
    train_tiny(tmp_path / "through", pool_ranks(), *words)
    train_tiny(tmp_path / "cut", pool_ranks(), *words, "train.steps=4", "checkpoint.every=4 steps")
    train_tiny(tmp_path / "cut", pool_ranks(), *words, "checkpoint.every=4 steps")
    if rank == 0:
        assert read_column(tmp_path / "cut") == read_column(tmp_path / "through")
        by_step = zip(read_steps(tmp_path / "cut", 0), read_steps(tmp_path / "cut", 1), strict=True)
        used = [sample for first, second in by_step for sample in (*first["ids"], *second["ids"])]
        train_samples = len(set(used))
        assert sorted(used[:train_samples]) == list(range(train_samples))


def test_a_flipped_bit_is_refused_and_nothing_else_is_touched(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=5 steps")
    folder = RunDir(tmp_path).checkpoint_path(10)
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(JobError, match=r"step-000000010 is damaged: the content of __0_0\.distcp has changed"):
        train_tiny(tmp_path, lone_rank(), *SHORT, "train.steps=12", "checkpoint.every=5 steps")
    assert shard.read_bytes() == bytes(content)
    assert RunDir(tmp_path).checkpoint_steps() == [5, 10]
