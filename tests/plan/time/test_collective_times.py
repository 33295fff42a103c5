"""Seconds of collectives: rings, the two sorts of wire, and what a latency adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import h100s
from shardway.plan.case import load_ceilings
from shardway.plan.time import CollectiveGroup, Kind, Wires

MACHINE = h100s()
PERFECT = replace(
    load_ceilings(MACHINE.accelerator),
    link=1.0,
    network=1.0,
    link_latency_s=0.0,
    network_latency_s=0.0,
    hop_s=0.0,
    half_bytes=0.0,
)
WIRES = Wires(MACHINE, PERFECT)
SIZE = 1e9
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rings_inside_a_node(ranks: int) -> None:
    """(n - 1) / n of the tensor leaves a rank, of an all-reduce twice (Patarasuk and Yuan, 2009, section 3)."""
    once = SIZE * (ranks - 1) / ranks / MACHINE.link
    found = {kind: WIRES.seconds(kind, SIZE, CollectiveGroup(ranks)) for kind in KINDS}
    assert found == pytest.approx(
        {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once, "all_to_all": once}
    )


def test_ranks_of_a_node_share_its_adapters() -> None:
    """Sixteen neighbours leave by eight adapters; without rails, and where each is in another node, by one."""
    near, far = CollectiveGroup(16), CollectiveGroup(16, stride=8)
    once = SIZE * 15 / 16
    assert WIRES.seconds("all_gather", SIZE, near) == pytest.approx(once / min(8 * MACHINE.network, MACHINE.link))
    assert WIRES.seconds("all_gather", SIZE, far) == pytest.approx(once / MACHINE.network)
    assert Wires(MACHINE, PERFECT, rails=False).seconds("all_gather", SIZE, near) == pytest.approx(
        once / MACHINE.network
    )


def test_without_a_switch_a_pair_has_a_part_of_the_links() -> None:
    """Eight that are joined pairwise (MI300X): two of them share one link of seven."""
    pairwise = Wires(h100s(peer=MACHINE.link / 7), PERFECT)
    two, eight = (pairwise.seconds("all_reduce", SIZE, CollectiveGroup(ranks)) for ranks in (2, 8))
    assert two == pytest.approx(7 * WIRES.seconds("all_reduce", SIZE, CollectiveGroup(2)))
    assert eight == pytest.approx(WIRES.seconds("all_reduce", SIZE, CollectiveGroup(8)))


def test_a_rack_is_one_domain() -> None:
    rack = Wires(h100s(domain=72), PERFECT)
    assert rack.seconds("all_gather", SIZE, CollectiveGroup(64)) == pytest.approx(SIZE * 63 / 64 / MACHINE.link)


def test_what_an_exchange_leaves_inside_a_node_does_not_leave_it() -> None:
    """Of 16 ranks 8 are near: 7 of 15 parts go over the link, 8 over the network."""
    travels = SIZE * 15 / 16
    expected = travels * 7 / 15 / MACHINE.link + travels * 8 / 15 / MACHINE.network
    assert WIRES.seconds("all_to_all", SIZE, CollectiveGroup(16)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_sent_to_oneself(kind: Kind) -> None:
    slow = Wires(MACHINE, load_ceilings(MACHINE.accelerator))
    assert slow.seconds(kind, SIZE, CollectiveGroup(1)) == 0
    assert slow.seconds(kind, 0, CollectiveGroup(8)) == 0


GROUPS = st.builds(CollectiveGroup, st.sampled_from([2, 4, 8, 16, 64, 1024]), st.sampled_from([1, 2, 8, 64]))


@given(st.sampled_from(KINDS), GROUPS, st.floats(1, 1e11), st.floats(1.0, 10.0))
def test_more_bytes_take_longer_and_less_than_as_many_messages(
    kind: Kind, group: CollectiveGroup, size: float, factor: float
) -> None:
    wires = Wires(MACHINE, load_ceilings(MACHINE.accelerator))
    here, more = wires.seconds(kind, size, group), wires.seconds(kind, factor * size, group)
    assert here <= more <= factor * here * (1 + 1e-9)
    assert here >= wires.start(CollectiveGroup(2))


@given(GROUPS, st.floats(1, 1e11))
def test_an_all_reduce_is_a_scatter_and_a_gather(group: CollectiveGroup, size: float) -> None:
    both = WIRES.seconds("reduce_scatter", size, group) + WIRES.seconds("all_gather", size, group)
    assert WIRES.seconds("all_reduce", size, group) == pytest.approx(both)


@given(st.floats(1, 1e11))
def test_a_message_to_another_node_goes_over_the_network(size: float) -> None:
    assert WIRES.send(size, stride=4) == pytest.approx(size / MACHINE.link)
    assert WIRES.send(size, stride=8) == pytest.approx(size / MACHINE.network)
