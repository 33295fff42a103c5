"""Optimizers by name: which parameters they treat how, and which numbers they take from the run file."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_layouts import Model
from torch import nn

from shardway.errors import UserError
from shardway.models.image_models import ConvNet, ConvNetShape
from shardway.models.transformer import Transformer
from shardway.plugins import GROUPS
from shardway.runfile.schema import OptimSection
from shardway.train.optim.base import decay_groups, muon_groups
from shardway.train.optim.kinds import build_optimizer
from trained import SHAPE


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in parameters}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = ConvNet(ConvNetShape((1, 8, 8), (4,), 3))
    matrices, vectors = decay_groups(model, 0.3)
    assert names_of(model, matrices["params"]) == {"blocks.0.conv.weight", "head.weight"}
    assert names_of(model, vectors["params"]) == {"blocks.0.norm.weight", "blocks.0.norm.bias", "head.bias"}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


def test_what_is_frozen_is_left_out_and_an_empty_group_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (only,) = decay_groups(model, 0.1)
    assert only["params"] == [model.weight]


@pytest.mark.parametrize("name", [name for name in GROUPS["optimizers"].own if name != "adamw8bit"])
def test_every_parameter_is_in_one_group_once(name: str) -> None:
    model = Transformer(SHAPE)
    optimizer = build_optimizer(OptimSection(name=name), model, 0.1)  # type: ignore[arg-type]
    together = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in model.parameters())


def test_the_numbers_of_the_run_file_arrive() -> None:
    model = nn.Linear(2, 2)
    adam = build_optimizer(OptimSection(betas=[0.8, 0.99], eps=1e-6, weight_decay=0.2), model, 0.5)
    first, second = adam.param_groups
    assert (first["lr"], first["betas"], first["eps"]) == (0.5, (0.8, 0.99), 1e-6)
    assert (first["weight_decay"], second["weight_decay"]) == (0.2, 0.0)
    descent = build_optimizer(OptimSection(name="sgd", momentum=0.7, nesterov=True), model, 0.25)
    group = descent.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.7, True)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parameters_that_take_no_part_now_and_then_count_their_own_updates(name: str) -> None:
    """The numbers are torch's, with states that were loaded in between."""
    ours, theirs = (nn.ParameterList([torch.arange(1.0, 1 + size) for size in (3, 2, 4)]) for _ in range(2))
    section = OptimSection(name=name, weight_decay=0.0)  # type: ignore[arg-type]
    optimizer = build_optimizer(section, ours, 0.1)
    group = {key: optimizer.param_groups[0][key] for key in ("betas", "eps") if key in optimizer.param_groups[0]}
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    more = {"momentum": section.momentum} if name == "sgd" else group
    other = kinds[name](theirs.parameters(), lr=0.1, weight_decay=0.0, **more)
    for step, missing in enumerate([(), (0,), (0, 1), (), (2,), (), ()]):
        for at, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = two.grad = None
            if at not in missing:
                one.grad, two.grad = (torch.full_like(one, 0.5 + step + at) for _ in range(2))
        optimizer.step()
        other.step()
        if step == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = build_optimizer(section, ours, 0.1)
            optimizer.load_state_dict(saved)
    assert [optimizer.state[parameter]["step"].item() for parameter in ours] == [5, 6, 6]
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-7)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor"])
def test_a_copy_goes_on_as_its_original(name: str, copied: Callable[[Any], Any]) -> None:
    section = OptimSection(name=name, state_dtype="bf16" if name == "adamw" else "fp32")  # type: ignore[arg-type]
    model = Transformer(SHAPE)
    model.init_weights(0)
    optimizer = build_optimizer(section, model, 0.1)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()

    step(model, optimizer)
    model.zero_grad()
    other, its_optimizer = copied((model, optimizer))
    its_optimizer.load_state_dict(its_optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(other, its_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    others = [its_optimizer.state[parameter] for parameter in other.parameters()]
    assert [{name: tensor.dtype for name, tensor in each.items()} for each in others] == [
        {name: tensor.dtype for name, tensor in each.items()} for each in states
    ]


# --- what Muon takes


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_complex_parameters_are_trained_as_by_torch(name: str) -> None:
    """No fused kernel takes them."""
    weights = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    model = nn.ParameterDict({"weight": nn.Parameter(weights.clone())})
    twin = nn.Parameter(weights.clone())
    section = OptimSection.model_validate({"name": name, "weight_decay": 0.1})
    ours = build_optimizer(section, model, 0.1)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    settings = {key: value for key, value in ours.param_groups[0].items() if key in ("lr", "betas", "eps", "momentum")}
    theirs = kinds[name]([twin], weight_decay=ours.param_groups[0]["weight_decay"], **settings)
    for _ in range(3):
        for parameter, optimizer in ((model["weight"], ours), (twin, theirs)):
            parameter.grad = None
            ((parameter - 1j).abs() ** 2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(model["weight"], twin)


def test_muon_takes_matrices_and_experts_of_blocks() -> None:
    model = Model()
    matrices, others = muon_groups(model, 0.1)
    taken = {f"blocks.{i}.{name}.weight" for i in range(3) for name in ("up", "down", "experts")}
    assert names_of(model, matrices) == taken
    tables, vectors = others
    assert names_of(model, tables["params"]) == {"embedding.weight", "head.weight"}
    assert names_of(model, vectors["params"]) == {
        f"blocks.{i}.{name}" for i in range(3) for name in ("norm.weight", "up.bias")
    }
    assert (tables["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_muon_leaves_tables_inside_blocks_alone() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, bias=False), nn.Conv1d(4, 4, 3, bias=False))
    model = nn.Sequential(model)
    matrices, others = muon_groups(model, 0.1)
    assert names_of(model, matrices) == {"0.1.weight"}
    assert names_of(model, others[0]["params"]) == {"0.0.weight", "0.2.weight"}


def test_muon_has_a_rate_of_its_own_and_shows_that_of_the_rest() -> None:
    section = OptimSection(name="muon", muon_lr_factor=4.0, muon_momentum=0.8, muon_iterations=3)
    tables, vectors, matrices = build_optimizer(section, Transformer(SHAPE), 0.5).param_groups
    assert (tables["lr"], vectors["lr"], matrices["lr"]) == (0.5, 0.5, 2.0)
    assert (matrices["momentum"], matrices["iterations"], matrices["weight_decay"]) == (0.8, 3, 0.1)


def test_muon_is_refused_where_no_matrices_are_known() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(UserError, match=r'"muon" is for the matrices of a model\'s blocks, and Sequential has none'):
        build_optimizer(OptimSection(name="muon"), model, 0.1)


def test_a_part_of_a_model_without_blocks_has_adamw_alone() -> None:
    stage = Model()
    stage.blocks = nn.ModuleDict()
    optimizer = build_optimizer(OptimSection(name="muon"), stage, 0.1)
    assert [group["muon"] for group in optimizer.param_groups] == [False]


# --- 8-bit states


def test_without_torchao_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"(?s)needs torchao, which cannot be imported.*pip install"):
        build_optimizer(OptimSection(name="adamw8bit"), nn.Linear(2, 2), 0.1)


def test_eight_bits_follow_adamw_and_a_schedule() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    start, steps = torch.randn(64, 128), [torch.randn(64, 128) for _ in range(5)]
    ends = []
    for name in ("adamw", "adamw8bit"):
        model = nn.Linear(128, 64, bias=False)
        model.weight.data.copy_(start)
        optimizer = build_optimizer(OptimSection(name=name), model, 0.1)  # type: ignore[arg-type]
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its update, which takes a minute
            for number, gradient in enumerate(steps):
                optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
                model.weight.grad = gradient
                optimizer.step()
        ends.append(model.weight.detach())
    assert optimizer.state[model.weight]["exp_avg"].codes.dtype == torch.uint8
    moved, error = (ends[0] - start).norm(), (ends[1] - ends[0]).norm()
    assert 0 < error < 0.05 * moved  # 8 bits in blocks keep moments to about a hundredth
