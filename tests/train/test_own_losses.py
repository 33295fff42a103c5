"""Losses of a script that are no mean over samples: told once, with the remedy; a part without targets is no NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import shardway
from pool import ranks
from runs import layout, lone_rank, open_tiny, pool_ranks, read_column, read_named
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.train import run as door
from shardway.train.loss import LossSum, causal_lm_loss
from speed import picked_pairs

QUIET = (
    "run.device=cpu",
    "run.threads=1",
    "train.validate_every=off",
    "checkpoint.every=off",
    "data.shuffle=false",
)


def tokens(lengths: Callable[[int], int], count: int = 64) -> TensorDataset:
    """Rows of twelve tokens of which the first so many count."""
    x = torch.randint(0, 16, (count, 12), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, 1).clone()
    for index in range(count):
        y[index, lengths(index) :] = -100
    return TensorDataset(x, y)


def mean_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Head(nn.Linear):
    """Its output is no view, which FSDP2 would warn of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clone()


def embed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Dropout(0.2), Head(8, 16))


def train(
    folder: Path,
    on: Ranks,
    data: Any,
    loss: Callable[..., Any],
    *words: str,
    make: Callable[[], nn.Module] = embed,
    steps: int = 4,
) -> list[float]:
    losses = []
    with open_tiny(folder, on, *words, base=QUIET) as run:
        model = run.shard(make())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(data, batch_size=8), steps):
            losses.append(run.step(model, batch, loss))
    return losses


def notes(folder: Path) -> list[str]:
    return [event["reason"] for event in read_named(folder, "loss_depends_on_cut")]


