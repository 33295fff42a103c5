"""Dropout masks do not depend on the layout where the axes allow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawn_layouts import SMALL
from pool import ranks
from runs import pool_ranks, read_column, train_alone, train_tiny, worst_difference
from speed import picked

DROPPING = ("model.dropout=0.3", "model.tied=false", "train.micro_batch=2", "train.steps=4")


SPLITS = (
    ("parallel.dp_replicate=2",),
    ("parallel.dp_shard=2", "recompute.mode=full"),
    ("parallel.tp=2", "parallel.tp_sequence=false"),
    ("parallel.pp=2",),
    ("parallel.pp=2", "parallel.pp_schedule=zbv"),
    ("parallel.pp=2", "parallel.pp_schedule=interleaved", "parallel.pp_micro_batches=2"),
)


@pytest.mark.parametrize("words", picked(SPLITS, *SPLITS[1:3], SPLITS[5]), ids=" ".join)
@ranks(2)
def test_masks_are_those_of_one_rank(rank: int, tmp_path: Path, references: Path, words: tuple[str, ...]) -> None:
    size = f"model.layers={4 if 'parallel.pp=2' in words else 2}"  # a pipeline has two stages on each rank
    alone = train_dropping_alone(rank, references, size)
    train_tiny(tmp_path, pool_ranks(), *DROPPING, size, *words, base=SMALL)
    if rank == 0:
        assert worst_difference(read_column(tmp_path), read_column(alone)) < 1e-5


def train_dropping_alone(rank: int, references: Path, size: str) -> Path:
    """The folder of the run on one rank, which is made once."""
    alone = references / f"dropout, {size}"
    train_alone(rank, alone, *DROPPING, size, base=SMALL, once=True)
    return alone


@pytest.mark.parametrize("words", [("parallel.cp=2",), ("parallel.tp=2",)])
@ranks(2)
def test_parts_of_a_sequence_have_masks_of_their_own(
    rank: int, tmp_path: Path, references: Path, words: tuple[str, ...]
) -> None:
    alone = train_dropping_alone(rank, references, "model.layers=2")
    train_tiny(tmp_path, pool_ranks(), *DROPPING, "model.layers=2", *words, base=SMALL)
    if rank == 0:
        difference = worst_difference(read_column(tmp_path), read_column(alone))
        assert 1e-4 < difference < 0.2


@ranks(2)
def test_masks_change_with_every_micro_batch(rank: int, tmp_path: Path) -> None:
    """The same data twice give two losses where dropout is on."""
    words = (*DROPPING, "optim.lr=1e-12", "data.samples=8", "data.shuffle=false", "parallel.dp_replicate=2")
    train_tiny(tmp_path, pool_ranks(), *words, base=SMALL)
    if rank == 0:
        losses = read_column(tmp_path)
        assert len({round(loss, 6) for loss in losses}) == len(losses)
