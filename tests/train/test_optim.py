"""Optimizers by name: who decays, which numbers they take, and that each runs on whole and on sharded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pool import ranks
from runs import lone_rank, pool_ranks
from shardway.models.convnet import ConvNet, ConvNetShape
from shardway.models.transformer import Transformer
from shardway.runfile.schema import OptimSection
from shardway.train.optim import OPTIMIZERS, build_optimizer, decay_groups
from trained import SHAPE, make_parallel, whole


def test_matrices_decay_and_vectors_do_not() -> None:
    model = ConvNet(ConvNetShape((1, 8, 8), (4,), 3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, vectors = decay_groups(model, 0.3)
    assert {names[p] for p in matrices["params"]} == {"blocks.0.conv.weight", "head.weight"}
    assert {names[p] for p in vectors["params"]} == {"blocks.0.norm.weight", "blocks.0.norm.bias", "head.bias"}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


def test_what_is_frozen_is_left_out_and_an_empty_group_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (only,) = decay_groups(model, 0.1)
    assert only["params"] == [model.weight]


def test_every_parameter_is_in_one_group_once() -> None:
    model = Transformer(SHAPE)
    together = [id(p) for group in decay_groups(model, 0.1) for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in model.parameters())


def test_the_numbers_of_the_run_file_arrive() -> None:
    model = nn.Linear(2, 2)
    adam = build_optimizer(OptimSection(betas=[0.8, 0.99], eps=1e-6, weight_decay=0.2), model, 0.5)
    assert isinstance(adam, torch.optim.AdamW)
    first, second = adam.param_groups
    assert (first["lr"], first["betas"], first["eps"]) == (0.5, (0.8, 0.99), 1e-6)
    assert (first["weight_decay"], second["weight_decay"]) == (0.2, 0.0)
    descent = build_optimizer(OptimSection(name="sgd", momentum=0.7, nesterov=True), model, 0.25)
    assert isinstance(descent, torch.optim.SGD)
    group = descent.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.7, True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_sharded_weights_move_as_whole_ones_do(rank: int, name: str) -> None:
    section = OptimSection(name=name)  # type: ignore[arg-type]
    moved = []
    for on, shape in ((lone_rank(), (1, 1)), (pool_ranks(), (1, 2))):
        with torch.device("meta"):
            model: nn.Module = Transformer(SHAPE)
        model = make_parallel(model, on, shape, seed=1)
        optimizer = build_optimizer(section, model, 0.05)
        for _ in range(3):
            model(torch.arange(10).reshape(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved.append([whole(p) for p in model.parameters()])
    for found, expected in zip(moved[1], moved[0], strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
