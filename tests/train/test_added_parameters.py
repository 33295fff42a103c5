"""What a run has added to a model is not made again by a resume, which says so and names it; nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import lone_rank, open_tiny, pool_ranks, read_steps
from shardway.errors import UserError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir

WORDS = ("run.device=cpu", "run.threads=1", "train.steps=6", "checkpoint.every=off", "checkpoint.background=false")
Change = Callable[[nn.Module, torch.optim.Optimizer], object]


class Net(nn.Module):
    """A model that a script changes while it trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(4, 1)
        self.extra: nn.Module | None = None
        self.scale: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y = y if self.extra is None else y + self.extra(x)
        return y if self.scale is None else y * self.scale


def drive(folder: Path, on: Ranks, *words: str, change: Change | None = None, at: int = 0, until: int = 9) -> None:
    """Train; the model is changed before the loop (at 0) or after step `at`."""
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    with open_tiny(folder, on, *words, base=WORDS) as run:
        net = Net()
        if change is not None and not at:
            change(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model = run.shard(net)
        optimizer = run.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        for batch in run.steps(run.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)):
            run.step(model, batch, F.mse_loss)
            if change is not None and at == run.step_number + 1:
                change(net, optimizer)
            if run.step_number + 1 == until:
                break


def add_module(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    net.extra = nn.Linear(4, 1)


def add_parameter(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.scale = nn.Parameter(torch.full((1,), 2.0))
    optimizer.param_groups[0]["params"].append(net.scale)


def add_buffer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.register_buffer("seen", torch.ones(3))


def add_group(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    add_module(net, optimizer)
    optimizer.add_param_group({"params": list(net.extra.parameters())})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_module, ["extra.bias", "extra.weight"]),
        (add_parameter, ["scale"]),
        (add_buffer, ["seen"]),
        (add_group, ["extra.weight", "extra.bias"]),
    ],
)
def test_a_resume_names_what_is_not_made_again(
    change: Change, named: list[str], tmp_path: Path, quiet_threads: None
) -> None:
    drive(tmp_path, lone_rank(), change=change, at=2, until=4)
    before = json.dumps(RunDir(tmp_path).read_status())
    with pytest.raises(UserError, match=", ".join(named)) as told:
        drive(tmp_path, lone_rank())
    assert "Nothing was changed" in str(told.value)
    assert json.dumps(RunDir(tmp_path).read_status()) == before


def test_it_goes_on_where_the_script_makes_it_before_the_loop(tmp_path: Path, quiet_threads: None) -> None:
    drive(tmp_path, lone_rank(), change=add_buffer, at=2, until=4)
    drive(tmp_path, lone_rank(), change=add_buffer)
    assert len(read_steps(tmp_path)) == 6


@ranks(2)
def test_ranks_that_hold_shards_say_it_alike(rank: int, tmp_path: Path) -> None:
    shards = ("parallel.dp_shard=2", "parallel.dp_replicate=1")
    drive(tmp_path, pool_ranks(), *shards, change=add_buffer, at=2, until=4)
    with pytest.raises(UserError, match="holds seen of model"):
        drive(tmp_path, pool_ranks(), *shards)
    drive(tmp_path, pool_ranks(), *shards, change=add_buffer)
