"""Data sets of which a disk holds some files at a time: those that are read now stay, and room is never exceeded."""

from __future__ import annotations

import fcntl
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardway.data import stage
from shardway.data.formats import base
from shardway.data.formats.base import FAILED, FileParts, describe_file, move_parts, sum_blocks
from shardway.data.stage import CopyGivenUp, CopyProgress, PartialSet, StageFolder
from shardway.errors import JobError, SiteError

SIZE = 1000


def make_parts(root: Path, files: int = 6, *, sums: bool = False) -> FileParts:
    root.mkdir(exist_ok=True)
    for number in range(files):
        (root / f"{number}").write_bytes(random.Random(number).randbytes(SIZE))
    named = [describe_file(root, f"{number}") for number in range(files)]
    return FileParts(root, named, [sum_blocks(root / file.name) for file in named] if sums else [])


def count_bytes(folder: Path) -> int:
    return sum(max(0, stage._size_at(path)) for path in folder.glob("objects/*") if ".sums" not in path.name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageFolder:
    """A folder with room for three files."""
    disk = tmp_path / "disk"
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * SIZE - count_bytes(disk)))
    return StageFolder(disk)


def list_there(held: PartialSet) -> list[int]:
    missing = held.list_missing(range(len(held.parts.files)))
    return [number for number in range(len(held.parts.files)) if number not in missing]


def copy_all(held: PartialSet) -> None:
    while held.copy_next(CopyProgress()):
        pass


def test_files_come_in_the_order_of_their_use_and_go_last_used_first(tmp_path: Path, folder: StageFolder) -> None:
    held = PartialSet(folder, make_parts(tmp_path / "data"))
    held.want([4], [2, 0, 1, 3, 5])
    copy_all(held)
    assert list_there(held) == [0, 2, 4]
    assert (held.root / "2").read_bytes() == (held.parts.root / "2").read_bytes()
    held.want([1], [0, 3, 4, 5])  # 2 comes no more, and 4 after 3
    copy_all(held)
    assert list_there(held) == [0, 1, 3]
    held.want([3, 5], [1])
    copy_all(held)
    assert list_there(held) == [1, 3, 5]
    assert count_bytes(folder.path) == 3 * SIZE
    assert len(list(folder.path.glob("objects/*"))) == 6  # with their checksums
    held.close()


def test_a_file_that_is_read_now_stays_whatever_is_wanted(tmp_path: Path, folder: StageFolder) -> None:
    held = PartialSet(folder, make_parts(tmp_path / "data"))
    held.want([0, 1, 2], [3])
    copy_all(held)
    assert list_there(held) == [0, 1, 2]
    held.want([0, 1, 2, 3], [])
    copy_all(held)
    assert list_there(held) == [0, 1, 2]
    held.close()


def test_what_another_process_reads_now_stays_until_it_ends(tmp_path: Path, folder: StageFolder) -> None:
    parts = make_parts(tmp_path / "data")
    held, other = PartialSet(folder, parts), PartialSet(folder, parts)
    other.want([0, 1], [])
    copy_all(other)
    held.want([2, 3], [4])
    copy_all(held)
    assert list_there(held) == [0, 1, 2]
    other.want([1], [0])
    copy_all(held)
    assert list_there(held) == [1, 2, 3]
    other.close()
    copy_all(held)
    assert list_there(held) == [2, 3, 4]
    held.close()
    assert not list(folder.path.glob("locks/claim-*"))


def test_room_for_what_others_copy_is_not_taken_twice(tmp_path: Path, folder: StageFolder) -> None:
    parts = make_parts(tmp_path / "data")
    held, other = PartialSet(folder, parts), PartialSet(folder, parts)
    held.want([0, 1, 2], [])
    other.want([5], [])
    other._write_copying(((other._keys[5], SIZE),))  # it has begun, and written nothing
    copy_all(held)
    assert list_there(held) == [0, 1]
    (folder.path / "objects" / f".{other._keys[5]}.part").write_bytes(bytes(400))
    copy_all(held)
    assert list_there(held) == [0, 1]
    other.close()
    held.close()


