"""What a file system that does not answer is told as, and what it is never taken for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardway.checkpoint.file_format import checksum_file, find_damage
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import AWAY, answers, is_there, list_names

Refuse = Callable[[int], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """`refuse(number)`: from now on whoever looks is answered with this error."""

    def act(number: int) -> None:
        def fail(path: Any, *_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number), os.fsdecode(path))

        for name in ("stat", "listdir"):
            monkeypatch.setattr(os, name, fail)

    return act


def test_what_stands_there_and_what_does_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_there(tmp_path / "file")
    assert not is_there(tmp_path / "nothing")
    assert not is_there(tmp_path / "file" / "below")
    assert not is_there(tmp_path / ("x" * 300))
    assert list_names(tmp_path / ("x" * 300)) == []
    assert list_names(tmp_path) == ["file"]
    assert list_names(tmp_path / "nothing") == list_names(tmp_path / "file") == []
    assert answers(tmp_path)
    assert answers(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "ask its owner for permission"),
        (errno.EIO, "look at the disk or its server"),
        (errno.ENOTCONN, "look at the file system"),
    ],
)
def test_no_answer_is_not_no(number: int, remedy: str, tmp_path: Path, refuse: Refuse) -> None:
    run = RunDir(tmp_path)
    refuse(number)
    for ask in (lambda: is_there(tmp_path), lambda: list_names(tmp_path), run.exists, run.checkpoint_steps):
        with pytest.raises(JobError) as caught:
            ask()
        first, *_, last = str(caught.value).splitlines()
        assert first.endswith(f"cannot be looked at: {os.strerror(number)}.")
        assert f"To do: {remedy}" in last


@pytest.mark.parametrize("number", sorted(AWAY))
def test_a_stop_file_that_cannot_be_seen_asks_for_nothing(number: int, tmp_path: Path, refuse: Refuse) -> None:
    run = RunDir(tmp_path)
    run.stop_path.touch()
    assert run.stop_requested()
    refuse(number)
    assert not run.stop_requested()
    assert not answers(tmp_path)


@pytest.mark.parametrize("number", sorted(AWAY))
def test_a_file_of_a_server_that_is_away_is_not_damaged(number: int, tmp_path: Path, refuse: Refuse) -> None:
    """It would be set aside, and an older checkpoint be trained from."""
    (tmp_path / "file").write_bytes(b"content")
    seal = checksum_file(tmp_path / "file")
    refuse(number)
    with pytest.raises(JobError, match="cannot be looked at"):
        find_damage(tmp_path, "file", seal)


def test_a_file_that_cannot_be_read_for_its_own_sake_is_damaged(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "file").write_bytes(b"content")
    seal = checksum_file(tmp_path / "file")
    refuse(errno.EIO)
    assert find_damage(tmp_path, "file", seal) == "file cannot be read (Input/output error)"
