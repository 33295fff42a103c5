"""An update that the device is given before the host reads the numbers of its step: on the CPU, as if it were such a
device, beside one that is made afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch

from runs import lone_rank
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.apply import ParallelModel
from shardway.parallel.mesh import build_mesh
from shardway.parallel.precision import Precision
from shardway.ranks.stop import StepRequests
from shardway.runfile.schema import OptimSection, ParallelSection
from shardway.train import step as module
from shardway.train.loss import LossScale, LossSum, token_cross_entropy
from shardway.train.optim.kinds import build_optimizer
from shardway.train.passes import BatchSplit, Passes
from shardway.train.step import GuardChecks, StepContext, StepParts, StepResult, Tried, take_step

SHAPE = TransformerShape(vocab=64, dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64)
CPU, ROWS = torch.device("cpu"), 8
GUARDED = GuardChecks(repeat=True)


@dataclass
class Trained:
    """What some steps have left."""

    results: list[StepResult]
    weights: list[torch.Tensor]
    states: list[Any]
    order: list[str]


def train(
    contexts: Sequence[Callable[[], StepContext]],
    *,
    queued: bool,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer],
    clip: float | None = None,
    loss_fn: Callable[..., LossSum] = token_cross_entropy,
    empty: Sequence[int] = (),
) -> Trained:
    """Steps of two micro-batches, those of `empty` without a target; queued as on a device, or not."""
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    model.init_weights(0)
    on = lone_rank()
    parallel = ParallelModel(model, model, build_mesh(on, ParallelSection(dp_replicate=1)))
    passes = Passes(parallel, BatchSplit(ROWS, ROWS // 2, 2), Precision(None, torch.float32), CPU)
    optimizer, results, order = make(model), [], []
    optimizer.register_step_pre_hook(lambda *_: order.append("update"))

    class Read(Tried):
        @property
        def numbers(self) -> list[float]:
            order.append("numbers")
            return self.summed.tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUEUED_ON", ("cpu",) if queued else ())
        patch.setattr(module, "Tried", Read)
        parts = StepParts(passes, optimizer, on, clip)
        for number, context in enumerate(contexts):
            batch = torch.randint(64, (ROWS, 10)), torch.randint(64, (ROWS, 10))
            if number in empty:
                batch[1].fill_(-100)
            results.append(take_step(parts, model, batch, loss_fn, context()))
    states = [[*optimizer.state[each].values()] for each in model.parameters() if each in optimizer.state]
    return Trained(results, [each.detach().clone() for each in model.parameters()], states, order)


def of(**section: Any) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda model: build_optimizer(OptimSection(**section), model, 1e-2)


def with_torch(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Scaled(torch.optim.AdamW):
    """As of a library that sets the flag of torch's fused ones, and looks at `found_inf` in its own way."""

    def step(self, closure: Any = None) -> Any:
        assert not hasattr(self, "found_inf")
        return super().step(closure)


def check_same(one: Trained, other: Trained) -> None:
    """To the bit."""
    numbers = [[(each.loss, each.grad_norm, each.skipped, each.decision) for each in of.results] for of in (one, other)]
    assert repr(numbers[0]) == repr(numbers[1])
    for ours, theirs in zip((one.weights, *one.states), (other.weights, *other.states), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def guarded() -> StepContext:
    return StepContext(watch=GUARDED)


OPTIMIZERS = {
    "adamw": of(name="adamw"),
    "sgd": of(name="sgd", momentum=0.9),
    "plain sgd": of(name="sgd", momentum=0.0),
    "bf16 states": of(name="adamw", state_dtype="bf16"),
    "a script's": with_torch,
}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_queued_update_has_the_bits_of_one_that_waits(name: str, clip: float | None) -> None:
    """With one step that has no target, in which nothing may change."""
    queued, waiting = (
        train([guarded] * 4, queued=each, make=OPTIMIZERS[name], clip=clip, empty=[1]) for each in (True, False)
    )
    check_same(queued, waiting)
    assert [each.skipped for each in queued.results] == [False, True, False, False]
    assert queued.order[:2] == ["update", "numbers"]
    assert waiting.order[0] == "numbers"


@pytest.mark.parametrize("faults", [{4}, {4, 6}], ids=["a transient fault", "bad data"])
def test_numbers_that_are_not_finite_change_nothing_and_the_passes_are_repeated(faults: set[int]) -> None:
    """By calls of the loss: 0 to 3 are those of two steps, 4 and 5 the first run of the third, 6 and 7 the second."""

    def train_with_faults(*, queued: bool) -> Trained:
        calls = count()

        def faulty(outputs: torch.Tensor, targets: torch.Tensor) -> LossSum:
            found = token_cross_entropy(outputs, targets)
            return LossSum(found.total * math.inf, found.count) if next(calls) in faults else found

        return train([guarded] * 4, queued=queued, make=of(name="adamw"), clip=0.1, loss_fn=faulty)

    queued, waiting = (train_with_faults(queued=each) for each in (True, False))
    check_same(queued, waiting)
    watched = [each.watched for each in queued.results]
    assert [each is not None and each.repeated for each in watched] == [False, False, True, False]
    assert [each.skipped for each in queued.results] == [False, False, len(faults) == 2, False]


def test_a_first_step_that_is_discarded_leaves_no_state() -> None:
    void = StepContext(requests=StepRequests(void=True), watch=GUARDED)
    queued, waiting = (train([lambda: void], queued=each, make=of(name="adamw")) for each in (True, False))
    check_same(queued, waiting)
    assert queued.results[0].decision.void
    assert queued.states == []


def test_without_a_guard_weights_change_whatever_the_numbers_are() -> None:
    """The run ends then (`Guard.look_at`), as it does where the host waits first."""

    def faulty(outputs: torch.Tensor, targets: torch.Tensor) -> LossSum:
        found = token_cross_entropy(outputs, targets)
        return LossSum(found.total * math.nan, found.count)

    found = [train([StepContext], queued=each, make=of(name="adamw"), loss_fn=faulty) for each in (True, False)]
    assert all(math.isnan(each.weights[0].sum()) and not each.results[0].skipped for each in found)


@pytest.mark.parametrize(
    ("make", "context"),
    [
        (of(name="muon"), guarded),
        (of(name="adafactor"), guarded),
        (of(name="adamw", kernel="foreach"), guarded),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), guarded),
        (lambda model: Scaled(model.parameters(), lr=1e-2, fused=True), guarded),
        (of(name="adamw"), lambda: StepContext(loss_scale=LossScale())),
        (of(name="adamw"), lambda: StepContext(watch=GuardChecks(repeat=True, probe=True))),
    ],
    ids=["muon", "adafactor", "foreach", "torch's foreach", "a library's", "a loss scale", "a probe"],
)
def test_what_cannot_be_left_out_on_the_device_waits(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], context: Callable[[], StepContext]
) -> None:
    queued, waiting = (train([context] * 2, queued=each, make=make) for each in (True, False))
    assert queued.order[0] == "numbers"
    check_same(queued, waiting)
