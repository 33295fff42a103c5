"""Positions that no step takes: what is read is the rest, each position once, in order, whoever reads and resumes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.loader import Share, StepSampler
from shardway.data.order import SampleOrder, Skips
from shardway.runfile.schema import read_skips

PAIRS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=6)
CUTS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4)
FAR = 1500
"""Further than any of these runs reads."""


def make_skips(pairs: list[tuple[int, int]]) -> Skips:
    return Skips(read_skips([[start, start + length] for start, length in pairs]))


def list_kept(pairs: list[tuple[int, int]]) -> list[int]:
    """The positions in no span, found one by one."""
    return [p for p in range(FAR) if not any(start <= p < start + length for start, length in pairs)]


def read_attempt(
    order: SampleOrder, batch: int, world: int, position: int, steps: int, skips: Skips
) -> tuple[list[int], int]:
    """The ids of some steps over all ranks, and where the next step begins."""
    samplers = [StepSampler(order, Share(batch, rank, world), position, steps, skips) for rank in range(world)]
    ids: list[int] = []
    for requests in zip(*samplers, strict=True):
        assert len({(request.position, request.next_position) for request in requests}) == 1
        position = requests[0].next_position
        ids += np.concatenate([request.ids for request in requests]).tolist()
    return ids, position


@settings(max_examples=40)
@given(pairs=PAIRS, position=st.integers(0, 500))
def test_kept_positions_are_those_in_no_span(pairs: list[tuple[int, int]], position: int) -> None:
    skips, kept = make_skips(pairs), list_kept(pairs)
    assert skips.count_kept(position) == sum(1 for each in kept if each < position)
    assert skips.find_kept(np.arange(400).reshape(20, 20)).ravel().tolist() == kept[:400]


@settings(max_examples=40)
@given(samples=st.integers(1, 90), batch=st.integers(1, 17), pairs=PAIRS, cuts=CUTS)
def test_any_attempts_of_any_worlds_read_the_rest_in_order(
    samples: int, batch: int, pairs: list[tuple[int, int]], cuts: list[tuple[int, int]]
) -> None:
    order, found, position = SampleOrder(samples, seed=3), [], 0
    for world, (steps, _) in zip(itertools.cycle((1, 4, 3, 2)), cuts, strict=False):
        ids, position = read_attempt(order, batch, world, position, steps, make_skips(pairs))
        found += ids
    kept = list_kept(pairs)[: len(found)]
    assert found == order.ids(np.array(kept)).tolist()
    assert position == kept[-1] + 1


@settings(max_examples=60)
@given(batch=st.integers(1, 9), pairs=PAIRS, later=PAIRS, cuts=CUTS)
def test_a_span_that_is_added_jumps_over_what_lies_ahead_alone(
    batch: int, pairs: list[tuple[int, int]], later: list[tuple[int, int]], cuts: list[tuple[int, int]]
) -> None:
    order, position, found, expected = SampleOrder(70, seed=1), 0, [], []
    for steps, world in cuts:
        before = position
        ids, position = read_attempt(order, batch, world, position, steps, make_skips(pairs))
        found += ids
        expected += [p for p in list_kept(pairs) if p >= before][: steps * batch]
        pairs = [*pairs, *later[:1]]
        later = later[1:]
    assert found == order.ids(np.array(expected)).tolist()
    assert len(set(expected)) == len(expected)


def test_a_span_across_the_end_of_an_epoch_shifts_no_epoch() -> None:
    """Ten samples, positions 8 to 12 left out: the first epoch lacks its last two, the second its first three."""
    order = SampleOrder(10, seed=1)
    ids, _ = read_attempt(order, 5, 2, 0, 5, Skips([[8, 13]]))
    whole = order.ids(np.arange(30)).tolist()
    assert ids == whole[:8] + whole[13:30]
    assert sorted(ids[15:]) == list(range(10))


def test_spans_may_lie_at_any_height() -> None:
    skips = Skips([[10**12, 10**18]])
    assert skips.find_kept(np.array([10**12 - 1, 10**12])).tolist() == [10**12 - 1, 10**18]
    assert skips.count_kept(10**17) == skips.count_kept(10**18) == 10**12
