"""The values of a sweep's members, from the words of a command or the rows of a file."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from shardway.errors import UserError
from shardway.launch.sweep.axes import (
    MOST_MEMBERS,
    Axis,
    draw_random,
    list_grid,
    read_axes,
    read_rows,
    render_words,
    split_values,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-3,3e-3", ["1e-3", "3e-3"]),
        ("100 steps, 200 steps", ["100 steps", "200 steps"]),
        ("[1, 2]", ["[1, 2]"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ('"a, b","c"', ['"a, b"', '"c"']),
        ('{a = "x, }", b = 2}', ['{a = "x, }", b = 2}']),
        ('"say \\"a, b\\"",c', ['"say \\"a, b\\""', "c"]),
        ("it's,x", ["it's", "x"]),
        ("", [""]),
    ],
)
def test_commas_in_quotes_and_brackets_separate_nothing(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_words_that_vary_are_axes_and_all_others_are_shared() -> None:
    words = ("my.toml", "optim.lr=1e-3,3e-3", "train.seed=0..2", "data.betas=[0.9, 0.95]", "train.steps=5")
    found = read_axes(words)
    assert [(axis.key, axis.values) for axis in found.axes] == [
        ("optim.lr", ("1e-3", "3e-3")),
        ("train.seed", ("0", "1", "2")),
    ]
    assert found.shared == ("my.toml", "data.betas=[0.9, 0.95]", "train.steps=5")
    rows = list_grid(found.axes)
    assert len(rows) == 6
    assert render_words(rows[1]) == ("optim.lr=1e-3", "train.seed=1")
    assert render_words(rows[3]) == ("optim.lr=3e-3", "train.seed=0")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optim.lr=1e-3,", "a value between the commas is empty"),
        ("optim.lr=1e-3,1e-3", "is there twice"),
        ("train.seed=4..0", "ends before it begins"),
        ("train.seed=0..2000", f"at most {MOST_MEMBERS}"),
        ("optim.lr=1e-4..1e-2", "a range of numbers has no steps"),
        ("run.name=a,b", "lie in one folder"),
        ("optim.lr=1e-3,1e-4..1e-2", "cannot be one of several values"),
    ],
)
def test_what_is_no_axis_is_refused(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_axes(["my.toml", word])


def test_a_key_that_is_set_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim\.lr is set twice"):
        read_axes(["optim.lr=1,2", "optim.lr=3"])


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(UserError, match="1050 runs"):
        list_grid(read_axes(["train.seed=0..34", "data.seed=0..29"]).axes)


def test_random_values_follow_from_the_seed_and_more_trials_only_add() -> None:
    axes = read_axes(["optim.lr=log:1e-5..1e-2", "train.seed=0..99999", "optim.kind=sgd,adamw"], search="random").axes
    few, more = draw_random(axes, 5, seed=3), draw_random(axes, 40, seed=3)
    assert more[:5] == few != draw_random(axes, 5, seed=4)
    rates = [float(row["optim.lr"]) for row in more]
    assert all(1e-5 <= rate <= 1e-2 for rate in rates)
    below = sum(rate < math.sqrt(1e-5 * 1e-2) for rate in rates)
    assert 8 <= below <= 32, "each order of magnitude is as likely as any other"
    assert {row["optim.kind"] for row in more} == {"sgd", "adamw"}
    assert all(row["train.seed"].isdecimal() for row in more)


def test_a_range_that_is_not_logarithmic_is_drawn_evenly() -> None:
    source, axis = random.Random(1), Axis("optim.lr", low=0.0, high=1.0)
    drawn = [float(axis.draw(source)) for _ in range(400)]
    assert 0.4 < sum(drawn) / len(drawn) < 0.6  # 0.5, and 0.014 is the deviation of such a mean


def test_more_trials_than_there_are_combinations_are_refused() -> None:
    with pytest.raises(UserError, match="fewer combinations; 4 were found"):
        draw_random(read_axes(["a.b=1,2", "a.c=1,2"], search="random").axes, 5, seed=0)


def test_rows_of_a_csv_and_of_a_toml_file(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text('optim.lr,train.seed,data.blend\n1e-3,0,\n\n3e-3,1,"[1, 2]"\n')
    rows = [{"optim.lr": "1e-3", "train.seed": "0"}, {"optim.lr": "3e-3", "train.seed": "1", "data.blend": "[1, 2]"}]
    assert read_rows(table) == rows
    toml = tmp_path / "rows.toml"
    toml.write_text('[[member]]\n"optim.lr" = 0.001\n[[member]]\n[member.optim]\nlr = 0.003\nkind = "sgd"\n')
    assert read_rows(toml) == [{"optim.lr": "0.001"}, {"optim.lr": "0.003", "optim.kind": '"sgd"'}]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "optim.lr\n1,2\n", "line 2: 2 cells below 1 keys"),
        ("a.csv", "lr\n1\n", "'lr' is no key"),
        ("a.csv", "run.name\nx\n", r"'run\.name' is no key"),
        ("a.csv", "optim.lr\n", "no row with a value"),
        (
            "a.csv",
            "optim.lr,train.seed,optim.lr, train.seed,data.path\n1,2,3,4,x\n",
            "a.csv.*'optim.lr', 'train.seed'\\.",
        ),
        ("a.csv", "optim.lr\n1\n1\n", "row 2 sets the same as row 1"),
        ("a.toml", "member = 3\n", r"no \[\[member\]\]"),
        ("a.toml", "[[member]\n", "not valid TOML"),
    ],
)
def test_rows_that_cannot_be_members_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        read_rows(tmp_path / name)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_rows(tmp_path / "rows.csv")
