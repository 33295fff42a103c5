"""The gradient that the optimizer sees, for each axis alone and for some pairs, against float64 on one rank."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pool import ranks
from runs import pool_ranks
from shardway.data.order import position_share
from shardway.models.experts import MixtureShape
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.mesh import build_mesh
from shardway.runfile.schema import ParallelSection
from shardway.train.loss import IGNORED, token_cross_entropy
from shardway.train.passes import BatchSplit, Passes
from shardway.train.step import StepContext, StepParts, StepResult, take_step
from speed import picked
from trained import FP32, plain, whole

DENSE = TransformerShape(vocab=24, dim=16, layers=4, heads=4, kv_heads=2, ffn_dim=32, tied=False)
SHORT = replace(DENSE, layers=2)
"""For layouts without a pipeline, whose stages want a block each."""

MIXED = replace(SHORT, mixture=MixtureShape(experts=4, per_token=2, expert_dim=8, shared=1, balance="none"))
ROWS, LENGTH = 8, 16

ALONE: dict[str, tuple[TransformerShape, dict[str, Any]]] = {
    "replicate": (SHORT, {"dp_replicate": 2}),
    "shard": (SHORT, {"dp_shard": 2}),
    "context ring": (SHORT, {"cp": 2}),
    "context gather": (SHORT, {"cp": 2, "cp_method": "gather"}),
    "tensor": (SHORT, {"tp": 2, "tp_sequence": False}),
    "tensor, sequence": (SHORT, {"tp": 2}),
    "tensor, whole logits": (SHORT, {"tp": 2, "tp_loss": False}),
    "tensor, one kv head": (replace(SHORT, kv_heads=1), {"tp": 2}),
    "tensor, tied": (replace(SHORT, tied=True), {"tp": 2}),
    "tensor, experts": (MIXED, {"tp": 2}),
    "expert": (MIXED, {"dp_shard": 2, "ep": 2}),
    **{
        f"pipeline {schedule}": (DENSE, {"pp": 2, "pp_schedule": schedule, "pp_stages_per_rank": stages})
        for schedule, stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2))
    },
}
PAIRS: dict[str, tuple[TransformerShape, dict[str, Any]]] = {
    "hybrid": (SHORT, {"dp_replicate": 2, "dp_shard": 2}),
    "tensor of 4": (replace(SHORT, kv_heads=2), {"tp": 4}),
    "tensor x expert": (MIXED, {"tp": 2, "dp_shard": 2, "ep": 2}),
    "zero bubbles x shard": (DENSE, {"pp": 2, "dp_shard": 2, "pp_schedule": "zero_bubble", "pp_stages_per_rank": 2}),
    "v x shard": (DENSE, {"pp": 2, "dp_shard": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 2}),
}


class Recorded(torch.optim.SGD):
    """Descent that keeps the whole gradients of its last step by parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: dict[int, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = {id(p): whole(p.grad) for p in self.param_groups[0]["params"]}


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and targets of which some do not count, more in some rows than in others."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(DENSE.vocab, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0, 0.9, ROWS)[:, None]] = IGNORED
    return tokens[:, :-1], targets


def filled(shape: TransformerShape) -> Transformer:
    model = Transformer(shape)
    model.init_weights(3)
    return model


def true_gradients(model: Transformer) -> tuple[float, dict[str, torch.Tensor]]:
    inputs, targets = make_batch()
    exact = copy.deepcopy(model).double()
    loss = F.cross_entropy(exact(inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in exact.named_parameters()}


def take(model: Transformer, section: ParallelSection) -> tuple[StepResult, dict[str, torch.Tensor]]:
    on = pool_ranks()
    mesh = build_mesh(on, section)
    parallel = apply_parallelism(model, mesh, on.device, ApplyOptions(section, FP32))
    optimizer = Recorded(parallel.module.parameters())
    rows = list(position_share(ROWS, mesh.data_rank, mesh.data_ranks))
    accumulation = len(rows) // 2
    passes = Passes(parallel, BatchSplit(ROWS, 2, accumulation, accumulation), FP32, on.device)
    inputs, targets = make_batch()
    batch = (inputs[rows], targets[rows])
    result = take_step(StepParts(passes, optimizer, on, None), parallel.call, batch, token_cross_entropy, StepContext())
    return result, {plain(name): optimizer.seen[id(p)] for name, p in parallel.module.named_parameters()}


def check(shape: TransformerShape, keys: dict[str, Any]) -> None:
    section = ParallelSection(**{"dp_replicate": 1, "dp_shard": 1, "pp_stages_per_rank": 1, **keys})
    model = filled(shape)
    loss, expected = true_gradients(model)
    result, found = take(copy.deepcopy(model), section)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert found.keys() <= expected.keys()
    assert found.keys() == expected.keys() or section.pp > 1
    for name, grad in found.items():
        error = (grad.double() - expected[name]).norm() / norm
        assert error < 1e-6, (name, float(error))


IN_PAIRS = {"replicate", "shard", "tensor, experts", "expert", "pipeline zero_bubble", "pipeline zbv"}
"""Axes that are a part of a pair as well."""


@pytest.mark.parametrize("name", picked(ALONE, *(ALONE.keys() - IN_PAIRS)))
@ranks(2)
def test_an_axis_alone_gives_the_true_gradient(rank: int, name: str) -> None:
    check(*ALONE[name])


@pytest.mark.parametrize("name", PAIRS)
@ranks(4)
def test_axes_together_give_the_true_gradient(rank: int, name: str) -> None:
    check(*PAIRS[name])
