"""Data that say where they stand: a resume goes on from their state, with the same samples and without reading what
came before; where that would not be exact they are run through, which is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pool import ranks
from runs import Died, die_at, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, tell_steps, train_line
from shardway.data.loader import digest_sample
from shardway.data.samplers import SnapshotPace, StreamSnapshot
from shardway.ranks.start import Ranks

QUIET = (
    "run.device=cpu",
    "run.threads=1",
    "train.validate_every=off",
    "checkpoint.every=6 steps",
    "checkpoint.background=false",
)
UNSAVED = "checkpoint.every=off"
READ: list[int] = []
"""The numbers of the samples that were made in this process."""


@pytest.fixture(autouse=True)
def every_batch_has_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick a step is."""
    READ.clear()
    monkeypatch.setattr(SnapshotPace, "take", lambda pace, stream: stream.snapshot())


def make_row(index: int, noise: float = 0.0) -> torch.Tensor:
    READ.append(index)
    return torch.tensor([index, 1.0, -index, index % 5]) / 40 + noise


class Counted(IterableDataset[Any]):
    """Twenty rows, which go on where they were."""

    rows = 20

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.rows:
            self.at += 1
            yield self.row(self.at - 1)
        self.at = 0

    def row(self, index: int) -> torch.Tensor:
        return make_row(index)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OwnGenerator(Counted):
    """Noise from a generator of its own, which is a tensor of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def row(self, index: int) -> torch.Tensor:
        return make_row(index, torch.rand(1, generator=self.generator).item())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class Shuffled(Counted):
    """A buffer that is drawn from, handed out as it is: the same list and the same arrays go on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[np.ndarray] = []
        self.random = np.random.RandomState(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.rows or self.buffer:
            while self.at < self.rows and len(self.buffer) < 6:
                self.buffer.append(make_row(self.at).numpy())
                self.at += 1
            one = self.buffer.pop(self.random.randint(len(self.buffer)))
            for each in self.buffer:
                each *= 1.01
            yield torch.from_numpy(one)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer, "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], state["buffer"]
        self.random.set_state(state["random"])


class Rows:
    """An iterator with a state."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == 20:
            raise StopIteration
        self.at += 1
        return make_row((self.at * 3 + self.epoch) % 20)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OfIterator(IterableDataset[Any]):
    """Its iterator has the state, as torchdata allows; each epoch has its own order."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Rows:
        return Rows(self.epoch)


class Sized(Counted):
    def __len__(self) -> int:
        return self.rows


def train(
    folder: Path, on: Ranks, data: Any, *words: str, steps: int = 12, last: int | None = None, **loader: Any
) -> list[float]:
    """The losses of a script with a linear model of four inputs; all ranks die after step `last`."""
    loader = {"batch_size": 4, **loader} if not isinstance(data, DataLoader) else loader

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    return train_line(folder, on, data, loss, *words, base=QUIET, steps=steps, last=last, **loader)


def notes(folder: Path) -> list[str]:
    return [event["reason"] for event in read_named(folder, "data_order_noted")]


def kill_and_go_on(
    folder: Path, on: Ranks, make: Callable[[], Any], *words: str, last: tuple[int, ...] = (8,)
) -> list[int]:
    """The samples that the last attempt has made, of a run that is killed; it has the losses of one that is not, and
    that saves nothing unless `words` say when."""
    train(folder / "through", on, make(), UNSAVED, *words)
    for each in last:
        with pytest.raises(Died):
            train(folder / "killed", on, make(), *words, last=each)
    READ.clear()
    train(folder / "killed", on, make(), *words)
    assert read_column(folder / "killed") == read_column(folder / "through")
    return list(READ)


MAKERS = [Counted, Sized, OwnGenerator, Shuffled, OfIterator, lambda: DataLoader(Counted(), batch_size=4)]


@pytest.mark.parametrize("make", MAKERS)
def test_a_resume_goes_on_from_the_state(make: Callable[[], Any], tmp_path: Path, quiet_threads: None) -> None:
    """The second epoch begins within the first steps; saved at step 6 with the state after step 5, which a sample has
    followed, so that 20 samples are not made again."""
    read = kill_and_go_on(tmp_path, lone_rank(), make)
    assert len(read) == 48 - 20 + (5 if make is Shuffled else 0)  # its buffer is full at the end
    assert notes(tmp_path / "killed") == []


@pytest.mark.parametrize("make", [Counted, Shuffled])
def test_after_several_kills_and_one_at_the_end_of_an_epoch(
    make: Callable[[], Any], tmp_path: Path, quiet_threads: None
) -> None:
    kill_and_go_on(tmp_path, lone_rank(), make, "checkpoint.every=5 steps", last=(6, 7, 11))


def test_a_state_that_is_too_dear_for_each_batch_costs_a_few_samples(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10_000))
    monkeypatch.setattr(SnapshotPace, "take", lambda pace, stream: None if next(calls) % 4 else stream.snapshot())
    read = kill_and_go_on(tmp_path, lone_rank(), OwnGenerator)
    assert 24 < len(read) <= 24 + 16


