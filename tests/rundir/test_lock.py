"""One writer a run directory: refused while another lives, free once it is gone, however it went."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from holding import holding

from shardway.errors import UserError
from shardway.rundir import lease
from shardway.rundir.lease import (
    Claim,
    LeaseFiles,
    LeaseOptions,
    LeaseTimes,
    WriterLock,
    find_holder,
    find_holder_host,
    newest_epoch,
    signal_holder,
    write_claim,
)

SINCE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Being refused takes a fraction of a second otherwise."""
    monkeypatch.setattr(lease, "PAUSE_S", 0.001)


def writer(folder: Path) -> WriterLock:
    return WriterLock(folder)


def test_another_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with holding(tmp_path) as other:
        with pytest.raises(UserError) as told:
            writer(tmp_path).acquire()
        with pytest.raises(UserError) as told_before:
            writer(tmp_path).await_free(pytest.fail)
        named, host = find_holder(tmp_path), find_holder_host(tmp_path)
    who = rf"process {other.pid} on host {re.escape(socket.gethostname())} since {SINCE}"
    assert re.fullmatch(
        rf"another run is training into {tmp_path}: {who}\.\n"
        r"  Two writers would destroy each other's checkpoints, so this one stops before it wrote anything\.\n"
        rf"  To do: wait for it, stop it gracefully with `touch {tmp_path}/stop`, or give this run another directory "
        r"with --dir\.",
        str(told.value),
    )
    assert str(told_before.value) == str(told.value)
    assert named is not None
    assert re.fullmatch(who, named)
    assert host == socket.gethostname()


def test_a_run_is_free_at_once_when_its_holder_was_killed(tmp_path: Path) -> None:
    with holding(tmp_path) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.process.wait()
        assert find_holder(tmp_path) is None
        mine = writer(tmp_path)
        mine.await_free(pytest.fail)
        mine.acquire(pytest.fail)
        assert mine.lease.epoch == 2
        mine.release()


def test_a_holder_that_nobody_has_waited_for_is_gone(tmp_path: Path) -> None:
    """A rank that was killed is a zombie until its agent asks for it."""
    with holding(tmp_path, locks=False) as other:
        os.kill(other.pid, signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert find_holder(tmp_path) is None
        mine = writer(tmp_path)
        mine.acquire(pytest.fail)
        mine.release()


def test_a_lock_that_children_of_a_dead_holder_have_keeps_nobody_away(tmp_path: Path) -> None:
    with holding(tmp_path) as other:
        left = os.open((tmp_path / "writer.lock"), os.O_RDWR)
        os.kill(other.pid, signal.SIGKILL)
        other.process.wait()
        fcntl.flock(left, fcntl.LOCK_EX)  # as an open file that a child has inherited holds it
        assert find_holder(tmp_path) is None
        mine = writer(tmp_path)
        mine.acquire(pytest.fail)
        mine.release()
        os.close(left)


def test_a_refusal_keeps_nothing_from_the_holder(tmp_path: Path) -> None:
    def kept() -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in tmp_path.rglob("*")
            if path.is_file() and not path.name.startswith(("beat-", ".beat-"))
        }

    with holding(tmp_path):
        before = kept()
        with pytest.raises(UserError):
            writer(tmp_path).acquire()
        assert kept() == before


def test_release_and_take_again(tmp_path: Path) -> None:
    first, second = writer(tmp_path), writer(tmp_path)
    first.acquire()
    with pytest.raises(UserError):
        second.acquire()
    first.release()
    first.release()
    second.acquire(pytest.fail)
    assert (first.lease.epoch, second.lease.epoch) == (1, 2)
    second.release()
    first.acquire(pytest.fail)
    assert first.lease.epoch == 3
    first.lease.confirm()
    first.release()


