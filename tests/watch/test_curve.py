from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.watch.live import GrowingCurve
from shardway.watch.report.curves import CurvePoint, smooth, thin
from shardway.watch.report.event_log import StepSeries

values = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300)
limits = st.integers(1, 20).map(lambda half: 2 * half)


def _points(numbers: list[float]) -> list[CurvePoint]:
    return [CurvePoint(step, number) for step, number in enumerate(numbers, 1)]


@given(values, limits)
def test_thin_keeps_order_ends_and_extremes(numbers: list[float], limit: int) -> None:
    points = _points(numbers)
    kept = thin(points, limit)
    steps = [point.step for point in kept]
    assert len(kept) <= limit + 2
    assert steps == sorted(set(steps))
    assert {point.step for point in points[:1] + points[-1:]} <= set(steps)
    finite = [number for number in numbers if math.isfinite(number)]
    if finite:
        shown = [point.value for point in kept if math.isfinite(point.value)]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_thin_leaves_a_gap_where_nothing_is_finite() -> None:
    points = _points([1.0, 2.0] * 25 + [math.nan] * 50)
    assert [math.isnan(point.value) for point in thin(points, 4)] == [
        False,
        False,
        True,
        True,
    ]  # the last one is the end


def test_thin_leaves_a_short_curve_alone() -> None:
    assert thin(_points([3.0, 1.0, 2.0]), 4) == _points([3.0, 1.0, 2.0])


def _series(numbers: list[float]) -> StepSeries:
    steps = np.arange(1, len(numbers) + 1)
    return StepSeries(steps, np.array(numbers), 10.0 * steps)


@given(st.integers(2, 60), st.integers(0, 10))
def test_smooth_does_not_lag_behind_a_straight_line(count: int, half_window: int) -> None:
    line = _series([2.0 * step for step in range(count)])
    means = smooth(line, half_window)
    assert means.step.tolist() == line.step.tolist()
    assert means.value == pytest.approx(line.value)


def test_smooth_means_over_the_window_and_skips_nan() -> None:
    means = smooth(_series([0.0, 3.0, math.nan, 6.0, 0.0]), 1)
    assert (means.step.tolist(), means.value.tolist()) == ([1, 2, 4, 5], [0.0, 3.0, 3.0, 1.5])
    assert means.time.tolist() == [10.0, 20.0, 40.0, 50.0]


def test_the_end_of_a_smooth_curve_is_not_one_step() -> None:
    means = smooth(_series([100.0, 120.0] * 20 + [10.0]), 6)
    assert 80 < means.value[-1] < 110
    assert smooth(_series([5.0, 7.0]), 6).value.tolist() == [5.0, 7.0]


@given(st.integers(0, 2000), st.integers(1, 40))
def test_growing_curve_is_bounded_and_keeps_the_mean(count: int, width: int) -> None:
    curve = GrowingCurve(capacity=16)
    for step in range(1, count + 1):
        curve.add(step, float(step))
    columns = curve.columns(width)
    assert len(columns) <= min(width, 16)
    assert columns == sorted(columns)
    assert (len(columns) == 0) == (count == 0)


def test_growing_curve_forgets_what_was_undone() -> None:
    curve = GrowingCurve()
    for step, value in ((1, 5.0), (2, 4.0), (3, math.nan), (4, 3.0)):
        curve.add(step, value)
    curve.undo_after(2)
    assert curve.columns(10) == [5.0, 4.0]
