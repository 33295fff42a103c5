"""bf16 and fp16 in layouts: the curve is near that of fp32, and an overflow on one rank skips the step on all."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from drawn_layouts import SMALL
from pool import ranks
from runs import pool_ranks, read_column, read_steps, train_alone, train_tiny, worst_difference
from shardway.train.loss import LossScale, LossSum
from shardway.train.step import StepContext, StepParts, take_step
from speed import thinned
from trained import apply_shape, make_passes, whole

LAYOUTS = {
    "replicate": ("parallel.dp_replicate=2",),
    "shard": ("parallel.dp_shard=2",),
    "tensor": ("parallel.tp=2",),
    "context": ("parallel.cp=2",),
    "pipeline": ("parallel.pp=2", "parallel.pp_schedule=interleaved"),
}
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3}
"""Relative difference of losses from fp32 over 20 steps: the formats have 8 and 11 bits."""


@thinned(("name", "compute"), itertools.product(LAYOUTS, TOLERANCE), every=5)
@ranks(2)
def test_half_formats_follow_fp32(rank: int, tmp_path: Path, name: str, compute: str) -> None:
    words = ("model.tied=false", "precision.loss_scale=1024" if compute == "fp16" else "train.seed=0")
    train_alone(rank, tmp_path / "fp32", "model.tied=false", base=SMALL)
    train_tiny(tmp_path / "half", pool_ranks(), *words, f"precision.compute={compute}", *LAYOUTS[name], base=SMALL)
    if rank == 0:
        found, expected = read_column(tmp_path / "half"), read_column(tmp_path / "fp32")
        assert 0 < worst_difference(found, expected) < TOLERANCE[compute]


@thinned("name", LAYOUTS, every=5)
@ranks(2)
def test_a_scale_that_is_too_large_is_lowered_in_every_layout(rank: int, tmp_path: Path, name: str) -> None:
    """Steps are skipped until gradients fit; then they are those of fp32."""
    words = ("model.tied=false", "precision.compute=fp16", "precision.loss_scale=1e9", "optim.schedule=constant")
    train_tiny(tmp_path, pool_ranks(), *words, *LAYOUTS[name], base=SMALL)
    if rank == 0:
        steps = read_steps(tmp_path)
        skipped = [step["skipped"] for step in steps]
        assert 2 < sum(skipped) < 20
        assert skipped[:2] == [True, True]
        scale = 1e9
        for step in steps:
            scale = scale / 2 if step["skipped"] else scale
            assert step["loss_scale"] == scale
        assert steps[-1]["loss"] < steps[0]["loss"]


@ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    for shape in ((2, 1), (1, 2)):
        torch.manual_seed(0)
        parallel = apply_shape(nn.Linear(3, 2), pool_ranks(), shape)
        before = [whole(p) for p in parallel.module.parameters()]
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parts = StepParts(make_passes(parallel, pool_ranks(), 4), optimizer, pool_ranks(), None)

        def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> LossSum:
            return LossSum((outputs * targets).sum(), len(targets))

        targets = torch.full((2, 2), math.inf if rank == 1 else 1.0)
        moment = StepContext(loss_scale=LossScale(8.0))
        result = take_step(parts, parallel.call, (torch.ones(2, 3), targets), loss_of, moment)
        assert result.skipped
        assert result.loss_scale == LossScale(4.0)
        for parameter, old in zip(parallel.module.parameters(), before, strict=True):
            assert torch.equal(whole(parameter), old)
            assert parameter.grad is None


@ranks(2)
def test_the_scale_leaves_no_trace_in_gradient_and_norm(rank: int) -> None:
    results = []
    for scale in (None, LossScale(1024.0)):
        torch.manual_seed(0)
        parallel = apply_shape(nn.Linear(3, 2), pool_ranks(), (1, 2))
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        parts = StepParts(make_passes(parallel, pool_ranks(), 4), optimizer, pool_ranks(), 0.5)

        def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> LossSum:
            return LossSum(((outputs - targets) ** 2).sum(), len(targets))

        batch = (torch.ones(2, 3) * (rank + 1), torch.zeros(2, 2))
        result = take_step(parts, parallel.call, batch, loss_of, StepContext(loss_scale=scale))
        results.append((result.loss, result.grad_norm, [whole(p) for p in parallel.module.parameters()]))
    (loss, norm, weights), (scaled_loss, scaled_norm, scaled_weights) = results
    assert scaled_loss == loss
    assert scaled_norm == pytest.approx(norm, rel=1e-6)
    for one, other in zip(weights, scaled_weights, strict=True):
        torch.testing.assert_close(one, other)