def test_nobody_holds_what_is_not_there(tmp_path: Path) -> None:
    assert find_holder(tmp_path) is None
    assert find_holder_host(tmp_path) == ""
    writer(tmp_path).release()
    writer(tmp_path).await_free(pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_file_stays(tmp_path: Path) -> None:
    """Unlinking it would let two writers hold two locks of one name."""
    mine = writer(tmp_path)
    mine.acquire()
    mine.release()
    assert (tmp_path / "writer.lock").exists()
    assert find_holder(tmp_path) is None


@pytest.mark.parametrize("claim", [None, "", "{", "[]", "{}", '{"who": {"pid": "7"}}', '{"who": 3}'])
def test_a_holder_that_has_not_yet_said_who_it_is(tmp_path: Path, claim: str | None) -> None:
    locked = os.open((tmp_path / "writer.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(locked, fcntl.LOCK_EX)
    if claim is not None:
        (tmp_path / "lease").mkdir()
        ((tmp_path / "lease") / "epoch-000001.json").write_text(claim)
    assert find_holder(tmp_path) == "a process that has just started"
    assert find_holder_host(tmp_path) == ""
    os.close(locked)


def test_somebody_who_only_looks_does_not_refuse_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pauses = (tmp_path / "writer.lock"), list[float]()
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)

    def look_away_at_the_second(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            os.close(looking)

    monkeypatch.setattr(lease, "time", SimpleNamespace(**{**vars(time), "sleep": look_away_at_the_second}))
    mine = writer(tmp_path)
    mine.acquire()
    mine.release()
    assert pauses == [lease.PAUSE_S] * 2


@pytest.mark.parametrize("name", ["writer.lock", "lease"])
def test_what_may_not_be_taken_is_a_users_mistake(tmp_path: Path, name: str) -> None:
    (tmp_path / "writer.lock").mkdir() if name == "writer.lock" else (tmp_path / "lease").touch()
    with pytest.raises(UserError) as told:
        writer(tmp_path).acquire()
    why, kinds = ("Is a directory", "folder file") if name == "writer.lock" else ("Not a directory", "file folder")
    found, wanted = kinds.split()
    assert str(told.value) == (
        f"the run directory {tmp_path} cannot be locked: {why} ({tmp_path / name}).\n"
        f"  To do: move away the {found} that stands in place of a {wanted} there, or choose a directory that you may "
        "write to with --dir."
    )
    assert list_open(tmp_path) == []


def list_open(folder: Path) -> list[str]:
    """What this process holds open of a folder and below it."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if Path(path).is_relative_to(folder)]


@pytest.mark.parametrize("target", ["/dev/null", "."])
def test_what_is_no_file_cannot_be_locked(tmp_path: Path, target: str) -> None:
    """The lock of a device would be one for the whole machine."""
    (tmp_path / "writer.lock").symlink_to(target)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be locked: .*writer.lock"):
        writer(tmp_path).acquire()


# --- without locks


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lease.fcntl, "flock", refuse)


QUICK = LeaseTimes(beat_s=0.05, sure_s=0.4, ttl_s=0.6, look_s=0.02, slack_s=0.3)
PATIENT = replace(QUICK, ttl_s=120.0)
"""To watch one that lives, however long its machine keeps it from a beat."""


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_holder_that_beats_refuses_others(tmp_path: Path) -> None:
    with holding(tmp_path, locks=False, beat_s=0.05) as other:
        told: list[str] = []
        with pytest.raises(UserError, match=rf"another run is training into .*: process {other.pid} on host "):
            WriterLock(tmp_path, LeaseOptions(terms=PATIENT)).acquire(told.append)
        assert told == [f"process {other.pid} of this host held this run; watching for 120 s whether it still does"]
        named = find_holder(tmp_path)
        assert named is not None
        assert re.fullmatch(rf"process {other.pid} on host \S+ since {SINCE}, last seen {SINCE}", named)
        assert other.say("release") == "done release"
        assert find_holder(tmp_path) is None
        mine = writer(tmp_path)
        mine.acquire(pytest.fail)
        mine.release()


@pytest.mark.usefixtures("no_locks")
def test_a_holder_that_was_stopped_is_overtaken_and_writes_nothing_more(tmp_path: Path) -> None:
    with holding(tmp_path, locks=False, beat_s=0.05) as other:
        assert other.say("confirm") == "done confirm"
        other.send(signal.SIGSTOP)
        mine = WriterLock(tmp_path, LeaseOptions(terms=QUICK))
        told: list[str] = []
        mine.acquire(told.append)
        assert len(told) == 1
        assert mine.lease.epoch == 2
        other.send(signal.SIGCONT)
        for word in ("check", "confirm", "check"):
            kind, code, words = other.say(word).split(" ", 2)
            assert (kind, code) == ("Fenced", "4")
            assert f"another run has taken over {tmp_path}: process {os.getpid()} on host " in words
            assert "(epoch 2; this one had 1)" in words
        mine.lease.confirm()
        mine.release()


@pytest.mark.usefixtures("no_locks")
def test_a_silence_that_somebody_saw_is_not_watched_again(tmp_path: Path) -> None:
    with holding(tmp_path, locks=False, beat_s=0.05) as other:
        other.send(signal.SIGSTOP)
        first = WriterLock(tmp_path, LeaseOptions(terms=QUICK))
        first.await_free(lambda line: None)
        assert (tmp_path / "lease").exists()
        second = WriterLock(tmp_path, LeaseOptions(terms=QUICK))
        second.acquire(pytest.fail)
        second.release()


@pytest.mark.usefixtures("no_locks")
def test_a_holder_that_has_not_beaten_for_long_is_not_shown(tmp_path: Path) -> None:
    """What is shown of another host's holder goes by the date of its last beat; taking over does not."""
    mine = writer(tmp_path)
    mine.acquire()
    elsewhere = tmp_path / "lease" / "epoch-000001.json"
    elsewhere.write_text(elsewhere.read_text().replace(socket.gethostname(), "n1"))
    assert find_holder_host(tmp_path) == "n1"
    beat = tmp_path / "lease" / "beat-000001"
    mine._stop_beats()
    os.utime(beat, (0, beat.stat().st_mtime - lease.SHOWN_S))
    assert find_holder(tmp_path) is None
    assert find_holder_host(tmp_path) == ""
    mine.release()


# --- a right under which nothing was written


def test_a_withdrawn_right_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    mine = writer(tmp_path)
    mine.acquire()
    mine.withdraw()
    mine.withdraw()
    assert list(tmp_path.iterdir()) == []
    first = writer(tmp_path)
    first.acquire()
    first.release()
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    second = writer(tmp_path)
    second.acquire()
    assert second.lease.epoch == 2
    with pytest.raises(UserError, match="another run is training into"):
        writer(tmp_path).acquire()
    second.withdraw()
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    first.acquire()
    assert first.lease.epoch == 2
    first.release()


def test_a_right_that_was_lost_is_not_withdrawn(tmp_path: Path) -> None:
    """The epoch of whoever took over stays."""
    mine = writer(tmp_path)
    mine.acquire()
    assert write_claim(LeaseFiles(tmp_path / "lease"), Claim(2, "theirs"))
    mine.withdraw()
    assert newest_epoch(LeaseFiles(tmp_path / "lease").names()) == 2
    assert (tmp_path / "writer.lock").exists()


def test_a_holder_of_this_machine_is_signalled(tmp_path: Path) -> None:
    assert not signal_holder(tmp_path, signal.SIGTERM)
    with holding(tmp_path) as other:
        assert signal_holder(tmp_path, signal.SIGTERM)
        assert other.process.wait(60) == -signal.SIGTERM


def test_a_holder_that_is_not_seen_from_here_is_not_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number would be that of another process."""
    with holding(tmp_path) as other:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        assert not signal_holder(tmp_path, signal.SIGTERM)
        assert other.process.poll() is None
