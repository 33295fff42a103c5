"""`data.skip`: what it takes, what it says of what it does not take."""

from __future__ import annotations

from typing import Any

import pytest

from shardway.errors import UserError
from shardway.runfile.load import load_run
from shardway.runfile.schema import read_skips

ALLOWED = (
    "\n      allowed: pairs [from, to] of integers, from less than to, 0 to 1000000000000000000, such as "
    "[[120000, 121000]]"
)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([], []),
        ([[5, 9]], [[5, 9]]),
        ([[7, 12], [5, 9], [20, 21]], [[5, 12], [20, 21]]),
        ([[9, 12], [5, 9]], [[5, 12]]),
        ([[5, 20], [7, 9]], [[5, 20]]),
    ],
)
def test_spans_are_sorted_and_merged(given: list[list[int]], read: list[list[int]]) -> None:
    assert read_skips(given) == read
    assert read_skips(read) == read


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("7", "7 is no pair"),
        ("[1, 2]", "1 is no pair, 2 is no pair"),
        ("[[1]]", "[1] is no pair"),
        ("[[1, 2, 3]]", "[1, 2, 3] is no pair"),
        ("[[1, 2.0]]", "[1, 2.0] holds what is no integer"),
        ("[[true, 2]]", "[True, 2] holds what is no integer"),
        ("[[-1, 2]]", "[-1, 2] reaches out of the order"),
        ("[[1, 2000000000000000000]]", "[1, 2000000000000000000] reaches out of the order"),
        ("[[5, 5], [1, 4], [9, 3]]", "[5, 5] ends where or before it begins, [9, 3] ends where or before it begins"),
    ],
)
def test_all_that_is_wrong_is_said_at_once(given: str, what: str) -> None:
    with pytest.raises(UserError) as told:
        load_run(None, [f"data.skip={given}"])
    assert str(told.value).partition("data.skip (command line): ")[2] == what + ALLOWED


def test_a_run_file_holds_merged_spans() -> None:
    values: Any = load_run(None, ["data.skip=[[7, 12], [5, 9]]"]).values
    assert values.data.skip == [[5, 12]]
