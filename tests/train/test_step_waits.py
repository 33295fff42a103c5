"""How often a step makes the host wait for its device, counted on the meta device: it has no numbers, so whatever the
host reads of it passes through here."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runs import lone_rank
from shardway.models.transformer import Transformer, TransformerShape
from shardway.parallel.apply import ParallelModel
from shardway.parallel.mesh import build_mesh
from shardway.parallel.precision import Precision
from shardway.runfile.schema import OptimSection, ParallelSection
from shardway.train.loss import LossScale, token_cross_entropy
from shardway.train.optim.kinds import build_optimizer
from shardway.train.passes import SUMS, BatchSplit, Passes
from shardway.train.step import GuardChecks, StepContext, StepParts, StepResult, take_step

SHAPE = TransformerShape(vocab=64, dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64)
META = torch.device("meta")
ROWS = 8


class Waits(TorchDispatchMode):
    """Counts what the host reads of the device, and answers as a good step would: finite numbers, no requests."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and first.is_meta:
            if name == "_local_scalar_dense":
                self.seen["number"] += 1
                return 1.0
            if name == "_to_copy" and torch.device(kwargs.get("device") or META).type == "cpu":
                self.seen["copy"] += 1
                numbers = torch.zeros(first.numel(), dtype=kwargs.get("dtype") or first.dtype)
                numbers[[0, 1, SUMS]] = 1.0  # sum of losses, targets, squares of gradients
                return numbers.view(first.shape)
        return func(*args, **kwargs)


def take_steps(
    name: str = "adamw",
    *,
    accumulation: int = 1,
    watch: GuardChecks | None = None,
    scale: LossScale | None = None,
) -> tuple[list[dict[str, int]], StepResult]:
    """Two steps, the second with states of the optimizer: what the host has read in each, and the last result."""
    with META:
        model = Transformer(SHAPE)
        batch = torch.empty(ROWS, 10, dtype=torch.int64), torch.empty(ROWS, 10, dtype=torch.int64)
    on = replace(lone_rank(), device=META)
    parallel = ParallelModel(model, model, build_mesh(on, ParallelSection(dp_replicate=1)))
    split = BatchSplit(ROWS, ROWS // accumulation, accumulation)
    passes = Passes(parallel, split, Precision(None, torch.float32), META)
    parts = StepParts(passes, build_optimizer(OptimSection(name=name), model, 1e-3), on, 1.0)
    seen = []
    for _ in range(2):
        with Waits() as waits:
            result = take_step(parts, model, batch, token_cross_entropy, StepContext(watch=watch, loss_scale=scale))
        assert not result.skipped
        seen.append(dict(waits.seen))
    return seen, result


ONCE = [{"copy": 1}] * 2
"""The vector of a step's numbers, and nothing else."""


def test_a_step_waits_for_its_device_once() -> None:
    seen, result = take_steps(watch=GuardChecks(repeat=True))
    assert seen == ONCE
    assert (result.loss, result.targets) == (1.0, 1.0)


def test_further_micro_batches_wait_for_nothing() -> None:
    assert take_steps(accumulation=4)[0] == ONCE


@pytest.mark.parametrize("name", ["sgd", "adafactor", "muon"])
def test_other_optimizers_wait_for_nothing(name: str) -> None:
    assert take_steps(name)[0] == ONCE


def test_a_loss_scale_waits_for_nothing() -> None:
    assert take_steps(scale=LossScale())[0] == ONCE


def test_what_is_read_is_seen() -> None:
    with Waits() as waits:
        tensor = torch.ones(8, device=META)
        assert float(tensor[0]) == 1.0
        assert bool(tensor.isfinite().all())
        assert tensor.tolist()[:2] == tensor.cpu().tolist()[:2] == [1.0, 1.0]
    assert waits.seen == {"number": 2, "copy": 2}
