"""The loss does not depend on the layout: one rank, replicas, shards and both give the same curve."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from pool import ranks
from runs import (
    TINY,
    TINY_IMAGES,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    train_alone,
    train_tiny,
    worst_difference,
)
from shardway.models.build import build_model

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4

OPTIONS = {
    "train.global_batch": ("8", "7", "5"),
    "train.micro_batch": ("1", "auto"),
    "model.tied": ("true", "false"),
    "model.norm": ("rmsnorm", "layernorm"),
    "model.activation": ("swiglu", "gelu"),
    "parallel.prefetch": ("0", "2"),
    "parallel.reshard_after_forward": ("true", "false"),
    "optim.clip": ("0.5", "off"),
    "optim.name": ("adamw", "sgd"),
}
"""What a drawn run may set; a batch of 5 or 7 leaves ranks with different shares. The layouts of all axes are in
`tests/parallel/test_layout_parity.py`."""


def draw_cases(layouts: list[tuple[int, int]], count: int) -> list[tuple[str, ...]]:
    """For each layout `count` draws from OPTIONS, the same in every session."""
    dice = random.Random(20)
    drawn = []
    for shape, _ in itertools.product(layouts, range(count)):
        picked = {name: dice.choice(values) for name, values in OPTIONS.items()}
        rate = "optim.lr=0.3" if picked["optim.name"] == "sgd" else "optim.lr=3e-3"
        drawn.append((*layout(*shape), rate, *(f"{name}={value}" for name, value in picked.items())))
    return drawn


def check_parity(rank: int, folder: Path, overrides: tuple[str, ...], steps: int = 20) -> None:
    overrides = (*overrides, f"train.steps={steps}")
    alone = [word for word in overrides if not word.startswith(("parallel.dp", "train.micro"))]
    train_alone(rank, folder / "alone", *alone)
    train_tiny(folder / "together", pool_ranks(), *overrides)
    if rank == 0:
        losses, expected = read_column(folder / "together"), read_column(folder / "alone")
        assert len(losses) == steps
        assert worst_difference(losses, expected) < LOSS_TOLERANCE
        norms, expected_norms = (read_column(folder / name, "grad_norm") for name in ("together", "alone"))
        assert worst_difference(norms, expected_norms) < NORM_TOLERANCE
        assert expected[-1] < expected[0], "the run learns nothing, so that equal curves would say little"


@pytest.mark.parametrize("overrides", draw_cases([(2, 1), (1, 2)], 1))
@ranks(2)
def test_two_ranks_give_the_curve_of_one(rank: int, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check_parity(rank, tmp_path, overrides, steps=8)


@pytest.mark.parametrize("overrides", draw_cases([(1, 4), (2, 2)], 1))
@ranks(4)
def test_four_ranks_give_the_curve_of_one(rank: int, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check_parity(rank, tmp_path, overrides, steps=8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", draw_cases([(2, 1), (1, 2)], 3))
@ranks(2)
def test_more_draws_of_two_ranks_give_the_curve_of_one(rank: int, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check_parity(rank, tmp_path, overrides)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", draw_cases([(4, 1), (1, 4), (2, 2)], 3))
@ranks(4)
def test_more_draws_of_four_ranks_give_the_curve_of_one(rank: int, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check_parity(rank, tmp_path, overrides)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_micro_batches_give_the_curve_of_whole_shares(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    for micro in ("1", "3", "4"):
        train_tiny(tmp_path / micro, pool_ranks(), *layout(*shape), f"train.micro_batch={micro}", "train.steps=5")
    if rank == 0:
        whole = read_column(tmp_path / "4")
        assert worst_difference(read_column(tmp_path / "1"), whole) < LOSS_TOLERANCE
        assert worst_difference(read_column(tmp_path / "3"), whole) < LOSS_TOLERANCE


MORE_WEIGHTS = [((4, 1), "true"), ((1, 4), "false"), ((2, 2), "true")]


def initial_weights(folder: Path, alone: bool, shape: tuple[int, int], tied: str) -> dict[str, torch.Tensor]:
    ranks_of_run = lone_rank() if alone else pool_ranks()
    words = () if alone else layout(*shape)
    with open_tiny(folder, ranks_of_run, *words, f"model.tied={tied}", "train.seed=3") as run:
        model = run.shard(build_model(run.resolved.values.model, vocab=32, sample_shape=(12,)))
        weights = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
        return {
            name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
            for name, weight in weights.items()
        }


@pytest.mark.parametrize(
    ("shape", "tied"),
    [
        *(((1, 4), "true"), ((2, 2), "false"), ((4, 1), "false")),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE_WEIGHTS),
    ],
)
@ranks(4)
def test_initial_weights_have_the_same_bits(rank: int, tmp_path: Path, shape: tuple[int, int], tied: str) -> None:
    found = initial_weights(tmp_path / "together", False, shape, tied)
    expected = initial_weights(tmp_path / f"alone-{rank}", True, shape, tied)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
        assert weight.std() > 0 or weight.dim() == 1, f"{name} was not filled"


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_batch_norm_in_equal_portions_gives_the_curve_of_one(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    """Batch norm sees the images of one forward pass, so one rank has to take them in the same portions."""
    words = ("train.steps=8",)
    train_alone(rank, tmp_path / "alone", *words, "train.micro_batch=4", base=TINY_IMAGES)
    train_tiny(tmp_path / "together", pool_ranks(), *words, *layout(*shape), base=TINY_IMAGES)
    if rank == 0:
        losses, expected = read_column(tmp_path / "together"), read_column(tmp_path / "alone")
        assert worst_difference(losses, expected) < LOSS_TOLERANCE


@pytest.mark.parametrize(
    ("shape", "base"),
    [
        pytest.param((1, 2), TINY_IMAGES, id="shards convnet", marks=pytest.mark.exhaustive),
        pytest.param((1, 2), TINY, id="shards transformer"),
        pytest.param((2, 1), TINY_IMAGES, id="replicas convnet"),
        pytest.param((2, 1), TINY, id="replicas transformer", marks=pytest.mark.exhaustive),
    ],
)
@ranks(2)
def test_bf16_stays_close_to_one_rank(rank: int, tmp_path: Path, shape: tuple[int, int], base: tuple[str, ...]) -> None:
    """Shards cast whole blocks to bf16 where one rank casts products alone, so only the first figures agree."""
    words = ("precision.compute=bf16", "train.steps=8")
    train_alone(rank, tmp_path / "alone", *words, "train.micro_batch=4", base=base)
    train_tiny(tmp_path / "together", pool_ranks(), *words, *layout(*shape), base=base)
    if rank == 0:
        losses, expected = read_column(tmp_path / "together"), read_column(tmp_path / "alone")
        assert worst_difference(losses, expected) < 1e-2
