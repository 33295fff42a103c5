"""What earlier attempts have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardway.rundir.directory import RunDir
from shardway.train.record import read_earlier

SAID = {"pid": 7, "host": "n1", "step": 3, "spent": {"step": 1.5}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def test_of_a_new_run_nothing_is_left(run: RunDir) -> None:
    assert read_earlier(run) == {}


def test_the_last_status_is_kept_for_the_next_start(run: RunDir) -> None:
    run.write_status(**SAID, state="running", time=5.0)
    assert read_earlier(run) == {"reached": 3, "before": {**SAID, "time": 5.0}}


def test_a_status_without_times_is_not(run: RunDir) -> None:
    run.write_status(pid=7, step=3, state="running")
    assert read_earlier(run) == {"reached": 3}


def test_the_events_know_of_more_steps_than_the_status(run: RunDir) -> None:
    """A status is written once a second."""
    run.write_status(**SAID, time=5.0)
    with run.event_writer(0) as writer:
        for step in range(1, 9):
            writer.write("step", step=step, loss=1.0)
    assert read_earlier(run)["reached"] == 8


@pytest.mark.parametrize("said", [{"step": 4, "reached": 90}, {"step": "x", "reached": None}, {}])
def test_the_most_steps_of_all_attempts_count(run: RunDir, said: dict[str, int]) -> None:
    run.write_status(**said)
    with run.event_writer(0) as writer:
        writer.write("started", step=2, reached=60)
        writer.write("step", step=5)
        writer.write("step")
    assert read_earlier(run)["reached"] == max(60, said.get("reached") or 0)
