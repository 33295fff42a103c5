"""The bytes that parameters, gradients and optimizer state take on every rank are those of the formulas."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from traffic_layouts import BASE, Case, case

from exact_states import OPTIMIZER_STATES, StateBytes, StateFormats, estimate_states
from exact_weights import transformer_weights
from page_tables import check_table
from pool import RankPool
from runs import open_tiny, pool_ranks
from shardway.models.contract import held_by_rank
from shardway.resolve import Resolved
from shardway.train.run import LiveRun, train_run
from speed import picked

CASES: Mapping[str, Case] = {
    "one rank": case(1),
    "replicate": case(2, "dp_replicate=2"),
    "shard": case(2, "dp_shard=2"),
    "shard, kept for the backward pass": case(2, "dp_shard=2", "reshard_after_forward=false"),
    "shard, sizes that do not divide": case(3, "dp_shard=3", "train.global_batch=9"),
    "hybrid": case(4, "dp_replicate=2", "dp_shard=2"),
    "context": case(2, "cp=2"),
    "tensor": case(2, "tp=2"),
    "tensor 4 with 2 key/value heads": case(4, "tp=4"),
    "tensor x shard": case(4, "tp=2", "dp_shard=2"),
    "tensor x replicate": case(4, "tp=2", "dp_replicate=2"),
    "tensor x context": case(4, "tp=2", "cp=2"),
    "pipeline": case(2, "pp=2", "pp_split=[3, 1]", "train.micro_batch=2"),
    "pipeline, ZBV": case(2, "pp=2", "pp_schedule=zbv", "pp_split=[1, 1, 1, 1]", "train.micro_batch=2"),
    "pipeline x shard": case(4, "pp=2", "dp_shard=2", "pp_split=[2, 2]", "train.micro_batch=2"),
    "pipeline x tensor": case(4, "pp=2", "tp=2", "pp_split=[2, 2]", "train.micro_batch=4"),
    "experts": case(2, "dp_shard=2", "ep=2", "model.experts=4"),
    "experts not split": case(2, "dp_shard=2", "model.experts=4"),
    "experts x shard": case(4, "dp_shard=4", "ep=2", "model.experts=4", "model.dense_layers=1"),
    "as many experts as ep, x shard": case(4, "dp_shard=4", "ep=2", "model.experts=2"),
    "experts x tensor": case(4, "dp_shard=2", "ep=2", "tp=2", "model.experts=4", "model.shared_experts=1"),
    "shard, SGD": case(2, "dp_shard=2", "optim.name=sgd"),
    "shard, bf16 moments": case(2, "dp_shard=2", "optim.state_dtype=bf16"),
    "tensor, bf16 weights": case(2, "tp=2", "precision.compute=bf16", "precision.weights=bf16"),
}
BYTES = {"fp32": 4, "bf16": 2}


def leave_bytes(rank: int, name: str, folder: Path) -> None:
    with open_tiny(folder / "run", pool_ranks(), *CASES[name].words, base=BASE) as run:
        gradients: list[int] = []
        made = run.optimizer

        def optimizer(*arguments: object, **options: object) -> torch.optim.Optimizer:
            found = made(*arguments, **options)  # type: ignore[arg-type]
            found.register_step_pre_hook(lambda *_: gradients.append(_count(p.grad for p in parameters_of(run))))
            return found

        run.optimizer = optimizer  # type: ignore[method-assign, assignment]
        train_run(run)
        state = run._held.optimizers[0].optimizer.state
        moments = [each for p in parameters_of(run) for each in state[p].values() if isinstance(each, torch.Tensor)]
        held = StateBytes(_count(parameters_of(run)), gradients[-1], _count(each for each in moments if each.dim()))
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps((held, estimate(run.resolved, rank))))


def parameters_of(run: LiveRun) -> list[torch.nn.Parameter]:
    return list(run._held.models[0].parallel.module.parameters())


def _count(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the memory behind these tensors, each once: padding and buckets count."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if tensor is not None
        for storage in [held_by_rank(tensor.detach()).untyped_storage()]
    }
    return sum(storages.values())


def estimate(resolved: Resolved, rank: int) -> StateBytes:
    """What the formulas say; weights in bf16 have moments in bf16."""
    values = resolved.values
    formats = StateFormats(
        weight_bytes=BYTES[values.precision.weights],
        state_bytes=min(BYTES[values.optim.state_dtype], BYTES[values.precision.weights]),
        states=OPTIMIZER_STATES[values.optim.name],
    )
    blocks = tuple(values.parallel.pp_split) or (values.model.layers,)
    return estimate_states(transformer_weights(values.model), values.parallel, rank, blocks, formats)


Held = Callable[[str], Sequence[tuple[StateBytes, StateBytes]]]
PICKED = (
    *("one rank", "replicate", "shard, sizes that do not divide", "tensor x context", "pipeline, ZBV"),
    *("experts x tensor", "shard, bf16 moments"),
)
"""One of each axis, for `make test`."""


@pytest.fixture(scope="module")
def held(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Held:
    """(measured, expected) of every rank of a case."""

    @cache
    def measure(name: str) -> Sequence[tuple[StateBytes, StateBytes]]:
        folder, size = tmp_path_factory.mktemp("case"), CASES[name].ranks
        rank_pool.run(leave_bytes, size, {"name": name, "folder": folder}, 120.0)
        return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]

    return measure


@pytest.mark.parametrize("name", picked(CASES, *PICKED))
def test_every_rank_holds_what_the_formulas_say(name: str, held: Held) -> None:
    """Within 1 %."""
    for measured, expected in held(name):
        assert measured.parameters == pytest.approx(expected.parameters, rel=0.01)
        assert measured.gradients == pytest.approx(expected.gradients, rel=0.01)
        assert measured.optimizer == pytest.approx(expected.optimizer, rel=0.01)


@pytest.mark.exhaustive
def test_the_page_shows_it(held: Held, request: pytest.FixtureRequest) -> None:
    head = ("layout", "ranks", "parameters", "measured", "gradients", "measured", "optimizer", "measured")
    rows = [(name, len(ranks), *_cells(ranks)) for name, ranks in ((name, held(name)) for name in CASES)]
    check_table(request, "memory.md", "bytes of the states", [head, *rows])


def _cells(ranks: Sequence[tuple[StateBytes, StateBytes]]) -> list[int]:
    """Of the rank that holds most."""
    measured, expected = max(ranks, key=lambda pair: pair[1].total)
    pairs = (
        (getattr(each, kind) for each in (expected, measured)) for kind in ("parameters", "gradients", "optimizer")
    )
    return [cell for pair in pairs for cell in pair]
