"""Whatever stands in a run file or on the command line, it loads or ends in a UserError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_values import overrides_of, texts, valid_values

from shardway.errors import UserError
from shardway.runfile.load import LoadedRunFile, load_run, render_value
from shardway.runfile.schema import all_keys, sections


def load_or_refuse(path: Path | None, *overrides: str) -> LoadedRunFile | str:
    try:
        return load_run(path, overrides)
    except UserError as error:
        return str(error)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any") / "any.toml"


@given(st.binary(max_size=60))
def test_any_bytes(run_file: Path, content: bytes) -> None:
    run_file.write_bytes(content)
    told = load_or_refuse(run_file)
    assert isinstance(told, LoadedRunFile) or str(run_file) in told


SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    texts(),
    st.sampled_from(["auto", "off", "1 steps", "1e999 steps", "9" * 400 + " tokens", "0s", "-1", "1e999d", "nan"]),
    st.integers(-(10**400), 10**400),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
NAMES = st.one_of(st.sampled_from([dotted.split(".")[1] for dotted in all_keys()]), texts())
SECTIONS = st.one_of(st.sampled_from([*sections(), "format", "extends"]), texts())
TABLES = st.dictionaries(SECTIONS, st.one_of(VALUES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3)


def render_inline(value: Any) -> str:
    """Any value as TOML, tables inline."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{render_value(name)} = {render_inline(inner)}' for name, inner in value.items())}}}"
    return render_value(value)


@given(TABLES)
@settings(max_examples=60)
def test_any_table(run_file: Path, table: dict[str, Any]) -> None:
    lines = [f"{render_value(name)} = {render_inline(value)}" for name, value in table.items()]
    run_file.write_text("\n".join(lines), encoding="utf-8")
    told = load_or_refuse(run_file)
    if isinstance(told, str):
        assert str(run_file.parent) in told
    else:
        assert told.values.model_dump(mode="json")["format"] == 1


@given(st.sampled_from(all_keys()), VALUES)
def test_any_value_of_any_key(dotted: str, value: Any) -> None:
    told = load_or_refuse(None, f"{dotted}={render_value(value)}")
    if isinstance(told, str):
        assert told.startswith(f"1 problem in the command line\n  {dotted} (command line): ")
    else:
        section, name = dotted.split(".")
        shown = told.values.model_dump(mode="json")[section][name]
        assert load_run(None, overrides_of({dotted: shown})).values == told.values


@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_words(words: list[str]) -> None:
    told = load_or_refuse(None, *words)
    assert isinstance(told, LoadedRunFile) or "in the command line" in told


@given(valid_values())
@settings(max_examples=25)
def test_what_is_valid_loads(values: dict[str, Any]) -> None:
    loaded = load_run(None, overrides_of(values))
    assert {dotted for dotted, origin in loaded.origins.items() if origin == "command line"} == values.keys()
