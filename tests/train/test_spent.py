"""What rank 0 books while a run goes on, and the account of a run that was killed and went on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from commands import stalling
from runs import TINY, Died, die_at, lone_rank, open_tiny, read_named, train_tiny
from shardway.rundir.directory import RunDir
from shardway.train.run import train_run
from shardway.watch.progress import TimeAccount, summarise

pytestmark = pytest.mark.usefixtures("warm_starts")

WORDS = ("train.steps=8", "optim.warmup=0 steps", "optim.schedule=constant", "checkpoint.every=2 steps")
NAP_S = 0.05


def account_of(folder: Path) -> TimeAccount:
    account = summarise(RunDir(folder)).account
    assert account is not None
    return account


def test_steps_after_a_fault_are_repeated_up_to_where_the_run_was(tmp_path: Path, quiet_threads: None) -> None:
    with pytest.raises(Died):
        train_tiny(tmp_path, lone_rank(), *WORDS, before_step=die_at(5))
    train_tiny(tmp_path, lone_rank(), *WORDS)
    first, second = read_named(tmp_path, "started")
    assert "before" not in first
    assert (second["step"], second["reached"], second["before"]["step"]) == (4, 5, 5)
    saved = {event["step"]: event["spent"] for event in read_named(tmp_path, "saved")[-2:]}
    assert saved[6]["repeat"] == saved[8]["repeat"] > 0, "step 5"
    assert saved[8]["step"] > saved[6]["step"] > 0, "steps 6, and 7 and 8"
    account = account_of(tmp_path)
    assert account.undone_steps == 1
    assert account.repeated_s == saved[8]["repeat"]
    assert 0 < account.lost_s < account.productive_s


def test_a_third_attempt_knows_what_the_first_had_reached(tmp_path: Path, quiet_threads: None) -> None:
    for last in (5, 4):
        with pytest.raises(Died):
            train_tiny(tmp_path, lone_rank(), *WORDS, before_step=die_at(last))
    train_tiny(tmp_path, lone_rank(), *WORDS)
    assert [event.get("reached") for event in read_named(tmp_path, "started")] == [None, 5, 5]


def test_every_activity_has_its_seconds(tmp_path: Path, quiet_threads: None) -> None:
    """A script that owns its loop naps after each batch, before the step and after it."""
    words = (*WORDS, "train.validate_every=4 steps", "train.steps=4")
    train_tiny(tmp_path, lone_rank(), *words, before_step=lambda run, step: time.sleep(NAP_S))
    (end,) = read_named(tmp_path, "finished")
    assert set(end["spent"]) == {"start", "load", "data", "step", "validate", "save", "script", "end"}
    assert end["spent"]["script"] >= 4 * NAP_S
    status = RunDir(tmp_path).read_status()
    assert status["spent"]["step"] == end["spent"]["step"]
    account = account_of(tmp_path)
    assert account.script_s == end["spent"]["script"]
    assert account.wall_s == pytest.approx(sum(status["spent"].values()), abs=0.01)
    assert account.unaccounted_s < 0.01


def test_a_step_that_fails_is_lost_however_long_it_hung(tmp_path: Path, quiet_threads: None) -> None:
    def hang(*arguments: Any) -> None:
        time.sleep(4 * NAP_S)
        raise Died

    with pytest.raises(Died), open_tiny(tmp_path, lone_rank(), *WORDS) as run:
        run._make_engine, make = lambda held: with_step(make(held), hang), run._make_engine  # type: ignore[method-assign]
        train_run(run)
    (fault,) = read_named(tmp_path, "fault")
    assert fault["spent"]["step"] >= fault["unfinished_s"] >= 4 * NAP_S
    account = account_of(tmp_path)
    assert (account.productive_s, account.undone_steps) == (0.0, 0)
    assert account.lost_s >= 4 * NAP_S


def with_step(engine: Any, step: Any) -> Any:
    engine.step = step
    return engine


# --- killed


def train(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardway", "train", "--json", "--dir", str(folder), *TINY, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **(environ or {})}, stdout=pipe, stderr=pipe, text=True)


def test_the_account_of_a_run_that_was_killed_is_its_wall_time(tmp_path: Path) -> None:
    """SIGKILL between two saves, a pause, and on from the last one: within a second by a clock outside of it."""
    start = [sys.executable, "-m", "shardway", "--version"]
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL)  # what warm processes are forked from is there now
    folder, words = tmp_path / "run", ("train.steps=4000", "checkpoint.every=100 steps", "checkpoint.keep=1")
    began = time.time()  # psutil's create_time counts from a boot that the kernel tells in whole seconds
    first = train(folder, *words, environ=stalling(0, 160, tmp_path / "stands"))  # before the next save
    until = time.monotonic() + 120
    while not (saved := read_named(folder, "saved")) or RunDir(folder).last_events()[-1].get("step", 0) < 150:
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    reached = max(event["step"] for event in read_named(folder, "step"))
    time.sleep(2.1)
    second = train(folder, *words, "train.steps=300")
    _, said = second.communicate(timeout=240)
    assert second.returncode == 0, said
    ended = read_named(folder, "finished")[-1]["time"]
    base = read_named(folder, "started")[-1]["step"]
    assert base >= saved[-1]["step"]
    account = account_of(folder)
    assert account.wall_s == pytest.approx(ended - began, abs=1.0)
    assert account.undone_steps == reached - base > 0
    assert account.repeated_s > 0
    assert account.idle_s >= 2.0
    assert account.unaccounted_s < 2.0
    assert account.start_s > 0.5, "Python, torch and the data of two processes"
    step_s = sum(event["seconds"] for event in RunDir(folder).events() if event["event"] == "step")
    assert 0 < account.productive_s <= step_s