def test_the_pace_leaves_out_what_costs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = [100.0]
    monkeypatch.setattr("shardway.data.samplers.time.perf_counter", lambda: now[0])

    class Dear:
        def snapshot(self) -> StreamSnapshot:
            now[0] += 1.0
            return StreamSnapshot(1, 0, 1, False, b"")

    pace, stream = SnapshotPace(), Dear()
    assert pace.take(stream) is not None
    now[0] += 8.0
    assert pace.take(stream) is None
    now[0] += 2.0
    assert pace.take(stream) is not None


class Draws(Counted):
    """Noise from torch's own generator."""

    def row(self, index: int) -> torch.Tensor:
        return make_row(index, torch.rand(1).item())


class DrawsPython(Counted):
    def row(self, index: int) -> torch.Tensor:
        return make_row(index, random.random())


class DrawsNumpy(Counted):
    def row(self, index: int) -> torch.Tensor:
        return make_row(index, float(np.random.rand()))


class Order(Counted):
    """An order that is drawn when an epoch begins."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.rows).tolist()
        while self.at < self.rows:
            self.at += 1
            yield self.row(order[self.at - 1])
        self.at = 0


class ForgetsBuffer(Shuffled):
    """A shuffle whose state leaves its buffer out."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], []
        self.random.set_state(state["random"])


class Locked(Counted):
    """Its state holds what no checkpoint can."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": random.Random(1)}


class Refusing(Counted):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Draws, "draws from generators of its own alone"),
        (DrawsPython, "draws from generators of its own alone"),
        (DrawsNumpy, "draws from generators of its own alone"),
        (Order, "draws from generators of its own alone"),
        (Refusing, "draws from generators of its own alone"),
        (Locked, "its state at random is a Random, which a checkpoint cannot hold"),
    ],
)
def test_what_a_state_does_not_say_exactly_is_run_through(
    make: Callable[[], Any], why: str, tmp_path: Path, quiet_threads: None
) -> None:
    read = kill_and_go_on(tmp_path, lone_rank(), make, "checkpoint.every=6 steps")
    assert len(read) == 48
    (note,) = notes(tmp_path / "through")
    assert why in note
    assert "run through from its beginning" in note


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_does_not_lead_to_the_next_sample_is_not_used(
    workers: int, tmp_path: Path, quiet_threads: None
) -> None:
    words = (f"data.workers={workers}", "checkpoint.every=2 steps")
    read = kill_and_go_on(tmp_path, lone_rank(), ForgetsBuffer, *words, last=(4, 8))
    assert workers or len(set(read)) == 20
    assert notes(tmp_path / "through") == []
    assert any("does not lead to the sample that came next" in note for note in notes(tmp_path / "killed"))


def test_the_digest_of_a_sample_is_of_its_values() -> None:
    one: dict[str, Any] = {"text": "a", "x": torch.arange(4, dtype=torch.bfloat16), "y": [np.ones(2), None, 3]}
    same = {"text": "a", "x": torch.arange(8, dtype=torch.bfloat16)[:4].clone(), "y": [np.ones(2), None, 3]}
    assert digest_sample(one) == digest_sample(same) != ""
    others = ({**one, "text": "b"}, {**one, "x": one["x"] + 1}, {**one, "y": [np.ones(2), None, 4]})
    assert digest_sample(one) not in {digest_sample(each) for each in others}
    assert digest_sample(lambda: None) == ""


def test_a_checkpoint_without_a_digest_is_used(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions are."""
    monkeypatch.setattr("shardway.data.loader.digest_sample", lambda sample: "")
    assert len(kill_and_go_on(tmp_path, lone_rank(), OwnGenerator)) == 28


