"""Blocks in bf16 whose parts are computed by hand (`models.eager`), on layouts that keep weights whole: the gradient of
one rank that takes the same micro-batches."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch

from pool import ranks
from runs import lone_rank, pool_ranks
from shardway.data.order import position_share
from shardway.models import eager
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.apply import ApplyOptions, apply_parallelism
from shardway.parallel.mesh import build_mesh
from shardway.parallel.precision import Precision
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ParallelSection
from shardway.train.loss import token_cross_entropy
from shardway.train.passes import BatchSplit, Passes
from trained import plain, whole

SHAPE = TransformerShape(vocab=24, dim=16, layers=4, heads=4, kv_heads=2, ffn_dim=32, tied=False)
BF16 = Precision(torch.bfloat16, torch.float32)
ROWS, MICRO = 8, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"dp_replicate": 2},
    "pipeline": {"pp": 2},
    "zero bubbles": {"pp": 2, "pp_schedule": "zero_bubble", "pp_stages_per_rank": 2},
    "v": {"pp": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 2},
}


def gradients(model: Transformer, on: Ranks, keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole gradients of what this rank holds, after the passes of one step."""
    section = ParallelSection(**{"dp_replicate": 1, "dp_shard": 1, "pp_stages_per_rank": 1, **keys})
    mesh = build_mesh(on, section)
    parallel = apply_parallelism(copy.deepcopy(model), mesh, on.device, ApplyOptions(section, BF16))
    rows = list(position_share(ROWS, mesh.data_rank, mesh.data_ranks))
    tokens = torch.randint(SHAPE.vocab, (ROWS, 17), generator=torch.Generator().manual_seed(5))[rows]
    parts = len(rows) // MICRO
    passes = Passes(parallel, BatchSplit(ROWS, MICRO, parts, parts), BF16, on.device)
    passes.train(parallel.call, (tokens[:, :-1], tokens[:, 1:]), token_cross_entropy)
    return {plain(name): whole(p.grad) for name, p in parallel.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LAYOUTS)
@ranks(2)
def test_a_layout_gives_the_gradient_of_one_rank(rank: int, name: str) -> None:
    model = Transformer(SHAPE)
    model.init_weights(3)
    wrapped = mock.patch.object(eager._JoinedLinear, "forward", wraps=eager._JoinedLinear.forward)
    with mock.patch.object(eager, "FEWEST", 0), wrapped as joined:
        expected = gradients(model, lone_rank(), {})
        alone = joined.call_count
        found = gradients(model, pool_ranks(), LAYOUTS[name])
    assert alone == SHAPE.layers * ROWS // MICRO
    assert joined.call_count > alone
    assert len(found) >= len(expected) // 3
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    for each, grad in found.items():
        error = float((grad - expected[each]).norm()) / norm
        assert error < (2e-3 if name == "replicate" else 1e-6), (each, error)
