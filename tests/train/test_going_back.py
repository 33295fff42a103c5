"""Runs that go back before a spike: what they come to, what they leave out, and that no death in between matters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import (
    Died,
    die_at,
    layout,
    lone_rank,
    open_tiny,
    pool_ranks,
    read_column,
    read_named,
    read_steps,
    signal_at,
    tell_steps,
)
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.train.run import Run
from trained import assert_same_bits, whole_state

BATCH, SAMPLES, STEPS = 4, 400, 60
BASE = (
    *("run.device=cpu", "run.threads=1", "data.record_ids=true", f"train.global_batch={BATCH}"),
    *(f"train.steps={STEPS}", "checkpoint.background=false", "checkpoint.every=6 steps"),
)
BACK = ("guard.spike=20.0", "guard.on_spike=roll_back", "guard.spike_steps=2")
POISONED = range(128, 136)
"""Positions of the samples whose targets are far off: those of steps 33 and 34."""


def order_of_seed_0() -> list[int]:
    from shardway.data.order import Order

    return Order(SAMPLES, 0).ids(torch.arange(2 * SAMPLES).numpy()).tolist()


def make_data(poisoned: Any = POISONED) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 2, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator)
    order = order_of_seed_0()
    targets[[order[position] for position in poisoned]] = 1e4
    return TensorDataset(inputs, targets)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


class Net(nn.Module):
    """What draws random numbers and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(
    folder: Path,
    *words: str,
    poisoned: Any = POISONED,
    before_step: Callable[[Run, int], None] | None = None,
    alone: bool = False,
) -> dict[str, torch.Tensor]:
    """A script's own loop; the state at its end."""
    on = lone_rank() if alone or not torch.distributed.is_initialized() else pool_ranks()
    with open_tiny(folder, on, *words, base=BASE) as run:
        if before_step is not None:
            tell_steps(run, before_step)
        torch.manual_seed(4)
        net = run.shard(Net())
        optimizer = run.optimizer(torch.optim.AdamW, net, lr=1e-3)
        for batch in run.steps(run.loader(make_data(poisoned))):
            run.step(net, batch, mean_square)
        return whole_state(net, optimizer)


def spans(folder: Path) -> list[list[int]]:
    return [each.span for each in RunDir(folder).left_out.read()]


def assert_same_run(found: Path, expected: Path) -> None:
    for name in ("step", "loss", "grad_norm", "lr"):
        assert read_column(found, name) == read_column(expected, name)


def used(folder: Path, world: int) -> list[int]:
    """The samples of all steps that hold, over all ranks."""
    return [sample for rank in range(world) for event in read_steps(folder, rank) for sample in event["ids"]]


@ranks(2)
def test_a_run_that_goes_back_is_the_run_that_never_saw_the_span(rank: int, tmp_path: Path) -> None:
    """The checkpoint of step 30 begins at position 120. Each sample but those of the span is used exactly once."""
    found = train(tmp_path / "back", *layout(2, 1), *BACK)
    expected = train(tmp_path / "told", *layout(2, 1), "data.skip=[[120, 136]]")
    assert_same_bits(found, expected)
    pool_ranks().barrier()
    assert_same_run(tmp_path / "back", tmp_path / "told")
    assert spans(tmp_path / "back") == [[120, 136]]
    assert spans(tmp_path / "told") == []
    order = order_of_seed_0()
    kept = [order[position] for position in range(STEPS * BATCH + 16) if not 120 <= position < 136]
    assert sorted(used(tmp_path / "back", 2)) == sorted(kept)
    (told,) = read_named(tmp_path / "back", "rolled_back")
    facts = ("step", "first", "last", "start", "end", "samples", "roll_backs")
    assert [told[name] for name in facts] == [30, 33, 34, 120, 136, 16, 1]
    (skipped,) = read_named(tmp_path / "back", "data_skipped")
    assert skipped["reason"] == "guard.on_spike left out 16 samples between positions 120 and 140"
