"""data.workers = "auto": the number of loader processes follows the times of steps, and the samples do not."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from shardway.data import waiting
from shardway.data.loader import Batch, LoaderOptions, Share, StepLoader
from shardway.data.order import SampleOrder
from shardway.data.waiting import (
    WorkerChoice,
    WorkerSearch,
    describe_waiting,
    tuned_batches,
    watched_batches,
)
from shardway.data.workers import Unsendable, WorkerDied

pytestmark = pytest.mark.usefixtures("warm_starts")


@dataclass
class FakeReading:
    """Batches of 4 samples on a simulated clock: `read_s` for a batch, `start_s` for loader processes, which give none
    before `breaks` of them were read if that is set."""

    read_s: float
    start_s: float = 3.0
    costs_s: float = 0.0
    breaks: Exception | None = None
    now: float = 0.0
    begun: list[tuple[int, int]] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    """Shares of time that were reported."""
    closed: int = 0

    def begin(self, workers: int, position: int) -> Iterator[Batch]:
        self.begun.append((workers, position))
        return self._read(workers, position)

    def _read(self, workers: int, position: int) -> Iterator[Batch]:
        ready = self.now + (self.start_s if workers else 0.0)
        try:
            for number in range(10**6):
                if workers and self.breaks is not None and number == 3:
                    raise self.breaks
                if workers:  # they read on all the time, each its own batches
                    ready += self.read_s / workers + self.costs_s
                    self.now = max(self.now, ready)
                else:
                    self.now += self.read_s
                yield make_batch(position + 4 * number)
        finally:
            self.closed += 1

    def clock(self) -> float:
        return self.now


def make_batch(position: int) -> Batch:
    return Batch(None, np.arange(position, position + 4), position, position + 4, 4)


def take(reading: FakeReading, step_s: float, steps: int, most: int = 8) -> tuple[list[int], list[WorkerChoice]]:
    """The positions of the batches of a run with steps of `step_s`, and what was chosen."""
    choices: list[WorkerChoice] = []
    stream = tuned_batches(reading.begin, 0, most, 2, choices.append, reading.told.append, reading.clock)
    positions = []
    for _ in range(steps):
        positions.append(next(stream).position)
        reading.now += step_s
    stream.close()  # type: ignore[attr-defined]
    return positions, choices


@pytest.mark.parametrize(
    ("read_s", "step_s", "workers"), [(0.1, 0.1, 2), (0.2, 0.1, 3), (0.4, 0.1, 5), (2.0, 0.1, 8), (0.05, 0.5, 1)]
)
def test_as_many_processes_read_as_hide_the_reading(read_s: float, step_s: float, workers: int) -> None:
    reading = FakeReading(read_s)
    positions, (choice,) = take(reading, step_s, 400)
    assert positions == list(range(0, 1600, 4))
    assert choice.workers == workers
    assert [number for number, _ in reading.begun] == [0, workers]
    assert (choice.before.waiting, choice.before.rest) == pytest.approx((read_s, step_s))
    assert choice.now.waiting == pytest.approx(max(0.0, read_s / workers - step_s), abs=0.01)
    assert reading.closed == len(reading.begun)
    assert reading.told == ([] if read_s < 2.0 else [pytest.approx(0.6)])
    if workers == 3:
        assert str(choice) == "data.workers: auto took 3: waiting for data fell from 67 % to 0 %"


@pytest.mark.parametrize(("read_s", "step_s"), [(0.002, 0.1), (0.0001, 0.01), (0.04, 1.0)])
def test_a_run_that_hardly_waits_starts_none(read_s: float, step_s: float) -> None:
    reading = FakeReading(read_s)
    positions, choices = take(reading, step_s, 20_000)
    assert (choices, reading.begun, reading.closed) == ([], [(0, 0)], 1)
    assert positions == list(range(0, 80_000, 4))


def test_a_short_run_starts_none() -> None:
    """It would be over before they have started."""
    reading = FakeReading(0.1)
    take(reading, 0.1, 20)
    assert reading.begun == [(0, 0)]


def test_one_long_wait_starts_none() -> None:
    search = WorkerSearch(8, 2)
    for number in range(200):
        assert search.add(30.0 if number in (0, 50) else 0.001, 0.1) is None


def test_processes_that_do_not_help_end_again() -> None:
    reading = FakeReading(0.1, costs_s=0.15)
    positions, (choice,) = take(reading, 0.02, 400, most=1)
    assert positions == list(range(0, 1600, 4))
    assert [workers for workers, _ in reading.begun] == [0, 1, 0]
    assert str(choice) == (
        "data.workers: auto stays at 0: 83 % of the time is spent waiting for data, and 1 loader process did not make "
        "it faster"
    )


def test_more_are_tried_while_that_helps() -> None:
    """The time of a batch was thought to be shorter: each process reads more slowly than the rank itself."""
    search = WorkerSearch(16, 1)
    changes, now = [], 0
    for _ in range(2000):
        waited = 0.3 if not now else max(0.0, 0.9 / now - 0.2)
        if (wanted := search.add(waited, 0.2)) is not None:
            changes.append(now := wanted)
        if search.choice is not None:
            break
    assert changes == [2, 4, 8]
    assert search.choice is not None
    assert search.choice.workers == 8


@pytest.mark.parametrize("error", [WorkerDied("a loader process died: out of memory\nmore"), Unsendable("a lambda")])
def test_processes_that_fail_while_they_are_tried_do_not_end_the_run(error: Exception) -> None:
    reading = FakeReading(0.1, breaks=error)
    positions, (choice,) = take(reading, 0.1, 300)
    assert positions == list(range(0, 1200, 4))
    assert [workers for workers, _ in reading.begun] == [0, 2, 0]
    assert str(choice).endswith(f"waiting for data, and {str(error).splitlines()[0]}")


def test_an_error_of_the_data_passes() -> None:
    reading = FakeReading(0.1, breaks=LookupError("sample 11 is bad"))
    with pytest.raises(LookupError, match="sample 11"):
        take(reading, 0.1, 300)
    assert reading.closed == 2


# --- with processes


class SlowRows(Dataset[Any]):
    """A dataset that takes its time, and draws from all three random generators."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, random.random(), np.random.random(), float(torch.rand(()))


