"""Ranks on nodes: the pictures, and what they say of who is where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_files import Golden, golden_names
from shardway.layout import AXES, SHARD, Layout
from shardway.plan.placement import MeshPlacement, place_mesh, render_placement


def layout(ep: int = 1, **degrees: int) -> Layout:
    return Layout({axis: degrees.get(axis, 1) for axis in AXES}, ep)


PICTURES = {
    "one-rank": (layout(), 1),
    "one-node": (layout(dp_shard=2, cp=2, tp=2), 8),
    "two-nodes": (layout(pp=2, dp_shard=2, tp=4), 8),
    "tensor-across-nodes": (layout(dp_shard=2, tp=8), 4),
    "ragged-nodes": (layout(dp_shard=4, tp=3), 8),
    "1024-dense": (layout(pp=16, dp_shard=8, tp=8), 8),
    "1024-long": (layout(dp_shard=32, cp=4, tp=8), 8),
    "1024-experts": (layout(ep=64, dp_replicate=2, dp_shard=128, tp=4), 8),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name: str, golden: Golden) -> None:
    golden(render_placement(place_mesh(*PICTURES[name])), f"placement/{name}.txt")


def test_every_picture_is_compared() -> None:
    assert golden_names("placement") == {f"{name}.txt" for name in PICTURES}


DEGREES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@given(DEGREES, st.integers(1, 9))
def test_every_rank_is_on_one_node_and_in_one_group_of_each_dim(degrees: dict[str, int], per_node: int) -> None:
    placement = place_mesh(Layout(degrees), per_node)
    everyone = list(range(placement.layout.world))
    assert [rank for node in range(placement.nodes) for rank in placement.ranks_of(node)] == everyone
    for each in placement.dims:
        assert sorted(rank for group in each.groups for rank in group) == everyone
        assert {len(group) for group in each.groups} == {each.degree}


@given(DEGREES, st.integers(1, 9))
def test_a_dim_crosses_where_a_group_has_ranks_on_two_nodes(degrees: dict[str, int], per_node: int) -> None:
    placement = place_mesh(Layout(degrees), per_node)
    node_of = {rank: node for node in range(placement.nodes) for rank in placement.ranks_of(node)}
    for each in placement.dims:
        assert each.nodes == max(len({node_of[rank] for rank in group}) for group in each.groups)
    picture = render_placement(placement)
    assert ("warning: a tp group" in picture) == any(each.dim == "tp" and each.crosses for each in placement.dims)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_inner_axes_cross_last(tp: int, cp: int, shard: int, copies: int) -> None:
    """With powers of two, an axis leaves the node only once those inside it fill one: tensor first, then context,
    then the shards of hybrid sharding."""
    degrees = {"tp": 2**tp, "cp": 2**cp, "dp_shard": 2**shard, "dp_replicate": 2**copies}
    crosses = {each.dim: each.crosses for each in place_mesh(layout(**degrees), 8).dims}
    inner = 1
    for dim, degree in (("tp", 2**tp), ("cp", 2**cp), (SHARD, 2 ** (shard + cp)), ("dp_replicate", 2**copies)):
        inner = inner * degree if dim != SHARD else 2 ** (tp + cp + shard)
        assert crosses.get(dim, False) == (degree > 1 and inner > 8)


def test_facts_hold_every_group() -> None:
    placement: MeshPlacement = place_mesh(layout(pp=2, tp=2), 2)
    assert placement.facts() == {
        "ranks": 4,
        "nodes": 2,
        "ranks_per_node": 2,
        "dims": {
            "tp": {"degree": 2, "nodes_of_a_group": 1, "groups": ((0, 1), (2, 3))},
            "pp": {"degree": 2, "nodes_of_a_group": 2, "groups": ((0, 2), (1, 3))},
        },
    }
