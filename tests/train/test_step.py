"""One step: the gradient is that of the mean over all targets that count, however the batch was cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pool import ranks
from runs import lone_rank, pool_ranks
from shardway.data.order import position_share
from shardway.errors import UserError
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.apply import ParallelModel
from shardway.ranks.start import Ranks
from shardway.ranks.stop import StepRequests
from shardway.train.loss import IGNORED, LossSum, token_cross_entropy
from shardway.train.passes import count_rows, cut
from shardway.train.step import GuardChecks, StepContext, StepParts, StepResult, take_step
from trained import apply_shape, make_passes, whole

SHAPE = TransformerShape(vocab=11, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24)
LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(2, 2)]}


class Recorded(torch.optim.SGD):
    """Plain descent that keeps the whole gradient of its last step."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.seen: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> Any:
        self.seen = [whole(p.grad) for p in self.param_groups[0]["params"] if p.grad is not None]
        return super().step(closure)


@dataclass
class Stepped:
    """What one step of a small model did."""

    result: StepResult
    gradient: list[torch.Tensor]
    weights: list[torch.Tensor]
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Way:
    """How a step is taken: on which ranks, in which layout, in how many parts, with which limit."""

    ranks: Ranks
    shape: tuple[int, int] = (1, 1)
    accumulation: int = 1
    clip: float | None = None


def take(way: Way, model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Callable[..., Any]) -> Stepped:
    """One step of a copy of `model` on this rank's rows of a global batch."""
    applied = apply_shape(copy.deepcopy(model), way.ranks, way.shape)
    optimizer = Recorded(applied.module.parameters())
    rows = list(position_share(len(batch[0]), way.ranks.rank, way.ranks.world))
    share = tuple(tensor[rows] for tensor in batch)
    result = step_once(way, applied, optimizer, share, loss, len(batch[0]))
    return Stepped(result, optimizer.seen, [whole(p) for p in applied.module.parameters()])


def step_once(
    way: Way,
    applied: ParallelModel,
    optimizer: torch.optim.Optimizer,
    share: Any,
    loss: Callable[..., Any],
    global_batch: int,
    wishes: StepRequests | None = None,
) -> StepResult:
    """One step on this rank's share."""
    passes = make_passes(applied, way.ranks, global_batch, way.accumulation)
    parts = StepParts(passes, optimizer, way.ranks, way.clip)
    return take_step(parts, applied.call, share, loss, StepContext(0, wishes or StepRequests()))


def filled(seed: int = 1) -> Transformer:
    model = Transformer(SHAPE)
    model.init_weights(seed)
    return model


def padded_batch(rows: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; the first half of the rows has hardly a target that counts, one row has none."""
    tokens = torch.randint(SHAPE.vocab, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    targets = tokens[:, 1:].clone()
    targets[: rows // 2, 1:] = IGNORED
    targets[0] = IGNORED
    return tokens[:, :-1], targets


def true_gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient of the mean over all targets in float64, by torch alone."""
    exact = copy.deepcopy(model).double()
    loss = F.cross_entropy(exact(inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in exact.parameters()]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare as one vector, since a gradient's small entries carry the rounding of its large ones."""
    a = torch.cat([tensor.double().flatten() for tensor in found])
    b = torch.cat([tensor.double().flatten() for tensor in expected])
    assert (a - b).norm() <= tolerance * b.norm()


def check_against_float64(way: Way, rows: int) -> None:
    model, batch = filled(), padded_batch(rows)
    loss, gradient = true_gradient(model, *batch)
    stepped = take(way, model, batch, token_cross_entropy)
    assert stepped.result.targets == int((batch[1] != IGNORED).sum())
    assert stepped.result.loss == pytest.approx(loss, rel=1e-6)
    assert_close(stepped.gradient, gradient)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient))
    assert stepped.result.grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_one_rank_takes_the_true_gradient(accumulation: int) -> None:
    check_against_float64(Way(lone_rank(), accumulation=accumulation), 5)


