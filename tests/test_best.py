"""Which validation is the best, and the text of a monitor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.units import LOSS, BestResult, Monitor, parse_monitor

NAN = math.nan


@pytest.mark.parametrize(
    ("text", "metric", "highest", "rendered"),
    [
        ("loss", "loss", False, "loss"),
        (" accuracy ", "accuracy", True, "accuracy"),
        ("bits_per_byte", "bits_per_byte", False, "bits_per_byte"),
        ("max accuracy", "accuracy", True, "accuracy"),
        ("min loss", "loss", False, "loss"),
        ("max f1", "f1", True, "max f1"),
        ("min  rmse", "rmse", False, "min rmse"),
        ("max macro f1", "macro f1", True, "max macro f1"),
        ("min max", "max", False, "min max"),
    ],
)
def test_a_monitor_is_a_metric_and_its_direction(text: str, metric: str, highest: bool, rendered: str) -> None:
    monitor = parse_monitor(text)
    assert (monitor.metric, monitor.highest, str(monitor)) == (metric, highest, rendered)
    assert parse_monitor(str(monitor)) == monitor


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "f1",
            'whether more or less of "f1" is better is not known; allowed: "max f1" or "min f1", or "loss", '
            '"accuracy", "bits_per_byte"',
        ),
        (
            "",
            '"" names no metric; allowed: "loss", "accuracy", "bits_per_byte", or any other with its direction: '
            '"max f1"',
        ),
        (
            "max",
            '"max" names no metric; allowed: "loss", "accuracy", "bits_per_byte", or any other with its direction: '
            '"max f1"',
        ),
        ("max loss", '"max loss" would take the worst loss for the best; allowed: "loss"'),
        ("min accuracy", '"min accuracy" would take the worst accuracy for the best; allowed: "accuracy"'),
    ],
)
def test_what_is_no_monitor_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError) as failure:
        parse_monitor(text)
    assert str(failure.value) == told


def test_the_best_is_a_number_and_of_equals_the_earlier() -> None:
    results = {10: {"loss": NAN}, 20: {"loss": 2.0}, 30: {"loss": -math.inf}, 40: {"loss": 2.0}, 50: {"f1": 1.0}}
    assert LOSS.rank(results) == [20, 40]
    assert LOSS.find_best(results) == BestResult(20, {"loss": 2.0})
    assert LOSS.count_since_best(results) == 2  # step 50 has no loss
    assert Monitor("f1", highest=True).rank({1: {"f1": 0.5}, 2: {"f1": 0.75}, 3: {"f1": 0.75}}) == [2, 3, 1]
    assert LOSS.find_best({}) is None
    assert LOSS.count_since_best({1: {"loss": NAN}, 2: {"loss": NAN}}) == 2
    assert LOSS.render(results[20]) == "loss 2"


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, NAN, math.inf, -math.inf]), max_size=9), st.booleans())
def test_ranks_by_hand(values: list[float], highest: bool) -> None:
    """Whoever asks after each value which is the best so far sees the same as whoever asks in the end."""
    monitor, best, since = Monitor("x", highest), None, 0
    for step, value in enumerate(values, 1):
        since += 1
        if math.isfinite(value) and (
            best is None or ((value > values[best - 1]) is highest and value != values[best - 1])
        ):
            best, since = step, 0
        found = monitor.find_best({s: {"x": values[s - 1]} for s in range(1, step + 1)})
        assert (found.step if found else None) == best
        assert monitor.count_since_best({s: {"x": values[s - 1]} for s in range(1, step + 1)}) == since
