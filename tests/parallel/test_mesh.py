"""The grid of ranks: coordinates, groups, and who answers for what."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from pool import ranks
from runs import lone_rank, pool_ranks
from shardway.errors import Bug
from shardway.layout import AXES, EXPERT_SHARD, SHARD, Layout, layout_of, needs_sharding
from shardway.parallel.mesh import build_mesh
from shardway.runfile.schema import ParallelSection

DEGREES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


def section(**degrees: int) -> ParallelSection:
    return ParallelSection(**{"dp_replicate": 1, "dp_shard": 1, **degrees})


@given(DEGREES)
def test_coordinates_are_row_major(degrees: dict[str, int]) -> None:
    """tp varies fastest, copies of the model are farthest apart; data ranks count copies and shards alone."""
    layout = Layout(degrees)
    seen = set()
    for rank in range(layout.world):
        replicate, _, shard, cp, _ = place = tuple(layout.coordinate(rank, axis) for axis in AXES)
        number = 0
        for axis, coordinate in zip(AXES, place, strict=True):
            number = number * degrees[axis] + coordinate
        assert rank == number
        assert layout.coordinate(rank, SHARD) == shard * degrees["cp"] + cp
        assert layout.data_rank(rank) == replicate * degrees["dp_shard"] + shard
        seen.add(place)
    assert len(seen) == layout.world


@given(DEGREES, st.data())
def test_peers_differ_in_one_dim_alone(degrees: dict[str, int], data: st.DataObject) -> None:
    layout = Layout(degrees)
    rank = data.draw(st.integers(0, layout.world - 1))
    for dim in (*AXES, SHARD):
        others = [axis for axis in AXES if axis != dim and not (dim == SHARD and axis in ("dp_shard", "cp"))]
        peers = layout.peers(rank, dim)
        assert rank in peers
        assert [layout.coordinate(peer, dim) for peer in peers] == list(range(layout.degree(dim)))
        assert {tuple(layout.coordinate(peer, axis) for axis in others) for peer in peers} == {
            tuple(layout.coordinate(rank, axis) for axis in others)
        }


@pytest.mark.parametrize("ep", [2, 3, 6])
def test_experts_split_the_ranks_that_share_the_states(ep: int) -> None:
    layout = Layout({"pp": 1, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}, ep)
    for rank in range(layout.world):
        whole = layout.coordinate(rank, SHARD)
        assert layout.coordinate(rank, EXPERT_SHARD) * ep + layout.coordinate(rank, "ep") == whole
        assert set(layout.peers(rank, "ep")) <= set(layout.peers(rank, SHARD))


@pytest.mark.parametrize(
    "degrees", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4}, {"tp": 2, "cp": 2}, {"pp": 2, "dp_replicate": 2}]
)
@ranks(4)
def test_the_grid_of_torch_has_the_same_coordinates(rank: int, degrees: dict[str, int]) -> None:
    mesh = build_mesh(pool_ranks(), section(**degrees))
    assert mesh.devices is not None
    for dim in mesh.devices.mesh_dim_names or ():
        assert mesh.part(dim).get_local_rank() == mesh.coordinate(dim)
        assert mesh.part(dim).mesh.tolist() == list(mesh.layout.peers(rank, dim))
    if mesh.degree("cp") > 1:
        assert dist.get_process_group_ranks(mesh.group("cp")) == list(mesh.layout.peers(rank, "cp"))


@pytest.mark.parametrize(
    ("degrees", "dims"),
    [
        ({"dp_replicate": 2}, ("dp_replicate",)),
        ({"dp_shard": 2}, (SHARD,)),
        ({"cp": 2}, (SHARD,)),
        ({"tp": 2}, ("tp",)),
        ({"pp": 2}, ("pp",)),
    ],
)
@ranks(2)
def test_only_dims_in_use_have_groups(rank: int, degrees: dict[str, int], dims: tuple[str, ...]) -> None:
    mesh = build_mesh(pool_ranks(), section(**degrees))
    assert mesh.devices is not None
    assert mesh.devices.mesh_dim_names == dims


def test_copies_beside_another_axis_go_through_fsdp() -> None:
    assert not needs_sharding(layout_of(section(dp_replicate=4)))
    assert needs_sharding(layout_of(section(dp_replicate=2, tp=2)))
    assert needs_sharding(layout_of(section(dp_replicate=2, pp=2)))
    assert not needs_sharding(layout_of(section(pp=2, tp=2)))


def test_a_process_alone_has_no_grid() -> None:
    mesh = build_mesh(lone_rank(), section())
    assert (mesh.data_ranks, mesh.data_rank) == (1, 0)
    with pytest.raises(Bug, match="there is no grid to take dp_shard_cp of"):
        mesh.part(SHARD)
    with pytest.raises(Bug, match="the grid has no axis 'no such'"):
        mesh.coordinate("no such")


@ranks(4)
def test_each_part_of_a_tensor_has_one_rank_that_answers_for_it(rank: int) -> None:
    mesh = build_mesh(pool_ranks(), section(dp_shard=2, tp=2))
    grid = mesh.part(SHARD, "tp")
    tensors = {
        "whole": torch.ones(4),
        "sharded": DTensor.from_local(torch.ones(2), mesh.part(SHARD), [Shard(0)], run_check=False),
        "split": DTensor.from_local(torch.ones(2), mesh.part("tp"), [Shard(0)], run_check=False),
        "both": DTensor.from_local(torch.ones(1), grid, [Shard(0), Shard(0)], run_check=False),
        "copied": DTensor.from_local(torch.ones(4), grid, [Replicate(), Replicate()], run_check=False),
    }
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        count = torch.tensor([local.numel() if mesh.answers_for(tensor) else 0])
        dist.all_reduce(count)
        assert count.item() == 4, name
