"""Numbers in words: three figures, the unit that suits."""

from __future__ import annotations

import pytest

from shardway.plan.text import amount, duration, gib


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0213, "21.3 ms"), (4.7, "4.70 s"), (119, "119 s"), (150, "2.50 min"), (9000, "2.50 h"), (864000, "10.0 days")],
)
def test_a_time_has_the_unit_that_suits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0412, "0.0412"), (7, "7"), (12345.6, "12,300"), (999.7, "1,000"), (2718281, "2,720,000")]
)
def test_an_amount_has_three_figures(value: float, text: str) -> None:
    assert amount(value) == text


def test_small_memory_is_told_in_mib() -> None:
    assert gib(79.6 * 2**30) == "79.6 GiB"
    assert gib(3.25 * 2**20) == "3.2 MiB"
