"""What a rank checks of the data that it got: right results pass, and every wrong one is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardway.bench.bandwidth import BUS_FACTORS
from shardway.bench.collectives import BLOCKS, CollectiveBuffers, GroupPlace, PlaceTable

COLLECTIVES = sorted(BUS_FACTORS)
BLOCK = BLOCKS["cpu"]
SUMS = ("all_reduce", "reduce", "reduce_scatter")
Sent = Sequence[torch.Tensor]


def make_world(collective: str, ranks: int, size: int, step: int) -> list[CollectiveBuffers]:
    """Every rank of a launch, in this process, with the data of a step."""
    members = list(range(ranks))
    world = [CollectiveBuffers(collective, size, GroupPlace(rank, members), torch.device("cpu")) for rank in members]
    for buffers in world:
        buffers.fill(step)
    return world


def results(collective: str, sent: Sent) -> list[torch.Tensor]:
    """What each rank has to receive, by the definitions in the manual of MPI."""
    ranks = len(sent)
    if collective == "all_reduce":
        return [torch.stack(list(sent)).sum(0)] * ranks
    if collective == "all_gather":
        return [torch.cat(list(sent))] * ranks
    if collective == "reduce_scatter":
        return list(torch.stack(list(sent)).sum(0).chunk(ranks))
    if collective == "broadcast":
        return [sent[0]] * ranks
    if collective == "reduce":
        return [torch.stack(list(sent)).sum(0), *sent[1:]]
    if collective == "all_to_all":
        return [torch.cat([each.chunk(ranks)[rank] for each in sent]) for rank in range(ranks)]
    return [sent[(rank - 1) % ranks] for rank in range(ranks)]


def receive(world: list[CollectiveBuffers], arrived: Sent) -> None:
    for buffers, values in zip(world, [each.clone() for each in arrived], strict=True):
        buffers.received.copy_(values)


def copies(world: list[CollectiveBuffers]) -> list[torch.Tensor]:
    return [buffers.sent.clone() for buffers in world]


@given(st.sampled_from(COLLECTIVES), st.integers(2, 8), st.sampled_from((1, 1000, 4096)), st.integers(0, 99))
def test_right_results_pass(collective: str, ranks: int, size: int, step: int) -> None:
    world = make_world(collective, ranks, size, step)
    receive(world, results(collective, copies(world)))
    assert [buffers.check(step) for buffers in world] == [None] * ranks


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_data_of_several_blocks_are_checked_to_the_end(collective: str) -> None:
    world = make_world(collective, 3, 3 * 4 * BLOCK + 5000, 1)
    arrived = [each.clone() for each in results(collective, copies(world))]
    assert wrong(world, arrived, 1) == []
    arrived[0][-1] += 1
    assert wrong(world, arrived, 1) == [0]
    assert (found := world[0].check(1)) is not None
    assert (found.elements, found.index) == (1, len(arrived[0]) - 1)


def wrong(world: list[CollectiveBuffers], arrived: Sent, step: int) -> list[int]:
    """The ranks that find something wrong."""
    receive(world, arrived)
    return [rank for rank, buffers in enumerate(world) if buffers.check(step) is not None]


@given(st.sampled_from(COLLECTIVES), st.integers(2, 8), st.sampled_from((1, 1000, 4096)), st.integers(0, 2**32))
def test_one_corrupted_element_is_found_where_it_is(collective: str, ranks: int, size: int, seed: int) -> None:
    """Whichever bit of it has changed."""
    drawn = random.Random(seed)
    world = make_world(collective, ranks, size, 1)
    arrived = [each.clone() for each in results(collective, copies(world))]
    rank = 0 if collective == "reduce" else drawn.randrange(ranks)
    index, bit = drawn.randrange(len(arrived[rank])), drawn.randrange(32)
    right = float(arrived[rank][index])
    arrived[rank].view(torch.int32)[index] ^= (1 << bit) if bit < 31 else -(2**31)
    assert wrong(world, arrived, 1) == [rank]
    found = world[rank].check(1)
    assert found is not None
    assert (found.elements, found.index, found.expected) == (1, index, right)
    assert found.found == float(arrived[rank][index]) or found.found != found.found  # a NaN is no number that is equal


def swapped(collective: str, sent: Sent, drawn: random.Random) -> list[torch.Tensor]:
    """Two ranks stand in each other's place."""
    one, other = drawn.sample(range(len(sent)), 2)
    if collective == "broadcast":  # that of another root
        return results(collective, sent[1:] + sent[:1])
    if collective == "reduce_scatter":
        arrived = results(collective, sent)
        arrived[one], arrived[other] = arrived[other], arrived[one]
        return arrived
    moved = list(sent)
    moved[one], moved[other] = moved[other], moved[one]
    return results(collective, moved)


