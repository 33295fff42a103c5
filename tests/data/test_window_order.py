"""The order that visits files a few at a time: each sample once an epoch, window after window, the same forever."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.loader import Share, StepSampler
from shardway.data.order import Skips
from shardway.data.sources.base import FileBlocks
from shardway.data.window_order import WINDOW_ORDER_VERSION, WindowOrder
from shardway.errors import UserError

EVEN, UNEVEN = tuple(range(10, 101, 10)), (3, 3, 10, 12, 40)
LARGE = tuple(int(end) for end in np.cumsum([70_000, 10, 90_000, 65_536]))
GOLDEN_POSITIONS = np.array([0, 1, 2, 9, 10, 11, 10**6, 10**9 + 7], np.int64)
GOLDEN: dict[tuple[tuple[int, ...], int, int], list[int]] = {
    (EVEN, 3, 0): [11, 4, 3, 19, 7, 8, 99, 71],
    (EVEN, 10, 2**64 - 1): [68, 73, 22, 33, 47, 32, 95, 37],
    (UNEVEN, 2, 1): [6, 9, 3, 0, 23, 31, 8, 20],
    (LARGE, 1, 42): [44494, 41126, 27927, 42161, 52920, 65266, 91132, 128875],
    (LARGE, 2, 42): [99336, 159865, 156891, 63016, 42224, 2044, 58948, 102516],
}


@st.composite
def orders(draw: st.DrawFn) -> WindowOrder:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    return WindowOrder(np.cumsum(sizes).tolist(), draw(st.integers(1, 13)), draw(st.integers(0, 2**64 - 1)))


def block_of(order: WindowOrder, sample: int) -> int:
    return int(np.searchsorted(np.asarray(order.ends), sample, side="right"))


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_order_is_what_it_always_was(case: tuple[tuple[int, ...], int, int]) -> None:
    assert WINDOW_ORDER_VERSION == 1
    assert WindowOrder(*case).ids(GOLDEN_POSITIONS).tolist() == GOLDEN[case]


@settings(max_examples=80, deadline=None)
@given(orders(), st.integers(0, 10**9))
def test_an_epoch_is_every_sample_once_window_by_window(order: WindowOrder, epoch: int) -> None:
    first, size = epoch * order.samples, order.samples
    ids = order.ids(np.arange(first, first + size))
    assert np.array_equal(np.sort(ids), np.arange(size))
    windows = range(epoch * order.windows, (epoch + 1) * order.windows)
    found = [window for position in range(first, first + size) for window in order.windows_at(np.array([position]))]
    assert found == sorted(found)
    assert sorted(set(found)) == list(windows)
    bounds = [*(first + found.index(window) for window in windows), first + size]
    for window, start, end in zip(windows, bounds, bounds[1:], strict=False):
        blocks = order.blocks_of(window)
        assert {block_of(order, sample) for sample in ids[start - first : end - first].tolist()} == set(blocks)
        assert len(set(blocks)) == len(blocks) <= order.blocks_at_once
        assert end - start >= order.least_samples >= 1
        assert order.windows_at(np.array([start, end - 1])) == [window]


@settings(max_examples=60, deadline=None)
@given(orders(), st.data())
def test_a_sample_is_found_where_the_order_has_it(order: WindowOrder, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, 5 * order.samples))
    sample = int(order.ids(np.array([position]))[0])
    found = order.find_positions(sample, position)
    assert next(found) == position
    following = next(found)
    assert order.ids(np.array([following])).tolist() == [sample]
    assert following // order.samples == position // order.samples + 1


@settings(max_examples=60, deadline=None)
@given(orders(), st.integers(1, 5), st.integers(1, 9), st.data())
def test_steps_are_the_same_on_any_ranks_from_any_stop_and_around_skips(
    order: WindowOrder, ranks: int, batch: int, data: st.DataObject
) -> None:
    start, steps = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 8))
    span = data.draw(st.tuples(st.integers(0, 150), st.integers(1, 60)))
    skips = Skips([[span[0], sum(span)]])

    def take(number: int, position: int, count: int) -> list[list[int]]:
        shares = [StepSampler(order, Share(batch, rank, number), position, count, skips) for rank in range(number)]
        return [np.concatenate([each.ids for each in step]).tolist() for step in zip(*shares, strict=True)]

    whole = take(1, start, steps)
    assert take(ranks, start, steps) == whole
    stop = data.draw(st.integers(0, steps - 1))
    begins = [step.position for step in StepSampler(order, Share(batch), start, steps, skips)]
    assert take(ranks, begins[stop], steps - stop) == whole[stop:]


def test_large_windows_are_permuted_too_and_inverted() -> None:
    order = WindowOrder(LARGE, 2, 9)
    ids = order.ids(np.arange(order.samples, 2 * order.samples))
    assert np.array_equal(np.sort(ids), np.arange(order.samples))
    for position in (0, 5, 123_456, order.samples + 77_777):
        assert next(order.find_positions(int(order.ids(np.array([position]))[0]), position)) == position


def test_epochs_and_seeds_differ_in_their_blocks_and_within_them() -> None:
    order = WindowOrder(EVEN, 2, 1)
    blocks = [[order.blocks_of(epoch * 5 + window) for window in range(5)] for epoch in range(4)]
    assert len({str(each) for each in blocks}) == 4
    assert blocks[0] != [WindowOrder(EVEN, 2, 2).blocks_of(window) for window in range(5)]
    one = WindowOrder((50,), 1, 1)
    epochs = [one.ids(np.arange(epoch * 50, epoch * 50 + 50)) for epoch in range(3)]
    for first in range(3):
        for second in range(first):
            assert np.sum(epochs[first] == epochs[second]) < 10


def test_samples_of_a_window_are_well_mixed() -> None:
    """Each sample comes to each place of its window about as often as to any other."""
    order = WindowOrder((6, 12), 2, 5)
    epochs = 3000
    ids = order.ids(np.arange(12 * epochs)).reshape(epochs, 12)
    counts = np.stack([np.bincount(ids[:, place], minlength=12) for place in range(12)])
    chi_square = float(((counts - epochs / 12) ** 2 / (epochs / 12)).sum())
    assert 60 < chi_square < 200  # 121 degrees of freedom: 121 +- 15.6


def test_positions_of_any_shape_and_mix_give_the_same_and_so_does_a_copy() -> None:
    order = WindowOrder(UNEVEN, 2, 3)
    positions = np.random.default_rng(0).integers(0, 400, (5, 7))
    together = order.ids(positions)
    alone = [order.ids(np.array([position]))[0] for position in positions.ravel().tolist()]
    assert together.ravel().tolist() == alone
    assert np.array_equal(pickle.loads(pickle.dumps(order)).ids(positions), together)
    assert np.array_equal(order.epochs(positions), positions // 40)


def test_how_many_files_a_window_has_follows_from_their_sizes_alone() -> None:
    files = [SimpleNamespace(size=size) for size in (100, 5000, 300, 200)]
    blocks = FileBlocks(np.array([10, 10, 30, 40]), SimpleNamespace(files=files))  # the large file has no samples
    assert blocks.order(0, 1000).blocks_at_once == 3
    assert blocks.order(0, 299).blocks_at_once == 1
    assert blocks.order(0, 600).windows == 2
    assert blocks.filled == [0, 2, 3]


def test_no_samples_and_a_seed_that_does_not_fit_are_refused() -> None:
    for ends, seed, what in (((), 0, "no samples"), ((0,), 0, "no samples"), ((5,), 2**64, "train.seed")):
        with pytest.raises(UserError, match=what):
            WindowOrder(ends, 1, seed)
