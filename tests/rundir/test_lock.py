"""One writer a run directory: refused while another lives, free once it is gone, however it went."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardway.errors import SiteError, UserError
from shardway.rundir import lock
from shardway.rundir.lock import WriterLock, find_holder

HOLD = """
import sys
from pathlib import Path
from shardway.rundir.lock import WriterLock
WriterLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""
SINCE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Being refused takes a fraction of a second otherwise."""
    monkeypatch.setattr(lock, "PAUSE_S", 0.001)


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_another_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    with holder(path) as process:
        with pytest.raises(UserError) as told:
            WriterLock(path).acquire()
        named = find_holder(path)
    who = rf"process {process.pid} on host {re.escape(socket.gethostname())} since {SINCE}"
    assert re.fullmatch(
        rf"another run is training into {tmp_path}: {who}\.\n"
        r"  Two writers would destroy each other's checkpoints, so this one stops before it wrote anything\.\n"
        rf"  To do: wait for it, stop it gracefully with `touch {tmp_path}/stop`, or give this run another directory "
        r"with --dir\.",
        str(told.value),
    )
    assert named is not None
    assert re.fullmatch(who, named)


def test_the_lock_is_free_once_its_holder_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    with holder(path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert find_holder(path) is None
        mine = WriterLock(path)
        mine.acquire()
        mine.release()


def test_a_refusal_keeps_nothing_from_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "writer.lock"
    with holder(path):
        before = path.read_bytes()
        with pytest.raises(UserError):
            WriterLock(path).acquire()
        assert path.read_bytes() == before


def test_release_and_take_again(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path / "lock"), WriterLock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(UserError):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()


def test_nobody_holds_what_is_not_there(tmp_path: Path) -> None:
    assert find_holder(tmp_path / "lock") is None
    WriterLock(tmp_path / "lock").release()
    assert not (tmp_path / "lock").exists()


def test_the_lock_file_stays(tmp_path: Path) -> None:
    """Unlinking it would let two writers hold two locks of one name."""
    mine = WriterLock(tmp_path / "lock")
    mine.acquire()
    mine.release()
    assert (tmp_path / "lock").exists()
    assert find_holder(tmp_path / "lock") is None


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_holder_that_has_not_yet_written_its_name(tmp_path: Path, note: bytes) -> None:
    path = tmp_path / "lock"
    mine = WriterLock(path)
    mine.acquire()
    path.write_bytes(note)
    try:
        assert find_holder(path) == "a process that has just started"
    finally:
        mine.release()


def test_somebody_who_only_looks_does_not_refuse_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PAUSE_S", 0.05)
    path = tmp_path / "lock"
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    lock.fcntl.flock(looking, lock.fcntl.LOCK_SH)
    looked_away = threading.Timer(0.06, os.close, [looking])
    looked_away.start()
    mine = WriterLock(path)
    mine.acquire()
    mine.release()
    looked_away.join()


def test_a_lock_that_may_not_be_taken_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.mkdir()
    with pytest.raises(UserError) as told:
        WriterLock(path).acquire()
    assert str(told.value) == (
        f"the run directory {tmp_path} cannot be locked: Is a directory ({path}).\n"
        "  To do: move away what stands there where it is no file, or choose a directory that you may write to with "
        "--dir."
    )


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SiteError) as told:
        WriterLock(path).acquire()
    assert str(told.value) == (
        f"the file system of {tmp_path} cannot lock files (Function not implemented), so two runs could write there "
        "at once.\n  To do: choose a directory on another file system with --dir, or have it mounted with locks."
    )
    assert find_holder(path) is None
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("target", ["/dev/null", "."])
def test_what_is_no_file_cannot_be_locked(tmp_path: Path, target: str) -> None:
    """The lock of a device would be one for the whole machine."""
    path = tmp_path / "writer.lock"
    path.symlink_to(target)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be locked: .*writer.lock"):
        WriterLock(path).acquire()


@pytest.mark.parametrize("note", [b"[" * 4096, b"\xff", b"[1]", b"", b"9" * 4096])
def test_a_note_that_cannot_be_read(tmp_path: Path, note: bytes) -> None:
    path = tmp_path / "writer.lock"
    with holder(path):
        path.write_bytes(note)
        assert find_holder(path) == "a process that has just started"


def test_a_disk_that_takes_no_note_takes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    path = tmp_path / "writer.lock"
    held = WriterLock(path)
    held.acquire()
    assert find_holder(path) == "a process that has just started"
    held.release()
    assert find_holder(path) is None
