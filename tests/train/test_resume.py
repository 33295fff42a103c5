"""What was stopped goes on: the same bits on the same world, the same curve on another, no sample twice."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
import torch

from pool import RankPool, ranks
from runs import (
    TINY,
    TINY_IMAGES,
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    signal_at,
    train_tiny,
    used_samples,
    worst_difference,
)
from shardway.models.build import build_model
from shardway.ranks.start import Ranks
from shardway.train.loss import token_cross_entropy
from shardway.train.optim.kinds import build_optimizer
from trained import assert_same_bits, whole_state

RUN = ("train.steps=8", "checkpoint.every=3 steps", "model.dropout=0.2", "train.micro_batch=2")


def interrupt(directory: Path, on: Ranks, last: int, *words: str, base: tuple[str, ...] = TINY) -> None:
    """Train until the death of all ranks after step `last`."""
    with contextlib.suppress(Died):
        train_tiny(directory, on, *words, base=base, before_step=die_at(last))
        raise AssertionError("the run went on")


def check_same_bits(folder: Path, on: Ranks, *words: str, base: tuple[str, ...] = TINY) -> None:
    """A run that died after step 5, and was stopped after step 4 when it had gone on, against one that ran through."""
    train_tiny(folder / "through", on, *words, base=base)
    interrupt(folder / "cut", on, 5, *words, base=base)
    train_tiny(folder / "cut", on, *words, base=base, before_step=signal_at(4, rank=on.world - 1))
    train_tiny(folder / "cut", on, *words, base=base)
    if on.is_first:
        assert [event["step"] for event in read_named(folder / "cut", "started")] == [0, 3, 4]
        for column in ("step", "loss", "grad_norm", "lr"):
            assert read_column(folder / "cut", column) == read_column(folder / "through", column), column


def test_one_rank_resumes_with_the_same_bits(tmp_path: Path, quiet_threads: None) -> None:
    check_same_bits(tmp_path, lone_rank(), *RUN)


@pytest.mark.parametrize("shape", [pytest.param((2, 1)), (1, 2)])
@ranks(2)
def test_two_ranks_resume_with_the_same_bits(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    check_same_bits(tmp_path, pool_ranks(), *RUN, *layout(*shape))


@ranks(4)
def test_hybrid_ranks_resume_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    check_same_bits(tmp_path, pool_ranks(), *RUN, *layout(2, 2), "optim.name=sgd", "optim.lr=0.1")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_batch_norm_resumes_with_the_same_bits(rank: int, tmp_path: Path, shape: tuple[int, int]) -> None:
    words = ("train.steps=8", "checkpoint.every=3 steps", "train.validate_every=2 steps", *layout(*shape))
    check_same_bits(tmp_path, pool_ranks(), *words, base=TINY_IMAGES)


def test_plain_descent_without_state_resumes(tmp_path: Path, quiet_threads: None) -> None:
    words = ("train.steps=8", "checkpoint.every=3 steps", "optim.name=sgd", "optim.momentum=0.0", "optim.lr=0.1")
    check_same_bits(tmp_path, lone_rank(), *words)


def stage(rank: int, directory: Path, words: tuple[str, ...], last: int | None, graceful: bool) -> None:
    """One attempt of a run: to its end, or until something happens after step `last`."""
    if last is None:
        train_tiny(directory, pool_ranks(), *words)
    elif graceful:
        train_tiny(directory, pool_ranks(), *words, before_step=signal_at(last))
    else:
        interrupt(directory, pool_ranks(), last, *words)


def attempt(
    pool: RankPool, directory: Path, shape: tuple[int, int], *words: str, last: int | None = None, graceful: bool = True
) -> None:
    arguments = {"directory": directory, "words": (*words, *layout(*shape)), "last": last, "graceful": graceful}
    pool.run(stage, shape[0] * shape[1], arguments)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 1), (1, 1)),
        ((1, 4), (2, 1)),
        ((2, 1), (1, 2)),
        pytest.param((1, 1), (1, 2), marks=pytest.mark.exhaustive),
        pytest.param((1, 2), (4, 1), marks=pytest.mark.exhaustive),
        pytest.param((2, 2), (1, 2), marks=pytest.mark.exhaustive),
    ],
    ids=lambda shape: f"replicate{shape[0]}shard{shape[1]}",
)
def test_another_world_goes_on_with_the_same_curve(
    rank_pool: RankPool, tmp_path: Path, references: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    words, through = ("train.steps=8",), references / "eight steps in another world"
    if not through.exists():
        attempt(rank_pool, through, (1, 1), *words)
    attempt(rank_pool, tmp_path / "moved", before, *words, last=5)
    attempt(rank_pool, tmp_path / "moved", after, *words)
    assert [event["step"] for event in read_named(tmp_path / "moved", "started")] == [0, 5]
    assert read_column(tmp_path / "moved", "step") == list(range(1, 9))
    assert worst_difference(read_column(tmp_path / "moved"), read_column(through)) < 1e-5
    assert read_column(tmp_path / "moved", "lr") == read_column(through, "lr")


def test_each_sample_of_an_epoch_is_used_once(rank_pool: RankPool, tmp_path: Path) -> None:
    """Over two deaths, a stop and three worlds; 48 samples are 6 steps an epoch."""
    words = ("data.samples=48", "data.validation_fraction=0.0", "data.record_ids=true")
    words = (*words, "train.steps=2 epochs", "checkpoint.every=3 steps")
    attempt(rank_pool, tmp_path, (2, 1), *words, last=4, graceful=False)
    attempt(rank_pool, tmp_path, (1, 4), *words, last=7, graceful=False)
    attempt(rank_pool, tmp_path, (1, 1), *words, last=8)
    attempt(rank_pool, tmp_path, (1, 2), *words)
    assert [event["step"] for event in read_named(tmp_path, "started")] == [0, 3, 6, 8]
    used = used_samples(tmp_path)
    assert sorted(used) == list(range(1, 13))
    for first in (1, 7):
        ids = Counter(identity for step in range(first, first + 6) for identity in used[step])
        assert ids == Counter(range(48))
    assert [used[step] for step in range(1, 7)] != [used[step] for step in range(7, 13)]


def walk(directory: Path, on: Ranks, *words: str, steps: int) -> dict[str, torch.Tensor]:
    """Open a run, take `steps` steps of what is left, and return the state then."""
    with open_tiny(directory, on, *words) as run:
        values = run.resolved.values
        model = run.shard(build_model(values.model, vocab=32, sample_shape=(12,)))
        optimizer = run.optimizer(lambda _: build_optimizer(values.optim, model, 0.01), model)
        rows = [(torch.arange(12) * k % 32, torch.arange(12) * (k + 1) % 32) for k in range(16)]
        for number, batch in enumerate(run.steps(run.loader(rows))):
            if number == steps:
                break
            run.step(model, batch, token_cross_entropy)
        return whole_state(model, optimizer)


STATE = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer", "step")}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@ranks(2)
def test_state_is_loaded_with_the_same_bits(rank: int, tmp_path: Path, name: str) -> None:
    words = ("train.steps=4", "checkpoint.every=4 steps", f"optim.name={name}")
    saved = walk(tmp_path / "run", pool_ranks(), *words, *layout(1, 2), steps=4)
    assert {key.split()[-1] for key in saved} == {"weight", *STATE[name]}
    longer = (*words, "train.steps=20", "checkpoint.every=off")
    for shape in ((2, 1), (1, 2)):
        loaded = walk(tmp_path / "run", pool_ranks(), *longer, *layout(*shape), steps=0)
        assert_same_bits(loaded, saved)


def test_learning_rate_settings_are_those_of_today(tmp_path: Path, quiet_threads: None) -> None:
    words = ("train.steps=6", "optim.schedule=constant", "optim.warmup=0 steps")
    train_tiny(tmp_path, lone_rank(), *words, "optim.lr=0.01", before_step=signal_at(3))
    train_tiny(tmp_path, lone_rank(), *words, "optim.lr=0.002")
    assert read_column(tmp_path, "lr") == [0.01] * 3 + [0.002] * 3
