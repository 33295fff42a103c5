"""A staged state is that of one moment, whatever happens to its source afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pool import ranks
from runs import pool_ranks
from shardway.checkpoint.manager import MOST_OF_MEMORY, Staging, has_room
from shardway.checkpoint.state import Tensors
from trained import assert_same_bits, make_trained, train_on, whole


def flatten(tensors: Tensors, place: str = "") -> dict[str, torch.Tensor]:
    """Every tensor by its place, whole."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{place}/{name}")
        elif isinstance(value, torch.Tensor):
            found[f"{place}/{name}"] = whole(value)
    return found


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@ranks(2)
def test_what_is_staged_stays_as_it_was(rank: int, shape: tuple[int, int]) -> None:
    trained = make_trained(pool_ranks(), shape)
    expected = flatten(trained.collect())
    staged = Staging().stage(trained.collect())
    train_on(trained, 1)
    assert_same_bits(flatten(staged), expected)
    assert not all(torch.equal(value, expected[place]) for place, value in flatten(trained.collect()).items())


@ranks(2)
def test_parts_stay_parts_of_the_same_whole(rank: int) -> None:
    tensors = make_trained(pool_ranks(), (1, 2)).collect()
    staged = Staging().stage(tensors)
    assert any(isinstance(tensor, DTensor) for tensor in tensors["model"].values())
    for name, tensor in tensors["model"].items():
        copied = staged["model"][name]
        assert type(copied) is type(tensor), name
        if isinstance(tensor, DTensor):
            assert (copied.device_mesh, copied.placements) == (tensor.device_mesh, tensor.placements)
            assert copied.stride() == tensor.stride()
            assert torch.equal(copied.to_local(), tensor.to_local())
            assert copied.to_local().data_ptr() != tensor.to_local().data_ptr()


def test_buffers_are_used_again_until_a_shape_changes() -> None:
    staging = Staging()
    state = {"a": torch.arange(6.0).reshape(2, 3), "deep": {"n": [1, 2]}}
    assert staging.missing_bytes(state) == 24
    staging.reserve(state)
    assert staging.missing_bytes(state) == 0
    first = staging.stage(state)
    second = staging.stage({"a": torch.ones(2, 3)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert staging.missing_bytes({"a": torch.ones(3)}) == 12
    assert torch.equal(staging.stage({"a": torch.ones(3)})["a"], torch.ones(3))
    state["deep"]["n"].append(3)  # type: ignore[index]
    assert first["deep"] == {"n": [1, 2]}


def test_the_order_of_numbers_in_memory_is_kept() -> None:
    weight = nn.Parameter(torch.rand(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    expanded = torch.arange(3.0).expand(4, 3)
    staging = Staging()
    for _ in range(2):
        staged = staging.stage({"weight": weight, "expanded": expanded})
        assert staged["weight"].stride() == weight.stride()
        assert not staged["weight"].requires_grad
        assert torch.equal(staged["weight"], weight)
        assert torch.equal(staged["expanded"], expanded)


def test_numbers_in_few_bits_are_taken_apart() -> None:
    module = pytest.importorskip("torchao.optim.subclass_8bit")
    state = module.OptimState8bit.zeros((4, 256))
    state.copy_(torch.linspace(-1, 1, 1024).reshape(4, 256))
    staging, expected = Staging(), state.dequantize()
    staged = staging.stage({"moment": state})["moment"]
    state.copy_(torch.zeros(4, 256))
    assert type(staged) is type(state)
    assert torch.equal(staged.dequantize(), expected)
    assert staging.missing_bytes({"moment": state}) == 0


def test_memory_that_a_job_may_not_use_is_no_room(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    assert has_room(1000, tmp_path)
    (group / "memory.max").write_text("10000000\n")
    (group / "memory.current").write_text("7000000\n")
    (group / "memory.stat").write_text("anon 6000000\ninactive_file 1000000\n")
    left = 4_000_000
    assert has_room(int(MOST_OF_MEMORY * left), tmp_path)
    assert not has_room(int(MOST_OF_MEMORY * left) + 1, tmp_path)
    assert not has_room(2**60, Path("/"))
