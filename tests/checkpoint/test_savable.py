"""What a checkpoint cannot hold is refused before there is work to lose: at `run.shard`, or with the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pool import ranks
from runs import layout, lone_rank, open_tiny, pool_ranks
from shardway.checkpoint.writer import check_collects, check_savable
from shardway.errors import JobError, UserError
from shardway.ranks.start import Ranks

SCRIPT = ("run.device=cpu", "run.threads=1", "train.steps=3", "checkpoint.background=false")


class Remembers(nn.Linear):
    """A module with a state of its own."""

    def __init__(self, state: Any) -> None:
        super().__init__(4, 4)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Noting(torch.optim.SGD):
    """An optimizer that keeps something of each parameter."""

    def __init__(self, parameters: Any, value: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.value = value

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["note"] = self.value
        return super().step(closure)


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), {"seen": 3, "names": ["a", None], "share": 0.5}, [torch.ones(1)], "words", None, True, {}],
)
def test_what_can_be_saved(value: Any) -> None:
    check_savable({"model": {"weight": torch.ones(3).bfloat16(), "state": value}}, "it")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ((1, 2), "a tuple"),
        ({"deep": {1, 2}}, "a set"),
        (np.ones(2), "a ndarray"),
        ([torch.ones(1), object()], "a object"),
        (torch.eye(2).to_sparse(), "a tensor of layout sparse_coo"),
        (torch.ones(1, device="meta"), "a tensor on the meta device"),
        (1j, "a complex"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, told: str) -> None:
    with pytest.raises(UserError) as failure:
        check_savable({"model": {"layer.state": value}}, "it")
    assert "model.layer.state" in str(failure.value)
    assert told in str(failure.value)
    assert "allowed: tensors; numbers, strings" in str(failure.value)


def test_what_fails_to_collect_is_told(tmp_path: Path) -> None:
    def collect() -> dict[str, Any]:
        raise KeyError(0)

    with pytest.raises(UserError, match="cannot be collected for a checkpoint: KeyError: 0"):
        check_collects(collect)

    def told() -> dict[str, Any]:
        raise JobError("in words")

    with pytest.raises(JobError, match="in words"):
        check_collects(told)


def train(folder: Path, on: Ranks, *words: str, model: nn.Module | None = None, value: Any = None) -> list[int]:
    """The steps that were taken, in a list that an error cannot take away."""
    torch.manual_seed(0)
    steps: list[int] = []
    with open_tiny(folder, on, *words, base=SCRIPT) as run:
        net = run.shard(model or nn.Linear(4, 4))
        run.optimizer(Noting, net, value=value)
        for batch in run.steps(run.loader(TensorDataset(torch.ones(16, 4), torch.ones(16, 4)), batch_size=8)):
            run.step(net, batch, F.mse_loss)
            steps.append(len(steps))
            assert steps == [0] or value is None
    return steps


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_a_model_whose_state_cannot_be_saved_is_refused_at_once(
    rank: int, tmp_path: Path, shape: tuple[int, int]
) -> None:
    with pytest.raises(UserError, match="_extra_state: a tuple"):
        train(tmp_path, pool_ranks(), *layout(*shape), model=Remembers((1, "a")))
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@ranks(2)
def test_an_optimizer_whose_state_cannot_be_saved_is_refused_with_the_first_step(
    rank: int, tmp_path: Path, shape: tuple[int, int]
) -> None:
    with pytest.raises(UserError, match=r"the state of optimizer \(Noting\) holds a object"):
        train(tmp_path, pool_ranks(), *layout(*shape), value=object())


def test_a_state_of_plain_data_trains_and_is_saved(tmp_path: Path) -> None:
    assert train(tmp_path, lone_rank(), model=Remembers({"seen": [1, 2]})) == [0, 1, 2]
    assert (tmp_path / "checkpoints" / "step-000000003").is_dir()
