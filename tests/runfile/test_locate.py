"""Line numbers of keys: right for every way to write a key, or none."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.runfile.load import key_lines


def test_plain_keys_and_heads() -> None:
    text = '# a comment\nformat = 1\n\n[model]  # what\ndim = 64\n  heads=2\n[ data ]\npath = "x"\n'
    assert key_lines(text) == {
        "format": 2,
        "model": 4,
        "model.dim": 5,
        "model.heads": 6,
        "data": 7,
        "data.path": 8,
    }


def test_dotted_keys() -> None:
    assert key_lines("train.seed = 1\n[train]\nnested.key = 2\n") == {
        "train.seed": 1,
        "train": 2,
        "train.nested.key": 3,
    }


def test_an_inline_table_has_the_line_of_its_section_alone() -> None:
    assert key_lines("train = { seed = 1, steps = 5 }\n[model]\ndim = 2\n") == {"train": 1, "model": 2, "model.dim": 3}


@pytest.mark.parametrize(
    "value",
    [
        "[1, 2]",
        "[\n1,\n2\n]",
        "[ # one ]\n 1, # two ]\n]",
        '["]",\n"["\n]',
        "['a\"]',\n]",
        '["\\"]",\n"x"\n]',
        "[\n[1,\n2],\n[3]\n]",
        '["""\n]\n[x]\na = 1\n"""\n]',
        '"""one line"""',
        '"""\n[x]\na = 1\n"""',
        "'''\n[x]\na = 1\n'''",
        "'''\n\"\"\"\n'''",
        '"""\n\\""" a = 1\n"""',
        '"""a"""  # """',
        '"# no comment"',
        '"a[b"',
        "'[x]'",
        "{ a = [1, 2] }",
        "[{ a = 1 },\n{ b = 2 }]",
        "1  # [",
    ],
)
def test_a_value_over_several_lines_hides_nothing_after_it(value: str) -> None:
    text = f"[train]\nvalue = {value}\nseed = 1\n[model]\ndim = 2\n"
    tomllib.loads(text)
    after = 2 + value.count("\n")
    assert key_lines(text) == {
        "train": 1,
        "train.value": 2,
        "train.seed": after + 1,
        "model": after + 2,
        "model.dim": after + 3,
    }


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\t"])
def test_only_a_newline_ends_a_line(separator: str) -> None:
    text = f"# a{separator}b\n[train]\nseed = 1\n"
    tomllib.loads(text)
    assert key_lines(text) == {"train": 2, "train.seed": 3}


NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
VALUES = st.sampled_from(
    ["1", "[\n1,\n2]", '"""\n[a]\nb = 1\n"""', "'''x'''", '"x # y"', "[[1],\n[2]]", "true # [", "''"]
)


@settings(max_examples=40)
@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), max_size=4))
def test_any_sections(tables: dict[str, dict[str, str]]) -> None:
    lines, expected = [], {}
    for section, table in tables.items():
        lines.append(f"[{section}]")
        expected[section] = len(lines)
        for name, value in table.items():
            expected[f"{section}.{name}"] = len(lines) + 1
            lines += f"{name} = {value}".split("\n")
    assert key_lines("\n".join(lines)) == expected


@pytest.mark.parametrize("head", ["[[train]]", '["train"]', "['train']", '[a."b"]', "[[ train ]]  # x"])
def test_a_head_of_another_form_lends_its_keys_to_no_other(head: str) -> None:
    text = f"[model]\ndim = 1\n{head}\nheads = 2\n[data]\npath = 3\n"
    tomllib.loads(text)
    assert key_lines(text) == {"model": 1, "model.dim": 2, "data": 5, "data.path": 6}


@pytest.mark.parametrize("entry", ['"heads" = 2', "'heads' = 2", 'a."b" = 2', "a . b = 2"])
def test_a_key_of_another_form_is_left_out(entry: str) -> None:
    text = f"[model]\n{entry}\ndim = 1\n"
    tomllib.loads(text)
    assert key_lines(text) == {"model": 1, "model.dim": 3}


PIECES = [
    "[a]",
    "[[a]]",
    "[b.c]",
    "a",
    "b",
    "c",
    " = ",
    " = ",
    "1",
    "[",
    "]",
    "{",
    "}",
    ",",
    "\n",
    "\n",
    '"',
    '"""',
    "'",
]


@given(st.lists(st.sampled_from([*PIECES, "'''", "#", "\\", "."]), max_size=40).map("".join))
def test_a_key_that_is_found_is_there(text: str) -> None:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    for dotted, number in key_lines(text).items():
        assert dotted.split(".")[-1] in text.split("\n")[number - 1]
        value: object = document
        for part in dotted.split("."):
            assert isinstance(value, dict)
            value = value[part]
