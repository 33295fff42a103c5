"""The damages themselves: the same for the same number, never none, and of every kind."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path

import pytest
from mutate import BYTES, PLACES, TEXT, mutate, restore
from trees import write_json, write_toml

CONTENT = {
    "": bytes(range(256)) * 4,
    "json": b'{"step": 3, "spent": {"start": 1.5}, "words": ["a", true, null],\n "reason": "done"}',
    "jsonl": b'{"event": "step", "step": 1}\n{"event": "step", "step": 2}\n',
    "toml": b'format = 1\n[train]\nsteps = "5 steps"\nseed = 3\n[site]\noptions = {a = [1, 2]}\n',
}


@pytest.mark.parametrize("form", CONTENT)
def test_a_number_gives_the_same_damage_every_time_and_never_none(form: str) -> None:
    for number in range(200):
        first, second = (mutate(CONTENT[form], random.Random(number), form) for _ in range(2))
        assert (first.what, first.data, first.place) == (second.what, second.data, second.place)
        assert first.place is not None or first.data != CONTENT[form]


@pytest.mark.parametrize("form", CONTENT)
def test_every_kind_of_damage_is_drawn(form: str) -> None:
    drawn = {mutate(CONTENT[form], random.Random(number), form).what for number in range(1000)}
    assert {*BYTES, *PLACES, *(TEXT if form else ())} <= drawn


@pytest.mark.parametrize("form", CONTENT)
def test_an_empty_file_is_damaged_too(form: str) -> None:
    for number in range(50):
        mutant = mutate(b"", random.Random(number), form)
        assert mutant.data or mutant.place


def test_whatever_stands_in_a_place_is_replaced_and_put_back(tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "path"
    source.write_bytes(CONTENT["json"])
    for number in range(100):
        mutant = mutate(CONTENT["json"], random.Random(number), "json")
        mutant.put(path)
        assert mutant.data is None or path.read_bytes() == mutant.data
    restore(source, path)
    assert path.read_bytes() == CONTENT["json"]


def test_what_is_not_changed_is_written_as_it_was() -> None:
    table = {"a": 1, "b.c": 'é\x7f\n"', "d": [1.5, True, {"e": "x"}], "f": {"g": -3, "h": {"i": []}}}
    assert tomllib.loads(write_toml(table)) == table
    assert json.loads(write_json({**table, "n": None})) == {**table, "n": None}
