"""Runs without file locks: who was killed is followed at once, who was stopped is overtaken and gives way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from commands import Command, Start, training_commands
from runs import TINY, read_named, read_steps

WORDS = ("--nproc", "2", *TINY, "train.steps=1000000", "checkpoint.every=20 steps", "data.samples=4096")
NO_LOCKS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "no_locks"), os.environ.get("PYTHONPATH", "")])}
WATCH = "of this host held this run; watching for 3 s whether it still does"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with training_commands(tmp_path) as go:
        yield go


def send(command: Command, number: signal.Signals) -> None:
    """To the agent and its ranks; the agent first, which else would let stopped ranks go on."""
    command.note_processes()
    agent = psutil.Process(command.process.pid)
    for process in (agent, *agent.children(recursive=True)):
        process.send_signal(number)


def test_a_run_that_was_stopped_and_overtaken_writes_nothing_more(start: Start, tmp_path: Path) -> None:
    first = start("run", *WORDS, environ=NO_LOCKS)
    first.wait_for_step(30)
    send(first, signal.SIGSTOP)
    stood = first.run.all_events()
    written = len(list(stood))

    second = start("run", *WORDS, environ=NO_LOCKS)
    second.wait_for_step(30)
    began = read_named(tmp_path / "run", "started")[-1]
    status_of = second.run.read_status()["pid"]
    send(first, signal.SIGCONT)
    code, said = first.end()
    assert code == 4, said
    assert f"another run has taken over {tmp_path}/run: process {began['pid']} on host " in said
    assert "(epoch 2; this one had 1)" in said
    assert "Traceback" not in said
    assert first.left_alive() == []
    second.wait_for_step(max(event["step"] for event in read_steps(tmp_path / "run")) + 5)
    assert second.run.read_status()["pid"] == status_of
    assert second.run.read_status()["state"] == "running"
    after = [event["event"] for event in list(second.run.all_events())[written:]]
    assert (after.count("started"), after.count("fault")) == (1, 0)
    assert "fault" not in [event["event"] for event in second.run.all_events(1)]

    send(second, signal.SIGKILL)
    _, said = second.end()
    assert said.count(WATCH) == 1
    killed = time.monotonic()
    third = start("run", *WORDS, environ=NO_LOCKS)
    third.wait_until(lambda: [event for event in third.own_events() if event["event"] == "started"] != [])
    assert time.monotonic() - killed < 60  # on a busy machine; what counts is that nobody was watched
    third.run.request_stop()
    code, said = third.end()
    assert (code, said.count(WATCH)) == (0, 0)
    assert [event["epoch"] for event in read_named(tmp_path / "run", "started")] == [1, 2, 3]
    steps = [event["step"] for event in read_steps(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