@pytest.mark.parametrize("rows", [8, 5])
@ranks(2)
def test_two_ranks_take_the_true_gradient(rank: int, rows: int) -> None:
    for shape in LAYOUTS[2]:
        for accumulation in (1, 2, 4):
            check_against_float64(Way(pool_ranks(), shape, accumulation), rows)


@ranks(4)
def test_hybrid_ranks_take_the_true_gradient(rank: int) -> None:
    for rows, accumulation in ((8, 1), (8, 2), (6, 2), (5, 2)):
        check_against_float64(Way(pool_ranks(), (2, 2), accumulation), rows)


@ranks(2)
def test_a_clipped_step_is_that_of_clip_grad_norm(rank: int) -> None:
    model, batch = filled(), padded_batch(8)
    _, gradient = true_gradient(model, *batch)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient))
    for shape in LAYOUTS[2]:
        for clip, factor in ((norm / 4, 0.25), (norm * 4, 1.0)):
            stepped = take(Way(pool_ranks(), shape, 2, clip), model, batch, token_cross_entropy)
            assert stepped.result.grad_norm == pytest.approx(norm, rel=1e-5)
            assert_close(stepped.gradient, [g * factor for g in gradient])


@ranks(2)
def test_a_batch_without_a_target_leaves_the_weights(rank: int) -> None:
    model, (inputs, targets) = filled(), padded_batch(4)
    for shape in LAYOUTS[2]:
        stepped = take(Way(pool_ranks(), shape, clip=1.0), model, (inputs, targets.fill_(IGNORED)), token_cross_entropy)
        assert math.isnan(stepped.result.loss)
        assert stepped.result.targets == 0
        assert stepped.result.grad_norm == 0.0
        for after, before in zip(stepped.weights, model.parameters(), strict=True):
            assert torch.equal(after, before)