UNEVEN: dict[str, Callable[[int], int]] = {
    "in turns": lambda i: 1 if i % 2 else 11,
    "rising": lambda i: 1 + i % 11,
    "one long": lambda i: 11 if i % 8 == 5 else 2,
    "some without": lambda i: 0 if i % 3 else 7,
}


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in picked_pairs(UNEVEN, ["whole", "train.micro_batch=1", "train.micro_batch=4"])
        if case.values != (("some without", "train.micro_batch=1"),)  # one by one, those that count are alike
    ],
    ids=", ".join,
)
def test_a_mean_over_targets_is_told_once_with_the_remedy(
    case: tuple[str, str], tmp_path: Path, quiet_threads: None
) -> None:
    name, words = case[0], () if case[1] == "whole" else (case[1],)
    train(tmp_path, lone_rank(), tokens(UNEVEN[name]), mean_loss, *words)
    (note,) = notes(tmp_path)
    assert "it is no mean over samples, so the result depends on train.micro_batch" in note
    assert "shardway.LossSum(total, count)" in note
    assert all(math.isfinite(loss) for loss in read_column(tmp_path))


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch[0]).mean(1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


TOLD: dict[str, Any] = {
    "contrastive": contrastive,
    "a sum": lambda model, batch: model(batch[0]).square().sum(),
    "a median": lambda model, batch: model(batch[0]).flatten(1).sum(1).median(),
}
SILENT: dict[str, Any] = {
    "a mean over samples": lambda model, batch: model(batch[0]).square().mean(),
    "a sum with its count": lambda model, batch: LossSum(model(batch[0]).square().sum(), len(batch[0])),
    "noise": lambda model, batch: (model(batch[0]) + torch.randn(len(batch[0]), 1, 1)).square().mean(),
    "written into": lambda model, batch: model(batch[0].mul_(2).remainder_(16)).square().mean(),
    "samples of equal weight": lambda model, batch: model(batch[0]).square().flatten(1).sum(1).mean(),
}


@pytest.mark.parametrize("name", [*TOLD, *SILENT])
def test_only_a_loss_that_depends_on_its_cut_is_told(name: str, tmp_path: Path, quiet_threads: None) -> None:
    """Dropout and batch norm do not make a loss depend on it: they are looked at as in a validation."""
    data = TensorDataset(tokens(lambda i: 12).tensors[0])

    def make() -> nn.Module:
        return nn.Sequential(embed(), nn.Flatten(1), nn.BatchNorm1d(192), nn.Unflatten(1, (12, 16)))

    train(tmp_path, lone_rank(), data, {**TOLD, **SILENT}[name], make=make)
    assert len(notes(tmp_path)) == (name in TOLD)


def test_looking_changes_nothing(tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        return nn.Sequential(embed(), nn.Flatten(1), nn.BatchNorm1d(192), nn.Unflatten(1, (12, 16)))

    data, words = tokens(UNEVEN["rising"]), ("train.micro_batch=3",)
    found = train(tmp_path / "a", lone_rank(), data, mean_loss, *words, make=make)
    assert len(notes(tmp_path / "a")) == 1
    monkeypatch.setattr(door, "probe_loss", lambda *arguments: None)
    assert train(tmp_path / "b", lone_rank(), data, mean_loss, *words, make=make) == found
    assert notes(tmp_path / "b") == []
    assert read_column(tmp_path / "a", "grad_norm") == read_column(tmp_path / "b", "grad_norm")


def test_a_model_that_cannot_be_evaluated_so_is_no_error(tmp_path: Path, quiet_threads: None) -> None:
    class OnlyTrains(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise RuntimeError("no predictions here")
            return super().forward(x)

    data = TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
    losses = train(tmp_path, lone_rank(), data, F.mse_loss, make=lambda: OnlyTrains(4, 1))
    assert len(losses) == 4
    assert notes(tmp_path) == []


def of_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes while the others wait, on every rank."""
    found = [make() if pool_ranks().is_first else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


@ranks(2)
def test_ranks_look_together(rank: int, tmp_path: Path) -> None:
    alone = of_first(
        lambda: train(tmp_path / "alone", lone_rank(), tokens(UNEVEN["rising"]), shardway.token_cross_entropy)
    )
    for shape in ((1, 2), (2, 1)):
        folder = tmp_path / str(shape)
        train(folder, pool_ranks(), tokens(UNEVEN["rising"]), mean_loss, *layout(*shape))
        assert len(notes(folder)) == 1
        exact = train(
            folder / "sum", pool_ranks(), tokens(UNEVEN["rising"]), shardway.token_cross_entropy, *layout(*shape)
        )
        assert exact[0] == pytest.approx(alone[0], rel=0.2)  # dropout differs
        assert notes(folder / "sum") == []


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), Head(8, 16))


class Labelled(Dataset[Any]):
    """The same, as Hugging Face has it."""

    def __init__(self, lengths: Callable[[int], int]) -> None:
        self.rows = tokens(lengths)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return {"input_ids": x, "labels": y}


def labelled_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return mean_loss(model(batch["input_ids"]), batch["labels"])


@pytest.mark.parametrize(
    "case",
    picked_pairs([1, 2, 4, 8], [mean_loss, shardway.token_cross_entropy, labelled_loss]),
    ids=lambda case: f"{case[1].__name__}-{case[0]}",
)
def test_a_part_without_targets_does_not_count(case: tuple[int, Any], tmp_path: Path, quiet_threads: None) -> None:
    """Rows 0 to 3 of each batch have none, the others seven each, so that the mean over both is one."""
    micro, loss = case

    def lengths(index: int) -> int:
        return 7 if index % 8 > 3 else 0

    data = Labelled(lengths) if loss is labelled_loss else tokens(lengths)
    found = train(tmp_path / "a", lone_rank(), data, loss, f"train.micro_batch={micro}", make=plain)
    expected = train(tmp_path / "b", lone_rank(), tokens(lengths), shardway.token_cross_entropy, make=plain)
    assert found == pytest.approx(expected, rel=1e-5)
    assert read_column(tmp_path / "a", "grad_norm") == pytest.approx(read_column(tmp_path / "b", "grad_norm"), rel=1e-4)


@ranks(2)
def test_a_rank_without_targets_does_not_count(rank: int, tmp_path: Path) -> None:
    data = tokens(lambda i: 7 if i % 8 > 3 else 0)
    both = train(tmp_path / "both", pool_ranks(), data, mean_loss, *layout(1, 2), make=plain)
    alone = of_first(lambda: train(tmp_path / "alone", lone_rank(), data, mean_loss, make=plain))
    assert both == pytest.approx(alone, rel=1e-5)


def test_a_whole_batch_without_targets_leaves_the_weights_alone(tmp_path: Path, quiet_threads: None) -> None:
    data = tokens(lambda i: 0 if i < 8 else 5)
    losses = train(tmp_path, lone_rank(), data, mean_loss, "train.micro_batch=2", make=plain)
    assert [math.isnan(loss) for loss in losses] == [True, False, False, False]


def test_the_labels_of_the_script_stay_as_they_are(tmp_path: Path, quiet_threads: None) -> None:
    kept = []

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return labelled_loss(model, batch)

    with open_tiny(tmp_path, lone_rank(), base=QUIET) as run:
        model = run.shard(plain())
        run.optimizer(torch.optim.SGD, model, lr=0.1)
        for batch in run.steps(run.loader(Labelled(lambda i: 0), batch_size=8), 1):
            run.step(model, batch, loss)
            kept.append(batch["labels"].unique().tolist())
    assert kept == [[-100]]


class Causal(nn.Module):
    """A causal language model with the interface of the Hugging Face library."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(input_ids)
        loss = mean_loss(logits[:, :-1], labels[:, 1:]) if labels is not None else None
        return type("Output", (), {"logits": logits, "loss": loss})()


def library_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


@ranks(2)
def test_the_loss_of_a_causal_model_does_not_depend_on_ranks_with_our_helper(rank: int, tmp_path: Path) -> None:
    data, words = Labelled(UNEVEN["rising"]), ("train.micro_batch=2",)
    both = train(tmp_path / "both", pool_ranks(), data, causal_lm_loss, *layout(1, 2), *words, make=Causal)
    alone = of_first(lambda: train(tmp_path / "alone", lone_rank(), data, causal_lm_loss, make=Causal))
    assert both == pytest.approx(alone, rel=1e-5)
    whole = of_first(lambda: train(tmp_path / "library", lone_rank(), data, library_loss, make=Causal))
    assert alone == pytest.approx(whole, rel=1e-5)
    assert len(notes(tmp_path / "library")) == 1
    train(tmp_path / "on ranks", pool_ranks(), data, library_loss, *layout(1, 2), make=Causal, steps=1)
    assert "shardway.causal_lm_loss in place of model(**batch).loss" in notes(tmp_path / "on ranks")[0]


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(UserError, match='needs a batch with "labels"'):
        causal_lm_loss(Causal(), {"input_ids": torch.ones(2, 3, dtype=torch.int64)})
