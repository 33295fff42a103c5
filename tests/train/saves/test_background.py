"""Saves that are written while the run goes on: nothing is lost by them, and nothing of the run changes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pool import ranks
from runs import Died, lone_rank, pool_ranks, read_column, read_named, train_tiny
from shardway.checkpoint import manager
from shardway.checkpoint.writer import write_checkpoint
from shardway.errors import JobError
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun

SHORT = ("train.steps=6", "optim.warmup=0 steps", "checkpoint.keep=9", "checkpoint.background=true")
USAGE = shutil.disk_usage


class Gate:
    """Holds writes of checkpoints in the background until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.written: list[int] = []

    def write(self, directory: RunDir, on: Any, content: Any) -> Any:
        """As write_checkpoint."""
        if threading.current_thread() is threading.main_thread():
            return write_checkpoint(directory, on, content)
        assert self.open.wait(60.0)
        saved = write_checkpoint(directory, on, content)
        self.written.append(content.step)
        return saved


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before all writes in the background, open at the end at the latest."""
    made = Gate()
    monkeypatch.setattr(manager, "write_checkpoint", made.write)
    yield made
    made.open.set()


def wait_for_save(run: LiveRun, step: int) -> None:
    """For `before_step`: nothing is under way."""
    run._loop._checkpoints.settle()  # type: ignore[union-attr]


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on before a save is written, as it does where nothing else keeps the machine busy."""
    begin, goes_on = manager.AsyncSave.start, threading.Event()

    def begin_and_tell(*arguments: Any) -> Any:
        begun = begin(*arguments)
        goes_on.set()
        return begun

    def write(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return write_checkpoint(*arguments)
        assert goes_on.wait(60.0)
        goes_on.clear()
        return write_checkpoint(*arguments)

    monkeypatch.setattr(manager.AsyncSave, "start", begin_and_tell)
    monkeypatch.setattr(manager, "write_checkpoint", write)


def test_the_curve_is_that_of_saves_that_are_waited_for(tmp_path: Path, quiet_threads: None, in_turn: None) -> None:
    words = (*SHORT, "checkpoint.every=1 steps", "model.dropout=0.1")
    train_tiny(tmp_path / "waited", lone_rank(), *words, "checkpoint.background=false")
    train_tiny(tmp_path / "flown", lone_rank(), *words, before_step=wait_for_save)
    assert read_column(tmp_path / "flown") == read_column(tmp_path / "waited")
    for folder in ("waited", "flown"):
        assert RunDir(tmp_path / folder).checkpoint_steps() == [1, 2, 3, 4, 5, 6]
    told = read_named(tmp_path / "flown", "saved")
    assert [event["step"] for event in told] == [1, 2, 3, 4, 5, 6]
    assert all(0 < event["stall_s"] < event["seconds"] for event in told[:-1])
    assert all(e["stall_s"] == e["seconds"] for e in [told[-1], *read_named(tmp_path / "waited", "saved")])


def test_one_that_is_due_while_another_is_under_way_is_left_out(
    tmp_path: Path, quiet_threads: None, gate: Gate
) -> None:
    def look(run: LiveRun, step: int) -> None:
        if step == 5:
            assert RunDir(tmp_path).checkpoint_steps() == []
            gate.open.set()
            wait_for_save(run, step)

    train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=2 steps", before_step=look)
    skipped = [(event["step"], event["saving"]) for event in read_named(tmp_path, "save_skipped")]
    assert skipped == [(4, 2)]
    assert gate.written == [2]
    assert RunDir(tmp_path).checkpoint_steps() == [2, 6]


def test_the_last_save_waits_for_the_one_under_way(tmp_path: Path, quiet_threads: None, gate: Gate) -> None:
    timer = threading.Timer(0.3, gate.open.set)

    def look(run: LiveRun, step: int) -> None:
        if step == 6:
            timer.start()

    train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=4 steps", before_step=look)
    timer.join()
    assert [event["step"] for event in read_named(tmp_path, "saved")] == [4, 6]
    assert RunDir(tmp_path).checkpoint_steps() == [4, 6]


def test_a_full_disk_costs_no_step(tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "RETRY_S", 0.0)
    full = [True]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(path)._replace(free=100 if full[0] else 2**40))

    def look(run: LiveRun, step: int) -> None:
        wait_for_save(run, step)
        full[0] = step < 5

    train_tiny(tmp_path / "full", lone_rank(), *SHORT, "checkpoint.every=3 steps", before_step=look)
    train_tiny(tmp_path / "well", lone_rank(), *SHORT, "checkpoint.every=off")
    assert read_column(tmp_path / "full") == read_column(tmp_path / "well")
    failed = read_named(tmp_path / "full", "save_failed")
    assert failed[0]["step"] == 3
    assert "it needs about" in failed[0]["reason"]
    assert RunDir(tmp_path / "full").checkpoint_steps() == [5, 6]
    assert RunDir(tmp_path / "full").read_status()["save_failed"] == ""


