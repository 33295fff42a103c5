"""Samplers that hold a generator or a state: the order after a resume is that of a run without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from runs import Died, die_at, lone_rank, open_tiny, read_column, read_named, tell_steps
from speed import picked_pairs

UNSAVED = "checkpoint.every=off"
SAVED = "checkpoint.every=6 steps"
"""At steps 6 and 12: where a run that dies after 8 and 12 goes on."""
QUIET = (
    "run.device=cpu",
    "run.threads=1",
    "train.validate_every=off",
    "checkpoint.background=false",
    "data.record_ids=true",
)
ROWS = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(2)))


def unseeded() -> torch.Generator:
    """With another seed at each start of the script."""
    generator = torch.Generator()
    generator.manual_seed(random.SystemRandom().getrandbits(60))
    return generator


class Hardest(Sampler[int]):
    """Gives the rows whose losses were large first; the script tells it the losses."""

    def __init__(self) -> None:
        self.losses = torch.zeros(20)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(torch.argsort(self.losses, descending=True, stable=True).tolist())

    def update(self, ids: list[int], loss: float) -> None:
        self.losses[ids] = self.losses[ids] * 0.9 + loss

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"].clone()


class GoesOn(Sampler[int]):
    """Counts on from epoch to epoch."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            self.at += 3
            yield self.at % 20
        self.at += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Locked(GoesOn):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": random.Random(1)}


def train(
    folder: Path, given: Callable[[], dict[str, Any]], *words: str, steps: int = 14, last: int | None = None
) -> None:
    """A script of 14 steps of 4 rows, which tells its sampler of each loss; it dies after step `last`."""
    with open_tiny(folder, lone_rank(), *words, base=QUIET) as run:
        if last is not None:
            tell_steps(run, die_at(last))
        torch.manual_seed(3)
        model = run.shard(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        options = given()
        data = options.pop("data", ROWS)
        sampler = options.get("sampler")
        for (batch,) in run.steps(run.loader(data, **options), steps):
            loss = run.step(model, batch, lambda model, batch: model(batch).square().mean())
            if isinstance(sampler, Hardest):
                rows = [int((ROWS.tensors[0] == row).all(1).nonzero()[0]) for row in batch]
                sampler.update(rows, loss)


def kill_twice_and_go_on(folder: Path, given: Callable[[], dict[str, Any]], *words: str) -> None:
    """A run that dies after steps 8 and 12, and is gone on with."""
    for last in (8, 12):
        with pytest.raises(Died):
            train(folder, given, *words, last=last)
    train(folder, given, *words)


@pytest.mark.parametrize(
    "case", picked_pairs([Hardest, GoesOn], [6, 5]), ids=lambda case: f"{case[0].__name__}-{case[1]}"
)
def test_a_sampler_with_a_state_goes_on(case: tuple[type[Any], int], tmp_path: Path, quiet_threads: None) -> None:
    """Saved within an epoch, and at the end of one."""
    make, every = case
    given = lambda: {"sampler": make(), "batch_size": 4}  # noqa: E731
    train(tmp_path / "through", given, UNSAVED)
    kill_twice_and_go_on(tmp_path / "killed", given, f"checkpoint.every={every} steps")
    assert read_column(tmp_path / "killed", "ids") == read_column(tmp_path / "through", "ids")
    assert read_column(tmp_path / "killed") == read_column(tmp_path / "through")
    assert read_named(tmp_path / "killed", "data_order_noted") == []


BY_GENERATOR: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": RandomSampler(ROWS, generator=unseeded()), "batch_size": 4},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(20), generator=unseeded()), "batch_size": 4},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(ROWS, generator=unseeded()), 4, False)},
    "loader": lambda: {"data": DataLoader(ROWS, batch_size=4, shuffle=True, generator=unseeded())},
}


@pytest.mark.parametrize("kind", BY_GENERATOR)
def test_a_generator_that_is_seeded_anew_at_each_start_goes_on(kind: str, tmp_path: Path, quiet_threads: None) -> None:
    kill_twice_and_go_on(tmp_path, BY_GENERATOR[kind], SAVED)
    rows = [each for ids in read_column(tmp_path, "ids") for each in ids]
    assert [sorted(rows[at : at + 20]) for at in (0, 20)] == [list(range(20))] * 2
    assert rows[:20] != rows[20:40]


def test_weights_too(tmp_path: Path, quiet_threads: None) -> None:
    seed = [5]

    def given() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed[0])
        return {"sampler": WeightedRandomSampler(torch.arange(20.0), 20, generator=generator), "batch_size": 4}

    train(tmp_path / "through", given, UNSAVED)
    with pytest.raises(Died):
        train(tmp_path / "killed", given, SAVED, last=8)
    seed[0] = 99  # what the script draws from now on was drawn from before
    train(tmp_path / "killed", given, SAVED)
    assert read_column(tmp_path / "killed", "ids") == read_column(tmp_path / "through", "ids")


def test_a_state_that_cannot_be_saved_is_said(tmp_path: Path, quiet_threads: None) -> None:
    given = lambda: {"sampler": Locked(), "batch_size": 4}  # noqa: E731
    train(tmp_path / "through", given, UNSAVED)
    kill_twice_and_go_on(tmp_path / "killed", given, SAVED)
    assert read_column(tmp_path / "killed", "ids") == read_column(tmp_path / "through", "ids")
    (note, *_) = read_named(tmp_path / "killed", "data_order_noted")
    assert "the state of the sampler of run.loader holds a Random" in note["reason"]


class _Torchdata(Sampler[int]):
    """As the sampler that torchdata's loader makes of `shuffle=True`: always with a generator of its own."""

    replacement = False

    def __init__(self, data: Any, generator: torch.Generator | None) -> None:
        self.data_source, self.generator = data, generator or unseeded()

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=self.generator).tolist())


class StatefulLoader(DataLoader[Any]):
    """As torchdata's StatefulDataLoader, with a state of its own that counts batches."""

    def __init__(self, data: Any, *, generator: torch.Generator | None = None) -> None:
        kind = type("RandomSampler", (_Torchdata,), {"__module__": "torchdata.stateful_dataloader.sampler"})
        super().__init__(data, batch_size=4, sampler=kind(data, generator), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("seed", [None, 9])
def test_a_loader_of_torchdata_shuffles_as_one_of_torch(seed: int | None, tmp_path: Path, quiet_threads: None) -> None:
    """Where the script gives it no generator, by train.seed."""

    def given(kind: Callable[..., Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        return {"data": kind(ROWS, generator=generator)}

    train(tmp_path / "torchdata", lambda: given(StatefulLoader), UNSAVED)
    through = read_column(tmp_path / "torchdata", "ids")
    if seed is None:
        of_torch = lambda: given(lambda data, **more: DataLoader(data, 4, shuffle=True, **more))  # noqa: E731
        train(tmp_path / "torch", of_torch, UNSAVED)
        assert read_column(tmp_path / "torch", "ids") == through
    kill_twice_and_go_on(tmp_path / "killed", lambda: given(StatefulLoader), SAVED)
    assert read_column(tmp_path / "killed", "ids") == through
