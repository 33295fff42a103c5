from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runs import lone_rank, read_column, train_tiny
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.train import record
from shardway.train.run import Run

SHORT = ("train.steps=8", "optim.warmup=0 steps", "checkpoint.every=off")
WRITE = os.write


class Disk:
    """A disk that takes no byte of an event file, nor a status, from one step to another."""

    def __init__(self, first: int, last: int) -> None:
        self._refused = range(first, last + 1)
        self._step = 0

    def look(self, run: Run, step: int) -> None:
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
