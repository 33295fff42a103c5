"""Gradients by hand: run.backward and run.clip do what plain torch does on one device, whatever the layout."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway
from pool import RankPool, ranks
from runs import Signalled, layout, lone_rank, open_tiny, pool_ranks, read_column, read_named, read_steps
from shardway.data.loader import Batch
from shardway.errors import JobError, UserError
from shardway.models.experts import MixtureShape
from shardway.models.transformer import Transformer, TransformerShape
from shardway.ranks import stop as stop_rules
from shardway.ranks.start import Ranks
from shardway.train import by_hand as by_hand_rules
from shardway.train import run as door
from shardway.train.run import LiveRun
from speed import picked, picked_pairs, thinned
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

Body = Callable[[LiveRun, nn.Module, torch.optim.Optimizer, Any], Any]
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
    loader: Any = None,
    last: int | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The whole weights at the end; `last`: the script leaves its loop after so many batches of this start."""
    with open_tiny(folder, on, *words, base=WORDS) as run:
        model = run.shard(make())
        optimizer = run.optimizer(factory, model, **(options or {"lr": 0.05, "weight_decay": 0.1}))
        batches = run.loader(data or points(), **(loader or {"batch_size": batch_size}))
        for number, batch in enumerate(run.steps(batches), start=1):
            body(run, model, optimizer, batch)
            if number == last:
                break
    return [whole(each) for each in model.parameters()]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def by_hand(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    run.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def by_step(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
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


def halves(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    rows = len(batch[0]) // 2
    for part in (slice(None, rows), slice(rows, None)):
        run.backward(loss_of(model, [each[part] for each in batch]), samples=len(batch[0][part]))
    run.clip(model, 0.3)
    optimizer.step()
    optimizer.zero_grad()


def two_losses(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Of one graph; each leaves one head out."""
    one, other = model.both(batch[0])  # type: ignore[operator]
    run.backward(F.mse_loss(one, batch[1]), retain_graph=True)
    run.backward(0.3 * F.l1_loss(other, batch[1]))
    optimizer.step()
    optimizer.zero_grad()


def two_graphs(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Both passes forward, then both backward; each leaves one head out."""
    one, other = model.both(batch[0])[0], model.both(batch[0] + 0.1)[1]  # type: ignore[operator]
    run.backward(F.mse_loss(one, batch[1]))
    run.backward(0.3 * F.l1_loss(other, batch[1]))
    run.clip(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def beside_forward(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """A method beside forward, and a parameter that gets no gradient."""
    run.backward(model.encode(batch[0]).square().mean())  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def called_twice(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    run.backward(F.mse_loss(model(batch[0]), model(batch[0] + 0.1)) + loss_of(model, batch))
    run.clip(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def targets_counted(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """A mean over targets of which each sample has another number."""
    counted = (batch[1] > 0.4).float()
    total = ((model(batch[0]) - batch[1]).square() * counted).sum()
    run.backward(shardway.LossSum(total, counted.sum()))
    optimizer.step()
    optimizer.zero_grad()


def partly_frozen(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """The script changes what is frozen while it goes on."""
    model.body.requires_grad_(run.step_number % 2 == 0)  # type: ignore[union-attr,operator]
    by_hand(run, model, optimizer, batch)


def accumulated(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """An update after every second batch."""
    run.backward(loss_of(model, batch) / 2)
    if run.step_number % 2:
        run.clip(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()


def in_turns(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """By hand in every second batch."""
    (by_hand if run.step_number % 2 else by_step)(run, model, optimizer, batch)


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


@pytest.mark.parametrize("case", picked_pairs(BODIES, NAMES), ids="-".join)
@ranks(2)
def test_on_two_ranks_gradients_are_those_of_one(rank: int, case: tuple[str, str], tmp_path: Path) -> None:
    compare(rank, BODIES[case[0]], LAYOUTS[NAMES.index(case[1])], tmp_path)


@pytest.mark.parametrize("shape", picked(WIDE, (2, 2)), ids=str)
@pytest.mark.parametrize("name", picked(["halves", "two losses", "two graphs", "called twice"], "two losses"))
@ranks(4)
def test_on_four_ranks_gradients_are_those_of_one(rank: int, name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    compare(rank, BODIES[name], shape, tmp_path, batch_size=8)


@pytest.mark.parametrize("shape", LAYOUTS, ids=NAMES)
@ranks(2)
def test_batches_by_hand_and_by_run_step_may_take_turns(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    compare(rank, in_turns, shape, tmp_path)


def compare(rank: int, body: Body, shape: tuple[int, int], tmp_path: Path, batch_size: int = 8, **options: Any) -> None:
    found = train(tmp_path / "ranks", pool_ranks(), body, *layout(*shape), batch_size=batch_size, **options)
    if rank == 0:
        expected = train(tmp_path / "one", lone_rank(), body, batch_size=batch_size, **options)
        assert near(found, expected)
        for name in ("loss", "grad_norm"):
            assert read_column(tmp_path / "ranks", name) == pytest.approx(read_column(tmp_path / "one", name), 1e-5)


# --- shares of ranks


@pytest.mark.parametrize("case", picked_pairs([5, 3], NAMES), ids=lambda case: f"{case[0]}-{case[1]}")
@ranks(2)
def test_shares_of_different_size_count_by_their_samples(rank: int, case: tuple[int, str], tmp_path: Path) -> None:
    compare(rank, by_hand, LAYOUTS[NAMES.index(case[1])], tmp_path, batch_size=case[0])


@pytest.mark.parametrize("shape", LAYOUTS, ids=NAMES)
@ranks(2)
def test_a_rank_without_samples_counts_for_nothing(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    """Of a batch of one, the first of two ranks has none: whatever its loss is."""
    batches = [[0, 1, 2, 3, 4], [5], [6, 7, 8], [9]]

    def body(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        alone = len(batches[run.step_number]) == 1
        has_none = alone and run.session.ranks.world == 2 and run.session.ranks.rank == 0
        loss = loss_of(model, batch)
        run.backward(torch.full((), math.nan) * loss if has_none else loss, samples=len(batch[0]))
        optimizer.step()
        optimizer.zero_grad()

    compare(rank, body, shape, tmp_path, loader={"batch_sampler": batches})


class Tokens(nn.Module):
    """Logits of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(x))).clone()


def tokens(counted: Callable[[int], int]) -> TensorDataset:
    x = torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, 1).clone()
    for row in range(len(y)):
        y[row, counted(row) :] = -100
    return TensorDataset(x, y)


@pytest.mark.parametrize("shape", picked(LAYOUTS, (1, 2)), ids=NAMES)
@ranks(2)
def test_a_mean_over_targets_is_one_over_all_ranks(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    def body(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        run.backward(shardway.token_cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    data = tokens(lambda row: row % 7)
    compare(rank, body, shape, tmp_path, make=Tokens, data=data)


@pytest.mark.parametrize("shape", picked(LAYOUTS, (1, 2)), ids=NAMES)
@ranks(2)
def test_a_rank_without_targets_makes_no_nan(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    """A mean over no targets at all is 0 / 0."""

    def body(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        run.backward(F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100))
        optimizer.step()
        optimizer.zero_grad()

    data = tokens(lambda row: 6 if row % 4 < 2 else 0)
    words = ("data.shuffle=false", *layout(*shape))
    found = train(tmp_path, pool_ranks(), body, *words, make=Tokens, data=data, batch_size=4)
    assert all(bool(each.isfinite().all()) for each in found)
    assert all(math.isfinite(loss) for loss in read_column(tmp_path))


# --- clipping


@pytest.mark.parametrize("shape", picked(LAYOUTS, (1, 2)), ids=NAMES)
@ranks(2)
def test_clipping_is_that_of_torch_on_one_rank(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    """By run.clip, by torch's own function on what a rank has, and by the run file."""
    norms: dict[str, list[float]] = {"run": [], "torch": [], "none": []}

    def body(kind: str) -> Body:
        def step(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
            run.backward(loss_of(model, batch))
            if kind == "torch":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                norms[kind].append(float(whole(norm)))
            elif kind == "run":
                norms[kind].append(run.clip(optimizer, 0.2))
            optimizer.step()
            optimizer.zero_grad()

        return step

    options = {"lr": 0.1}
    torchs = train(tmp_path / "t", pool_ranks(), body("torch"), *layout(*shape), factory=torch.optim.SGD, **options)
    mine = train(tmp_path / "r", pool_ranks(), body("run"), *layout(*shape), factory=torch.optim.SGD, **options)
    words = ("optim.clip=0.2", *layout(*shape))
    keys = train(tmp_path / "k", pool_ranks(), body("none"), *words, factory=torch.optim.SGD, **options)
    assert near(mine, torchs)
    assert same(mine, keys)
    assert norms["run"] == pytest.approx(norms["torch"], 1e-5)
    assert max(norms["run"]) > 0.2
    if rank == 0:
        one = train(tmp_path / "o", lone_rank(), body("torch"), factory=torch.optim.SGD, **options)
        assert near(mine, one)


# --- several models


def noise(batch: Any) -> torch.Tensor:
    return torch.sin(batch[0][:, :2] * 50)


def train_gan(folder: Path, on: Ranks, *words: str, named: bool = True, last: int | None = None) -> list[torch.Tensor]:
    with open_tiny(folder, on, *words, base=WORDS) as run:
        torch.manual_seed(11)
        generator = run.shard(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)))
        judge = run.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), name="judge")
        of_generator = run.optimizer(torch.optim.Adam, generator, lr=0.02)
        of_judge = run.optimizer(torch.optim.Adam, judge, name="judge", lr=0.05)
        for number, batch in enumerate(run.steps(run.loader(points(), batch_size=BATCH)), start=1):
            made = generator(noise(batch))
            loss = F.softplus(-judge(batch[0])).mean() + F.softplus(judge(made.detach())).mean()
            of_judge.zero_grad()
            run.backward(loss, judge if named else None)
            of_judge.step()
            of_generator.zero_grad()
            run.backward(F.softplus(-judge(made)).mean(), generator if named else None)
            of_generator.step()
            if number == last:
                break
        return [whole(each) for model in (generator, judge) for each in model.parameters()]


@pytest.mark.parametrize("case", picked_pairs(["named", "not named"], NAMES), ids="-".join)
@ranks(2)
def test_a_gan_by_hand_trains_as_on_one_rank(rank: int, case: tuple[str, str], tmp_path: Path) -> None:
    named, shape = case[0] == "named", LAYOUTS[NAMES.index(case[1])]
    found = train_gan(tmp_path / "ranks", pool_ranks(), *layout(*shape), named=named)
    if rank == 0:
        assert near(found, train_gan(tmp_path / "one", lone_rank(), named=named))
        step = read_steps(tmp_path / "ranks")[-1]
        assert set(step.get("losses", {})) == ({"judge", "model"} if named else {"model"})


# --- what ends a batch early


class Normed(nn.Module):
    """With buffers that a forward pass changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).clone()


def stopped_in(step: int, body: Body, rank: int = 0) -> Body:
    """One rank is signalled in that step."""

    def signalled(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        if run.step_number + 1 == step and run.session.ranks.rank == rank:
            run.session.signals = Signalled()  # type: ignore[assignment]
        body(run, model, optimizer, batch)

    return signalled


def on_ranks(rank: int, folder: Path, name: str, shape: tuple[int, int], stops: Sequence[int | None]) -> None:
    on = pool_ranks() if shape != (1, 1) else lone_rank()
    for stop in stops:
        body = BODIES[name] if stop is None else stopped_in(stop, BODIES[name], shape[0] * shape[1] - 1)
        make = Normed if name == "plain" else Net
        found = train(folder, on, body, *layout(*shape), make=make, batch_size=8)
    if rank == 0:
        torch.save(found, folder / "tensors.pt")


@pytest.mark.parametrize("shape", [(1, 1), *LAYOUTS], ids=["one rank", *NAMES])
@pytest.mark.parametrize("name", picked(["plain", "halves", "accumulated"], "accumulated"))
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    """Also where a stop comes between two batches whose gradients one update uses."""
    size = shape[0] * shape[1]
    for folder, stops in (("whole", (None,)), ("stopped", (1, 3, None))):
        arguments = {"folder": tmp_path / folder, "name": name, "shape": shape, "stops": stops}
        rank_pool.run(on_ranks, size, arguments)
    assert [event["step"] for event in read_named(tmp_path / "stopped", "started")] == [0, 1, 3]
    for column in ("loss", "grad_norm"):
        assert read_column(tmp_path / "stopped", column) == read_column(tmp_path / "whole", column)
    assert same(*(torch.load(tmp_path / each / "tensors.pt") for each in ("stopped", "whole")))


# --- every layout that takes a model apart


def train_transformer(
    folder: Path, on: Ranks, kind: str, shape: dict[str, Any], *words: str, steps: int = 2
) -> list[torch.Tensor]:
    """By run.step, by hand, or by hand with the loss in two parts of one graph. The second step takes what the first
    has left: momentum, the biases of experts, the numbers that dropout draws."""
    sizes = {"vocab": 32, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 32, "tied": False, **shape}
    data = torch.randint(0, 32, (32, 9), generator=torch.Generator().manual_seed(0))
    with open_tiny(folder, on, f"train.steps={steps}", *words, base=WORDS) as run:
        with torch.device("meta"):
            model: nn.Module = Transformer(TransformerShape(**sizes))
        model = run.shard(model)
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        for batch in run.steps(run.loader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=8)):
            if kind == "step":
                run.step(model, batch, shardway.token_cross_entropy)
                continue
            with run.autocast():
                loss = shardway.token_cross_entropy(model(batch[0]), batch[1])
            if kind == "parts":
                run.backward(replace(loss, total=loss.total * 0.25), retain_graph=True)
                loss = replace(loss, total=loss.total * 0.75)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return [whole(each) for each in model.parameters()]


EXPERTS = MixtureShape(experts=4, per_token=2, expert_dim=16, bias_update_rate=0.01, balance_weight=0.1)
SHAPES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.2},
    "experts, bias": {"mixture": EXPERTS},
    "experts, loss": {"mixture": replace(EXPERTS, balance="loss")},
}
SPLIT: dict[str, tuple[str, ...]] = {
    "shards": layout(1, 2),
    "replicas": layout(2, 1),
    "tensor": ("parallel.tp=2",),
    "tensor, whole logits": ("parallel.tp=2", "parallel.tp_loss=false"),
    "experts": (*layout(1, 2), "parallel.ep=2", "model.experts=4"),
    "bf16": (*layout(1, 2), "precision.compute=bf16"),
}


@pytest.mark.parametrize("case", picked_pairs(SHAPES, ["bf16", "fp32"]), ids="-".join)
def test_a_transformer_by_hand_takes_the_steps_of_run_step(
    case: tuple[str, str], tmp_path: Path, quiet_threads: None
) -> None:
    name, words = case[0], (f"precision.compute={case[1]}",)
    found = train_transformer(tmp_path / "hand", lone_rank(), "hand", SHAPES[name], *words)
    assert same(found, train_transformer(tmp_path / "step", lone_rank(), "step", SHAPES[name], *words))
    assert read_column(tmp_path / "hand") == read_column(tmp_path / "step")


ON_RANKS = [(name, way) for name in SHAPES for way in SPLIT if way != "experts" or "mixture" in SHAPES[name]]
EVERY_TRAIT = (
    ("dropout", "replicas"),
    ("dropout", "tensor"),
    ("experts, bias", "experts"),
    ("experts, loss", "tensor, whole logits"),
    ("experts, loss", "bf16"),
)


@pytest.mark.parametrize("case", picked(ON_RANKS, *EVERY_TRAIT), ids=", ".join)
@ranks(2)
def test_a_transformer_on_ranks_takes_the_steps_of_run_step(rank: int, case: tuple[str, str], tmp_path: Path) -> None:
    name, words = case[0], SPLIT[case[1]]
    found = train_transformer(tmp_path / "hand", pool_ranks(), "hand", SHAPES[name], *words)
    expected = train_transformer(tmp_path / "step", pool_ranks(), "step", SHAPES[name], *words)
    assert near(found, expected)
    for column in ("loss", "grad_norm"):
        assert read_column(tmp_path / "hand", column) == pytest.approx(read_column(tmp_path / "step", column), 1e-6)


@ranks(4)
def test_a_transformer_on_shards_of_slices_takes_the_steps_of_run_step(rank: int, tmp_path: Path) -> None:
    for number, words in enumerate((("parallel.tp=2", *layout(1, 2)), ("parallel.tp=2", *layout(2, 1)))):
        hand, step = tmp_path / f"hand{number}", tmp_path / f"step{number}"
        found = train_transformer(hand, pool_ranks(), "hand", SHAPES["dropout"], *words)
        assert near(found, train_transformer(step, pool_ranks(), "step", SHAPES["dropout"], *words))
        assert read_column(hand, "grad_norm") == pytest.approx(read_column(step, "grad_norm"), 1e-6)


# --- batches that do not count, and what a script is told


@contextlib.contextmanager
def stalled(number: int, *, on: bool) -> Iterator[None]:
    """The batch of that number does not come to this rank, while a scheduler asks for a stop."""
    fetch = door.training_batches

    def batches(*arguments: Any) -> Iterator[Batch]:
        for index, batch in enumerate(fetch(*arguments)):
            if on and index == number:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_rules, "NOTICE_S", 0.05)
        patch.setattr(stop_rules, "TICK_S", 0.02)
        patch.setattr(door, "training_batches", batches)
        yield


@pytest.mark.parametrize("shape", [(1, 1), *LAYOUTS], ids=["one rank", *NAMES])
@pytest.mark.parametrize("name", picked(["plain", "accumulated", "halves"], "accumulated"))
@ranks(2)
def test_a_batch_that_a_rank_did_not_get_changes_nothing(
    rank: int, name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Weights, buffers, schedulers, and gradients that an update was still to use."""
    on = pool_ranks() if shape != (1, 1) else lone_rank()
    if shape == (1, 1) and rank:
        return
    make = Normed if name == "plain" else Net
    losses: list[float] = []

    def attempt(folder: str) -> list[torch.Tensor]:
        with open_tiny(tmp_path / folder, on, *layout(*shape), base=WORDS) as run:
            model = run.shard(make())
            optimizer = run.optimizer(torch.optim.Adam, model, lr=0.05, weight_decay=0.1)
            scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR, optimizer, step_size=1, gamma=0.9)
            for batch in run.steps(run.loader(points(), batch_size=8)):
                before = [whole(each) for each in model.parameters()]
                BODIES[name](run, model, optimizer, batch)
                if name != "accumulated" or run.step_number % 2:
                    scheduler.step()
                if run._loop._open_step.decision.void:  # type: ignore[union-attr]
                    assert same([whole(each) for each in model.parameters()], before)
                    assert math.isnan(run.clip(model, 1.0))
                    losses.append(run.backward(torch.ones(()), samples=1))
        return [whole(each) for each in model.parameters()]

    expected = attempt("through")
    with stalled(3, on=rank == shape[0] * shape[1] - 1):
        attempt("stopped")
    assert len(losses) == 1
    assert math.isnan(losses[0])
    found = attempt("stopped")
    assert same(found, expected)
    if rank == 0:
        for column in ("step", "loss", "grad_norm", "lr"):
            assert read_column(tmp_path / "stopped", column) == read_column(tmp_path / "through", column)
        assert [event["step"] for event in read_named(tmp_path / "stopped", "step_discarded")] == [3]


@pytest.mark.parametrize("shape", [(1, 1), *LAYOUTS], ids=["one rank", *NAMES])
@pytest.mark.parametrize("name", picked(["plain", "halves", "accumulated"], "accumulated"))
@ranks(2)
def test_gradients_that_are_not_finite_change_nothing(
    rank: int, name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    on = pool_ranks() if shape != (1, 1) else lone_rank()
    if shape == (1, 1) and rank:
        return
    bad, weights = 1, list[list[torch.Tensor]]()

    def body(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        weights.append([whole(each) for each in model.parameters()])
        if run.step_number == bad and rank == shape[0] * shape[1] - 1:
            batch = [batch[0].clone(), batch[1].clone()]
            batch[1][0] = math.inf  # of the first of two halves
        BODIES[name](run, model, optimizer, batch)

    words = ("guard.non_finite=skip", *layout(*shape))
    train(tmp_path, on, body, *words, make=Normed if name == "plain" else Net, batch_size=8)
    assert all(bool(each.isfinite().all()) for each in weights[-1])
    if name != "accumulated":  # there an update uses the gradient of the batch before
        assert same(weights[bad + 1], weights[bad])
    assert not same(weights[bad + 2], weights[bad + 1]) or name == "accumulated"
    if rank == 0:
        assert [event["step"] for event in read_named(tmp_path, "step_skipped")] == [bad + 1]
        assert len(read_steps(tmp_path)) == 4


def test_without_the_guard_weights_that_are_no_numbers_end_the_run(tmp_path: Path, quiet_threads: None) -> None:
    def body(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        run.backward(loss_of(model, batch) * math.inf)
        optimizer.step()

    with pytest.raises(JobError, match="not finite"):
        train(tmp_path, lone_rank(), body)


@pytest.mark.parametrize("shape", picked([(1, 1), *LAYOUTS], (1, 1), (1, 2)), ids=["one rank", *NAMES])
@ranks(2)
def test_a_run_that_one_rank_has_stopped_is_finished(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    on = pool_ranks() if shape != (1, 1) else lone_rank()
    if shape == (1, 1) and rank:
        return

    def body(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        by_hand(run, model, optimizer, batch)
        if run.step_number == 1 and rank == shape[0] * shape[1] - 1:
            run.stop("no gain")

    stopped = train(tmp_path / "stopped", on, body, *layout(*shape), batch_size=8)
    whole_run = train(tmp_path / "two", on, by_hand, "train.steps=2", *layout(*shape), batch_size=8)
    assert same(stopped, whole_run)
    if rank == 0:
        assert read_column(tmp_path / "stopped", "step") == [1, 2]
        (end,) = read_named(tmp_path / "stopped", "finished")
        assert end["reason"] == "no gain"


def notes(folder: Path) -> list[str]:
    return [event["reason"] for event in read_named(folder, "gradients_by_hand")]


def test_a_script_is_told_what_it_may_not_mean(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        run.backward(loss_of(model, batch))

    def kept(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        run.backward(loss_of(model, batch))
        optimizer.step()

    train(tmp_path / "never", lone_rank(), never, "train.steps=101")
    (note,) = notes(tmp_path / "never")
    assert note.startswith(
        "run.backward was called for 100 batches up to step 100, and no optimizer has made an update"
    )
    train(tmp_path / "kept", lone_rank(), kept)
    (note,) = notes(tmp_path / "kept")
    assert note.startswith("the gradients that an update had used were still there, and run.backward adds to them.")
    monkeypatch.setattr(by_hand_rules, "PATIENCE", 3)
    for name in ("plain", "halves", "accumulated", "a method beside forward"):
        train(tmp_path / name, lone_rank(), BODIES[name], "train.steps=8")
        assert notes(tmp_path / name) == []
    train(tmp_path / "micro", lone_rank(), by_hand, "train.micro_batch=2")
    (note,) = notes(tmp_path / "micro")
    assert "train.micro_batch = 2 (command line) cuts nothing here" in note
    train(tmp_path / "bf16", lone_rank(), by_hand, "precision.compute=bf16")
    (note,) = notes(tmp_path / "bf16")
    assert note.startswith('precision.compute = "bf16" holds within `with run.autocast():` alone')


def test_gradients_that_are_never_cleared_go_on_with_the_same_bits(tmp_path: Path, quiet_threads: None) -> None:
    def kept(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        run.backward(loss_of(model, batch))
        optimizer.step()

    expected = train(tmp_path / "whole", lone_rank(), kept)
    train(tmp_path / "stopped", lone_rank(), kept, last=3)
    assert same(train(tmp_path / "stopped", lone_rank(), kept), expected)


def test_a_gan_that_was_stopped_ends_with_the_same_bits(tmp_path: Path, quiet_threads: None) -> None:
    expected = train_gan(tmp_path / "whole", lone_rank())
    for last in (1, 2):
        train_gan(tmp_path / "stopped", lone_rank(), last=last)
    assert same(train_gan(tmp_path / "stopped", lone_rank()), expected)


def plain_backward(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.step()


def both_kinds(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    by_hand(run, model, optimizer, batch)
    by_step(run, model, optimizer, batch)


def both_kinds_turned(run: LiveRun, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    by_step(run, model, optimizer, batch)
    by_hand(run, model, optimizer, batch)


REFUSED: dict[str, tuple[Body, tuple[str, ...], str]] = {
    "loss.backward": (
        plain_backward,
        (),
        "the loop went on without run.step for the batch of step 1, so nothing was learnt from it.\n"
        "  To do: call run.step(model, batch, loss_fn) once for each batch of run.steps; or run.backward(loss) in "
        "place of loss.backward(), and run.stop after it.",
    ),
    "run.step after it": (
        both_kinds,
        (),
        "run.step was called after run.backward for the batch of step 1.\n"
        "  To do: use one of the two for all models of a batch: run.step drops gradients that run.backward has left.",
    ),
    "run.step before it": (
        both_kinds_turned,
        (),
        "run.backward was called after run.step for the batch of step 1.\n"
        "  To do: use one of the two for all models of a batch: run.step drops gradients that run.backward has left.",
    ),
    "a loss of each sample": (
        lambda run, model, optimizer, batch: run.backward(model(batch[0]).square().mean(1)),
        (),
        "run.backward was given a tensor of shape [6] as the loss.\n"
        "  Allowed: a tensor without dimensions, the mean over the samples of this rank, or a shardway.LossSum of such "
        "a tensor. To do: run.backward(losses.mean()).",
    ),
    "a number": (
        lambda run, model, optimizer, batch: run.backward(loss_of(model, batch).item()),  # type: ignore[arg-type]
        (),
        "run.backward was given float as the loss.\n"
        "  Allowed: a tensor without dimensions, the mean over the samples of this rank, or a shardway.LossSum of such "
        "a tensor. To do: run.backward(losses.mean()).",
    ),
    "a loss of nothing": (
        lambda run, model, optimizer, batch: run.backward(loss_of(model, batch).detach()),
        (),
        "in a step of Net, no parameter that is trained took part in the loss: all that it was computed from is frozen "
        "or detached.\n"
        "  To do: let some parameters of the model have requires_grad = True, and compute the loss from its outputs "
        "without detach() or torch.no_grad().",
    ),
    "too many samples": (
        lambda run, model, optimizer, batch: run.backward(loss_of(model, batch), samples=7),
        (),
        "run.backward was given samples=7, and this rank has 6 samples of the batch.\n"
        "  Allowed: the number of samples that the loss is the mean over, at most those.",
    ),
    "two counts": (
        lambda run, model, optimizer, batch: run.backward(shardway.LossSum(loss_of(model, batch), 1), samples=6),
        (),
        "run.backward was given a LossSum and samples, and a LossSum has its own count.\n"
        "  To do: leave samples out; where the batch is cut, count the targets of this rank's whole share in each "
        "part.",
    ),
    "another model": (
        lambda run, model, optimizer, batch: run.backward(loss_of(model, batch), Net()),
        (),
        "run.backward was given a Net that run.shard has not returned.\n"
        "  To do: give it what run.shard has returned, or leave the model out.",
    ),
    "clipping a number": (
        lambda run, model, optimizer, batch: run.clip(1.0, 1.0),
        (),
        "run.clip was given a float.\n  Allowed: a model, an optimizer, or parameters. To do: run.clip(model, 1.0).",
    ),
    "a probe": (
        by_hand,
        ("guard.probe_every=2 steps",),
        "run.backward cannot be used here: guard.probe_every runs the passes of a step twice.\n"
        "  To do: use run.step(model, batch, loss_fn), or set what is named here to something else.",
    ),
    "fp16": (
        by_hand,
        ("precision.compute=fp16",),
        'run.backward cannot be used here: precision.compute = "fp16" scales the loss and looks for overflows.\n'
        "  To do: use run.step(model, batch, loss_fn), or set what is named here to something else.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str, tmp_path: Path, quiet_threads: None) -> None:
    body, words, expected = REFUSED[name]
    with pytest.raises(UserError) as failure:
        train(tmp_path, lone_rank(), body, *words)
    assert str(failure.value) == expected
    assert read_steps(tmp_path) == []


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(UserError, match="LBFGS evaluates the loss itself, as often as it wants"):
        train(tmp_path, lone_rank(), by_hand, factory=torch.optim.LBFGS, lr=0.1)


@ranks(2)
def test_compressed_gradients_are_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'parallel.compress = "fp16" is a part of DDP'):
        train(tmp_path, pool_ranks(), by_hand, *layout(2, 1), "parallel.compress=fp16")


@pytest.mark.parametrize("call", ["backward", "clip", "autocast"])
def test_calls_outside_the_loop_are_refused(call: str, tmp_path: Path, quiet_threads: None) -> None:
    with open_tiny(tmp_path, lone_rank(), base=WORDS) as run:
        model = run.shard(Net())
        calls: dict[str, Callable[[], Any]] = {
            "backward": lambda: run.backward(torch.ones(())),
            "clip": lambda: run.clip(model, 1.0),
            "autocast": lambda: run.autocast(),
        }
        with pytest.raises(UserError, match=f"run.{call} was called before"):
            calls[call]()


@thinned("words", [*SPLIT.values()][:3])
@ranks(2)
def test_two_parts_of_a_loss_have_the_gradients_of_the_whole(rank: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """Of one graph, also of one that computes its blocks again."""
    for more in ((), ("recompute.mode=full",)):
        found = train_transformer(tmp_path / f"parts{more}", pool_ranks(), "parts", {}, *words, *more)
        expected = train_transformer(tmp_path / f"hand{more}", pool_ranks(), "hand", {}, *words, *more)
        assert near(found, expected)
        for column in ("loss", "grad_norm"):
            found_column, expected_column = (
                read_column(tmp_path / f"{each}{more}", column) for each in ("parts", "hand")
            )
            assert found_column == pytest.approx(expected_column, 1e-5)


@pytest.mark.parametrize("axis", ["pp", "cp"])
@ranks(2)
def test_layouts_that_run_step_alone_takes_are_refused(rank: int, axis: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"parallel.{axis}.*\n.*run.step") as failure:
        train_transformer(tmp_path, pool_ranks(), "hand", {}, f"parallel.{axis}=2", "model.tied=false")
    assert "To do:" in str(failure.value)


@pytest.mark.parametrize("shape", picked(LAYOUTS, (1, 2)), ids=NAMES)
@ranks(2)
def test_gradients_that_wait_go_on_in_another_layout(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    train(tmp_path / "moved", pool_ranks(), stopped_in(3, accumulated), *layout(*shape), batch_size=8)
    if rank == 0:
        found = train(tmp_path / "moved", lone_rank(), accumulated, batch_size=8)
        assert near(found, train(tmp_path / "whole", lone_rank(), accumulated, batch_size=8))
        assert read_column(tmp_path / "moved", "step") == [1, 2, 3, 4]
