"""The planner's figures for our own engine against what ranks of the CPU hold while they train.

Norms here are layer norms: one kernel on a CPU as on other devices, which keeps its input alone. A root-mean-square
norm is three operators on a CPU and keeps what they compute as well.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from measured_memory import Measured, measure

from pool import RankPool
from runs import COMMON, open_tiny, pool_ranks
from shardway.plan.memory import StageMemory, estimate_memory, load_overheads
from shardway.resolve.planned import case_of, shape_of_run
from shardway.runfile.schema import RunFile
from speed import picked, thinned

BASE = (
    *COMMON,
    "train.steps=1",
    "train.global_batch=8",
    "optim.warmup=1 steps",
    "model.dim=64",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=192",
    "model.vocab=96",
    "model.norm=layernorm",
    "model.tied=false",
    "data.seq_len=64",
    "parallel.dp_replicate=1",
)


Pairs = Sequence[tuple[Measured, StageMemory]]
"""What every rank of a run held, and what the plan says of it."""


def leave_memory(rank: int, words: tuple[str, ...], folder: Path) -> None:
    """Train a step on the ranks of the pool."""
    with open_tiny(folder / "run", pool_ranks(), *words, base=BASE) as run:
        measured = measure(run)
        stage = run._held.models[0].parallel.mesh.coordinate("pp")
        planned = plan(run.resolved.values)[stage]
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps((measured, planned)))


def plan(values: RunFile) -> tuple[StageMemory, ...]:
    """What the planner says of a resolved run."""
    return estimate_memory(case_of(values, shape_of_run(values)), load_overheads())


@pytest.fixture(scope="module")
def train(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train a step of a run with these words on so many ranks; each run is made once."""
    known: dict[tuple[int, tuple[str, ...]], Pairs] = {}

    def run(ranks: int, *words: str) -> Pairs:
        if (ranks, words) not in known:
            folder = tmp_path_factory.mktemp("run")
            rank_pool.run(leave_memory, ranks, {"words": words, "folder": folder}, 120.0)
            known[ranks, words] = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
        return known[ranks, words]

    return run


PIPELINE = ("parallel.pp=2", "parallel.pp_split=[2, 2]", "train.micro_batch=2")
INTERLEAVED = (
    "parallel.pp=2",
    "parallel.pp_schedule=interleaved",
    "parallel.pp_split=[1, 1, 1, 1]",
    "train.micro_batch=2",
)
ONE: Mapping[str, tuple[str, ...]] = {
    "grouped heads, gated": (),
    "as many key/value heads": ("model.kv_heads=4", "model.ffn_dim=256"),
    "GELU, biases": ("model.activation=gelu", "model.bias=true", "model.kv_heads=4", "model.ffn_dim=256"),
    "wide": ("model.dim=128", "model.ffn_dim=512", "model.heads=8", "data.seq_len=32"),
    "long": ("data.seq_len=256", "train.global_batch=2"),
    "two micro-batches": ("train.micro_batch=4",),
}
"""Models on one rank."""

FLAT: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "replicate": (2, ("parallel.dp_replicate=2",)),
    "tensor": (2, ("parallel.tp=2",)),
    "tensor, sequence whole": (2, ("parallel.tp=2", "parallel.tp_sequence=false")),
    "pipeline": (2, PIPELINE),
    "pipeline, GPipe": (2, (*PIPELINE, "parallel.pp_schedule=gpipe")),
    "pipeline, interleaved": (2, INTERLEAVED),
    "tensor 4 with 2 key/value heads": (4, ("parallel.tp=4",)),
    "pipeline x tensor": (4, (*PIPELINE, "parallel.tp=2")),
}
"""Layouts whose ranks have their weights to themselves."""

