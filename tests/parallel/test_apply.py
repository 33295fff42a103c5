"""What `apply_parallelism` promises: rank 0's weights everywhere, ties kept, buffers averaged when they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pool import ranks
from runs import lone_rank, pool_ranks
from shardway.errors import UserError
from shardway.models.contract import ModelPlan, find_plan
from shardway.models.initialise import normal_
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.axes.replicate import accumulating, average_buffers
from shardway.parallel.blocks import find_units
from shardway.parallel.mesh import build_mesh
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ParallelSection
from trained import FP32, assert_same_bits, make_parallel, whole, whole_state


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Tied(nn.Module):
    """Embedding and output layer are one weight; on request they lie inside the repeated parts."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        head.weight = embedding.weight
        middle = [Layer(), Layer()]
        self.parts = nn.Sequential(embedding, *middle, head) if inside else nn.Sequential(*middle)
        self.ends = nn.ModuleDict() if inside else nn.ModuleDict({"first": embedding, "last": head})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.ends:
            return self.parts(tokens)
        return self.ends["last"](self.parts(self.ends["first"](tokens)))

    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            normal_(parameter, seed=seed, name=name, std=0.5)


def tied_pair(model: nn.Module) -> list[nn.Parameter]:
    shape = torch.Size([16, 8])
    return [p for _, p in model.named_parameters(remove_duplicate=False) if p.shape == shape]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def train_one(model: nn.Module, summed_over: int = 1) -> float:
    """One step of plain descent; the loss before it. Shards add the gradients of their ranks up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(12).reshape(3, 4)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    (loss / summed_over).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make_inside() -> Tied:
    torch.manual_seed(0)
    return Tied(inside=True)


def make_outside() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.mark.parametrize("make", [make_inside, make_outside, on_meta])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_tied_weights_stay_one(rank: int, shape: tuple[int, int], make: Callable[[], nn.Module]) -> None:
    """Both ends take the same weight and learn together, as they do on one rank."""
    alone, together = make_parallel(make(), lone_rank()), make_parallel(make(), pool_ranks(), shape)
    for model in (alone, together):
        first, last = tied_pair(model)
        assert first is last
    losses = [(train_one(together, shape[1]), train_one(alone)) for _ in range(3)]
    for found, expected_loss in losses:
        assert found == pytest.approx(expected_loss, rel=1e-5)
    first, last = tied_pair(together)
    assert torch.equal(whole(first), whole(last))


class Buffers(nn.Module):
    """Weights in an uncommon memory format and buffers of every sort that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.rand(4, 4) > 0.5)
        self.register_buffer("turns", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("table", torch.randn(5, 3).t())
        self.register_buffer("narrow", torch.randn(3).bfloat16())
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_every_rank_gets_what_rank_0_has(rank: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    expected = whole_state(Buffers(), None)
    torch.manual_seed(rank)
    model = make_parallel(Buffers(), pool_ranks(), shape)
    assert_same_bits(whole_state(model, None), expected)


def test_a_process_alone_keeps_its_model() -> None:
    torch.manual_seed(3)
    model = Buffers()
    before = whole_state(model, None)
    assert make_parallel(model, lone_rank()) is model
    assert_same_bits(whole_state(model, None), before)


@ranks(3)
def test_running_statistics_become_their_mean_and_constants_stay(rank: int) -> None:
    """A third of three equal numbers is not always that number; a table of constants must not drift by it."""
    model = nn.Module()
    constant = torch.linspace(0.1, 7.3, 997)
    model.register_buffer("table", constant.clone())
    model.register_buffer("running", torch.full((3,), float(rank)))
    model.register_buffer("batches", torch.tensor(rank))
    model.register_buffer("narrow", constant.bfloat16())
    mesh = build_mesh(pool_ranks(), ParallelSection(dp_replicate=3, dp_shard=1))
    for _ in range(2):
        average_buffers(model, mesh)
        assert torch.equal(model.running, torch.ones(3))
        assert torch.equal(model.table, constant)
        assert torch.equal(model.narrow, constant.bfloat16())
        assert model.batches.item() == rank


class Planned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(k): Layer() for k in range(3)})
        self.extra = nn.Sequential(Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.extra(x)

    def plan(self) -> ModelPlan:
        return ModelPlan(blocks=("layers.*",))


def names_of(model: nn.Module, units: list[nn.Module]) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in units]


