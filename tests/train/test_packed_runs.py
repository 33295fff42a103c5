"""Runs whose samples hold whole documents (data.pack): the same curve on every layout, and every sample once over
stops and other worlds."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from pool import RankPool, ranks
from runs import (
    TINY,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    signal_at,
    train_alone,
    train_tiny,
    used_samples,
    worst_difference,
)
from shardway.data.batch_tree import PackedInputs
from shardway.models.build import build_model
from shardway.train.loss import IGNORED, token_cross_entropy
from speed import picked

DOCUMENTS = 160
PIPELINES = {"gpipe": 2, "1f1b": 2, "zero_bubble": 4, "zbv": 4}
"""Schedule -> the layers of a model that two ranks can cut for it."""
LENGTH = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short texts, of which some are longer than a sample."""
    folder, dice = tmp_path_factory.mktemp("text"), random.Random(5)
    for number in range(DOCUMENTS):
        words = "".join(dice.choice(("ab", "cde", "f")) for _ in range(dice.randint(1, 16)))
        (folder / f"{number:03}.txt").write_text(words)
    return folder


def words_of(text: Path, *words: str) -> tuple[str, ...]:
    return (
        *("data.kind=text", f"data.path={text}", "data.include=*.txt", "data.pack=true", f"data.seq_len={LENGTH}"),
        *("model.vocab=256", "train.steps=8", *words),
    )


BASE = tuple(word for word in TINY if not word.startswith(("data.", "model.vocab")))


def check_parity(rank: int, folder: Path, references: Path, text: Path, *words: str) -> None:
    layers = next((word for word in words if word.startswith("model.layers=")), "model.layers=2")
    apart, alone = ("model.tied=false", layers), references / f"packed-{layers}"  # so that a pipeline can cut it
    train_alone(rank, alone, *words_of(text, *apart), base=BASE, once=True)
    train_tiny(folder, pool_ranks(), *words_of(text, *apart, *words), base=BASE)
    if rank == 0:
        for column in ("loss", "grad_norm"):
            found, expected = (read_column(each, column) for each in (folder, alone))
            assert len(found) == 8
            assert worst_difference(found, expected) < 1e-4, column
        assert expected[-1] < read_column(alone, "grad_norm")[0]
        losses = read_column(alone)
        assert losses[-1] < losses[0] - 0.1, "the run learns nothing, so that equal curves would say little"


TWO_RANKS = {
    "replicate": layout(2, 1),
    "shard": layout(1, 2),
    "tensor": (*layout(1, 1), "parallel.tp=2"),
    "tensor, whole stream": (*layout(1, 1), "parallel.tp=2", "parallel.tp_sequence=false", "parallel.tp_loss=false"),
    "shard, accumulated, recomputed": (*layout(1, 2), "train.micro_batch=2", "recompute.mode=selective"),
    "context": (*layout(1, 1), "parallel.cp=2"),
    "context, gathered, recomputed": (
        *layout(1, 1),
        *("parallel.cp=2", "parallel.cp_method=gather", "recompute.mode=full"),
    ),
    **{
        schedule: (
            *layout(1, 1),
            *("parallel.pp=2", f"parallel.pp_schedule={schedule}", "train.micro_batch=2", f"model.layers={layers}"),
        )
        for schedule, layers in PIPELINES.items()
    },
}
FOUR_RANKS = {
    "pipeline x context": (*layout(1, 1), "parallel.pp=2", "parallel.cp=2"),
    "pipeline x tensor": (*layout(1, 1), "parallel.pp=2", "parallel.tp=2"),
    "context x tensor": (*layout(1, 1), "parallel.cp=2", "parallel.tp=2"),
    "pipeline x shard": (*layout(1, 2), "parallel.pp=2"),
}


@pytest.mark.parametrize("case", picked(TWO_RANKS, *TWO_RANKS.keys() - {"shard", "gpipe"}))
@ranks(2)
def test_two_ranks_have_the_curve_of_one(rank: int, tmp_path: Path, references: Path, text: Path, case: str) -> None:
    check_parity(rank, tmp_path / "split", references, text, *TWO_RANKS[case])


@pytest.mark.parametrize("case", picked(FOUR_RANKS, "pipeline x context", "context x tensor"))
@ranks(4)
def test_four_ranks_have_the_curve_of_one(rank: int, tmp_path: Path, references: Path, text: Path, case: str) -> None:
    check_parity(rank, tmp_path / "split", references, text, *FOUR_RANKS[case])