def test_a_removed_file_takes_no_room_even_if_it_is_open(tmp_path: Path, folder: StageFolder) -> None:
    held = PartialSet(folder, make_parts(tmp_path / "data", sums=True))
    held.want([0, 1, 2], [])
    copy_all(held)
    reader = move_parts(held.parts, held.as_staged())
    assert reader.read(0, 10, 20) == held.parts.read(0, 10, 20)
    descriptor = os.open(held.root / "0", os.O_RDONLY)
    held.want([1, 2, 3], [])
    copy_all(held)
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
    held.want([0, 1, 2], [])
    copy_all(held)
    assert list_there(held) == [0, 1, 2]
    assert reader.read(0, 10, 20) == held.parts.read(0, 10, 20)  # of the file that is there anew
    assert pickle.loads(pickle.dumps(reader)).read(0, 10, 20) == held.parts.read(0, 10, 20)
    held.close()


def test_a_reader_waits_for_a_file_and_learns_why_it_does_not_come(
    tmp_path: Path, folder: StageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(tmp_path / "data", sums=True)
    held = PartialSet(folder, parts)
    reader = move_parts(parts, held.as_staged())
    held.want([3], [1])
    looks = iter([lambda: None, lambda: held.copy_next(CopyProgress())])
    monkeypatch.setattr(base.time, "sleep", lambda seconds: next(looks)())
    assert reader.read(3, 0, SIZE) == parts.read(3, 0, SIZE)
    assert next(looks, None) is None
    (parts.root / "1").write_bytes(bytes(SIZE))
    copy_all(held)
    assert (held.root / FAILED / "1").exists()
    assert held.find_failure([0, 1]).startswith(f"{parts.root / '1'} is damaged at byte 0")
    with pytest.raises(JobError, match=f"{parts.root / '1'} is damaged at byte 0"):
        reader.read(1, 0, 10)
    monkeypatch.setattr(base, "WAIT_S", 0.0)
    with pytest.raises(JobError, match="was not there 0 s after it was needed"):
        reader.read(2, 0, 10)
    held.close()
    again = PartialSet(folder, make_parts(tmp_path / "data", sums=True))
    assert not again.find_failure([1])  # another run tries again
    again.close()


def test_unused_sets_and_what_a_kill_has_left_make_room(tmp_path: Path, folder: StageFolder) -> None:
    other = make_parts(tmp_path / "other", 2)
    folder.hold(other, spare=0).close()
    parts = make_parts(tmp_path / "data")
    held = PartialSet(folder, parts)
    left = folder.path / "objects" / held._keys[5]  # copied, and not linked before the kill
    left.write_bytes((parts.root / "5").read_bytes())
    held.want([0, 1, 2], [])
    copy_all(held)
    assert list_there(held) == [0, 1, 2]
    assert not left.exists()
    assert not list(folder.path.glob("sets/*/*other*"))
    held.close()


def test_a_file_of_a_whole_set_is_shared_and_not_removed(tmp_path: Path, folder: StageFolder) -> None:
    parts = make_parts(tmp_path / "data")
    whole = folder.hold(FileParts(parts.root, parts.files[:2]), spare=0)
    held = PartialSet(folder, parts)
    held.want([0], [2])
    copy_all(held)
    assert list_there(held) == [0, 2]
    assert count_bytes(folder.path) == 3 * SIZE
    held.want([3, 4], [])
    copy_all(held)
    assert list_there(held) == [0, 3]
    assert (whole.root / "0").read_bytes() == (parts.root / "0").read_bytes()
    held.close()
    whole.close()


def test_what_a_partial_set_has_is_not_counted_as_room_for_the_whole(tmp_path: Path, folder: StageFolder) -> None:
    parts = make_parts(tmp_path / "data")
    held = PartialSet(folder, parts)
    held.want([0, 1], [])
    copy_all(held)
    held.close()
    assert folder.find_room() == 3 * SIZE
    with pytest.raises(SiteError, match="has 1kB free, and 4kB are to be copied there"):
        folder.check_room(parts)
    folder.check_room(FileParts(parts.root, parts.files[:3]))
    assert folder.hold(FileParts(parts.root, parts.files[:3]), spare=0).copied_bytes == SIZE


def test_a_copy_ends_when_it_is_given_up(tmp_path: Path, folder: StageFolder) -> None:
    held, progress = PartialSet(folder, make_parts(tmp_path / "data")), CopyProgress()
    held.want([0], [])
    progress.give_up()
    with pytest.raises(CopyGivenUp):
        held.copy_next(progress)
    assert list_there(held) == []
    held.close()


def test_two_files_of_one_content_go_together(tmp_path: Path, folder: StageFolder) -> None:
    parts = make_parts(tmp_path / "data")
    (parts.root / "1").write_bytes((parts.root / "0").read_bytes())
    parts = FileParts(parts.root, parts.files, [sum_blocks(parts.root / file.name) for file in parts.files])
    held = PartialSet(folder, parts)
    held.want([0, 1], [2, 3])
    copy_all(held)
    assert list_there(held) == [0, 1, 2, 3]
    held.want([0], [4, 5, 1])
    copy_all(held)
    assert list_there(held) == [0, 1, 4, 5]
    held.want([3, 4, 5], [])
    copy_all(held)
    assert list_there(held) == [3, 4, 5]
    held.close()


WALKER = """
import random, shutil, sys
from pathlib import Path
from types import SimpleNamespace
from shardway.data import stage
from shardway.data.formats.base import FileParts, describe_file
from shardway.data.stage import CopyProgress, PartialSet, StageFolder
root, disk = Path(sys.argv[1]), Path(sys.argv[2])
def used():
    paths = [path for path in disk.glob("objects/*") if ".sums" not in path.name]
    return sum(max(0, stage._size_at(path)) for path in paths)
shutil.disk_usage = lambda path: SimpleNamespace(free=12_000_000 - used())
stage.SPARE_BYTES = 0
names = sorted(path.name for path in root.iterdir())
held = PartialSet(StageFolder(disk), FileParts(root, [describe_file(root, name) for name in names]))
print("begun", flush=True)
drawn = random.Random(int(sys.argv[3]))
for turn in range(10**6):
    order = drawn.sample(range(len(names)), len(names))
    held.want(order[:2], order[2:])
    held.copy_next(CopyProgress())
    assert used() <= 12_000_000
"""


def test_a_kill_at_any_moment_leaves_no_half_file_and_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, disk = tmp_path / "data", tmp_path / "disk"
    root.mkdir()
    for number in range(6):
        (root / f"{number}").write_bytes(random.Random(number).randbytes(4_000_000))
    for turn in range(4):
        command = [sys.executable, "-c", WALKER, str(root), str(disk), f"{turn}"]
        walker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert walker.stdout is not None
        assert walker.stdout.readline() == "begun\n"
        walker.stdout.close()
        until = random.Random(turn).randrange(1, 30)
        seen: set[tuple[str, int]] = set()
        while len(seen) < until and walker.poll() is None:
            seen |= {(path.name, stage._size_at(path)) for path in (disk / "objects").iterdir()}
        walker.send_signal(signal.SIGKILL)
        assert walker.wait() == -signal.SIGKILL
        for path in disk.glob("sets/*/*"):
            assert path.read_bytes() == (root / path.name).read_bytes()
    monkeypatch.setattr(stage, "SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12_000_000 - count_bytes(disk)))
    held = PartialSet(StageFolder(disk), FileParts(root, [describe_file(root, f"{number}") for number in range(6)]))
    for now in ([0, 1, 2], [3, 4, 5]):
        held.want(now, [])
        copy_all(held)
        assert not held.list_missing(now)
    assert not list(disk.glob("objects/.*"))
    assert len(list(disk.glob("locks/claim-*"))) == 1
    held.close()


def test_a_claim_whose_process_is_gone_counts_no_more(tmp_path: Path, folder: StageFolder) -> None:
    parts = make_parts(tmp_path / "data")
    held, gone = PartialSet(folder, parts), PartialSet(folder, parts)
    gone.want([0, 1, 2], [])
    copy_all(gone)
    held.want([3], [])
    copy_all(held)
    assert list_there(held) == [0, 1, 2]
    fcntl.flock(gone._claim_lock, fcntl.LOCK_UN)  # as the kernel does when it ends
    copy_all(held)
    assert 3 in list_there(held)
    held.close()
    gone.close()
