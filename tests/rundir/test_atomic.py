"""Files appear whole or not at all, wherever writing them fails."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardway.rundir import file_io
from shardway.rundir.file_io import fsync_folder, remove_folder, render_json, why_refused, write_json, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(*arguments: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_new_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    assert names(tmp_path) == ["a"]


def test_a_name_that_is_not_utf8_is_written_as_its_bytes(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "cd " + os.fsdecode(b"caf\xe9\n"))
    assert (tmp_path / "a").read_bytes() == b"cd caf\xe9\n"


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old, and longer than what comes")
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"step": 3, "reason": "é"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"step": 3, "reason": "é"}


def test_json_is_strict() -> None:
    """A diverged loss must not make a file that only Python reads."""
    content = {"loss": float("nan"), "all": (1.0, float("inf")), "in": {"it": -float("inf")}, "step": 3}
    assert json.loads(render_json(content), parse_constant=pytest.fail) == {
        "loss": None,
        "all": [1.0, None],
        "in": {"it": None},
        "step": 3,
    }


@pytest.mark.parametrize("call", ["open", "write", "flush", "fsync", "replace"])
@pytest.mark.parametrize("old", ["old", None])
def test_a_failure_leaves_what_was_there(
    call: str, old: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    if old is not None:
        path.write_text(old)
    monkeypatch.setattr(*_broken(call), raising=False)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert (path.read_text() if path.exists() else None) == old
    assert names(tmp_path) == (["a"] if old is not None else [])


def _broken(call: str) -> tuple[Any, str, Callable[..., Any]]:
    """What to replace so that this call within `write_whole` fails."""
    if call in ("fsync", "replace"):
        return os, call, fail
    if call == "open":
        return file_io, "open", fail
    return file_io, "open", lambda *arguments, **options: _BrokenFile(open(*arguments, **options), call)


class _BrokenFile:
    """A file of which one call fails, after half of what is written has reached the disk."""

    def __init__(self, file: Any, call: str) -> None:
        self._file, self._call = file, call

    def __enter__(self) -> _BrokenFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, text: str) -> None:
        self._file.write(text[: len(text) // 2])
        if self._call == "write":
            fail()

    def flush(self) -> None:
        self._file.flush()
        if self._call == "flush":
            fail()

    def fileno(self) -> int:
        return int(self._file.fileno())


def test_the_file_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power cut needs: content, name, folder."""
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "a", "new")
    assert calls == ["fsync file", "replace", "fsync folder"]


def test_a_file_system_that_cannot_sync_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    fsync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_folder(tmp_path / "gone")


def test_why_a_folder_refuses(tmp_path: Path) -> None:
    assert why_refused(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert why_refused(tmp_path / "gone") == "No such file or directory"


def test_a_folder_is_left_where_its_file_system_goes_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)

    def refuse(descriptor: int) -> os.stat_result:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", refuse)
        remove_folder(tmp_path / "a")
    assert (tmp_path / "a").exists()
    remove_folder(tmp_path / "a")
    assert not (tmp_path / "a").exists()
