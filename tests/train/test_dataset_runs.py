"""Runs on a torch Dataset of the user's own: the same samples and curve for any ranks, loader processes and stops."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    read_steps,
    signal_at,
    train_tiny,
    worst_difference,
)
from shardway.errors import UserError
from shardway.rundir.directory import RunDir

MODULE = '''
import random
import torch
from torch.utils.data import Dataset

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
'''
NAME = "dataset_of_a_run_test"
HELD = (
    "data.kind=dataset",
    "data.record_ids=true",
    "checkpoint.every=4 steps",
    "train.steps=12",
    "optim.schedule=constant",
)
IMAGES = (*HELD, f"data.dataset={NAME}:Augmented", "train.validate_every=6")
TOKENS = (*HELD, f"data.dataset={NAME}:Counting", "data.validation_fraction=0.1", "train.validate_every=6")


def without_data(base: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in base if not word.startswith(("data.kind", "data.samples")))


BASES = {
    IMAGES: without_data((*COMMON, "model.kind=mlp", "model.hidden=[16]", "model.classes=4")),  # without batch norm
    TOKENS: without_data(TINY),
}


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


def used_by_step(folder: Path) -> list[list[int]]:
    """The samples of each step, over all ranks that took part in it, in the order of the global batch."""
    found: dict[int, list[int]] = {}
    for rank in sorted(RunDir(folder).ranks_with_events()):
        for event in read_steps(folder, rank):
            found.setdefault(event["step"], []).extend(event["ids"])
    return [found[step] for step in sorted(found)]


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