def without_the_last(collective: str, sent: Sent, drawn: random.Random) -> list[torch.Tensor]:
    """The last rank takes no part: nothing of it arrives, or nothing at it."""
    if collective in ("broadcast", "send_recv"):
        return [*results(collective, sent)[:-1], torch.zeros_like(sent[-1])]
    return results(collective, [*sent[:-1], torch.zeros_like(sent[-1])])


def doubled(collective: str, sent: Sent, drawn: random.Random) -> list[torch.Tensor]:
    """One rank counts in the place of another."""
    one, other = drawn.sample(range(len(sent)), 2)
    if collective == "broadcast":
        one = 0
    moved = list(sent)
    moved[one] = sent[other or 1] if collective == "broadcast" else sent[other]
    return results(collective, moved)


def shifted(collective: str, sent: Sent, drawn: random.Random) -> list[torch.Tensor]:
    """Everything arrives one element further on."""
    return [each.roll(1) for each in results(collective, sent)]


@pytest.mark.parametrize("fault", [swapped, without_the_last, doubled, shifted])
@given(
    st.sampled_from(COLLECTIVES),
    st.integers(2, 8),
    st.sampled_from((1024, 5000)),
    st.integers(0, 2**32),
)
def test_what_arrives_in_a_wrong_way_is_found(
    fault: Callable[[str, Sent, random.Random], list[torch.Tensor]], collective: str, ranks: int, size: int, seed: int
) -> None:
    if fault is swapped and collective in ("all_reduce", "reduce"):
        return  # a sum is the same in any order
    drawn = random.Random(seed)
    world = make_world(collective, ranks, size, 3)
    assert wrong(world, fault(collective, copies(world), drawn), 3) != []


@given(st.sampled_from(COLLECTIVES), st.integers(2, 8), st.integers(0, 300), st.sampled_from((-1, 1)))
def test_the_data_of_another_step_are_found(collective: str, ranks: int, step: int, off: int) -> None:
    other = make_world(collective, ranks, 4096, step + off)
    world = make_world(collective, ranks, 4096, step)
    found = wrong(world, results(collective, copies(other)), step)
    assert found == ([0] if collective == "reduce" else list(range(ranks)))


def test_sums_are_exact_over_many_ranks() -> None:
    """In fp32, whatever the order: every partial sum is an integer below 2**24."""
    for ranks in (2, 1000, 4096, 20_000, 60_000):
        place = GroupPlace(0, range(ranks))
        buffers = CollectiveBuffers("all_reduce", 64, place, torch.device("cpu"))
        largest = 256 * ranks + sum(buffers._mark(rank) for rank in range(ranks))
        assert largest <= 2**24, ranks


def test_a_checksum_is_that_of_its_blocks() -> None:
    table = PlaceTable(torch.device("cpu"))
    values = torch.arange(3 * BLOCK, dtype=torch.float32)
    sums = [table.checksum(values[start : start + BLOCK], start) for start in range(0, len(values), BLOCK)]
    moved = [table.checksum(values[start : start + BLOCK], 0) for start in range(0, len(values), BLOCK)]
    assert len({*sums, *moved}) == 5  # the same values elsewhere have another checksum
    both = table.values(BLOCK - 3, 6, 2)
    assert both.tolist() == [*table.values(BLOCK - 3, 3, 2).tolist(), *table.values(BLOCK, 3, 2).tolist()]
