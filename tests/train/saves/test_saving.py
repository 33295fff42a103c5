from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pool import ranks
from runs import lone_rank, pool_ranks, read_column, train_tiny
from shardway.checkpoint import manager
from shardway.checkpoint.manager import LeastCost
from shardway.errors import JobError
from shardway.plan.economy import GPU_MTBF_SECONDS
from shardway.rundir.directory import RunDir
from shardway.train.run import LiveRun

SHORT = ("train.steps=6", "optim.warmup=0 steps", "checkpoint.every=2 steps")
USAGE = shutil.disk_usage


class Disk:
    """A disk that is full before some steps, and so at the saves right before them."""

    def __init__(self, *full_before: int) -> None:
        self.full_before = full_before
        self.full = False

    def usage(self, path: Any) -> Any:
        """As shutil.disk_usage."""
        return USAGE(path)._replace(free=100) if self.full else USAGE(path)

    def look(self, run: LiveRun, step: int) -> None:
        """Before a step; a save that is due after it happens before the next."""
        self.full = step + 1 in self.full_before


def train_on(disk: Disk, folder: Path, *words: str, on: Any = None) -> None:
    with mock.patch.object(shutil, "disk_usage", disk.usage):
        train_tiny(folder, on or lone_rank(), *SHORT, *words, before_step=disk.look)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in RunDir(folder).events(0) if event["event"] == name]


def test_a_save_that_fails_costs_no_step(tmp_path: Path, quiet_threads: None) -> None:
    train_on(Disk(), tmp_path / "well")
    train_on(Disk(3, 5), tmp_path / "full")
    assert read_column(tmp_path / "full") == read_column(tmp_path / "well")
    assert RunDir(tmp_path / "full").checkpoint_steps() == [6]
    failed = events(tmp_path / "full", "save_failed")
    assert [event["step"] for event in failed] == [2, 4]
    assert "it needs about" in failed[0]["reason"]
    assert RunDir(tmp_path / "full").read_status()["save_failed"] == ""


def test_it_is_tried_again_by_the_clock(tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "RETRY_S", 0.0)
    train_on(Disk(4), tmp_path, "checkpoint.every=3 steps")
    assert [event["step"] for event in events(tmp_path, "save_failed")] == [3]
    assert RunDir(tmp_path).checkpoint_steps() == [4, 6]


def test_where_the_run_ends_it_is_an_error(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(JobError, match="step 4 is the last complete checkpoint"):
        train_on(Disk(7), tmp_path)
    assert RunDir(tmp_path).checkpoint_steps() == [2, 4]
    train_on(Disk(), tmp_path)
    assert RunDir(tmp_path).read_status()["state"] == "finished"


@pytest.mark.parametrize(
    ("ranks_", "save_s", "expected"),
    [
        (1, None, 120.0),  # nothing was measured yet
        (8, 0.3, 1800.0),  # such a job fails once in months: the longest that a person would want to lose
        (16_384, 0.3, 120.0),
        (16_384, 10.0, 465.27),  # a failure every 11,135 s: √(2·10·11135) · 1.00711 - 10
        (16_384, 60.0, 1200.0),  # saves take a twentieth of the time at most
    ],
)
def test_the_interval_that_costs_least(ranks_: int, save_s: float | None, expected: float) -> None:
    assert LeastCost(GPU_MTBF_SECONDS / ranks_).interval_s(save_s) == pytest.approx(expected, rel=1e-3)


def test_a_run_saves_at_the_interval_that_costs_least(
    tmp_path: Path, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeastCost, "interval_s", lambda cost, save_s: 0.0)
    train_tiny(tmp_path, lone_rank(), *SHORT, "checkpoint.every=auto", "checkpoint.keep=9")
    assert RunDir(tmp_path).checkpoint_steps() == [1, 2, 3, 4, 5, 6]
    assert {event["next_in_s"] for event in events(tmp_path, "saved")} == {0.0}


@ranks(2)
def test_all_ranks_go_on_when_one_cannot_write(rank: int, tmp_path: Path) -> None:
    disk = Disk(3)
    with mock.patch.object(manager, "write_checkpoint", fail_where(disk, rank == 1)):
        train_tiny(tmp_path, pool_ranks(), *SHORT, before_step=disk.look)
    if rank == 0:
        assert [event["step"] for event in events(tmp_path, "save_failed")] == [2]
        assert RunDir(tmp_path).checkpoint_steps() == [4, 6]
        assert len(read_column(tmp_path)) == 6


def fail_where(disk: Disk, here: bool) -> Any:
    """write_checkpoint on a rank whose own disk may be full."""
    save = manager.write_checkpoint

    def try_to_save(place: Any, on: Any, *arguments: Any) -> Any:
        def check() -> None:
            if here and disk.full:
                raise JobError("no space here")

        on.together(check)
        return save(place, on, *arguments)

    return try_to_save
