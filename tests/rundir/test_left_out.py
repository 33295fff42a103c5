"""The file that says what a run left out of its data by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardway.errors import JobError
from shardway.rundir.directory import OWN_NAMES, RunDir
from shardway.rundir.names import SkippedRange, read_left_out

ONE = SkippedRange(120, 136, 16, 30, 33, 34, "a spike in steps 33 to 34", 1.5)
TWO = SkippedRange(200, 240, 40, 50, 58, 60, "a spike in steps 58 to 60", 2.5)


def test_what_is_written_is_read_in_its_order(tmp_path: Path) -> None:
    file = RunDir(tmp_path).left_out
    assert file.read() == ()
    file.write([TWO, ONE])
    assert file.read() == (TWO, ONE)
    assert file.path.name in OWN_NAMES


def damaged(**changes: Any) -> str:
    return json.dumps({"format": 1, "spans": [{**ONE.as_json(), **changes}]})


TEXTS = {
    "cut": damaged()[:-9],
    "empty": "",
    "list": "[]",
    "no spans": '{"format": 1}',
    "spans are none": '{"format": 1, "spans": {}}',
    "newer": '{"format": 2, "spans": []}',
    "text": damaged(start="120"),
    "backwards": damaged(end=120),
    "endless": damaged(end=10**30),
    "after the spike": damaged(back_to=33),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_cannot_be_read_is_no_empty_list(name: str, tmp_path: Path) -> None:
    file = RunDir(tmp_path).left_out
    file.path.write_text(TEXTS[name])
    with pytest.raises(
        JobError, match=r"left_out\.json cannot be read: .*\n  It says which samples this run leaves out"
    ):
        file.read()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"left_out\.json cannot be written: No such file"):
        RunDir(tmp_path / "gone").left_out.write([ONE])


def test_what_a_checkpoint_holds_is_read_alike() -> None:
    assert read_left_out([ONE.as_json(), TWO.as_json()]) == (ONE, TWO)
    with pytest.raises(ValueError, match="is no span"):
        read_left_out([{}])
