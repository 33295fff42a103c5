from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runs import lone_rank, read_column, train_tiny
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.train import record
from shardway.train.run import LiveRun

SHORT = ("train.steps=8", "optim.warmup=0 steps", "checkpoint.every=off")
WRITE = os.write


class Disk:
    """A disk that takes no byte of an event file, nor a status, from one step to another."""

    def __init__(self, first: int, last: int) -> None:
        self._refused = range(first, last + 1)
        self._step = 0

    def look(self, run: LiveRun, step: int) -> None:
        """Before a step."""
        self._step = step

    def write(self, descriptor: int, data: bytes) -> int:
        """As os.write."""
        if self._step in self._refused and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return WRITE(descriptor, data)

    def write_status(self, run: RunDir, **facts: Any) -> None:
        """As RunDir.write_status."""
        if self._step in self._refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        STATUS(run, **facts)


STATUS = RunDir.write_status


def train_on(disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "STATUS_EVERY_S", 0.0)
    monkeypatch.setattr(RunDir, "write_status", lambda run, **facts: disk.write_status(run, **facts))
    with mock.patch.object(os, "write", disk.write):
        train_tiny(folder, lone_rank(), *SHORT, before_step=disk.look)


def test_a_disk_that_is_full_for_a_while_costs_no_event(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tiny(tmp_path / "well", lone_rank(), *SHORT)
    train_on(Disk(3, 5), tmp_path / "full", monkeypatch)
    assert read_column(tmp_path / "full") == read_column(tmp_path / "well")
    assert len(read_column(tmp_path / "full")) == 8
    (late,) = (event for event in RunDir(tmp_path / "full").events(0) if event["event"] == "recorded_late")
    assert (late["step"], late["reason"]) == (5, "No space left on device")
    assert RunDir(tmp_path / "full").read_status()["state"] == "finished"


def test_a_run_that_cannot_say_how_it_ended_fails(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="does not take more writing: No space left on device"):
        train_on(Disk(8, 8), tmp_path, monkeypatch)


def test_what_waits_has_a_limit(tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_WAITING", 2)
    with pytest.raises(JobError, match="does not take more writing"):
        train_on(Disk(3, 8), tmp_path, monkeypatch)
    assert RunDir(tmp_path).read_status()["step"] <= 5


class SlowStatus:
    """A writer of statuses that takes as long as a test wants."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.written: list[int] = []

    def write(self, facts: dict[str, Any]) -> None:
        """As Recorder writes one."""
        self.began.set()
        if not self.may_end.wait(30.0):
            raise OSError(errno.EIO, "the test has forgotten it")
        self.written.append(facts["step"])


def test_a_step_waits_for_no_status_and_the_newest_is_written() -> None:
    disk = SlowStatus()
    thread = record.StatusThread(disk.write)
    thread.take({"step": 1})
    assert disk.began.wait(30.0)
    for step in range(2, 50):
        thread.take({"step": step})  # none of them waits, or the test would hang here
    assert disk.written == []
    disk.may_end.set()
    while len(disk.written) < 2:
        time.sleep(0.001)
    thread.close()
    assert disk.written == [1, 49]


def test_no_status_follows_one_that_was_wanted_now() -> None:
    disk = SlowStatus()
    thread = record.StatusThread(disk.write)
    thread.take({"step": 1})
    assert disk.began.wait(30.0)
    thread.take({"step": 2})
    threading.Timer(0.05, disk.may_end.set).start()
    thread.settle()
    assert disk.written == [1]
    thread.take({"step": 3})
    while len(disk.written) < 2:
        time.sleep(0.001)
    thread.close()
    assert disk.written == [1, 3]
    assert "shardway-status" not in {each.name for each in threading.enumerate()}


def test_a_status_that_fails_ends_neither_thread_nor_run(tmp_path: Path) -> None:
    written: list[int] = []

    def write(facts: dict[str, Any]) -> None:
        written.append(facts["step"])
        if facts["step"] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    thread = record.StatusThread(write)
    for step in (1, 2):
        thread.take({"step": step})
        while len(written) < step:
            time.sleep(0.001)
    thread.close()
    assert written == [1, 2]
