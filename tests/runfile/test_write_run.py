"""What is written as a run file loads again to the same values."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_values import overrides_of, texts, valid_values

from shardway.runfile.load import DEFAULT, load_run, render_commented, render_run, render_value
from shardway.runfile.schema import RunFile, all_keys, sections

CHOSEN = {"data.kind": "text", "train.steps": "800 steps"}


def load_text(folder: Path, text: str) -> RunFile:
    path = folder / "written.toml"
    path.write_text(text, encoding="utf-8")
    return load_run(path).values


def test_an_origin_may_have_any_name(tmp_path: Path) -> None:
    """That of a run file whose name holds a newline, and a byte that is not UTF-8."""
    origin = "new\nline" + chr(0xDCE9) + ".toml:3"
    text = render_run(RunFile(), dict.fromkeys(all_keys(), origin), lambda _: True)
    assert load_text(tmp_path, text) == RunFile()
    assert "# new\\u000Aline\\uDCE9.toml:3\n" in text


# --- the file of `shardway init`


def test_the_commented_file_loads_to_the_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, render_commented(RunFile(), CHOSEN)) == RunFile()


def test_every_key_of_the_commented_file_may_be_uncommented(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", render_commented(RunFile(), CHOSEN))
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    loaded = load_run(path)
    assert loaded.values == RunFile()
    assert [dotted for dotted, origin in loaded.origins.items() if origin == DEFAULT] == []


def test_only_the_chosen_keys_are_set(tmp_path: Path) -> None:
    table = tomllib.loads(render_commented(RunFile(), {"train.seed": 7, "run.name": 'a "b"'}))
    assert {name: content for name, content in table.items() if content} == {
        "format": 1,
        "train": {"seed": 7},
        "run": {"name": 'a "b"'},
    }


def test_each_section_and_key_carries_its_doc() -> None:
    text = " ".join(render_commented(RunFile(), CHOSEN).replace("\n## ", " ").split())
    for name, section in sections().items():
        assert f"{section.__doc__} [{name}]" in text
        for key, field in section.model_fields.items():
            assert re.search(rf"{re.escape(str(field.description))} (# )?{key} = ", text), f"{name}.{key}"


def test_lines_fit_a_screen() -> None:
    assert max(map(len, render_commented(RunFile(), CHOSEN).splitlines())) <= 103


# --- the resolved file


def test_a_rendered_run_shows_each_origin() -> None:
    loaded = load_run(None, ["train.seed=7"])
    lines = render_run(loaded.values, loaded.origins, lambda dotted: dotted in ("train.seed", "run.root")).splitlines()
    assert [line for line in lines if "#" in line] == [
        "seed = 7".ljust(40) + " # command line",
        'root = "runs"'.ljust(40) + " # default",
    ]
    assert [line for line in lines if line.startswith("[")] == ["[train]", "[run]"]


def test_a_rendered_run_names_every_section_that_has_a_key_to_show() -> None:
    loaded = load_run(None)
    lines = render_run(loaded.values, loaded.origins, lambda dotted: True).splitlines()
    assert [line for line in lines if line.startswith("[")] == [f"[{name}]" for name in sections()]


@given(valid_values())
@settings(max_examples=25)
def test_any_valid_run_survives(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    loaded = load_run(None, overrides_of(values))
    text = render_run(loaded.values, loaded.origins, lambda dotted: True)
    assert load_text(tmp_path_factory.getbasetemp(), text) == loaded.values


# --- one value

SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), texts()
)


@given(st.one_of(SCALARS, st.lists(SCALARS, max_size=4)))
def test_a_value_survives(value: Any) -> None:
    read = tomllib.loads(f"value = {render_value(value)}")["value"]
    assert read == value
    assert type(read) is type(value)


def test_every_key_is_in_a_rendered_run() -> None:
    loaded = load_run(None)
    table = tomllib.loads(render_run(loaded.values, loaded.origins, lambda dotted: True))
    assert [f"{section}.{name}" for section in sections() for name in table[section]] == all_keys()


@pytest.mark.parametrize("text", ["\u202e", "\x7f", "\x1b[2J", "a\u2028b", "\U000e0001", "é 漢"])
def test_a_text_is_written_so_that_a_terminal_obeys_none_of_it(text: str) -> None:
    written = render_value(text)
    assert written.isprintable()
    assert tomllib.loads(f"value = {written}") == {"value": text}
