"""A run goes on with the same bits in any layout of three to eight ranks, wherever and however it was stopped.

Two ranks add two numbers, and no order changes the sum; from three on the order of a sum is a part of its bits.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from drawn_layouts import SMALL, Drawn, draw_layouts
from pool import ranks
from runs import Died, die_at, pool_ranks, read_column, read_named, signal_at, train_tiny
from shardway.rundir.directory import RunDir

STEPS = 10
WORDS = (f"train.steps={STEPS}", "checkpoint.every=2 steps", "train.validate_every=4 steps", "model.dropout=0.1")
LAYOUTS = draw_layouts(30, seed=7, worlds=(3, 3, 4, 4, 6, 8))
REPLICAS = tuple(Drawn(world, "dense", (f"parallel.dp_replicate={world}",)) for world in (3, 4, 6, 8))
"""What DDP does alone."""


def of_world(world: int) -> pytest.MarkDecorator:
    """All layouts on so many ranks, of which `make test` has three replicas: the fewest whose order of a sum counts."""
    cases = [drawn for drawn in (*REPLICAS, *LAYOUTS) if drawn.world == world]
    return pytest.mark.parametrize(
        "drawn",
        [
            pytest.param(drawn, id=str(drawn), marks=() if drawn in REPLICAS[:1] else pytest.mark.exhaustive)
            for drawn in cases
        ],
    )


def check_same_bits(rank: int, folder: Path, drawn: Drawn) -> None:
    """A run that is stopped, or dies, at three drawn moments against one that is left alone."""
    words = (*WORDS, *drawn.overrides, f"model.layers={drawn.layers}")
    dice = random.Random(str(drawn))
    stops = [(step, dice.random() < 0.5) for step in sorted(dice.sample(range(1, STEPS), 3))]
    train_tiny(folder / "through", pool_ranks(), *words, base=SMALL)
    for step, dies in stops:
        with contextlib.suppress(Died):
            look = die_at(step) if dies else signal_at(step, rank=drawn.world - 1)
            train_tiny(folder / "stopped", pool_ranks(), *words, base=SMALL, before_step=look)
            assert not dies, "the run went on"
    train_tiny(folder / "stopped", pool_ranks(), *words, base=SMALL)
    if rank == 0:
        assert len(read_named(folder / "stopped", "started")) == 4
        for column in ("step", "loss", "grad_norm", "lr"):
            assert read_column(folder / "stopped", column) == read_column(folder / "through", column), (stops, column)
        found, expected = (read_validated(folder / name) for name in ("stopped", "through"))
        assert found == expected
        assert [step for step, _ in found] == [4, 8, STEPS]


def read_validated(directory: Path) -> list[tuple[int, float]]:
    """Step and loss of each validation that still holds."""
    events = RunDir(directory).events(0)
    return [(event["step"], event["loss"]) for event in events if event["event"] == "validation"]


@of_world(3)
@ranks(3, timeout_s=240.0)
def test_three_ranks(rank: int, tmp_path: Path, drawn: Drawn) -> None:
    check_same_bits(rank, tmp_path, drawn)


@of_world(4)
@ranks(4, timeout_s=240.0)
def test_four_ranks(rank: int, tmp_path: Path, drawn: Drawn) -> None:
    check_same_bits(rank, tmp_path, drawn)


@of_world(6)
@ranks(6, timeout_s=300.0)
def test_six_ranks(rank: int, tmp_path: Path, drawn: Drawn) -> None:
    check_same_bits(rank, tmp_path, drawn)


@of_world(8)
@ranks(8, timeout_s=300.0)
def test_eight_ranks(rank: int, tmp_path: Path, drawn: Drawn) -> None:
    check_same_bits(rank, tmp_path, drawn)
