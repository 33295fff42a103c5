"""Runs whose data come slowly: what data.workers = "auto" does in a run, and that a run that waits says so."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from pool import ranks
from runs import Died, lone_rank, pool_ranks, read_column, read_named, train_line
from shardway.data import waiting
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir
from shardway.train import dataloader

pytestmark = pytest.mark.usefixtures("warm_starts")

QUIET = (
    "run.device=cpu",
    "run.threads=1",
    "train.validate_every=off",
    "checkpoint.every=off",
    "checkpoint.background=false",
    "data.record_ids=true",
)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_cores(monkeypatch)


def pin_cores(monkeypatch: pytest.MonkeyPatch, cores: int = 2) -> None:
    """On a machine of many cores, a short run would be over before so many loader processes have started."""
    monkeypatch.setattr(dataloader, "count_own_cores", lambda ranks: cores)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Loader processes have ended when their run has."""
    yield
    gc.collect()  # an error holds the frames of its run
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            left += [child] if child.name() == "pt_data_worker" else []
    assert left == []


class SlowNumbers(Dataset[Any]):
    """Rows that take their time, with a number drawn at random for each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor([index / 96, 1.0, float(torch.rand(())), index % 5 / 5])


def mean_output(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def slow_step(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    time.sleep(0.004)
    return mean_output(model, rows)


def train(
    folder: Path,
    on: Ranks,
    seconds: float,
    *words: str,
    loss: Callable[..., Any] = slow_step,
    steps: int = 44,
    last: int | None = None,
    **loader: Any,
) -> list[float]:
    data = SlowNumbers(seconds)
    return train_line(folder, on, data, loss, *words, base=QUIET, steps=steps, last=last, batch_size=8, **loader)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tenth of a second be as long a wait as a start of loader processes."""
    monkeypatch.setattr(waiting, "START_S", 0.1)
    monkeypatch.setattr(waiting, "_TRIAL_S", 0.05)


def test_a_run_goes_on_with_loader_processes_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    found = train(tmp_path / "tuned", lone_rank(), 0.003, workers="auto")
    (event,) = read_named(tmp_path / "tuned", "loader")
    assert event["workers"] in (1, 2)
    assert event["reason"].startswith(f"data.workers: auto took {event['workers']}: waiting for data fell from ")
    assert event["waits"] < event["waited"]
    monkeypatch.setattr(waiting, "START_S", 1e9)
    assert found == train(tmp_path / "undisturbed", lone_rank(), 0.0, workers="auto", loss=mean_output)
    assert read_named(tmp_path / "undisturbed", "loader") == []
    assert read_column(tmp_path / "tuned", "ids") == read_column(tmp_path / "undisturbed", "ids")
    assert found == train(tmp_path / "processes", lone_rank(), 0.0, workers=2, loss=mean_output)


def test_a_run_that_died_resumes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    pin_cores(monkeypatch, 1)
    with pytest.raises(Died):
        train(tmp_path / "killed", lone_rank(), 0.003, "checkpoint.every=20 steps", workers="auto", steps=36, last=27)
    assert read_named(tmp_path / "killed", "loader")
    train(tmp_path / "killed", lone_rank(), 0.003, workers="auto", steps=36)
    assert [event["step"] for event in read_named(tmp_path / "killed", "started")] == [0, 20]
    monkeypatch.setattr(waiting, "START_S", 1e9)
    whole = train(tmp_path / "whole", lone_rank(), 0.0, workers="auto", steps=36, loss=mean_output)
    assert read_column(tmp_path / "killed") == whole
    assert read_column(tmp_path / "killed", "ids") == read_column(tmp_path / "whole", "ids")


def check_two_ranks(rank: int, folder: Path) -> None:
    """Each decides by its own times: the data of one are slow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hurry(monkeypatch)
        pin_cores(monkeypatch, 1)
        train(folder / "tuned", pool_ranks(), 0.003 * rank, workers="auto", steps=30)
        monkeypatch.setattr(waiting, "START_S", 1e9)
        train(folder / "plain", pool_ranks(), 0.0, workers="auto", steps=30, loss=mean_output)
    for number in range(2):
        events = [
            [event["ids"] for event in RunDir(folder / name).events(number) if event["event"] == "step"]
            for name in ("tuned", "plain")
        ]
        assert events[0] == events[1]
    if rank == 0:
        assert read_column(folder / "tuned") == read_column(folder / "plain")


@ranks(2)
def test_ranks_need_not_agree(rank: int, tmp_path: Path) -> None:
    check_two_ranks(rank, tmp_path)


def test_a_script_that_asks_for_nothing_reads_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dataset may be one that no other process can read."""
    hurry(monkeypatch)
    train(tmp_path, lone_rank(), 0.003, steps=30)
    assert read_named(tmp_path, "loader") == []


def test_a_dataset_that_cannot_be_sent_is_read_by_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)

    class Local(SlowNumbers):
        pass

    train_line(
        tmp_path, lone_rank(), Local(0.003), slow_step, base=QUIET, steps=12, last=None, batch_size=8, workers="auto"
    )
    (event,) = read_named(tmp_path, "loader")
    assert event["workers"] == 0
    assert "the dataset cannot be sent to a loader process" in event["reason"]


def test_a_run_that_waits_long_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WINDOW_S", 0.2)
    train(tmp_path, lone_rank(), 0.003, steps=24)
    (line,) = [event["reason"] for event in read_named(tmp_path, "data_slow")]
    assert line.startswith("data: ")
    assert line.endswith(
        ' % of the time is spent waiting for batches. To do: set data.workers = "auto"; `shardway data bench PATH` '
        "shows which layer limits."
    )
