"""Compiled blocks train as plain ones do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pool import ranks
from runs import layout, lone_rank, pool_ranks, read_column, train_tiny, worst_difference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU"
    ),
    pytest.mark.filterwarnings("ignore"),  # torch warns of its own doings while it compiles
]

WORDS = ("train.steps=4", "optim.warmup=0 steps")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2, timeout_s=400)
def test_compiled_blocks_give_the_same_curve(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    words = (*WORDS, *layout(*shape), "checkpoint.every=4 steps")
    train_tiny(tmp_path / "plain", pool_ranks(), *words)
    train_tiny(tmp_path / "compiled", pool_ranks(), *words, "train.compile=blocks")
    if rank == 0:
        found, expected = read_column(tmp_path / "compiled"), read_column(tmp_path / "plain")
        assert worst_difference(found, expected) < 1e-5
        # Names in a checkpoint are those of the plain model: the one goes on from the other.
        train_tiny(tmp_path / "compiled", lone_rank(), "train.steps=5", "optim.warmup=0 steps")
        assert read_column(tmp_path / "compiled", "step") == [1, 2, 3, 4, 5]
