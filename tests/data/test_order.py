from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.data.order import ORDER_VERSION, SampleOrder, mix64, position_share
from shardway.errors import UserError

SIZES = [1, 2, 3, 50, 255, 1000, 65535, 65536, 65537, 257 * 257, 2**17 + 1, 2**18 + 1, 2**19 + 1, 10**6]
GOLDEN_POSITIONS = np.array([0, 1, 2, 9, 10, 11, 10**6, 10**9 + 7], np.int64)
GOLDEN = {
    (10, 0): [6, 7, 1, 4, 7, 3, 5, 3],
    (10, 2**64 - 1): [5, 3, 7, 2, 7, 1, 0, 6],
    (65536, 1): [46036, 52571, 32763, 11626, 10550, 46737, 46546, 17744],
    (65537, 1): [52032, 42142, 32240, 1417, 33507, 6259, 39692, 44813],
    (10**12, 42): [
        571221775655,
        7436087900,
        471143223691,
        535175810122,
        262440412139,
        171954706636,
        457782962209,
        930001150363,
    ],
}


def epoch_ids(order: SampleOrder, epoch: int) -> np.ndarray:
    return order.ids(np.arange(epoch * order.samples, (epoch + 1) * order.samples, dtype=np.int64))


@pytest.mark.parametrize(("samples", "seed"), GOLDEN)
def test_the_order_is_what_it_always_was(samples: int, seed: int) -> None:
    assert ORDER_VERSION == 1
    assert SampleOrder(samples, seed).ids(GOLDEN_POSITIONS).tolist() == GOLDEN[samples, seed]


def test_keys_are_those_of_splitmix64() -> None:
    # The stream of seed 1234567 in the reference implementation (Vigna, splitmix64.c).
    state = 1234567
    outputs = [int(mix64(np.array([(state + (i + 1) * 0x9E3779B97F4A7C15) % 2**64], np.uint64))[0]) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("samples", SIZES)
def test_an_epoch_is_every_sample_once(samples: int) -> None:
    order = SampleOrder(samples, seed=5)
    for epoch in (0, 3):
        assert np.array_equal(np.sort(epoch_ids(order, epoch)), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(0, 10**9))
def test_any_small_epoch_is_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_ids(SampleOrder(samples, seed), epoch)), np.arange(samples))


@settings(max_examples=25, deadline=None)
@given(st.integers(65537, 10**12), st.integers(0, 2**64 - 1))
def test_ids_of_a_large_order_are_in_range_and_distinct(samples: int, seed: int) -> None:
    ids = SampleOrder(samples, seed).ids(np.arange(samples, samples + 4096, dtype=np.int64))
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < samples
    assert len(np.unique(ids)) == 4096


@pytest.mark.parametrize("samples", [50, 1000, 65537])
def test_epochs_and_seeds_differ(samples: int) -> None:
    orders = [
        epoch_ids(SampleOrder(samples, 1), 0),
        epoch_ids(SampleOrder(samples, 1), 1),
        epoch_ids(SampleOrder(samples, 2), 0),
    ]
    for first in range(3):
        for second in range(first):
            # Two random permutations agree in one place on average.
            assert np.sum(orders[first] == orders[second]) < 10


def test_ids_of_a_position_do_not_depend_on_what_else_is_asked() -> None:
    for samples in (7, 1000, 70000):
        order = SampleOrder(samples, 3)
        positions = np.random.default_rng(0).integers(0, 20 * samples, 300)
        alone = [int(order.ids(np.array([position]))[0]) for position in positions]
        assert order.ids(positions).tolist() == alone
        assert np.array_equal(order.ids(positions.reshape(20, 15)), np.reshape(alone, (20, 15)))


def test_no_positions_give_no_ids() -> None:
    for samples in (7, 70000):
        assert SampleOrder(samples, 3).ids(np.empty((4, 0), np.int64)).shape == (4, 0)


def test_without_shuffle_ids_count_up_in_each_epoch() -> None:
    assert SampleOrder(3, 0, shuffle=False).ids(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_each_sample_is_as_likely_at_each_place() -> None:
    samples, epochs = 50, 5000
    ids = SampleOrder(samples, 3).ids(np.arange(samples * epochs)).reshape(epochs, samples)
    counts = np.stack([np.bincount(column, minlength=samples) for column in ids.T])
    expected = epochs / samples
    chi_square = float(((counts - expected) ** 2).sum() / expected)
    freedom = (samples - 1) ** 2
    # Within 3.3 standard deviations of the mean of a chi-square distribution, either side.
    assert abs(chi_square - freedom) < 3.3 * math.sqrt(2 * freedom)


def test_a_feistel_order_spreads_places_over_all_samples() -> None:
    samples, buckets = 65537, 64
    ids = epoch_ids(SampleOrder(samples, 3), 0)
    cells = np.histogram2d(np.arange(samples), ids, bins=buckets, range=[[0, samples], [0, samples]])[0]
    expected = samples / buckets**2
    freedom = (buckets - 1) ** 2
    assert abs(float(((cells - expected) ** 2).sum() / expected) - freedom) < 3.3 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("samples", [5000, 65536, 65537, 2**20 + 1, 10**12])
def test_neighbours_are_as_far_apart_as_random_ones(samples: int) -> None:
    ids = SampleOrder(samples, 3).ids(np.arange(5000, dtype=np.int64)).astype(np.float64)
    # |x - y| of two uniform numbers: mean 1/3, standard deviation 1/sqrt(18); 5 standard errors of 5000 pairs.
    assert abs(np.abs(np.diff(ids)).mean() / samples - 1 / 3) < 5 / math.sqrt(18 * 5000)
    # Neither a run up nor down: the serial correlation of 5000 pairs has standard error 1/sqrt(5000).
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / math.sqrt(5000)


def test_time_of_an_index_does_not_grow_with_the_samples() -> None:
    positions = np.arange(16384, dtype=np.int64)

    def best_s(samples: int) -> float:
        order = SampleOrder(samples, 0)
        times = []
        for _ in range(7):
            start = time.process_time()
            order.ids(positions)
            times.append(time.process_time() - start)
        return min(times)

    small = best_s(10**6)
    for samples in (10**12, 2**40 + 1):
        assert best_s(samples) < 4 * small


@given(st.integers(0, 5000), st.integers(1, 300))
def test_shares_are_the_batch_in_order(global_batch: int, ranks: int) -> None:
    shares = [position_share(global_batch, rank, ranks) for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(global_batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("samples", "seed", "text"),
    [
        (0, 0, "there are no samples to put in order; the data must have at least one"),
        (1, 2**64, "train.seed is 18446744073709551616; allowed: 0 to 18446744073709551615"),
    ],
)
def test_an_order_that_cannot_be_is_refused(samples: int, seed: int, text: str) -> None:
    with pytest.raises(UserError) as caught:
        SampleOrder(samples, seed)
    assert str(caught.value) == text
