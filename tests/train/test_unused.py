"""A model with parameters that take no part in the loss: trained like on one rank, or told clearly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pool import ranks
from runs import COMMON, lone_rank, open_tiny, pool_ranks
from shardway.errors import UserError
from shardway.ranks.start import Ranks

STEPS = 4
WORDS = (*COMMON, f"train.steps={STEPS}", "optim.warmup=0 steps")


class Idle(nn.Module):
    """Two layers are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers[0](self.parts["used"](self.first(x))))


IDLE = ("parts.idle.weight", "parts.idle.bias", "layers.1.weight", "layers.1.bias")


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4,), index / 32)
        return x, x.sum()[None]


def squares(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().mean()


def train(folder: Path, on: Ranks, *words: str, model: nn.Module | None = None) -> list[float]:
    with open_tiny(folder, on, *words, base=WORDS) as run:
        called = run.shard(model or Idle())
        run.optimizer(torch.optim.AdamW, called, lr=1e-2)
        return [run.step(called, batch, squares) for batch in run.steps(run.loader(Points()))]


def train_both(rank: int, folder: Path, *words: str) -> None:
    if rank == 0:
        alone = train(folder / "alone", lone_rank())
    dist.barrier()
    together = train(folder / "together", pool_ranks(), *words)
    if rank == 0:
        assert len(alone) == STEPS
        assert together == pytest.approx(alone, rel=1e-5)
        assert alone[-1] < alone[0]


STATIC = ("parallel.dp_replicate=2", "parallel.static_graph=true")


@pytest.mark.parametrize("words", [STATIC, ("parallel.dp_shard=2",)], ids=lambda words: words[-1])
@pytest.mark.parametrize("micro_batch", [4, 2])
@ranks(2)
def test_it_trains_as_on_one_rank(rank: int, tmp_path: Path, words: tuple[str, ...], micro_batch: int) -> None:
    train_both(rank, tmp_path, *words, f"train.micro_batch={micro_batch}")


@pytest.mark.parametrize("micro_batch", [4, 2])
@ranks(2)
def test_copies_that_wait_for_all_gradients_tell_at_once(rank: int, tmp_path: Path, micro_batch: int) -> None:
    with pytest.raises(UserError) as told:
        train(tmp_path / "run", pool_ranks(), "parallel.dp_replicate=2", f"train.micro_batch={micro_batch}")
    assert str(told.value) == (
        f"parameters of Idle took no part in the loss: {', '.join(IDLE)}. Replicas (parallel.dp_replicate) wait for "
        "the gradients of all.\n"
        "  To do: leave them out of the model, or call requires_grad_(False) on them before run.shard(model); where "
        "every step leaves out the same ones, set parallel.static_graph = true, or parallel.dp_shard = 2 instead of "
        "parallel.dp_replicate."
    )


@ranks(2)
def test_frozen_parameters_are_no_idle_ones(rank: int, tmp_path: Path) -> None:
    model = Idle()
    for name in IDLE:
        model.get_parameter(name).requires_grad_(False)
    losses = train(tmp_path / "run", pool_ranks(), "parallel.dp_replicate=2", model=model)
    assert losses[-1] < losses[0]