class Line(nn.Module):
    """One linear layer, and how large its parts of a batch were."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(3, 2)
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return self.layer(x)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)


def summed_squares(outputs: torch.Tensor, targets: torch.Tensor) -> LossSum:
    return LossSum(((outputs - targets) ** 2).mean(-1).sum(), len(targets))


def numbers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


@pytest.mark.parametrize("rows", [8, 7])
@ranks(2)
def test_a_mean_and_its_sum_give_one_step(rank: int, rows: int) -> None:
    exact = Line().double()
    x, y = numbers(rows)
    loss = squares(exact(x.double()), y.double())
    loss.backward()
    for accumulation in (1, 3):
        way = Way(pool_ranks(), (2, 1), accumulation)
        by_mean, by_sum = (take(way, Line(), (x, y), fn) for fn in (squares, summed_squares))
        assert by_mean.result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert by_sum.result.loss == pytest.approx(loss.item(), rel=1e-6)
        for stepped in (by_mean, by_sum):
            assert_close(stepped.gradient, [p.grad for p in exact.parameters()], 1e-6)


@ranks(2)
def test_ranks_may_pad_to_different_lengths(rank: int) -> None:
    """Rank 0 pads to 3 tokens, rank 1 to 9; the true gradient is that of all pairs of token and target."""
    model = filled()
    inputs, targets = padded_batch(4, length=9)
    targets[:2, 3:] = IGNORED
    loss, gradient = true_gradient(model, inputs, targets)
    applied = apply_shape(model, pool_ranks(), (2, 1))
    optimizer = Recorded(applied.module.parameters())
    mine = (inputs[:2, :3], targets[:2, :3]) if rank == 0 else (inputs[2:], targets[2:])
    result = step_once(Way(pool_ranks()), applied, optimizer, mine, token_cross_entropy, 4)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert_close(optimizer.seen, gradient)


@ranks(4)
def test_a_part_without_rows_keeps_step_and_weighs_nothing(rank: int) -> None:
    model, (x, y) = Line(), numbers(5)
    exact = Line().double()
    squares(exact(x.double()), y.double()).backward()
    stepped = take(Way(pool_ranks(), (4, 1), accumulation=2), model, (x, y), squares)
    assert stepped.result.targets == 5
    assert_close(stepped.gradient, [p.grad for p in exact.parameters()], 1e-6)


def dict_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return (batch["weight"] * ((model(batch["parts"][0]) - batch["parts"][1]) ** 2).mean(-1)).mean()


@ranks(2)
def test_a_batch_may_be_any_tree_of_tensors(rank: int) -> None:
    x, y = numbers(8)
    weight = torch.arange(8.0)
    exact = Line().double()
    loss = dict_loss(exact, {"parts": [x.double(), y.double()], "weight": weight.double()})
    loss.backward()
    applied = apply_shape(Line(), pool_ranks(), (2, 1))
    optimizer, rows = Recorded(applied.module.parameters()), slice(4 * rank, 4 * rank + 4)
    batch = {"parts": [x[rows], y[rows]], "weight": weight[rows], "name": "kept", "scale": torch.tensor(2.0)}
    result = step_once(Way(pool_ranks(), accumulation=2), applied, optimizer, batch, dict_loss, 8)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close(optimizer.seen, [p.grad for p in exact.parameters()], 1e-6)


@given(rows=st.integers(1, 40), parts=st.integers(1, 12))
def test_cut_takes_every_row_once_in_nearly_equal_parts(rows: int, parts: int) -> None:
    batch = (torch.arange(rows), {"same": torch.arange(rows) * 2, "word": "x", "scalar": torch.tensor(1)})
    micros = list(cut(batch, parts))
    assert len(micros) == parts
    real = [micro for micro in micros if micro.weight]
    assert torch.cat([micro.data[0] for micro in real]).tolist() == list(range(rows))
    assert max(micro.rows for micro in real) - min(micro.rows for micro in real) <= 1
    assert all(micro.rows == 1 and len(micro.data[0]) == 1 for micro in micros if not micro.weight)
    assert all(torch.equal(micro.data[1]["same"], micro.data[0] * 2) for micro in micros)
    assert {micro.weight for micro in micros} <= {0.0, 1.0}


def test_rows_are_counted_in_dim_0() -> None:
    assert count_rows({"a": torch.zeros(3, 5), "b": (torch.zeros(3), 7, torch.tensor(1.0))}) == 3


def test_rows_of_different_numbers_are_refused() -> None:
    with pytest.raises(UserError) as failure:
        count_rows([torch.zeros(3, 5), torch.zeros(2)])
    assert str(failure.value) == (
        "a batch must have its samples in dim 0 of every tensor, and dim 0 of its tensors has the lengths [2, 3]."
    )


def test_a_batch_without_a_tensor_is_refused() -> None:
    with pytest.raises(UserError) as failure:
        count_rows({"text": ["a", "b"]})
    assert str(failure.value) == "a batch must have its samples in dim 0 of every tensor, and it holds no tensor."


def test_wishes_come_back_as_the_decision() -> None:
    model, (x, y) = Line(), numbers(4)
    optimizer = Recorded(model.parameters())
    wishes = StepRequests(stop_signal=True, save=True)
    way = Way(lone_rank(), accumulation=2)
    result = step_once(way, apply_shape(model, lone_rank()), optimizer, (x, y), squares, 4, wishes)
    assert result.decision.stop_reason == "a signal asked for a stop"
    assert result.decision.save
    assert model.sizes == [2, 2]


def test_the_device_is_read_once_and_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device works by itself, each read lets it stand still; after the update nothing waits for it."""
    model, (inputs, targets) = filled(), padded_batch(4)
    applied = apply_shape(copy.deepcopy(model), lone_rank(), (1, 1))
    optimizer = torch.optim.SGD(applied.module.parameters(), lr=0.1)
    parts = StepParts(make_passes(applied, lone_rank(), len(inputs), 2), optimizer, lone_rank(), 1.0)
    happened: list[str] = []

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            happened.append(name)
            return work(*arguments, **named)

        return noted

    for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, noting("read", getattr(torch.Tensor, name)))
    monkeypatch.setattr(optimizer, "step", noting("update", optimizer.step))
    take_step(parts, applied.call, (inputs, targets), token_cross_entropy, StepContext(watch=GuardChecks(repeat=True)))
    assert happened == ["read", "update"]
