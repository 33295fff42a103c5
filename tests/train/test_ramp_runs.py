"""Runs whose batch grows (train.global_batch as pairs): the same curve on every layout, over stops and after going
back, and what they record of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from pool import RankPool, ranks
from runs import (
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    signal_at,
    train_alone,
    train_tiny,
    worst_difference,
)
from saved_tensors import read_whole
from shardway.data.ledger import open_ledger
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.train import passes
from shardway.train.passes import BatchSplit
from shardway.watch.words import describe

RAMP = "train.global_batch=[[0, 4], [10, 7], [40, 16]]"
"""Steps at 0, 4, 8 of four samples, at 12, 19, 26, 33 of seven, from 40 on of sixteen."""
POSITIONS, SIZES = [0, 4, 8, 12, 19, 26, 33, 40, 56, 72], [4, 4, 4, 7, 7, 7, 7, 16, 16, 16]
WORDS = (RAMP, "train.steps=10", "model.tied=false", "data.record_ids=true", "checkpoint.every=100 steps")


def read_weights(folder: Path) -> dict[str, list[Any]]:
    """The tensors of the last checkpoint of a run, to the bit."""
    found = RunDir(folder).checkpoints
    return {name: tensor.tolist() for name, tensor in read_whole(max(found.iterdir())).items()}


def ids_of(folder: Path) -> list[list[int]]:
    """The samples of each step over all ranks that recorded them, each once."""
    found: dict[int, list[int]] = {}
    for rank in sorted(RunDir(folder).ranks_with_events()):
        for event in read_steps(folder, rank):
            ids = found.setdefault(event["step"], [])
            ids += [number for number in event["ids"] if number not in ids]
    return [found[step] for step in sorted(found)]


# --- layouts


def check_parity(rank: int, folder: Path, alone: Path, same: Sequence[str], split: Sequence[str]) -> None:
    """A run on two ranks has the samples and the curve of the one rank of `alone`, which is trained when it is first
    asked for."""
    train_alone(rank, alone, *WORDS, *same, once=True)
    train_tiny(folder, pool_ranks(), *WORDS, *same, *split)
    if rank == 0:
        for column in ("loss", "grad_norm"):
            found, expected = (read_column(each, column) for each in (folder, alone))
            assert worst_difference(found, expected) < 1e-4, column
        for column in ("position", "samples"):
            assert read_column(folder, column) == read_column(alone, column)
        assert ids_of(folder) == ids_of(alone)


@pytest.mark.parametrize(
    "words",
    [
        layout(2, 1),
        (*layout(1, 2), "train.micro_batch=2"),
        (*layout(1, 1), "parallel.tp=2", "train.micro_batch=8"),
        (*layout(1, 1), "parallel.pp=2", "train.micro_batch=4", "parallel.pp_micro_batches=2"),
    ],
    ids=["replicate", "shard, accumulated", "tensor", "pipeline in passes"],
)
@ranks(2)
def test_two_ranks_have_the_curve_of_one(rank: int, tmp_path: Path, references: Path, words: tuple[str, ...]) -> None:
    check_parity(rank, tmp_path / "split", references / "ramp", (), words)
    if rank == 0:
        assert read_column(tmp_path / "split", "position") == POSITIONS
        assert read_column(tmp_path / "split", "samples") == SIZES


@pytest.mark.parametrize("words", [layout(1, 2), (*layout(1, 1), "parallel.pp=2")], ids=["shard", "pipeline"])
@ranks(2)
def test_dropout_follows_the_positions(rank: int, tmp_path: Path, references: Path, words: tuple[str, ...]) -> None:
    """Where all layouts cut alike: a mask belongs to a micro-batch."""
    even = ("train.global_batch=[[0, 4], [10, 8], [40, 16]]", "train.micro_batch=2", "model.dropout=0.2")
    check_parity(rank, tmp_path / "split", references / "ramp-dropout", even, words)


def attempt(rank: int, folder: Path, replicate: int, last: int | None) -> None:
    before = signal_at(last, rank=replicate - 1) if last is not None else None
    on = pool_ranks() if replicate > 1 else lone_rank()
    train_tiny(folder, on, *WORDS, *layout(replicate, 1), before_step=before)


def train_on_one(rank_pool: RankPool, references: Path) -> Path:
    """The run on one rank of the pool, which is trained when it is first asked for."""
    if not (folder := references / "ramp").exists():
        rank_pool.run(attempt, 1, {"folder": folder, "replicate": 1, "last": None})
    return folder


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_to_the_bit(rank_pool: RankPool, tmp_path: Path, references: Path, world: int) -> None:
    """Before the batch grows, when it has just grown, and after that."""
    moved = tmp_path / "moved"
    if world == 1:
        through = train_on_one(rank_pool, references)
    else:
        through = tmp_path / "through"
        rank_pool.run(attempt, world, {"folder": through, "replicate": world, "last": None})
    for last in (2, 3, 8, None):
        rank_pool.run(attempt, world, {"folder": moved, "replicate": world, "last": last})
    assert [event["step"] for event in read_named(moved, "started")] == [0, 2, 3, 8]
    assert [event["samples_per_step"] for event in read_named(moved, "started")] == [4, 4, 7, 16]
    for column in ("position", "samples", "loss"):
        assert read_column(moved, column) == read_column(through, column)
    assert ids_of(moved) == ids_of(through)
    assert read_weights(moved) == read_weights(through)


def test_another_number_of_ranks_goes_on_with_the_same_samples(
    rank_pool: RankPool, tmp_path: Path, references: Path
) -> None:
    alone = train_on_one(rank_pool, references)
    for world, last in ((1, 2), (3, 5), (2, None)):
        rank_pool.run(attempt, world, {"folder": tmp_path / "moved", "replicate": world, "last": last})
    assert ids_of(tmp_path / "moved") == ids_of(alone)
    assert read_column(tmp_path / "moved", "position") == POSITIONS
    assert worst_difference(read_column(tmp_path / "moved"), read_column(alone)) < 1e-4


# --- the parts of a step


@pytest.mark.parametrize(
    ("samples", "ranks", "per_pass", "parts"),
    [
        (None, 1, 1, 8),
        (32, 1, 1, 8),
        (16, 1, 1, 4),
        (15, 1, 1, 4),
        (3, 1, 1, 1),
        (9, 2, 1, 2),
        (9, 1, 4, 4),
        (5, 1, 2, 2),
    ],
)
def test_a_step_is_cut_by_its_own_size(samples: int | None, ranks: int, per_pass: int, parts: int) -> None:
    assert BatchSplit(32, 4, 8, per_pass).count_parts(samples, ranks) == parts


def test_a_small_step_has_few_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_threads: None) -> None:
    taken, cut = [], passes.cut

    def watch(batch: Any, parts: int, known: int | None = None) -> Iterator[Any]:
        taken.append(parts)
        return cut(batch, parts, known)

    monkeypatch.setattr(passes, "cut", watch)
    train_tiny(tmp_path, lone_rank(), *WORDS, "train.micro_batch=4")
    assert taken == [-(-size // 4) for size in SIZES]


def test_dropout_numbers_are_the_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample of the run has a number of its own, the same on any number of ranks."""
    numbers: dict[int, list[int]] = {}
    first, share = passes.Passes.first_sample, passes.position_share
    for world in (1, 2, 3):
        for position, size in zip(POSITIONS, SIZES, strict=True):
            for rank in range(world):
                parallel: Any = type("At", (), {"mesh": type("Mesh", (), {"data_rank": rank, "data_ranks": world})})
                split = type("Of", (), {"parallel": parallel, "batch_split": BatchSplit(16, 16, 1)})
                begin = first(split, position, size)  # type: ignore[arg-type]
                numbers.setdefault(world, []).extend(range(begin, begin + len(share(size, rank, world))))
    assert numbers[1] == numbers[2] == numbers[3] == list(range(88))


