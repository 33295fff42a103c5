"""Data sets on a node's own disk: copied once, whole or not at all, never removed in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardway.data import stage
from shardway.data.content import DataPath
from shardway.data.formats.base import DamagedData, FileParts, describe_file, move_parts, sum_blocks
from shardway.data.formats.shard_file import write_token_shard
from shardway.data.formats.shard_manifest import write_manifest
from shardway.data.formats.shards import open_shards
from shardway.data.stage import CopyGivenUp, CopyProgress, StageFolder
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
    for number, sums in enumerate(first.sums):
        np.testing.assert_array_equal(sums, sum_blocks(parts.path(number)))
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
    with pytest.raises(SiteError, match="has 2kB free, and 4kB are to be copied there"):
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


def test_there_is_room_for_what_compressed_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What readers unpack lies beside their set and counts as the files do, until it is there."""
    parts, other = make_set(tmp_path / "data", {"a": 1000}), make_set(tmp_path / "other", {"a": 3000}, seed=1)
    parts.unpacked_bytes = 6000
    folder = StageFolder(tmp_path / "disk")
    folder.hold(other, spare=0).close()
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)
    for free, fits in ((3500, False), (4500, True)):
        monkeypatch.setattr(stage.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(SiteError, match="1kB are to be copied there, 6kB more are what compressed files hold")
        ):
            folder.check_room(parts)

    class Disk:
        def __init__(self, path: object) -> None:
            objects = (each for each in (tmp_path / "disk/objects").glob("*") if not each.name.endswith(".sums"))
            self.free = 8000 - sum(each.stat().st_size for each in objects)

    monkeypatch.setattr(stage.shutil, "disk_usage", Disk)
    staged = folder.hold(parts, spare=0)
    assert len(list((tmp_path / "disk/sets").iterdir())) == 1  # the other made room for it
    (staged.root / ".unpacked/x").mkdir(parents=True)
    (staged.root / ".unpacked/x/a").write_bytes(bytes(6000))
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    folder.check_room(parts)
    assert folder.hold(parts, spare=0).copied_bytes == 0


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {"a": 10})
    (tmp_path / "file").write_text("")
    with pytest.raises(SiteError, match="cannot be written: a file is in the place of a folder"):
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


KILLED = """
import os, signal, sys
from shardway.data.stage import CopyProgress
left = int(sys.argv[3])
count = CopyProgress.note
def note(self, copied=0):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    count(self, copied)
CopyProgress.note = note
"""


