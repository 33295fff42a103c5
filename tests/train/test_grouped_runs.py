"""Runs whose samples are groups of documents of similar length (data.group_tokens): the same curve on every layout, and
every sample once over stops and other worlds."""

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
from saved_tensors import read_whole
from shardway.data.batch_tree import LengthGroups
from shardway.errors import UserError
from shardway.models.build import build_model
from shardway.rundir.directory import RunDir
from shardway.train.dataloader import pad_groups
from shardway.train.loss import IGNORED, token_cross_entropy
from shardway.train.passes import cut

DOCUMENTS, LENGTH, TOKENS = 160, 24, 72


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short texts, of which some are longer than a sample."""
    folder, dice = tmp_path_factory.mktemp("text"), random.Random(5)
    for number in range(DOCUMENTS):
        words = "".join(dice.choice(("ab", "cde", "f")) for _ in range(dice.randint(1, 16)))
        (folder / f"{number:03}.txt").write_text(words)
    return folder


BASE = tuple(word for word in TINY if not word.startswith(("data.", "model.vocab")))
GROUPED = (
    *(f"data.group_tokens={TOKENS}", f"data.seq_len={LENGTH}", "model.vocab=256"),
    *("train.steps=8", "train.global_batch=4"),
)


def words_of(text: Path, *words: str) -> tuple[str, ...]:
    return ("data.kind=text", f"data.path={text}", "data.include=*.txt", *GROUPED, *words)


def check_parity(rank: int, folder: Path, references: Path, text: Path, *words: str) -> None:
    held, alone = words_of(text, "checkpoint.every=8 steps"), references / "grouped"
    train_alone(rank, alone, *held, base=BASE, once=True)
    train_tiny(folder, pool_ranks(), *held, *words, base=BASE)
    if rank == 0:
        for column in ("loss", "grad_norm"):
            found, expected = (read_column(each, column) for each in (folder, alone))
            assert len(found) == 8
            assert worst_difference(found, expected) < 1e-4, column
        weights, others = (read_whole(max(RunDir(each).checkpoints.iterdir())) for each in (folder, alone))
        shared = [name for name in others.keys() & weights.keys() if others[name].is_floating_point()]
        assert len(shared) > 20
        for name in shared:
            torch.testing.assert_close(weights[name], others[name], rtol=1e-3, atol=1e-4, msg=name)
        losses = read_column(alone)
        assert losses[-1] < losses[0] - 0.1, "the run learns nothing, so that equal curves would say little"


@pytest.mark.parametrize(
    "words",
    [
        layout(2, 1),
        (*layout(1, 2), "recompute.mode=full"),
        (*layout(1, 1), "parallel.tp=2"),
        (*layout(1, 1), "parallel.cp=2"),
    ],
    ids=["replicate", "shard, recomputed", "tensor", "context"],
)
@ranks(2)
def test_two_ranks_have_the_curve_of_one(
    rank: int, tmp_path: Path, references: Path, text: Path, words: tuple[str, ...]
) -> None:
    check_parity(rank, tmp_path / "split", references, text, *words)


@ranks(3)
def test_three_ranks_of_uneven_shares_have_the_curve_of_one(
    rank: int, tmp_path: Path, references: Path, text: Path
) -> None:
    """The loss is a mean over targets, of which groups have different numbers; one rank runs a pass that does not
    count."""
    check_parity(rank, tmp_path / "split", references, text, *layout(3, 1))


def test_the_first_loss_is_that_of_the_documents_one_by_one(tmp_path: Path, text: Path, quiet_threads: None) -> None:
    """Padding has no part in it."""
    from shardway.data.open import open_described

    words = words_of(text, "train.steps=1", "optim.warmup=0 steps")
    with open_tiny(tmp_path / "run", lone_rank(), *words, base=BASE) as run:
        values, data = run.resolved.values, open_described(run.resolved.values)
        assert values.train.micro_batch == 1
        model = run.shard(build_model(values.model, vocab=256, sample_shape=(LENGTH,)))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for groups in run.steps(run.loader(data.train)):
            assert isinstance(groups, LengthGroups)
            assert len({inputs.shape for inputs, _ in groups}) > 1
            total, count = 0.0, 0
            for inputs, targets in groups:
                assert inputs.shape == targets.shape
                assert inputs.numel() <= TOKENS
                for row, wanted in zip(inputs, targets, strict=True):
                    length = int((wanted != IGNORED).sum())
                    assert (wanted[length:] == IGNORED).all()
                    loss = token_cross_entropy(model(row[None, :length]), wanted[None, :length])
                    total, count = total + loss.total.item(), count + length
            run.step(model, groups, token_cross_entropy)
    assert read_column(tmp_path / "run")[0] == pytest.approx(total / count, abs=1e-5)


def test_a_pass_takes_one_group() -> None:
    groups = LengthGroups((torch.ones(rows, 3).long(), torch.ones(rows, 3).long()) for rows in (2, 5))
    found = [(micro.rows, micro.weight, micro.start, micro.pair) for micro in cut(groups, 3)]
    assert found == [(2, 1.0, 0, True), (5, 1.0, 1, True), (2, 0.0, 0, True)]
    assert [micro.weight for micro in cut(groups, 1, known=0)] == [0.0]
    with pytest.raises(UserError, match="2 groups of documents are to be run in 1 passes"):
        list(cut(groups, 1))
    (inputs, targets), _ = pad_groups(groups, 4)
    assert inputs.tolist() == [[1, 1, 1, 0]] * 2
    assert targets.tolist() == [[1, 1, 1, IGNORED]] * 2


def stage(rank: int, directory: Path, words: tuple[str, ...], last: int | None) -> None:
    """One attempt of a run: to its end, or until it is stopped after step `last`."""
    before = signal_at(last) if last is not None else None
    train_tiny(directory, pool_ranks(), *words, base=BASE, before_step=before)


def test_a_blend_is_used_once_while_the_world_changes(rank_pool: RankPool, tmp_path: Path, text: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    for number in range(60):
        (more / f"{number:02}.txt").write_text("xyz" * (1 + number % 11))
    parts = ", ".join(f'{{path = "{path}", weight = {weight}}}' for path, weight in ((text, 2), (more, 1)))
    held = ("data.validation_fraction=0.0", "data.record_ids=true", "train.global_batch=6", "checkpoint.every=4 steps")
    words = ("data.kind=text", f"data.blend=[{parts}]", "data.include=*.txt", *GROUPED, *held, "train.steps=14")
    through, moved = tmp_path / "through", tmp_path / "moved"
    for directory, world, last in ((through, 1, None), (moved, 1, 3), (moved, 2, 8), (moved, 3, None)):
        arguments = {"directory": directory, "words": (*words, *layout(world, 1)), "last": last}
        rank_pool.run(stage, world, arguments)
    assert [event["step"] for event in read_named(moved, "started")] == [0, 3, 8]
    assert read_column(moved, "step") == read_column(through, "step")
    assert worst_difference(read_column(moved), read_column(through)) < 1e-4
    used, expected = used_samples(moved), used_samples(through)
    assert {step: sorted(ids) for step, ids in used.items()} == {step: sorted(ids) for step, ids in expected.items()}
    counts = Counter(identity for ids in used.values() for identity in ids)
    assert sum(counts.values()) == 6 * len(used)
    assert len(counts) > 40


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path, text: Path, quiet_threads: None) -> None:
    words = words_of(text, "train.validate_every=4 steps", "data.workers=0", "model.dropout=0.1")
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
def test_a_worker_process_reads_the_same_groups(tmp_path: Path, text: Path, quiet_threads: None) -> None:
    found = []
    for workers in (0, 1):
        words = words_of(text, f"data.workers={workers}", "train.steps=3", "optim.warmup=0 steps")
        train_tiny(tmp_path / str(workers), lone_rank(), *words, base=BASE)
        found.append(read_column(tmp_path / str(workers)))
    assert found[0] == found[1]


def test_a_rule_of_the_data_needs_documents(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "tokens.npy", np.arange(500, dtype=np.uint16) % 200)
    words = ("data.kind=tokens", f"data.path={tmp_path / 'tokens.npy'}", *GROUPED)
    with pytest.raises(UserError) as caught:
        train_tiny(tmp_path / "run", lone_rank(), *words, base=BASE)
    assert "does not say where a document ends, and data.group_tokens = 72 takes whole documents" in str(caught.value)
    assert "set data.group_tokens = 0" in str(caught.value)
