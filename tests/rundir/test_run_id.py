"""An id is written once, copied with its directory, and never mistaken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardway.errors import JobError
from shardway.rundir import names
from shardway.rundir.names import RUN_ID, ensure_run_id, find_run_id

KNOWN = "0123456789abcdef" * 2


def test_it_is_made_once(tmp_path: Path) -> None:
    assert find_run_id(tmp_path) == ""
    made = ensure_run_id(tmp_path)
    assert len(made) == 32
    assert ensure_run_id(tmp_path, KNOWN) == find_run_id(tmp_path) == made
    (tmp_path / "other").mkdir()
    assert ensure_run_id(tmp_path / "other") != made


def test_what_checkpoints_say_is_taken_where_there_is_none(tmp_path: Path) -> None:
    assert ensure_run_id(tmp_path, KNOWN) == find_run_id(tmp_path) == KNOWN
    assert ensure_run_id(tmp_path, "") == KNOWN


@pytest.mark.parametrize("position", [0, 31, 32, 33, 40])
def test_a_file_that_has_changed_holds_none(position: int, tmp_path: Path) -> None:
    ensure_run_id(tmp_path, KNOWN)
    data = bytearray((tmp_path / RUN_ID).read_bytes())
    data[position] ^= 1
    (tmp_path / RUN_ID).write_bytes(data)
    assert find_run_id(tmp_path) == ""
    assert ensure_run_id(tmp_path, KNOWN) == find_run_id(tmp_path) == KNOWN


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 32, b"../x 00000000", b"\n"])
def test_nor_does_one_that_never_was_an_id(content: bytes, tmp_path: Path) -> None:
    (tmp_path / RUN_ID).write_bytes(content)
    assert find_run_id(tmp_path) == ""
    assert ensure_run_id(tmp_path, "no id") not in ("", "no id")


def test_a_disk_that_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(names, "write_whole", full)
    with pytest.raises(JobError, match=r"the id of the run cannot be written into .*: No space left"):
        ensure_run_id(tmp_path)