SHARED: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "shard": (2, ("parallel.dp_shard=2",)),
    "shard, kept gathered": (2, ("parallel.dp_shard=2", "parallel.reshard_after_forward=false")),
    "context": (2, ("parallel.cp=2",)),
    "hybrid": (4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "tensor x shard": (4, ("parallel.tp=2", "parallel.dp_shard=2")),
    "tensor x replicate": (4, ("parallel.tp=2", "parallel.dp_replicate=2")),
    "pipeline x shard": (4, (*PIPELINE, "parallel.dp_shard=2")),
    "pipeline x replicate": (4, (*PIPELINE, "parallel.dp_replicate=2")),
}
"""Layouts whose weights go through FSDP2."""

LAYOUTS = {**FLAT, **SHARED}
MODES = ("none", "selective", "full")


def check_states(pairs: Pairs) -> None:
    """Within 3 %, each of the three."""
    for measured, planned in pairs:
        assert planned.weights == pytest.approx(measured.parameters, rel=0.03)
        assert planned.gradients == pytest.approx(measured.gradients, rel=0.03)
        assert planned.optimizer == pytest.approx(measured.optimizer, rel=0.03)


def check_activations(pairs: Pairs) -> None:
    """Within 10 %."""
    for measured, planned in pairs:
        assert planned.activations == pytest.approx(measured.activations, rel=0.1)


def formats(compute: str, mode: str) -> tuple[str, str]:
    return f"precision.compute={compute}", f"recompute.mode={mode}"


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_one_rank_holds_what_the_plan_says(compute: str, train: Any) -> None:
    for mode in MODES:
        pairs = train(1, *formats(compute, mode))
        check_states(pairs)
        check_activations(pairs)


@thinned(("name", "compute", "mode"), itertools.product(ONE, ["fp32", "bf16"], MODES), every=5)
def test_one_rank_keeps_what_the_plan_says(name: str, compute: str, mode: str, train: Any) -> None:
    check_activations(train(1, *ONE[name], *formats(compute, mode)))


@pytest.mark.parametrize("name", picked(LAYOUTS, "pipeline", "shard, kept gathered", "tensor x shard"))
def test_every_rank_has_the_states_of_the_plan(name: str, train: Any) -> None:
    """Of every layout together with the test below."""
    ranks, words = LAYOUTS[name]
    check_states(train(ranks, *words, *formats("fp32", "none")))


KEPT = [
    (name, compute, mode)
    for compute, layouts in (("fp32", LAYOUTS), ("bf16", FLAT))
    for name, (ranks, _) in layouts.items()
    for mode in (MODES if ranks == 2 else MODES[:2])
]


PICKED = [
    *(("replicate", "bf16", "selective"), ("shard", "fp32", "full"), ("context", "fp32", "full")),
    *(("tensor, sequence whole", "fp32", "none"), ("pipeline, GPipe", "bf16", "selective")),
    *(("tensor 4 with 2 key/value heads", "bf16", "selective"), ("tensor x replicate", "fp32", "selective")),
    ("pipeline x replicate", "fp32", "none"),
]
"""Every layout once that is not above."""


@pytest.mark.parametrize("case", picked(KEPT, *PICKED), ids="-".join)
def test_every_rank_keeps_what_the_plan_says(case: tuple[str, str, str], train: Any) -> None:
    name, compute, mode = case
    ranks, words = LAYOUTS[name]
    pairs = train(ranks, *words, *formats(compute, mode))
    check_activations(pairs)
    check_states(pairs)


def test_kept_products_may_be_more_than_all_that_is_needed(train: Any) -> None:
    """With the stream whole on each rank, results of the last products are kept before and after their sum over the
    tensor axis; a narrow feed-forward layer keeps less if nothing is computed again."""
    words = ("parallel.tp=2", "parallel.tp_sequence=false", "model.ffn_dim=64", "model.activation=gelu")
    (everything, planned_all), (products, planned_products) = (
        train(2, *words, *formats("fp32", mode))[0] for mode in ("none", "selective")
    )
    assert products.activations > everything.activations
    assert planned_products.activations > planned_all.activations
