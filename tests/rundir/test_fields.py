"""A table that was read from a file becomes a dataclass whose values have the types that it says, or none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.rundir.file_io import read_fields


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Facts:
    name: str
    count: int = 1
    seconds: float = 0.5
    code: int | None = 7
    sure: bool = False
    colour: Colour = Colour.RED
    words: tuple[str, ...] = ("x",)
    more: Mapping[str, Any] = field(default_factory=dict)


def test_what_was_written_is_read() -> None:
    facts = Facts("a", 2, 1.5, None, True, Colour.RED, ("b", "c"), {"d": [1]})
    assert read_fields(Facts, json.loads(json.dumps(asdict(facts)))) == facts


def test_a_key_that_is_not_known_is_left_out() -> None:
    assert read_fields(Facts, {"name": "a", "newer": 1}) == Facts("a")


def test_a_whole_number_is_a_float_as_well() -> None:
    found = read_fields(Facts, {"name": "a", "seconds": 3})
    assert found == Facts("a", seconds=3.0)
    assert isinstance(found.seconds, float)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": "2"},
        {"count": True},
        {"count": 2.0},
        {"count": None},
        {"seconds": "soon"},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": 10**400},
        {"code": []},
        {"sure": 1},
        {"words": "bc"},
        {"words": ["b", 3]},
        {"words": {"b": 1}},
        {"more": "text"},
        {"more": [1]},
    ],
    ids=str,
)
def test_a_value_of_another_type_counts_as_not_there(wrong: dict[str, Any]) -> None:
    assert read_fields(Facts, {"name": "a", **wrong}) == Facts("a")


@pytest.mark.parametrize("name", [None, 3, [], {}, True, "a\0b", "\ud800"], ids=ascii)
def test_without_what_is_needed_there_is_nothing(name: Any) -> None:
    assert read_fields(Facts, {"name": name}) is None


@pytest.mark.parametrize("table", [None, 3, "text", [], ["name"]], ids=str)
def test_what_is_no_table_is_nothing(table: Any) -> None:
    assert read_fields(Facts, table) is None


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(Facts.__dataclass_fields__)), ANY))
def test_any_table(table: dict[str, Any]) -> None:
    found = read_fields(Facts, table)
    assert found is None or (type(found.count), type(found.seconds), type(found.words)) == (int, float, tuple)
    assert found is None or math.isfinite(found.seconds)