def test_what_is_read_is_that_of_an_undisturbed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "START_S", 0.1)
    monkeypatch.setattr(waiting, "_TRIAL_S", 0.6)  # a machine that halts for a moment is no reason against them
    order, share = SampleOrder(4000, 3), Share(4, 1, 2)
    options, choices, told = LoaderOptions(prefetch=1, seeded=True), list[WorkerChoice](), list[float]()

    def begin(rows: SlowRows, workers: int, position: int) -> Iterator[Batch]:
        return StepLoader(rows, order, share, replace(options, workers=workers)).batches(position)

    before = torch.random.get_rng_state(), random.getstate()
    slow, fast = SlowRows(0.02), begin(SlowRows(0.0), 0, 8)
    stream = tuned_batches(lambda workers, at: begin(slow, workers, at), 8, 2, 1, choices.append, told.append)
    changed = 0
    for _ in range(400):
        found, expected = next(stream), next(fast)
        assert found.position == expected.position
        assert found.ids.tolist() == expected.ids.tolist()
        assert [column.tolist() for column in found.data] == [column.tolist() for column in expected.data]
        time.sleep(0.005)
        changed += bool(choices)
        if changed > 4:
            break
    assert choices[0].workers == 2
    assert len(list_workers()) == 2
    stream.close()  # type: ignore[attr-defined]
    gc.collect()
    assert list_workers() == []
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def list_workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


# --- the report on a run that waits long


@pytest.mark.parametrize(("read_s", "step_s", "share"), [(0.03, 0.07, 0.3), (0.9, 0.1, 0.9), (0.009, 0.091, None)])
def test_long_waiting_is_reported_once(read_s: float, step_s: float, share: float | None) -> None:
    reading, told = FakeReading(read_s), list[float]()
    stream = watched_batches(reading.begin(0, 0), told.append, reading.clock)
    for number in range(3000):
        assert next(stream).position == 4 * number
        reading.now += step_s
        if number * (read_s + step_s) < 59:
            assert told == []
    stream.close()  # type: ignore[attr-defined]
    assert told == ([pytest.approx(share, abs=0.01)] if share is not None else [])
    assert reading.closed == 1


def test_the_report_says_what_to_do() -> None:
    assert describe_waiting(0.31, 0, tunes=False) == (
        'data: 31 % of the time is spent waiting for batches. To do: set data.workers = "auto"; `shardway data bench '
        "PATH` shows which layer limits."
    )
    assert 'set data.workers = "auto", or more than 4;' in describe_waiting(0.31, 4, tunes=False)
    assert "give each rank more cores (data.workers: auto has 2);" in describe_waiting(0.31, 2, tunes=True)