def test_a_run_that_ends_badly_waits_for_what_is_under_way(tmp_path: Path, quiet_threads: None, gate: Gate) -> None:
    def look(run: LiveRun, step: int) -> None:
        if step == 4:
            threading.Timer(0.3, gate.open.set).start()
            raise Died

    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=3 steps", before_step=look)
    assert RunDir(tmp_path).checkpoint_steps() == [3]
    assert [event["step"] for event in read_named(tmp_path, "saved")] == [3]


def test_it_does_not_wait_for_ever(
    tmp_path: Path, quiet_threads: None, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "LEAVE_S", 0.05)

    def look(run: LiveRun, step: int) -> None:
        if step == 4:
            raise Died

    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=3 steps", before_step=look)
    assert RunDir(tmp_path).checkpoint_steps() == []


def test_a_defect_in_the_thread_ends_the_run(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "write_checkpoint", mock.Mock(side_effect=KeyError("x")))
    with pytest.raises(KeyError):
        train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=2 steps", before_step=wait_for_save)


@ranks(2)
def test_ranks_save_while_they_train(rank: int, tmp_path: Path) -> None:
    words = (*SHORT, "parallel.dp_replicate=1", "parallel.dp_shard=2", "checkpoint.every=1 steps")
    train_tiny(tmp_path / "waited", pool_ranks(), *words, "checkpoint.background=false")
    train_tiny(tmp_path / "flown", pool_ranks(), *words)
    if rank == 0:
        assert read_column(tmp_path / "flown") == read_column(tmp_path / "waited")
        saved, skipped = (read_named(tmp_path / "flown", name) for name in ("saved", "save_skipped"))
        assert sorted(event["step"] for event in (*saved, *skipped)) == [1, 2, 3, 4, 5, 6]
        assert [event["step"] for event in saved] == RunDir(tmp_path / "flown").checkpoint_steps()


@ranks(2)
def test_all_go_on_when_one_cannot_write(rank: int, tmp_path: Path) -> None:
    def write(directory: RunDir, on: Any, content: Any) -> Any:
        def check() -> None:
            if rank == 1 and content.step == 2:
                raise JobError("no space here")

        on.together(check)
        return write_checkpoint(directory, on, content)

    with mock.patch.object(manager, "write_checkpoint", write):
        words = (*SHORT, "checkpoint.every=2 steps")
        train_tiny(tmp_path, pool_ranks(), *words, before_step=wait_for_save)
    if rank == 0:
        failed = [(event["step"], event["reason"]) for event in read_named(tmp_path, "save_failed")]
        assert failed == [(2, "no space here")]
        assert RunDir(tmp_path).checkpoint_steps() == [4, 6]


@ranks(2)
def test_where_memory_does_not_suffice_saves_are_waited_for(rank: int, tmp_path: Path) -> None:
    with mock.patch.object(manager, "has_room", return_value=rank == 0):
        train_tiny(tmp_path, pool_ranks(), *SHORT, "checkpoint.every=2 steps")
    if rank == 0:
        assert len(read_named(tmp_path, "background_off")) == 1
        saved = read_named(tmp_path, "saved")
        assert [event["step"] for event in saved] == [2, 4, 6]
        assert all(event["stall_s"] == event["seconds"] for event in saved)


def test_memory_that_ends_while_room_is_made_ends_nothing(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager.Staging, "reserve", mock.Mock(side_effect=MemoryError("no more")))
    train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=3 steps")
    assert RunDir(tmp_path).checkpoint_steps() == [3, 6]
    [event] = read_named(tmp_path, "background_off")
    assert "a copy of the state takes" in event["reason"]