@pytest.mark.parametrize("moment", [1, 2, 3, 5, 8])
def test_a_kill_while_it_copies_leaves_no_half_file(tmp_path: Path, moment: int) -> None:
    """Before a file is begun, and after each of its pieces of 8 MiB."""
    parts, disk = make_set(tmp_path / "data", {f"{number}": 9_000_000 for number in range(3)}), tmp_path / "disk"
    command = [sys.executable, "-c", KILLED + COPIER, str(parts.root), str(disk), str(moment)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL
    whole = [path for path in (disk / "objects").glob("[!.]*") if not path.name.endswith(".sums")]
    assert [path.stat().st_size for path in whole] == [9_000_000] * ((moment - 1) // 3)
    assert len(list((disk / "objects").glob(".*.part"))) == (moment % 3 != 1)
    staged = StageFolder(disk).hold(parts, spare=0)
    assert staged.copied_bytes == 9_000_000 * (3 - len(whole))
    for number, file in enumerate(parts.files):
        assert (staged.root / file.name).read_bytes() == parts.path(number).read_bytes()
    assert not list((disk / "objects").glob(".*"))


def test_leftovers_of_processes_that_are_gone_are_removed_by_any_copy(tmp_path: Path) -> None:
    parts, folder = make_set(tmp_path / "data", {"a": 1000}), StageFolder(tmp_path / "disk")
    folder.hold(parts, spare=0).close()
    left, lived = folder.path / "objects" / ".5-dead.part", folder.path / "objects" / ".5-alive.sums.part"
    left.write_bytes(b"half")
    lived.write_bytes(b"half")
    with (folder.path / "locks" / stage._lock_of("5-alive")).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as the process that copies it does
        assert stage._lock_of("5-alive") != stage._lock_of("5-dead")
        folder.hold(parts, spare=0).close()
        assert (left.exists(), lived.exists()) == (False, True)
    folder.hold(parts, spare=0).close()
    assert not lived.exists()


def test_what_was_copied_before_a_kill_is_not_copied_again(tmp_path: Path) -> None:
    parts = make_set(tmp_path / "data", {f"{number}": 3_000_000 for number in range(4)})
    folder, progress = StageFolder(tmp_path / "disk"), CopyProgress()
    count = progress.note

    def die_in_the_third(copied: int = 0) -> None:
        count(copied)
        if progress.copied_bytes > 6_000_000:
            progress.give_up()
        count()

    progress.note = die_in_the_third  # type: ignore[method-assign]
    with pytest.raises(CopyGivenUp):
        folder.hold(parts, spare=0, progress=progress)
    assert not list((folder.path / "objects").glob(".*"))
    assert folder.find_missing(parts) == 6_000_000
    staged = folder.hold(parts, spare=0)
    assert staged.copied_bytes == 6_000_000


def test_a_file_that_another_process_copies_counts_as_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second job on a disk that has room for the data once."""
    parts, folder = make_set(tmp_path / "data", {"a": 4000, "b": 10}), StageFolder(tmp_path / "disk")
    folder.hold(FileParts(parts.root, parts.files[1:]), spare=0).close()
    (key,) = FileParts(parts.root, parts.files[:1]).list_keys()
    half = folder.path / "objects" / f".{key}.part"
    with (folder.path / "locks" / stage._lock_of(key)).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        half.write_bytes(bytes(3000))
        assert folder.find_missing(parts, parts) == 1000
        monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: SimpleNamespace(free=1500))
        monkeypatch.setattr(stage, "SPARE_BYTES", 0)
        folder.check_room(parts, parts)
        progress = CopyProgress()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(folder.hold, parts, spare=0, progress=progress)
            until = time.monotonic() + 60
            while progress.awaited_bytes != 3000:
                assert time.monotonic() < until
                time.sleep(0.005)
            half.rename(folder.path / "objects" / key)
            (folder.path / "objects" / key).write_bytes(parts.path(0).read_bytes())
            fcntl.flock(held, fcntl.LOCK_UN)
            assert waiting.result(60).copied_bytes == 0


def test_a_set_that_is_removed_while_another_process_asks_for_it_is_made_anew(tmp_path: Path) -> None:
    parts, folder = make_set(tmp_path / "data", {"a": 1000}), StageFolder(tmp_path / "disk")
    first = folder.hold(parts, spare=0)
    first.close()
    lock = folder.path / "locks" / f"set-{first.root.name}"
    with lock.open("rb") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        asking = pool.submit(folder.hold, parts, spare=0)
        time.sleep(0.1)
        folder._remove(lock)
        fcntl.flock(held, fcntl.LOCK_UN)
        again = asking.result(60)
    assert (again.copied_bytes, again.root) == (1000, first.root)
    with lock.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_shards_are_known_by_their_manifest_and_compared_with_their_own_checksums(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    tokens = np.random.default_rng(0).integers(0, 60_000, 1_300_000).astype(np.uint16)
    facts = [
        write_token_shard(root / f"{number}.shard", [(part, None)], "uint16")
        for number, part in enumerate(np.split(tokens, 2))
    ]
    write_manifest(root, "tokens", facts, {})
    _, parts = open_shards(DataPath("data.path", str(root)), "tokens")
    folder = StageFolder(tmp_path / "disk")
    staged = move_parts(parts, folder.hold(parts, spare=0))
    root.rename(tmp_path / "gone")
    assert staged.read(1, 0, 100) == (tmp_path / "gone" / "1.shard").read_bytes()[:100]
    assert pickle.loads(pickle.dumps(staged)).read(0, 5, 10) == (tmp_path / "gone" / "0.shard").read_bytes()[5:15]
    (tmp_path / "gone").rename(root)
    for at in (100, facts[0].bytes - 20):
        with (root / "0.shard").open("r+b") as stream:
            stream.seek(at)
            kept = stream.read(1)
            stream.seek(at)
            stream.write(bytes([kept[0] ^ 1]))
        with pytest.raises(DamagedData, match=f"{root / '0.shard'} is damaged"):
            StageFolder(tmp_path / f"other{at}").hold(parts, spare=0)
        with (root / "0.shard").open("r+b") as stream:
            stream.seek(at)
            stream.write(kept)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_set(tmp_path / "data", {"a": 10})
    folder = StageFolder.below(tmp_path / "disk")
    folder.hold(parts, spare=0).close()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(stage.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(SiteError, match="is another user's"):
        folder.hold(parts, spare=0)
