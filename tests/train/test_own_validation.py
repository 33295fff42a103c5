"""Validation of a script of its own: ranks without rows, errors that cost no step, results that come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import shardway
from pool import ranks
from runs import Died, die_at, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, tell_steps
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train.loss import LossSum
from shardway.train.validate import Validation
from trained import whole

QUIET = ("run.device=cpu", "run.threads=1", "checkpoint.background=false", "train.validate_every=2 steps")


class Net(nn.Module):
    """Refuses a batch without rows, as `x.view(x.size(0), -1)` does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(1, 2, 3)
        self.line = nn.Linear(72, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).relu()
        return self.line(x.view(x.size(0), -1))


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


def train(
    folder: Path,
    on: Ranks,
    held_out: Any,
    loss: Callable[..., Any],
    *words: str,
    steps: int = 4,
    last: int | None = None,
    look: Callable[[int, Validation], None] = lambda step, validation: None,
    **options: Any,
) -> Validation:
    """A run with `steps` steps; `look` is called before each step and after the last."""
    with open_tiny(folder, on, *words, base=QUIET) as run:
        if last is not None:
            tell_steps(run, die_at(last))
        model = run.shard(Net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        validation = run.validation(held_out, loss, **options)
        for number, batch in enumerate(run.steps(run.loader(images(64), 8), steps, validation)):
            look(number, validation)
            run.step(model, batch, F.cross_entropy)
        look(steps, validation)
    return validation


@ranks(2)
def test_a_rank_without_rows_takes_part(rank: int, tmp_path: Path) -> None:
    """Nine held-out samples in batches of eight: the last is rank 1's alone. Also one for two ranks, and two kinds of
    loss."""
    for count, loss, shapes in (
        (9, F.cross_entropy, ((1, 2), (2, 1))),
        (1, F.cross_entropy, ((1, 2),)),
        (9, shardway.class_cross_entropy, ((2, 1),)),
    ):
        name = f"{count}-{loss.__name__}"
        alone = of_first(lambda: train(tmp_path / name, lone_rank(), images(count), loss).results)  # noqa: B023
        for shape in shapes:
            both = train(tmp_path / f"{name}-{shape}", pool_ranks(), images(count), loss, *layout(*shape))
            assert list(both.results) == list(alone) == [2, 4]
            for step in (2, 4):
                assert both.results[step] == pytest.approx(alone[step], rel=1e-5)


def of_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes while the others wait, on every rank."""
    found = [make() if pool_ranks().is_first else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def test_results_come_back_to_the_script_and_after_a_resume(tmp_path: Path, quiet_threads: None) -> None:
    seen: list[tuple[int, int, float | None]] = []

    def look(number: int, validation: Validation) -> None:
        seen.append((number, validation.step, validation.last and validation.last["loss"]))

    words = ("checkpoint.every=3 steps",)
    through = train(tmp_path / "a", lone_rank(), images(9), F.cross_entropy, *words, steps=6, look=look)
    told = {event["step"]: event["loss"] for event in read_named(tmp_path / "a", "validation")}
    assert {step: metrics["loss"] for step, metrics in through.results.items()} == told
    assert seen == [(n, n // 2 * 2, told.get(n // 2 * 2)) for n in range(7)]
    assert through.last == {"loss": told[6]}
    with pytest.raises(Died):
        train(tmp_path / "b", lone_rank(), images(9), F.cross_entropy, *words, steps=6, last=5)
    again = train(tmp_path / "b", lone_rank(), images(9), F.cross_entropy, *words, steps=6)
    assert again.results == through.results
    assert read_column(tmp_path / "b") == read_column(tmp_path / "a")


class Breaks(Exception):
    """An error of a script's own loss."""


def broken(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise Breaks("no such metric")


@pytest.mark.parametrize("words", [("checkpoint.every=2 steps",), ("checkpoint.every=100 steps",)], ids=str)
def test_a_validation_that_fails_costs_no_step_and_the_run_ends(
    words: tuple[str, ...], tmp_path: Path, quiet_threads: None
) -> None:
    """Each start comes further; the same training as without any validation."""
    for expected in (2, 4):
        with pytest.raises(Breaks):
            train(tmp_path / "a", lone_rank(), images(9), broken, *words)
        assert RunDir(tmp_path / "a").checkpoint_steps()[-1] == expected
    train(tmp_path / "a", lone_rank(), images(9), broken, *words)
    assert RunDir(tmp_path / "a").read_status()["state"] == "finished"
    assert [event["step"] for event in read_named(tmp_path / "a", "validation_failed")] == [2, 4]
    train(tmp_path / "b", lone_rank(), images(9), F.cross_entropy, *words, "train.validate_every=off")
    assert read_column(tmp_path / "a") == read_column(tmp_path / "b")


@ranks(2)
def test_an_error_on_one_rank_comes_after_the_save(rank: int, tmp_path: Path) -> None:
    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return broken(output, targets)

    with pytest.raises(Breaks):
        train(tmp_path, pool_ranks(), images(9), loss, "checkpoint.every=2 steps", *layout(2, 1))
    pool_ranks().barrier()
    assert RunDir(tmp_path).checkpoint_steps() == [2]


def test_a_validation_that_was_made_is_not_made_again(tmp_path: Path, quiet_threads: None) -> None:
    words = ("checkpoint.every=2 steps",)
    with pytest.raises(Died):
        train(tmp_path, lone_rank(), images(9), F.cross_entropy, *words, steps=6, last=4)
    train(tmp_path, lone_rank(), images(9), F.cross_entropy, *words, steps=6)
    assert [event["step"] for event in read_named(tmp_path, "started")] == [0, 4]
    assert [event["step"] for event in read_named(tmp_path, "validation")] == [2, 4, 6]


def f1_sums(output: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """Whether a sample is of class 1, as sums that can be added up."""
    guess, truth = output.argmax(1) == 1, targets == 1
    metrics = {
        "tp": (guess & truth).sum(),
        "fp": (guess & ~truth).sum(),
        "fn": (~guess & truth).sum(),
        "seen": len(truth),
    }
    return LossSum(F.cross_entropy(output, targets, reduction="sum"), len(targets), (guess == truth).sum(), metrics)


def f1(sums: dict[str, float]) -> float:
    return 2 * sums["tp"] / (2 * sums["tp"] + sums["fp"] + sums["fn"])


@ranks(2)
def test_f1_and_accuracy_of_two_ranks_are_those_of_one(rank: int, tmp_path: Path) -> None:
    for count, shape in ((33, (1, 2)), (9, (2, 1))):
        both = train(tmp_path / f"{count}", pool_ranks(), images(count), f1_sums, *layout(*shape))
        alone = of_first(lambda: train(tmp_path / f"{count} alone", lone_rank(), images(count), f1_sums).last)  # noqa: B023
        assert both.last is not None
        for name in ("tp", "fp", "fn", "seen", "accuracy"):
            assert both.last[name] == alone[name], (count, name)
        assert both.last["seen"] == count
        assert f1(both.last) == f1(alone)
    assert read_named(tmp_path / "33", "validation")[-1]["seen"] == 33


def f1_by_hand(model: nn.Module, held_out: TensorDataset) -> float:
    """In plain torch, of all samples at once, with the weights that the ranks hold together."""
    plain = Net()
    plain.load_state_dict({name: whole(each) for name, each in model.state_dict().items()})
    x, y = held_out.tensors
    with torch.no_grad():
        guess, truth = plain(x).argmax(1) == 1, y == 1
    right = int((guess & truth).sum())
    return 2 * right / int(guess.sum() + truth.sum())


@ranks(4)
def test_f1_of_four_ranks_is_that_of_one_and_the_exact_one(rank: int, tmp_path: Path) -> None:
    """While the model learns; also with fewer samples than ranks. A mean of the ranks' F1 would be another."""
    for shape, count in (((2, 2), 29), ((1, 4), 3)):
        both = f1_by_step(tmp_path / f"{shape}", pool_ranks(), count, *layout(*shape))
        if rank == 0:
            assert both == f1_by_step(tmp_path / f"{shape} alone", lone_rank(), count)
        assert list(both) == [2, 4, 6]
        assert count == 3 or len(set(both.values())) > 1
        pool_ranks().barrier()


def f1_by_step(folder: Path, on: Ranks, count: int, *words: str) -> dict[int, float]:
    """F1 after each validation, as the run says and as it is by hand, which is the same."""
    held_out, by_hand = images(count), dict[int, float]()
    with open_tiny(folder, on, *words, base=QUIET) as run:
        model = run.shard(Net())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        validation = run.validation(held_out, f1_sums)
        for batch in run.steps(run.loader(images(64), 8), 6, validation):
            if validation.step == run.step_number > 0:
                by_hand[validation.step] = f1_by_hand(model, held_out)
            run.step(model, batch, F.cross_entropy)
        by_hand[6] = f1_by_hand(model, held_out)
    assert all(sums["seen"] == count for sums in validation.results.values())
    assert {step: f1(sums) for step, sums in validation.results.items()} == by_hand
    return by_hand


def test_a_name_of_a_sum_that_is_taken_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    def loss(output: torch.Tensor, targets: torch.Tensor) -> LossSum:
        return LossSum(F.cross_entropy(output, targets, reduction="sum"), len(targets), metrics={"accuracy": 1.0})

    with pytest.raises(UserError) as failure:
        train(tmp_path, lone_rank(), images(9), loss)
    assert str(failure.value) == (
        'LossSum(metrics=...) of the loss function holds "accuracy", a name that the results of a validation have '
        "already.\n  To do: LossSum(correct=...)."
    )


class Streamed(IterableDataset[Any]):
    """The same samples, without numbers."""

    def __init__(self, count: int) -> None:
        self.samples = images(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples[index] for index in range(len(self.samples)))


@ranks(2)
def test_a_stream_is_validated_on(rank: int, tmp_path: Path) -> None:
    both = train(tmp_path / "both", pool_ranks(), Streamed(9), F.cross_entropy, *layout(1, 2))
    alone = of_first(lambda: train(tmp_path / "alone", lone_rank(), images(9), F.cross_entropy).results)
    assert both.results[4] == pytest.approx(alone[4], rel=1e-5)


def test_a_loader_of_torch_is_validated_on_as_it_samples(tmp_path: Path, quiet_threads: None) -> None:
    nine, subset = images(9), [1, 3, 4]
    some = TensorDataset(*(tensor[subset] for tensor in nine.tensors))
    expected = train(tmp_path / "a", lone_rank(), some, F.cross_entropy, steps=2).results[2]
    loaders = [
        DataLoader(nine, 2, sampler=SubsetRandomSampler(subset)),
        DataLoader(nine, batch_sampler=[[1, 3], [4]]),
        DataLoader(some, 2, shuffle=True),
        DataLoader(some, 2),
    ]
    for number, loader in enumerate(loaders):
        found = train(tmp_path / f"{number}", lone_rank(), loader, F.cross_entropy, steps=2).results[2]
        assert found == pytest.approx(expected, rel=1e-5)

    def collate(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])

    ragged = [(x, [int(y)][0]) for x, y in some]
    results = train(tmp_path / "own", lone_rank(), ragged, F.cross_entropy, steps=2, collate_fn=collate).results
    assert results[2] == pytest.approx(expected, rel=1e-5)


def test_validation_on_samples_without_targets_is_a_number(tmp_path: Path, quiet_threads: None) -> None:
    held_out = TensorDataset(images(9).tensors[0], torch.full((9,), -100))
    found = train(tmp_path, lone_rank(), held_out, F.cross_entropy).last
    assert found is not None
    assert math.isnan(found["loss"])
    assert read_named(tmp_path, "validation")[-1]["loss"] is None