# --- what a run says


def test_a_run_says_its_ramp_and_where_it_changes(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *WORDS)
    (said,) = read_named(tmp_path, "batch_ramp")
    assert (said["step"], said["ramp"]) == (0, [[0, 4], [10, 7], [40, 16]])
    changes = read_named(tmp_path, "batch_changed")
    assert [(each["step"], each["position"], each["before"], each["samples"]) for each in changes] == [
        (4, 12, 4, 7),
        (8, 40, 7, 16),
    ]
    lines = [describe(event) for event in (said, *changes)]
    assert [line.words for line in lines if line is not None] == [
        "a step has 4 samples, 7 from position 10 on, 16 from position 40 on",
        "steps have 7 samples from position 12 on, 4 before",
        "steps have 16 samples from position 40 on, 7 before",
    ]
    steps = read_steps(tmp_path)
    assert all(step["samples_per_s"] == pytest.approx(step["samples"] / step["seconds"]) for step in steps)
    assert all(step["tokens_per_s"] == pytest.approx(12 * step["samples_per_s"]) for step in steps)


def test_a_constant_batch_says_nothing(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), "train.steps=5")
    assert not read_named(tmp_path, "batch_ramp")
    assert not read_named(tmp_path, "batch_changed")


@pytest.mark.parametrize(
    "words", [("train.steps=88 samples",), ("train.steps=1056 tokens",), ("train.steps=1 epochs", "data.samples=88")]
)
def test_a_length_is_counted_by_the_ramp(tmp_path: Path, words: Sequence[str], quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *WORDS, "data.validation_fraction=0.0", *words)
    assert read_column(tmp_path, "position") == POSITIONS
    assert read_named(tmp_path, "started")[0]["total_steps"] == 10


