"""Data sets on a node's own disk: copied once, whole or not at all, never removed in use."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardway.data import stage
from shardway.data.formats.base import DamagedData, FileParts, describe_file, sum_blocks
from shardway.data.stage import StageFolder
from shardway.errors import SiteError


def make_set(root: Path, sizes: dict[str, int], *, sums: bool = False, seed: int = 0) -> FileParts:
    for number, (name, size) in enumerate(sizes.items()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(random.Random(f"{seed}-{number}").randbytes(size))
    files = [describe_file(root, name) for name in sizes]
    return FileParts(root, files, [sum_blocks(root / name) for name in sizes] if sums else [])


def test_a_set_is_the_same_and_is_copied_once(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a.tar": 3_000_001, "sub/b.tar": 10, "empty": 0})
    folder = StageFolder.below(tmp_path / "disk")
    assert folder.find_missing(parts) == 3_000_011
    first = folder.hold(parts, spare=0)
    for file in parts.files:
        assert (first.root / file.name).read_bytes() == (parts.root / file.name).read_bytes()
    assert [len(each) for each in first.sums] == [3, 1, 0]
    np.testing.assert_array_equal(first.sums[0], sum_blocks(parts.path(0)))
    second = folder.hold(parts, spare=0)
    assert (first.copied_bytes, second.copied_bytes, second.root) == (3_000_011, 0, first.root)
    assert folder.find_missing(parts) == 0


def test_sets_share_their_files(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a": 1000, "b": 2000})
    folder = StageFolder(tmp_path / "disk")
    folder.hold(parts, spare=0)
    part = FileParts(parts.root, parts.files[:1])
    assert folder.hold(part, spare=0).copied_bytes == 0


def test_a_file_that_changed_is_another(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a": 1000})
    folder = StageFolder(tmp_path / "disk")
    folder.hold(parts, spare=0)
    changed = make_set(tmp_path / "data", {"a": 1000}, seed=1)
    os.utime(changed.path(0), ns=(1, 1))
    staged = folder.hold(FileParts(parts.root, [describe_file(parts.root, "a")]), spare=0)
    assert (staged.root / "a").read_bytes() == changed.path(0).read_bytes()


def test_a_damaged_block_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a": 5 * 2**20}, sums=True)
    with parts.path(0).open("r+b") as stream:
        stream.seek(3 * 2**20 + 17)
        stream.write(b"!")
    with pytest.raises(DamagedData, match=rf"{parts.path(0)} is damaged at byte {3 * 2**20}"):
        StageFolder(tmp_path / "disk").hold(parts, spare=0)
    assert list((tmp_path / "disk" / "objects").iterdir()) == []


def test_a_file_that_is_shorter_by_now_is_named(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a": 1000})
    parts.path(0).write_bytes(b"short")
    with pytest.raises(DamagedData, match="had 1000 bytes when it was opened"):
        StageFolder(tmp_path / "disk").hold(parts, spare=0)


def test_unused_sets_make_room_those_used_longest_ago_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StageFolder(tmp_path / "disk")
    total = 10_000

    class Disk:
        def __init__(self, path: object) -> None:
            objects = (each for each in (tmp_path / "disk" / "objects").glob("*") if not each.name.endswith(".sums"))
            self.free = total - sum(each.stat().st_size for each in objects)

    monkeypatch.setattr(stage.shutil, "disk_usage", Disk)
    sets = [make_set(tmp_path / f"data{number}", {"a": 4000}, seed=number) for number in range(4)]
    held = [folder.hold(parts, spare=0) for parts in sets[:2]]
    with pytest.raises(SiteError, match="has 2kB free, and 4kB of"):
        folder.hold(sets[2], spare=0)
    for number, each in enumerate(held):
        each.close()
        os.utime(next((tmp_path / "disk" / "locks").glob(f"set-{each.root.name}")), (number, number))
    assert folder.find_room() == 10_000
    third = folder.hold(sets[2], spare=0)
    assert not held[0].root.exists()
    assert (held[1].root / "a").read_bytes() == sets[1].path(0).read_bytes()
    assert folder.hold(sets[0], spare=0).copied_bytes == 4000
    assert (third.root / "a").is_file()
    assert not held[1].root.exists()


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a": 10})
    (tmp_path / "file").write_text("")
    with pytest.raises(SiteError, match="cannot be written: Not a directory"):
        StageFolder(tmp_path / "file" / "x").hold(parts, spare=0)


COPIER = """
import sys
from pathlib import Path
from shardway.data.formats.base import FileParts, describe_file
from shardway.data.stage import StageFolder
root = Path(sys.argv[1])
files = [describe_file(root, name) for name in sorted(path.name for path in root.iterdir())]
staged = StageFolder(Path(sys.argv[2])).hold(FileParts(root, files), spare=0)
print(staged.copied_bytes, flush=True)
sys.stdin.read()
"""


def start_copier(data: Path, disk: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COPIER, str(data), str(disk)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_of_a_node_copy_each_byte_once(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {f"{number}": 2_000_000 for number in range(8)})
    copiers = [start_copier(parts.root, tmp_path / "disk") for _ in range(4)]
    copied = []
    for copier in copiers:
        assert copier.stdout is not None
        copied.append(int(copier.stdout.readline()))
    assert sum(copied) == parts.size
    for copier in copiers:
        copier.communicate("")


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_half_file(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {f"{number}": 20_000_000 for number in range(6)})
    disk, drawn = tmp_path / "disk", random.Random(1)
    for _ in range(6):
        copier = start_copier(parts.root, disk)
        until = time.monotonic() + 20
        while not (disk / "objects").exists() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(drawn.uniform(0, 0.1))
        copier.send_signal(signal.SIGKILL)
        copier.communicate()
        for path in (disk / "objects").glob("[!.]*"):
            assert path.name.endswith(".sums") or path.stat().st_size == 20_000_000
    staged = StageFolder(disk).hold(parts, spare=0)
    for number, file in enumerate(parts.files):
        assert (staged.root / file.name).read_bytes() == parts.path(number).read_bytes()
    assert not list((disk / "objects").glob(".*"))
