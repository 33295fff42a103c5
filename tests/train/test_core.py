"""What must never break, in seconds: one curve whatever the layout, exact resume, each sample once, no damage loaded.

The other files of this folder and of `tests/checkpoint` go into each of these at length; they are slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pool import ranks
from runs import layout, lone_rank, pool_ranks, read_column, read_steps, train_alone, train_tiny, worst_difference
from shardway.rundir.directory import RunDir

SHORT = ("train.steps=10", "data.samples=40", "train.global_batch=6")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["replicas", "shards"])
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


def test_a_flipped_bit_costs_the_steps_since_the_checkpoint_before(tmp_path: Path, quiet_threads: None) -> None:
    words = (*SHORT, "checkpoint.every=5 steps", "optim.schedule=constant")
    train_tiny(tmp_path / "through", lone_rank(), *words, "train.steps=12")
    train_tiny(tmp_path / "cut", lone_rank(), *words)
    run = RunDir(tmp_path / "cut")
    shard = next(run.checkpoint_path(10).glob("rank-*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    train_tiny(tmp_path / "cut", lone_rank(), *words, "train.steps=12")
    assert read_column(tmp_path / "cut") == read_column(tmp_path / "through")
    (event,) = (event for event in run.events(0) if event["event"] == "checkpoint_quarantined")
    assert event["reason"] == "the content of rank-00000.bin has changed (its checksum is another)"
    assert (run.checkpoints / event["kept_as"] / shard.name).read_bytes() == bytes(content)