def test_units_are_those_of_the_plan() -> None:
    model = Planned()
    assert names_of(model, find_units(model, find_plan(model))) == ["layers.0", "layers.1", "layers.2"]


def test_units_without_a_plan_are_the_outermost_repeated_parts() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    model = nn.ModuleDict({"body": inner, "list": nn.ModuleList([Layer()]), "end": nn.Linear(2, 2)})
    assert names_of(model, find_units(model, find_plan(model))) == ["body.0", "body.1", "list.0"]
    assert find_units(nn.Linear(2, 2), None) == []


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("reshard", [True, False])
@ranks(2)
def test_units_are_sharded_as_the_run_file_says(rank: int, prefetch: int, reshard: bool) -> None:
    section = ParallelSection(dp_replicate=1, dp_shard=2, prefetch=prefetch, reshard_after_forward=reshard)
    torch.manual_seed(0)
    model = apply_parallelism(
        Planned(), build_mesh(pool_ranks(), section), torch.device("cpu"), ApplyOptions(section, FP32)
    ).call
    torch.manual_seed(0)
    alone = Planned()
    assert isinstance(model, FSDPModule)
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == [
        "",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    for parameter in model.parameters():
        assert parameter.to_local().numel() * 2 == parameter.numel()  # type: ignore[attr-defined]
    x = torch.randn(2, 8)
    assert torch.equal(model(x), alone(x))


@ranks(2)
def test_gradients_travel_after_the_last_micro_batch(rank: int) -> None:
    """Before it each replica holds its own sum, after it all hold the mean of the sums."""
    model = make_parallel(nn.Linear(1, 1, bias=False), pool_ranks(), (2, 1))
    assert isinstance(model, DistributedDataParallel)
    for last, factor in ((False, 1.0), (True, 2.0)):
        with accumulating(model, last=last):
            model(torch.full((1, 1), factor * (rank + 1))).sum().backward()
        (weight,) = model.parameters()
        expected = 3.0 * 1.5 if last else rank + 1.0
        assert weight.grad is not None
        assert weight.grad.item() == expected


def test_a_frozen_model_needs_no_replication() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert make_parallel(frozen, lone_rank()) is frozen


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@ranks(2)
def test_a_parameter_without_dims_is_replicated_but_not_sharded(rank: int) -> None:
    replicas = make_parallel(Scaled(), pool_ranks(), (2, 1))
    assert replicas(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(UserError) as failure:
        make_parallel(Scaled(), pool_ranks(), (1, 2))
    assert str(failure.value) == (
        "the parameter scale of Scaled has no dimension, so it cannot be split over parallel.dp_shard.\n"
        "  To do: make it a tensor of one element (`torch.zeros(1)`), or set parallel.dp_shard = 1."
    )


def refusal(model: nn.Module, on: Ranks) -> str:
    with pytest.raises(UserError) as failure:
        make_parallel(model, on)
    return str(failure.value)


def test_a_model_partly_on_meta_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert refusal(model, lone_rank()) == (
        "Sequential is partly on the meta device (1.weight and 1 more are, of 4 tensors).\n"
        "  To do: build the whole model under one `with torch.device(...)`."
    )


def test_a_model_on_meta_without_a_filler_is_refused() -> None:
    assert refusal(nn.Linear(2, 2, device="meta"), lone_rank()) == (
        "Linear was built on the meta device and has no init_weights(seed) that fills it.\n"
        "  To do: build it on a real device, or give it that method."
    )


class Unsummed(nn.Module):
    """A plan that names no region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def plan(self) -> ModelPlan:
        return ModelPlan(tensor={"up": "column", "down": "row"})


@ranks(2)
def test_a_split_module_outside_of_every_region_is_refused(rank: int) -> None:
    """Each rank would go on with its own part of the sum, and nothing would say so."""
    on, section = pool_ranks(), ParallelSection(dp_replicate=1, tp=2)
    with pytest.raises(UserError, match=r"splits up \('column'\), which is in none of its regions"):
        apply_parallelism(Unsummed(), build_mesh(on, section), on.device, ApplyOptions(section, FP32))
