"""Runs on a torch Dataset of the user's own: the same samples and curve for any ranks, loader processes and stops."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pool import RankPool
from runs import (
    COMMON,
    TINY,
    layout,
    lone_rank,
    pool_ranks,
    read_column,
    read_named,
    signal_at,
    train_tiny,
    used_by_step,
    worst_difference,
)
from saved_tensors import read_whole
from shardway.data.ledger import open_ledger
from shardway.data.samplers import SnapshotPace
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from speed import picked_pairs

MODULE = '''
import random
import torch
from torch.utils.data import Dataset, IterableDataset

class Augmented(Dataset):
    """Images whose class is a bright corner, flipped and with noise that is drawn anew in each epoch."""

    def __init__(self, count=40, split="train", noise=0.5):
        self.count, self.noise = count if split == "train" else 11, noise

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        image = torch.rand(1, 8, 8) * self.noise
        label = number % 4
        image[0, 4 * (label // 2):, 4 * (label % 2):] += 1.0
        return {"image": image * random.uniform(0.8, 1.2), "label": label}

class Counting(Dataset):
    """Rows of tokens that count on from the number of the row."""

    def __len__(self):
        return 30

    def __getitem__(self, number):
        return (torch.arange(13) * (1 + number % 3) + number) % 32

class Shuffled(IterableDataset):
    """Images as above in sequence, in an order that is drawn anew in each epoch."""

    def __init__(self, split="train"):
        self.images = Augmented(split=split)

    def __iter__(self):
        for number in torch.randperm(len(self.images)).tolist():
            yield self.images[number]

READ = []

class Stateful(IterableDataset):
    """Rows as above in sequence; it says where it is. What it draws, it draws from a generator of its own."""

    def __init__(self):
        self.at, self.drawn = 0, torch.Generator().manual_seed(3)

    def __len__(self):
        return 30

    def __iter__(self):
        while self.at < 30:
            self.at += 1
            READ.append(self.at - 1)
            row = Counting()[self.at - 1]
            yield torch.cat([row[:-1], torch.randint(32, (1,), generator=self.drawn)])
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "drawn": self.drawn.get_state()}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.drawn.set_state(state["drawn"])

class Buffered(Stateful):
    """Rows as above out of a buffer, which its state leaves out; it holds one row at first."""

    def __iter__(self):
        held = []
        while self.at < 30 or held:
            while self.at < 30 and len(held) < (1 if self.at < 3 else 5):
                held.append(self.at)
                self.at += 1
            yield Counting()[held.pop(len(held) // 2)]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class ByRank(IterableDataset):
    """It gives each rank images of its own."""

    def __iter__(self):
        rank, world = 0, 1
        if torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for number in range(rank, 40, world):
            yield torch.full((1, 8, 8), number / 40), number % 4
'''
NAME = "dataset_of_a_run_test"
HELD = (
    "data.kind=dataset",
    "data.record_ids=true",
    "checkpoint.every=100 steps",
    "train.steps=12",
    "optim.schedule=constant",
)
IMAGES = (*HELD, f"data.dataset={NAME}:Augmented", "train.validate_every=6")
TOKENS = (*HELD, f"data.dataset={NAME}:Counting", "data.validation_fraction=0.1", "train.validate_every=6")

SHUFFLED = (*HELD, f"data.dataset={NAME}:Shuffled", "train.validate_every=6")
STATEFUL = (*HELD, f"data.dataset={NAME}:Stateful")


STREAMS = {"images": SHUFFLED, "tokens with a state": STATEFUL}


def without_data(base: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in base if not word.startswith(("data.kind", "data.samples")))


BASES = {
    IMAGES: without_data((*COMMON, "model.kind=mlp", "model.hidden=[16]", "model.classes=4")),  # without batch norm
    TOKENS: without_data(TINY),
}
# Nothing is validated where the dataset gives nothing for it.
BASES[SHUFFLED] = BASES[IMAGES]
BASES[STATEFUL] = tuple(word for word in BASES[TOKENS] if not word.startswith("train.validate_every"))


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    """The folder of the user's module; it can be imported here."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
        sys.modules.pop(NAME, None)


