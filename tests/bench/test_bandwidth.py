"""Bandwidths as nccl-tests defines them, the fit of cost by size, rounds of pairs and the rule for a slow one."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.bench.bandwidth import (
    BUS_FACTORS,
    CostFit,
    PairTime,
    algorithm_bandwidth,
    bus_bandwidth,
    find_slow,
    find_slow_ranks,
    fit_cost,
    format_rate,
    left_out_error,
    list_rounds,
    list_sizes,
    percentile,
    round_size,
)

PERFORMANCE_MD = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1),
    "reduce": lambda n: Fraction(1),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "send_recv": lambda n: Fraction(1),
}
"""Bus bandwidth over algorithm bandwidth, as doc/PERFORMANCE.md of nccl-tests derives it."""


@pytest.mark.parametrize("collective", PERFORMANCE_MD)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_bandwidths_are_those_of_nccl_tests(collective: str, ranks: int) -> None:
    assert set(BUS_FACTORS) == set(PERFORMANCE_MD)
    size, seconds = 3 * 2**20, 0.0037
    exact = Fraction(size) / Fraction(seconds)
    assert algorithm_bandwidth(size, seconds) == pytest.approx(float(exact), rel=1e-12, abs=0)
    expected = float(exact * PERFORMANCE_MD[collective](ranks))
    assert bus_bandwidth(collective, size, seconds, ranks) == pytest.approx(expected, rel=1e-12, abs=0)


@given(st.sampled_from(sorted(BUS_FACTORS)), st.integers(1, 2**40), st.integers(2, 64))
def test_sizes_are_whole_parts(collective: str, size: int, ranks: int) -> None:
    """As nccl-tests cuts them: a multiple of 16 bytes for each rank, where each has a part."""
    rounded = round_size(collective, size, ranks)
    unit = 16 * ranks if collective in ("all_gather", "reduce_scatter", "all_to_all") else 4
    assert rounded % unit == 0
    assert rounded == unit or size - unit < rounded <= size


def test_sizes_grow_by_a_factor() -> None:
    assert list_sizes(1024, 2**20) == (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
    assert list_sizes(1000, 5000, 2) == (1000, 2000, 4000)
    assert list_sizes(7, 7) == (7,)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.0, 0.1, 0.5, 0.99, 1.0)] == [1, 10, 50, 99, 100]
    assert percentile([5.0], 0.99) == 5.0


# --- the fit

SIZES = [4**power for power in range(5, 13)]
COSTS = st.builds(CostFit, st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-8))


@given(COSTS)
def test_exact_times_give_back_their_cost(cost: CostFit) -> None:
    found = fit_cost([(size, cost.predict(size)) for size in SIZES])
    assert found is not None
    for size in (1, *SIZES, 2**30):
        assert found.predict(size) == pytest.approx(cost.predict(size), rel=1e-5)


@given(COSTS, st.integers(0, 2**32), st.integers(0, len(SIZES) - 1))
def test_noise_and_a_disturbed_size_leave_the_fit_as_it_is(cost: CostFit, seed: int, disturbed: int) -> None:
    """Sizes that were left out are predicted within 15 %: noise is 5 %, and one size took five times as long."""
    drawn = random.Random(seed)
    points = [(size, cost.predict(size) * drawn.uniform(0.95, 1.05)) for size in SIZES]
    points[disturbed] = (SIZES[disturbed], 5 * cost.predict(SIZES[disturbed]))
    found = fit_cost(points)
    assert found is not None
    errors = [abs(found.predict(2 * size) / cost.predict(2 * size) - 1) for size in SIZES]
    assert median(errors) < 0.15


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-7, 1.0)), min_size=2, max_size=12))
def test_no_coefficient_is_negative(points: list[tuple[int, float]]) -> None:
    found = fit_cost(points)
    if found is None:
        assert len({size for size, _ in points}) == 1
    else:
        assert found.alpha_s >= 0
        assert found.beta_s_per_byte >= 0
        assert found.predict(1) > 0 or found.beta_s_per_byte > 0


def test_one_size_has_no_fit() -> None:
    assert fit_cost([]) is None
    assert fit_cost([(1024, 1e-3), (1024, 1e-3)]) is None


def test_a_left_out_size_is_predicted_from_the_others() -> None:
    cost = CostFit(2e-5, 1e-10)
    points = [(float(size), cost.predict(size)) for size in SIZES]
    error = left_out_error(points)
    assert error is not None
    assert error < 1e-6
    for index in range(1, len(points) - 1, 2):
        points[index] = (points[index][0], 1.5 * points[index][1])
    assert (left_out_error(points) or 0.0) > 0.1
    assert left_out_error(points[:3]) is None


# --- pairs


@given(st.integers(0, 17))
def test_each_meets_each_other_once(count: int) -> None:
    rounds = list_rounds(count)
    met = Counter(pair for pairs in rounds for pair in pairs)
    assert met == Counter((a, b) for b in range(count) for a in range(b))
    assert all(len({seat for pair in pairs for seat in pair}) == 2 * len(pairs) for pairs in rounds)


def times(count: int, slow: dict[tuple[int, int], float], seed: int = 0) -> list[PairTime]:
    """All pairs of ranks of one node, each within 15 % of a usual time but for the slow ones."""
    drawn = random.Random(seed)
    pairs = [pair for pairs in list_rounds(count) for pair in pairs]
    return [PairTime(a, b, "within", 2**20, slow.get((a, b), 1.0) * drawn.uniform(0.85, 1.15) * 1e-3) for a, b in pairs]


@given(st.integers(4, 16), st.floats(2.0, 100.0), st.integers(0, 2**32), st.data())
def test_a_slow_pair_is_named_and_no_other(count: int, factor: float, seed: int, data: st.DataObject) -> None:
    a = data.draw(st.integers(0, count - 2))
    b = data.draw(st.integers(a + 1, count - 1))
    pairs = times(count, {(a, b): factor}, seed)
    slow = find_slow(pairs)
    assert [(pair.first, pair.second) for pair in slow] == [(a, b)]
    assert find_slow_ranks(pairs, slow) == []
    assert find_slow(times(count, {}, seed)) == []


@given(st.integers(5, 16), st.integers(0, 2**32), st.data())
def test_a_rank_that_is_slow_with_all_is_named_itself(count: int, seed: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    slow = {(min(bad, other), max(bad, other)): 4.0 for other in range(count) if other != bad}
    pairs = times(count, slow, seed)
    assert find_slow_ranks(pairs, find_slow(pairs)) == [bad]


def test_kinds_are_not_compared_with_each_other_and_few_with_none() -> None:
    within = [PairTime(0, 1, "within", 4, 1e-6), PairTime(2, 3, "within", 4, 1.1e-6)]
    between = [PairTime(a, b, "between", 4, 1e-4) for a, b in ((0, 2), (1, 3), (0, 3))]
    assert find_slow([*within, *between]) == []
    assert find_slow([PairTime(0, 1, "within", 4, 1.0), PairTime(2, 3, "within", 4, 1e-6)]) == []


def test_rates_have_three_digits_and_no_power_of_ten() -> None:
    assert [format_rate(rate) for rate in (1.234e6, 42.49e9, 99.96e9, 1800e9)] == ["0.00123", "42.5", "100", "1800"]
    assert format_rate(494.6e12, 1e12) == "495"