class DrawsLater(Counted):
    """Draws from the second half of each epoch on: the state of before is used, and run on from."""

    def row(self, index: int) -> torch.Tensor:
        return make_row(index, torch.rand(1).item() if index >= 10 else 0.0)


def test_a_state_of_before_the_first_draw_is_used(tmp_path: Path, quiet_threads: None) -> None:
    kill_and_go_on(tmp_path, lone_rank(), DrawsLater)
    kill_and_go_on(tmp_path / "b", lone_rank(), DrawsLater, "checkpoint.every=4 steps", last=(5, 10))


@pytest.mark.usefixtures("warm_starts")
def test_a_loader_process_reads_ahead_and_its_state_is_of_the_last_batch_that_counts(
    tmp_path: Path, quiet_threads: None
) -> None:
    words = ("data.workers=1", "data.prefetch=4")
    train(tmp_path / "here", lone_rank(), OwnGenerator(), UNSAVED)
    with pytest.raises(Died):
        train(tmp_path / "killed", lone_rank(), OwnGenerator(), *words, last=8)
    train(tmp_path / "killed", lone_rank(), OwnGenerator())
    assert read_column(tmp_path / "killed") == read_column(tmp_path / "here")
    assert sorted(set(READ[-24:])) == sorted(index % 20 for index in range(24, 44))


def test_a_dataset_that_the_script_keeps_too_is_not_read_twice(tmp_path: Path, quiet_threads: None) -> None:
    def train_kept(place: Path, last: int | None) -> None:
        with open_tiny(place, lone_rank(), base=QUIET) as run:
            if last is not None:
                tell_steps(run, die_at(last))
            torch.manual_seed(3)
            model, data = run.shard(nn.Linear(4, 1)), run.keep("data", Draws())
            run.optimizer(torch.optim.SGD, model, lr=0.01)
            for batch in run.steps(run.loader(data, batch_size=4), 12):
                run.step(model, batch, lambda model, batch: model(batch).square().mean())

    train_kept(tmp_path / "through", None)
    with pytest.raises(Died):
        train_kept(tmp_path / "killed", 8)
    train_kept(tmp_path / "killed", None)
    assert read_column(tmp_path / "killed") == read_column(tmp_path / "through")


def test_validation_reads_a_dataset_with_a_state_from_its_beginning(tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), "train.validate_every=2", "train.validation_samples=6", base=QUIET) as run:
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.0)

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean()

        validation = run.validation(Counted(), loss)
        for batch in run.steps(run.loader(Counted(), batch_size=4), 8, validation):
            run.step(model, batch, loss)
        assert len({result["loss"] for result in validation.results.values()}) == 1
        assert len(validation.results) == 4


class SplitByRank(OwnGenerator):
    """Gives each rank rows of its own."""

    def row(self, index: int) -> torch.Tensor:
        return super().row(index) + torch.distributed.get_rank()


@ranks(2)
@pytest.mark.parametrize("make", [OwnGenerator, SplitByRank])
def test_each_rank_goes_on_from_its_own_state(rank: int, make: Callable[[], Any], tmp_path: Path) -> None:
    with mock.patch.object(SnapshotPace, "take", lambda pace, stream: stream.snapshot()):
        read = kill_and_go_on(tmp_path, pool_ranks(), make, *layout(1, 2))
    # A rank that shares runs through the rows of the other; it stands at its own last one.
    assert len(read) == (28 if make is OwnGenerator else 14) + 1  # and the first, which the ranks compare


@ranks(2)
def test_on_another_number_of_ranks_it_is_run_through(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        train(tmp_path / "through", lone_rank(), OwnGenerator(), UNSAVED)
    pool_ranks().barrier()
    with pytest.raises(Died):
        train(tmp_path / "killed", pool_ranks(), OwnGenerator(), *layout(1, 2), last=8)
    if rank == 0:
        READ.clear()
        train(tmp_path / "killed", lone_rank(), OwnGenerator(), *layout(1, 1))
        assert len(READ) == 48
        assert read_column(tmp_path / "killed") == pytest.approx(read_column(tmp_path / "through"), rel=1e-5)
        assert ["2 rank(s) have saved" in note for note in notes(tmp_path / "killed")] == [True]