def stage(
    rank: int, directory: Path, module: Path, words: tuple[str, ...], base: tuple[str, ...], last: int | None
) -> None:
    """One attempt of a run on ranks of the pool: to its end, or until it is stopped after step `last`."""
    before = signal_at(last) if last is not None else None
    sys.path.insert(0, str(module))
    try:
        train_tiny(directory, pool_ranks(), *words, base=base, before_step=before)
    finally:
        sys.path.remove(str(module))
        sys.modules.pop(NAME, None)


def alone(directory: Path, kind: tuple[str, ...], *words: str) -> None:
    train_tiny(directory, lone_rank(), *kind, *words, base=BASES[kind])


def losses_of_validation(folder: Path) -> list[float]:
    return [event["loss"] for event in read_named(folder, "validation")]


@pytest.mark.parametrize("kind", [IMAGES, TOKENS], ids=["images", "tokens"])
def test_a_run_goes_on_exactly_on_one_and_two_ranks(
    rank_pool: RankPool, module: Path, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    through, moved = tmp_path / "through", tmp_path / "moved"
    for directory, world, last in ((through, 1, None), (moved, 1, 5), (moved, 2, 9), (moved, 1, None)):
        words = (*kind, *layout(world, 1), "data.workers=0")
        arguments = {"directory": directory, "module": module, "words": words, "base": BASES[kind], "last": last}
        rank_pool.run(stage, world, arguments)
    assert [event["step"] for event in read_named(moved, "started")] == [0, 5, 9]
    used = used_by_step(through)
    assert used_by_step(moved) == used
    assert len({number for step in used for number in step}) == (40 if kind is IMAGES else 27)
    assert worst_difference(read_column(moved), read_column(through)) < 1e-4
    assert worst_difference(losses_of_validation(moved), losses_of_validation(through)) < 1e-4
    losses = read_column(through)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("kind", [IMAGES, TOKENS], ids=["images", "tokens"])
def test_loader_processes_read_the_same(
    module: Path, tmp_path: Path, quiet_threads: None, kind: tuple[str, ...]
) -> None:
    for workers in (0, 1):
        alone(tmp_path / f"{workers}", kind, f"data.workers={workers}")
    assert used_by_step(tmp_path / "1") == used_by_step(tmp_path / "0")
    assert read_column(tmp_path / "1") == read_column(tmp_path / "0")
    assert losses_of_validation(tmp_path / "1") == losses_of_validation(tmp_path / "0")


def test_the_same_data_go_on_and_others_do_not(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    through, run = tmp_path / "through", tmp_path / "run"
    alone(through, IMAGES, "data.workers=0")
    alone(run, IMAGES, "train.steps=6", "data.workers=0")
    before = sorted(path.name for path in RunDir(run).checkpoints.iterdir())
    with pytest.raises(UserError, match="the training data is not what the first 6 steps were trained on"):
        alone(run, IMAGES, "data.settings={noise = 0.1}", "data.workers=0")
    assert sorted(path.name for path in RunDir(run).checkpoints.iterdir()) == before
    alone(run, IMAGES, "data.workers=0")
    assert used_by_step(run) == used_by_step(through)
    assert read_column(run) == read_column(through)


def test_images_learn_from_a_part_that_is_held_out(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    """A split of the settings is the only one."""
    alone(
        tmp_path / "run", IMAGES, 'data.settings={split = "train"}', "data.validation_fraction=0.25", "data.workers=0"
    )
    assert {number for step in used_by_step(tmp_path / "run") for number in step} == set(range(30))
    assert len(losses_of_validation(tmp_path / "run")) == 2


# --- read in sequence


@pytest.fixture
def every_batch_has_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick a step is."""
    monkeypatch.setattr(SnapshotPace, "take", lambda pace, stream: stream.snapshot())


def read_weights(folder: Path) -> dict[str, list[Any]]:
    """The tensors of the last checkpoint of a run, to the bit, without the state of its data: which batch that is of
    depends on how long it takes to read."""
    found = read_whole(max(RunDir(folder).checkpoints.iterdir()))
    return {name: tensor.tolist() for name, tensor in found.items() if not name.startswith("stream-")}


def notes(folder: Path) -> list[str]:
    return [event["reason"] for event in read_named(folder, "data_order_noted")]


@pytest.mark.parametrize("case", picked_pairs(STREAMS, [1, 2]), ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_stream_goes_on_to_the_bit(rank_pool: RankPool, module: Path, tmp_path: Path, case: tuple[str, int]) -> None:
    """Also after a stop at the beginning, in the first epoch and in the second."""
    kind, world = STREAMS[case[0]], case[1]
    through, moved = tmp_path / "through", tmp_path / "moved"
    words = (*kind, *layout(world, 1), "data.workers=0")
    for directory, last in ((through, None), (moved, 1), (moved, 3), (moved, 7), (moved, None)):
        arguments = {"directory": directory, "module": module, "words": words, "base": BASES[kind], "last": last}
        rank_pool.run(stage, world, arguments)
    assert [event["step"] for event in read_named(moved, "started")] == [0, 1, 3, 7]
    assert used_by_step(through) == [list(range(8 * step, 8 * step + 8)) for step in range(12)]
    assert used_by_step(moved) == used_by_step(through)
    assert read_column(moved) == read_column(through)
    assert read_weights(moved) == read_weights(through)
    assert losses_of_validation(moved) == losses_of_validation(through)
    assert len(losses_of_validation(through)) == (2 if kind is SHUFFLED else 0)


@pytest.mark.parametrize("kind", STREAMS.values(), ids=STREAMS)
def test_a_stream_goes_on_with_another_number_of_ranks(
    rank_pool: RankPool, module: Path, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    through, moved = tmp_path / "through", tmp_path / "moved"
    for directory, world, last in ((through, 1, None), (moved, 1, 5), (moved, 2, 9), (moved, 1, None)):
        words = (*kind, *layout(world, 1), "data.workers=0")
        arguments = {"directory": directory, "module": module, "words": words, "base": BASES[kind], "last": last}
        rank_pool.run(stage, world, arguments)
    assert used_by_step(moved) == used_by_step(through)
    assert worst_difference(read_column(moved), read_column(through)) < 1e-4


@pytest.mark.usefixtures("every_batch_has_its_state")
def test_the_state_of_a_stream_is_used(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    """Only the first samples are read again, before the run, and one batch: that of the last state which a sample has
    followed is step 5. The second epoch begins within step 4."""
    alone(tmp_path / "run", STATEFUL, "train.steps=5", "data.workers=0")
    read = sys.modules[NAME].READ
    read.clear()
    alone(tmp_path / "run", STATEFUL, "train.steps=7", "data.workers=0")
    assert read == [0, 0, 0, 1, 1, *range(2, 26)]


@pytest.mark.usefixtures("every_batch_has_its_state")
def test_a_state_that_leaves_something_out_is_not_used(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    words = (f"data.dataset={NAME}:Buffered", "data.workers=0")
    through, moved = tmp_path / "through", tmp_path / "moved"
    alone(through, STATEFUL, *words)
    for steps in (4, 12):
        alone(moved, STATEFUL, *words, f"train.steps={steps}")
    assert read_column(moved) == read_column(through)
    assert any("its state does not lead to the sample that came next" in note for note in notes(moved))


@pytest.mark.usefixtures("warm_starts")
def test_a_loader_process_reads_a_stream_the_same(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    for workers in (0, 3):
        alone(tmp_path / f"{workers}", SHUFFLED, f"data.workers={workers}")
    assert read_column(tmp_path / "3") == read_column(tmp_path / "0")
    assert losses_of_validation(tmp_path / "3") == losses_of_validation(tmp_path / "0")
    assert any("one loader process reads it, whatever data.workers says" in note for note in notes(tmp_path / "3"))


def test_what_has_no_effect_on_a_stream_is_shown_once(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    alone(tmp_path / "run", STATEFUL, "train.steps=2 epochs")
    assert notes(tmp_path / "run")[0] == (
        f'data.dataset "{NAME}:Stateful" is iterable, and its samples come in its own order: data.shuffle has no '
        "effect, and nothing is validated, as nothing is held out at the end of what is read in sequence."
    )
    assert len(read_column(tmp_path / "run")) == 8
    alone(tmp_path / "quiet", SHUFFLED, "data.shuffle=false")
    assert all("is iterable" not in note for note in notes(tmp_path / "quiet"))


def test_positions_of_a_stream_are_left_out_and_found_again(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    run = tmp_path / "run"
    alone(run, SHUFFLED, "data.skip=[[10, 20]]", "train.steps=4")
    assert used_by_step(run)[1] == [8, 9, *range(20, 26)]
    ledger = open_ledger(run)
    assert ledger.at(2).ids == used_by_step(run)[1]
    assert ledger.at(2).sources[-1] == f'sample 25 in the sequence of data.dataset "{NAME}:Shuffled"'
    assert ledger.at(7).ids == list(range(58, 66))
    assert [ledger.where(sample) for sample in (9, 15, 60)] == [([2], None), ([], None), ([], 7)]


def test_a_stream_with_samples_for_each_rank_goes_on(rank_pool: RankPool, module: Path, tmp_path: Path) -> None:
    """Its ranks see different first samples."""
    through, moved = tmp_path / "through", tmp_path / "moved"
    words = (*HELD, f"data.dataset={NAME}:ByRank", *layout(2, 1), "data.workers=0")
    for directory, last in ((through, None), (moved, 5), (moved, None)):
        arguments = {"directory": directory, "module": module, "words": words, "base": BASES[SHUFFLED], "last": last}
        rank_pool.run(stage, 2, arguments)
    assert read_column(moved) == read_column(through)
    with pytest.raises(UserError, match="gives each rank samples of its own, so a sample has no number that holds for"):
        open_ledger(through).at(3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train.steps=3 epochs",), 'train.steps (command line): "3 epochs", and data.dataset "{name}" has no length'),
        (
            ("checkpoint.every=1 epochs",),
            'checkpoint.every (command line): "1 epochs", and data.dataset "{name}" has no length',
        ),
        (
            ("train.validate_every=10",),
            'train.validate_every (command line): "10 steps", and data.dataset "{name}" is read in sequence, so',
        ),
        (
            ("data.validation_fraction=0.1",),
            'data.validation_fraction (command line): 0.1, and data.dataset "{name}" is read in sequence, so nothing',
        ),
        (("checkpoint.keep_best=2", "train.patience=3"), "checkpoint.keep_best (command line): 2, and data.dataset"),
        (("checkpoint.keep_best=2", "train.patience=3"), "train.patience (command line): 3, and data.dataset"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(
    module: Path, tmp_path: Path, quiet_threads: None, words: tuple[str, ...], text: str
) -> None:
    name = f"{NAME}:ByRank"
    base = tuple(word for word in BASES[SHUFFLED] if not word.startswith("train.validate_every"))
    with pytest.raises(UserError) as caught:
        train_tiny(tmp_path / "run", lone_rank(), *HELD, f"data.dataset={name}", *words, base=base)
    assert text.format(name=name) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_fraction_of_0_with_validations_is_refused(module: Path, tmp_path: Path, quiet_threads: None) -> None:
    """Of a dataset with numbers, too."""
    with pytest.raises(UserError) as caught:
        alone(tmp_path / "run", TOKENS, "data.validation_fraction=0.0")
    assert 'train.validate_every (command line): "6 steps", and nothing is held out' in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("data.kind=dataset",), "data.dataset (default): is not set"),
        (
            ("data.kind=dataset", "data.dataset=a:b", "data.path=x"),
            "data.path (command line): has no effect with data.kind",
        ),
        (
            ("data.kind=dataset", "data.dataset=a:b", "data.validation=x"),
            "data.validation (command line): has no effect",
        ),
        (("data.dataset=a:b",), 'data.dataset (command line): has no effect with data.kind = "synthetic"'),
        (
            ("data.kind=dataset", "data.dataset=a:b", "data.pack=true"),
            'true, and data.kind = "dataset" has no documents',
        ),
        (("data.kind=dataset", "data.dataset=a:b", "model.vocab=auto"), 'model.vocab (command line): "auto" follows'),
    ],
)
def test_keys_are_checked_before_anything_is_imported(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train_tiny(tmp_path / "run", lone_rank(), *words)
    assert text in str(caught.value)
