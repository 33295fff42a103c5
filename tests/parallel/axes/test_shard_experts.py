"""Experts that are fewer than the ranks that share them out: each rank holds an equal part and learns the same."""

from __future__ import annotations

from pathlib import Path

from pool import ranks
from runs import open_tiny, pool_ranks, read_column, train_alone, worst_difference
from shardway.models.contract import held_by_rank
from shardway.train.run import train_run

MIXTURE = ("model.experts=2", "parallel.dp_replicate=1", "train.steps=8")


@ranks(4)
def test_one_expert_on_two_ranks(rank: int, tmp_path: Path) -> None:
    """Two experts, one for each place on the expert axis, and two ranks at each place."""
    train_alone(rank, tmp_path / "alone", *MIXTURE)
    with open_tiny(tmp_path / "shared", pool_ranks(), *MIXTURE, "parallel.dp_shard=4", "parallel.ep=2") as run:
        train_run(run)
        named = run._held.models[0].parallel.module.named_parameters()
        parts = {name: (held_by_rank(p).numel(), p.numel()) for name, p in named if ".experts." in name}
    assert parts
    assert all(part * 4 == whole for part, whole in parts.values())
    if rank == 0:
        for column, bound in (("loss", 1e-5), ("grad_norm", 1e-4)):
            curves = [read_column(tmp_path / each, column) for each in ("shared", "alone")]
            assert worst_difference(*curves) < bound