@ranks(3)
def test_three_ranks_of_uneven_shares_have_the_curve_of_one(
    rank: int, tmp_path: Path, references: Path, text: Path
) -> None:
    """The loss is a mean over targets, of which samples have different numbers."""
    check_parity(rank, tmp_path / "split", references, text, *layout(3, 1))


def stage(rank: int, directory: Path, words: tuple[str, ...], last: int | None) -> None:
    """One attempt of a run: to its end, or until it is stopped after step `last`."""
    before = signal_at(last) if last is not None else None
    train_tiny(directory, pool_ranks(), *words, base=BASE, before_step=before)


def test_each_sample_is_used_once_while_the_world_changes(rank_pool: RankPool, tmp_path: Path, text: Path) -> None:
    held = ("data.validation_fraction=0.0", "data.record_ids=true", "train.global_batch=6", "checkpoint.every=4 steps")
    words = words_of(text, *held, "data.include=0[0-5]*.txt", "train.steps=2 epochs")
    through, moved = tmp_path / "through", tmp_path / "moved"
    for directory, world, last in ((through, 1, None), (moved, 1, 5), (moved, 2, 11), (moved, 3, None)):
        arguments = {"directory": directory, "words": (*words, *layout(world, 1)), "last": last}
        rank_pool.run(stage, world, arguments)
    assert [event["step"] for event in read_named(moved, "started")] == [0, 5, 11]
    assert read_column(moved, "step") == read_column(through, "step")
    assert worst_difference(read_column(moved), read_column(through)) < 1e-4
    used, expected = used_samples(moved), used_samples(through)
    assert {step: sorted(ids) for step, ids in used.items()} == {step: sorted(ids) for step, ids in expected.items()}
    ids = Counter(identity for step in sorted(used) for identity in used[step])
    samples = len(ids)
    assert set(ids) == set(range(samples))
    steps = len(used)
    assert sum(ids.values()) == 6 * steps
    assert max(ids.values()) - min(ids.values()) <= 1
    assert samples > 30


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path, text: Path, quiet_threads: None) -> None:
    words = words_of(text, "train.validate_every=4 steps", "data.workers=0")
    train_tiny(tmp_path / "through", lone_rank(), *words, base=BASE)
    train_tiny(tmp_path / "stopped", lone_rank(), *words, base=BASE, before_step=signal_at(3))
    train_tiny(tmp_path / "stopped", lone_rank(), *words, base=BASE)
    for column in ("step", "loss", "grad_norm"):
        assert read_column(tmp_path / "stopped", column) == read_column(tmp_path / "through", column)
    validated = [event["loss"] for event in read_named(tmp_path / "through", "validation")]
    assert validated == [event["loss"] for event in read_named(tmp_path / "stopped", "validation")]
    assert len(validated) == 2
    assert validated[-1] < validated[0]


@pytest.mark.usefixtures("warm_starts")
def test_a_worker_process_reads_the_same_bins(tmp_path: Path, text: Path, quiet_threads: None) -> None:
    found = []
    for workers in (0, 1):
        words = words_of(text, f"data.workers={workers}", "train.steps=3", "optim.warmup=0 steps")
        train_tiny(tmp_path / str(workers), lone_rank(), *words, base=BASE)
        found.append(read_column(tmp_path / str(workers)))
    assert found[0] == found[1]


def test_a_script_gets_tokens_with_their_positions(tmp_path: Path, text: Path, quiet_threads: None) -> None:
    from shardway.data.open import open_described

    with open_tiny(tmp_path / "run", lone_rank(), *words_of(text), base=BASE) as run:
        values, data = run.resolved.values, open_described(run.resolved.values)
        model = run.shard(build_model(values.model, vocab=256, sample_shape=(LENGTH,)))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(data.train)):
            inputs, targets = batch
            assert isinstance(inputs, PackedInputs)
            assert inputs.tokens.shape == inputs.positions.shape == targets.shape == (8, LENGTH)
            assert (inputs.positions[:, 0] == 0).all()
            padding = targets == IGNORED
            assert (inputs.tokens[padding] == 0).all()
            run.step(model, batch, token_cross_entropy)
    assert len(read_column(tmp_path / "run")) == 8


@pytest.mark.parametrize("attention", ["positions=learned", "kv_rank=8"])
def test_other_attention_trains(tmp_path: Path, text: Path, quiet_threads: None, attention: str) -> None:
    train_tiny(tmp_path / "run", lone_rank(), *words_of(text, f"model.{attention}"), base=BASE)
    losses = read_column(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1