def test_the_ramp_may_change_when_a_run_goes_on(tmp_path: Path, quiet_threads: None) -> None:
    train_tiny(tmp_path, lone_rank(), *WORDS, "train.steps=5")
    later = "train.global_batch=[[0, 4], [10, 7], [30, 12]]"
    train_tiny(tmp_path, lone_rank(), *WORDS, later)
    assert read_column(tmp_path, "position") == [*POSITIONS[:6], 33, 45, 57, 69]
    changed = read_named(tmp_path, "started")[1]["changed"]
    assert changed["train.global_batch"] == [[[0, 4], [10, 7], [40, 16]], [[0, 4], [10, 7], [30, 12]]]
    train_tiny(tmp_path, lone_rank(), *WORDS, "train.global_batch=3", "train.steps=12")
    assert read_column(tmp_path, "position")[-2:] == [81, 84]
    ledger = open_ledger(tmp_path)  # steps that were taken say their sizes, whatever the run file says now
    assert [len(ledger.at(step).ids) for step in range(1, 13)] == [4, 4, 4, 7, 7, 7, 12, 12, 12, 12, 3, 3]
    assert [ledger.at(step).ids for step in range(1, 13)] == ids_of(tmp_path)


# --- skips, going back, the ledger


def check_ledger(folder: Path) -> None:
    """What the ledger says with and without ids is what the run recorded; `where` agrees with `at`."""
    expected = ids_of(folder)
    bare = open_ledger(folder)
    bare.__dict__["_recorded"] = {}
    for ledger in (open_ledger(folder), bare):
        assert [ledger.at(step).ids for step in range(1, len(expected) + 1)] == expected
    coming = {step: bare.at(step) for step in range(len(expected) + 1, len(expected) + 20)}
    assert not any(each.taken for each in coming.values())
    for sample in range(0, len(bare.source), 5):  # type: ignore[arg-type]
        steps, following = bare.where(sample)
        assert steps == [step for step, ids in enumerate(expected, start=1) if sample in ids]
        later = next((step for step, each in coming.items() if sample in each.ids), None)
        assert following == later or (later is None and following is not None and following > max(coming))


@pytest.mark.parametrize("last", [2, 5, 10])
def test_the_ledger_follows_the_ramp(tmp_path: Path, last: int, quiet_threads: None) -> None:
    """Of steps that were taken and of those to come, with spans left out; the run dies in between."""
    skips = "data.skip=[[5, 9], [39, 44], [60, 61], [120, 140]]"
    if last < 10:
        with pytest.raises(Died):
            train_tiny(tmp_path, lone_rank(), *WORDS, skips, "checkpoint.every=2 steps", before_step=die_at(last))
    else:
        train_tiny(tmp_path, lone_rank(), *WORDS, skips)
    check_ledger(tmp_path)
    taken, ledger = ids_of(tmp_path), open_ledger(tmp_path)
    coming = [ledger.at(step).ids for step in range(len(taken) + 1, 13)]
    train_tiny(tmp_path, lone_rank(), *WORDS, skips, "train.steps=12")
    assert ids_of(tmp_path)[len(taken) :] == coming
    assert read_column(tmp_path, "samples") == [4, 4, 7, 7, 7, 7, 16, 16, 16, 16, 16, 16]


