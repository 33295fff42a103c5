"""The rate of a folder's disk: how much is written by when, that nothing stays, what is refused."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from shardway.bench import disk
from shardway.bench.disk import describe_lack, measure_disk

BLOCK = 2**23


def test_a_file_is_written_and_read_and_gone(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, 60.0, 2 * BLOCK)
    assert (found.folder, found.size) == (str(tmp_path), 2 * BLOCK)
    assert list(tmp_path.iterdir()) == []


def test_rates_are_bytes_over_seconds(tmp_path: Path) -> None:
    ticks = itertools.count()
    found = measure_disk(tmp_path, 60.0, 4 * BLOCK, now=lambda: float(next(ticks)))
    assert found.size == 4 * BLOCK
    assert found.write_bytes_per_s == pytest.approx(found.size / found.write_s, rel=1e-12)
    assert found.read_bytes_per_s == pytest.approx(found.size / found.read_s, rel=1e-12)
    assert found.read_s == 1.0


def test_half_of_the_time_is_for_writing(tmp_path: Path) -> None:
    ticks = itertools.count()
    assert measure_disk(tmp_path, 4.0, 100 * BLOCK, now=lambda: float(next(ticks))).size == 2 * BLOCK
    assert measure_disk(tmp_path, 0.0, 100 * BLOCK).size == BLOCK


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_nothing_stays_when_a_write_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    seen: list[list[Path]] = []

    def write(descriptor: int, view: memoryview) -> int:
        seen.append(list(tmp_path.iterdir()))
        raise stop

    monkeypatch.setattr(disk.os, "write", write)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(stop):
        measure_disk(tmp_path, 60.0, 4 * BLOCK)
    assert seen == [[]]  # its name was gone before the first byte, so a kill leaves nothing either
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_without_direct_access_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, synced = os.open, []

    def open_plain(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return usual(path, flags, mode)

    monkeypatch.setattr(disk.os, "open", open_plain)
    monkeypatch.setattr(disk.os, "posix_fadvise", lambda *words: synced.append(words[3]))
    assert measure_disk(tmp_path, 60.0, BLOCK).direct is False
    assert synced == [os.POSIX_FADV_DONTNEED]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_that_is_none_or_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_lack("gone") == '"gone" is no folder'
    assert describe_lack("") == '"" is no folder'
    monkeypatch.setattr(disk.os, "access", lambda *words: False)
    assert describe_lack(str(tmp_path)) == f"{tmp_path} cannot be written"
    monkeypatch.undo()
    free = disk.shutil.disk_usage(tmp_path)._replace(free=3 * 2**30)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: free)
    assert describe_lack(str(tmp_path), 2**31) == f"{tmp_path} has 3.0 GiB free, less than twice the file of 2GiB"
    assert describe_lack(str(tmp_path), 2**30) == ""
