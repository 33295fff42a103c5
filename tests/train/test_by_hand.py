"""Gradients by hand: run.backward and run.clip do what plain torch does on one device, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway
from pool import ranks
from runs import layout, lone_rank, open_tiny, pool_ranks, read_column, read_steps
from shardway.ranks.start import Ranks
from shardway.train.run import Run
from trained import whole

WORDS = (
    "run.device=cpu",
    "run.threads=1",
    "train.steps=4",
    "train.validate_every=off",
    "checkpoint.every=off",
    "checkpoint.background=false",
)
BATCH = 6
LAYOUTS = [(2, 1), (1, 2)]
NAMES = ["replicas", "shards"]
WIDE = [(4, 1), (1, 4), (2, 2)]

Body = Callable[[Run, nn.Module, torch.optim.Optimizer, Any], Any]
"""What a script does with a batch."""


def points(rows: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator))


class Net(nn.Module):
    """Two outputs of one body; `encode` is a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head, self.other = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encode(x)
        return self.head(hidden), self.other(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x)) + 0.1 * self.other(self.encode(x))


def train(
    folder: Path,
    on: Ranks,
    body: Body,
    *words: str,
    make: Callable[[], nn.Module] = Net,
    factory: Any = torch.optim.Adam,
    batch_size: int = BATCH,
    data: Any = None,
    last: int | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The whole weights at the end; `last`: the script leaves its loop after so many batches of this start."""
    with open_tiny(folder, on, *words, base=WORDS) as run:
        model = run.shard(make())
        optimizer = run.optimizer(factory, model, **(options or {"lr": 0.05, "weight_decay": 0.1}))
        for number, batch in enumerate(run.steps(run.loader(data or points(), batch_size=batch_size)), start=1):
            body(run, model, optimizer, batch)
            if number == last:
                break
    return [whole(each) for each in model.parameters()]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def by_hand(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    run.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def by_step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    run.step(model, batch, F.mse_loss)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_a_loop_by_hand_takes_the_steps_of_run_step(tmp_path: Path, quiet_threads: None) -> None:
    assert same(train(tmp_path / "hand", lone_rank(), by_hand), train(tmp_path / "step", lone_rank(), by_step))
    facts = ("step", "loss", "grad_norm", "lr")
    hand, step = ([[e[n] for n in facts] for e in read_steps(tmp_path / name)] for name in ("hand", "step"))
    assert hand == step
    assert len(hand) == 4


def halves(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    rows = len(batch[0]) // 2
    for part in (slice(None, rows), slice(rows, None)):
        run.backward(loss_of(model, [each[part] for each in batch]), samples=len(batch[0][part]))
    run.clip(model, 0.3)
    optimizer.step()
    optimizer.zero_grad()


def two_losses(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Of one graph; each leaves one head out."""
    one, other = model.both(batch[0])  # type: ignore[operator]
    run.backward(F.mse_loss(one, batch[1]), retain_graph=True)
    run.backward(0.3 * F.l1_loss(other, batch[1]))
    optimizer.step()
    optimizer.zero_grad()


def two_graphs(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Both passes forward, then both backward; each leaves one head out."""
    one, other = model.both(batch[0])[0], model.both(batch[0] + 0.1)[1]  # type: ignore[operator]
    run.backward(F.mse_loss(one, batch[1]))
    run.backward(0.3 * F.l1_loss(other, batch[1]))
    run.clip(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def beside_forward(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """A method beside forward, and a parameter that gets no gradient."""
    run.backward(model.encode(batch[0]).square().mean())  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def called_twice(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    run.backward(F.mse_loss(model(batch[0]), model(batch[0] + 0.1)) + loss_of(model, batch))
    run.clip(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def targets_counted(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """A mean over targets of which each sample has another number."""
    counted = (batch[1] > 0.4).float()
    total = ((model(batch[0]) - batch[1]).square() * counted).sum()
    run.backward(shardway.LossSum(total, counted.sum()))
    optimizer.step()
    optimizer.zero_grad()


def partly_frozen(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """The script changes what is frozen while it goes on."""
    model.body.requires_grad_(run.step_number % 2 == 0)  # type: ignore[union-attr,operator]
    by_hand(run, model, optimizer, batch)


def accumulated(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """An update after every second batch."""
    run.backward(loss_of(model, batch) / 2)
    if run.step_number % 2:
        run.clip(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()


BODIES: dict[str, Body] = {
    "plain": by_hand,
    "halves": halves,
    "two losses": two_losses,
    "two graphs": two_graphs,
    "a method beside forward": beside_forward,
    "called twice": called_twice,
    "targets counted": targets_counted,
    "partly frozen": partly_frozen,
    "accumulated": accumulated,
}


class Plain:
    """One device without Shardway: what the methods of a run mean there."""

    def __init__(self) -> None:
        self.step_number, self.rows, self.norms = 0, 0, list[float]()

    def backward(self, loss: Any, model: Any = None, *, samples: int | None = None, retain_graph: bool = False) -> None:
        if isinstance(loss, shardway.LossSum):
            loss = loss.total / loss.count
        (loss * ((samples or self.rows) / self.rows)).backward(retain_graph=retain_graph)

    def clip(self, target: Any, most: float) -> None:
        if isinstance(target, torch.optim.Optimizer):
            target = target.param_groups[0]["params"]
        parameters = target.parameters() if isinstance(target, nn.Module) else target
        self.norms.append(float(nn.utils.clip_grad_norm_(parameters, most)))


def train_plain(body: Body, ids: Sequence[Sequence[int]], **options: Any) -> list[torch.Tensor]:
    """The same script on the same samples, in plain torch."""
    model, run, data = Net(), Plain(), points()
    optimizer = torch.optim.Adam(model.parameters(), **(options or {"lr": 0.05, "weight_decay": 0.1}))
    for number, batch in enumerate(ids):
        run.step_number, run.rows = number, len(batch)
        body(run, model, optimizer, [torch.stack(each) for each in zip(*(data[i] for i in batch), strict=True)])  # type: ignore[arg-type]
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("name", BODIES)
def test_on_one_rank_a_script_does_what_it_does_in_plain_torch(name: str, tmp_path: Path, quiet_threads: None) -> None:
    found = train(tmp_path, lone_rank(), BODIES[name], "data.record_ids=true")
    expected = train_plain(BODIES[name], read_column(tmp_path, "ids"))
    assert near(found, expected)


@pytest.mark.parametrize("shape", LAYOUTS, ids=NAMES)
@pytest.mark.parametrize("name", BODIES)
@ranks(2)
def test_on_two_ranks_gradients_are_those_of_one(rank: int, name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    compare(rank, BODIES[name], shape, tmp_path)


@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("name", ["halves", "two losses", "two graphs", "called twice"])
@ranks(4)
def test_on_four_ranks_gradients_are_those_of_one(rank: int, name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    compare(rank, BODIES[name], shape, tmp_path, batch_size=8)


def compare(rank: int, body: Body, shape: tuple[int, int], tmp_path: Path, batch_size: int = 8, **options: Any) -> None:
    found = train(tmp_path / "ranks", pool_ranks(), body, *layout(*shape), batch_size=batch_size, **options)
    if rank == 0:
        expected = train(tmp_path / "one", lone_rank(), body, batch_size=batch_size, **options)
        assert near(found, expected)
        for name in ("loss", "grad_norm"):
            assert read_column(tmp_path / "ranks", name) == pytest.approx(read_column(tmp_path / "one", name), 1e-5)
