"""Settings as text are read back as the values that were written, by the parser of each format."""

from __future__ import annotations

import ast
import math
import shlex
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from shardway.plan.export.common import literal, write_call, write_flags, write_toml, write_yaml

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
TEXTS = st.text(max_size=6)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
SCALARS = TEXTS | NUMBERS | st.sampled_from(["no", "Null", "1e5", "0x10", "1_000", "12:30", "~", "=", "a b"])
LISTS = st.lists(SCALARS, max_size=3)


TABLES = st.dictionaries(NAMES, SCALARS | LISTS | st.lists(LISTS, max_size=2), min_size=1, max_size=3)


@given(st.dictionaries(NAMES, TABLES, max_size=2))
@example({"model": {"name": "\U0001f600\u2028\x7f\x85\ufeff"}})
def test_toml(tables: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(tables)) == tables


def test_toml_leaves_out_what_is_not_set() -> None:
    assert write_toml({"model": {"name": None, "flavor": "8B"}, "empty": {}}) == '[model]\nflavor = "8B"\n'


INNER = st.dictionaries(NAMES, SCALARS, min_size=1, max_size=3)


@given(st.dictionaries(NAMES, SCALARS | LISTS | st.none() | INNER, max_size=3))
@example({"no": {"y": 1}, "model": "\U0001f600\u2028\x7f\x85\ufeff", "rate": 1e-05})
def test_yaml(settings: dict[str, Any]) -> None:
    read = yaml.safe_load(write_yaml(settings)) or {}
    assert read == settings
    assert [type(value) for value in read.values()] == [type(value) for value in settings.values()]


@given(st.dictionaries(NAMES, st.text("abc $'\"\\`*!;#", min_size=1, max_size=5) | st.integers(0, 9) | st.none()))
def test_flags(flags: dict[str, Any]) -> None:
    words = shlex.split(write_flags(flags))
    assert words == [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]


def test_flags_that_are_on_off_or_lists() -> None:
    assert write_flags({"bf16": True, "fp16": False, "sizes": ["a b", 2]}) == "  --bf16\n  --sizes 'a b' 2\n"


@given(SCALARS | LISTS | st.none())
@example("\U0001f600\u2028\x7f\x85\ufeff")
def test_literals_of_python(value: Any) -> None:
    read = ast.literal_eval(literal(value))
    assert read == value or (isinstance(value, float) and math.isclose(read, value))


@pytest.mark.parametrize(
    ("settings", "text"),
    [({}, "Config()"), ({"a": 1, "b": ["c"]}, 'Config(\n      a=1,\n      b=["c"],\n  )')],
)
def test_calls(settings: dict[str, Any], text: str) -> None:
    assert write_call("Config", settings, "  ") == text
