"""The loss does not depend on the layout: random legal layouts up to 8 ranks against one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawn_layouts import AXES, SMALL, Drawn, draw_layouts, pairs_of, pick_layouts, traits_of
from page_tables import check_table
from pool import ranks
from runs import pool_ranks, read_column, train_alone, train_tiny, worst_difference

LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-3
LAYOUTS = draw_layouts(160)
PICKED = pick_layouts(LAYOUTS)


def of_world(world: int) -> pytest.MarkDecorator:
    cases = [
        pytest.param(layout, id=str(layout), marks=() if layout in PICKED else pytest.mark.exhaustive)
        for layout in LAYOUTS
        if layout.world == world
    ]
    return pytest.mark.parametrize("drawn", cases)


def check_parity(rank: int, folder: Path, references: Path, drawn: Drawn) -> None:
    steps, warmup = (4, 1) if drawn in PICKED else (20, 4)
    size = (f"model.layers={drawn.layers}", f"train.steps={steps}", f"optim.warmup={warmup} steps")
    alone = references / f"{drawn.model}, {drawn.layers} layers, parity over {steps} steps"
    train_alone(rank, alone, *drawn.alone, *size, base=SMALL, once=True)
    train_tiny(folder, pool_ranks(), *drawn.overrides, *size, base=SMALL)
    if rank == 0:
        losses, expected = read_column(folder), read_column(alone)
        assert len(losses) == steps
        assert worst_difference(losses, expected) < LOSS_TOLERANCE
        norms, expected_norms = (read_column(directory, "grad_norm") for directory in (folder, alone))
        assert worst_difference(norms, expected_norms) < NORM_TOLERANCE
        assert expected[-1] < expected[0], "the run learns nothing, so that equal curves would say little"


@of_world(2)
@ranks(2)
def test_two_ranks(rank: int, tmp_path: Path, references: Path, drawn: Drawn) -> None:
    check_parity(rank, tmp_path, references, drawn)


@of_world(4)
@ranks(4, timeout_s=240.0)
def test_four_ranks(rank: int, tmp_path: Path, references: Path, drawn: Drawn) -> None:
    check_parity(rank, tmp_path, references, drawn)


@of_world(6)
@ranks(6, timeout_s=240.0)
def test_six_ranks(rank: int, tmp_path: Path, references: Path, drawn: Drawn) -> None:
    check_parity(rank, tmp_path, references, drawn)


@of_world(8)
@ranks(8, timeout_s=300.0)
def test_eight_ranks(rank: int, tmp_path: Path, references: Path, drawn: Drawn) -> None:
    check_parity(rank, tmp_path, references, drawn)


FIVE_AXES = Drawn(
    16,
    "experts, bias",
    (
        *(f"parallel.{axis}={2 if axis != 'dp_replicate' else 1}" for axis in AXES),
        "parallel.ep=4",
        "train.micro_batch=2",
    ),
)


@pytest.mark.exhaustive
@ranks(16, timeout_s=300.0)
def test_five_axes_on_sixteen_ranks(rank: int, tmp_path: Path, references: Path) -> None:
    check_parity(rank, tmp_path, references, FIVE_AXES)


def test_the_page_lists_what_runs(request: pytest.FixtureRequest) -> None:
    drawn = [*sorted(LAYOUTS, key=lambda each: each.world), FIVE_AXES]
    rows = [("ranks", "model", "degrees and features"), *((each.world, each.model, each.features) for each in drawn)]
    check_table(request, "layouts.md", "layouts", rows)


def test_the_draw_covers_every_pair_of_axes() -> None:
    possible = set(pairs_of([Drawn(0, "dense", tuple(f"parallel.{axis}=2" for axis in (*AXES, "ep")))]))
    assert pairs_of(LAYOUTS) == possible
    assert len(set(LAYOUTS)) >= 150
    assert {len(drawn.axes) for drawn in LAYOUTS} >= {1, 2, 3, 4}


def test_the_picked_ones_have_every_trait_of_all() -> None:
    traits, picked = (set().union(*map(traits_of, layouts)) for layouts in (LAYOUTS, PICKED))
    assert picked == traits
    assert len(PICKED) < len(LAYOUTS) / 3