def test_a_run_goes_back_to_smaller_steps(tmp_path: Path, quiet_threads: None) -> None:
    """A spike in the first large step: its samples are left out, and the sizes follow the position again."""
    spiky = ("guard.spike=6.0", "guard.on_spike=roll_back", "guard.spike_steps=1", "guard.spike_margin=1")
    words = (RAMP.replace("40", "150"), "train.steps=34", "checkpoint.every=5 steps", "optim.schedule=constant", *spiky)
    with open_tiny(tmp_path, lone_rank(), *words, "data.record_ids=true") as run:
        torch.manual_seed(0)
        net, hit = run.shard(nn.Linear(4, 1)), [26]
        run.optimizer(torch.optim.SGD, net, lr=1e-3)
        data = TensorDataset(torch.randn(200, 4))

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return model(batch[0]).square().mean() * (1e4 if run._loop.counters.step + 1 in hit else 1.0)  # type: ignore[union-attr]

        for batch in run.steps(run.loader(data)):
            run.step(net, batch, loss)
            hit[:] = [] if read_named(tmp_path, "rolled_back") else hit
    assert read_named(tmp_path, "rolled_back")
    at, sizes = read_column(tmp_path, "position"), read_column(tmp_path, "samples")
    assert sizes == [4 if each < 10 else 7 if each < 150 else 16 for each in at]
    (span,) = RunDir(tmp_path).left_out.read()
    assert not any(span.start <= each < span.end for each in at)


# --- a script's own loop, and what it cannot have


def train_script(folder: Path, on: Any, way: str, *words: str) -> list[float]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
    base = ("run.device=cpu", "run.threads=1", "train.steps=10", "checkpoint.every=off", "train.validate_every=off")
    with open_tiny(folder, on, *words, base=base) as run:
        net = run.shard(nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD, net, lr=0.1)
        losses = []
        for batch in run.steps(run.loader(data, batch_size=5)):
            if way == "step":
                losses.append(run.step(net, batch, lambda outputs, targets: (outputs - targets).square().mean()))
                continue
            optimizer.zero_grad()
            losses.append(run.backward((net(batch[0]) - batch[1]).square().mean()))
            optimizer.step()
    return losses


@pytest.mark.parametrize("way", ["step", "backward"])
@ranks(2)
def test_a_script_of_its_own_follows_the_ramp(rank: int, tmp_path: Path, way: str) -> None:
    alone = train_script(tmp_path / f"alone-{rank}", lone_rank(), "step", RAMP)
    found = train_script(tmp_path / "both", pool_ranks(), way, RAMP, "parallel.dp_replicate=2")
    assert worst_difference(found, alone) < 1e-5
    if rank == 0:
        assert read_column(tmp_path / "both", "position") == POSITIONS


def test_the_default_of_a_script_is_one_size(tmp_path: Path, quiet_threads: None) -> None:
    train_script(tmp_path, lone_rank(), "step")
    assert set(read_column(tmp_path, "samples")) == {5}


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (partial(dict, drop_last=True), r"drop_last=True\) ends an epoch with its last whole batch.*several sizes"),
        (
            lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(60)), 4, drop_last=True)},
            r"gives batches of 4 samples, and train.global_batch is \[\[0, 4\], \[10, 7\], \[40, 16\]\] \(command ",
        ),
    ],
    ids=["drop_last", "batch_sampler"],
)
def test_what_needs_one_size_is_refused(tmp_path: Path, loader: Any, told: str) -> None:
    with open_tiny(tmp_path, lone_rank(), RAMP) as run, pytest.raises(UserError, match=told):
        run.loader(TensorDataset(torch.zeros(60, 4)), **loader())
