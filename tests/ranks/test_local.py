"""Local ranks as processes: how they end is told, and none of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

RANK = """
import contextlib, os, signal, sys, time
from pathlib import Path
import psutil

folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']} threads {os.environ['OMP_NUM_THREADS']}", flush=True)

def wait(seconds):
    for _ in range(int(seconds * 50)):
        if (folder / "stop").exists():
            return
        time.sleep(0.02)

def wait_for_end_of(pid_file):
    # One that still lives when another fails is ended by the agent, and told too.
    while not (pid_file.is_file() and pid_file.read_text()):
        time.sleep(0.02)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)

def codes():
    if rank == 0:
        wait_for_end_of(folder / "pid-1")
        sys.exit(3)

def killed():
    if rank == 1:
        wait(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    wait(60)

def stopped():
    wait(60)

def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)

def bound():
    from shardway.ranks.parent import stop_with_parent

    stop_with_parent()
    wait(60)

def well():
    pass

globals()[sys.argv[1]]()
"""


DRIVER = """
import json, sys
from pathlib import Path
from shardway.errors import LateStop
from shardway.ranks import local
from shardway.ranks.local import LocalLaunch, run_local

local.LATER_S = local.LOOK_EVERY_S = 0.1
folder = Path(sys.argv[2])
launch = LocalLaunch(2, "a_rank_of_a_test", sys.argv[1:], folder / "logs", 1, folder / "stop", float(sys.argv[3]))
try:
    failures = run_local(launch, on_stop=(folder / "stop").touch)
except KeyboardInterrupt:
    sys.exit(130)
except LateStop as error:
    sys.exit(str(error))
print(json.dumps([[f.rank, f.pid, f.exit_code, f.signal_name] for f in failures]))
"""
"""Calls `run_local` in a process of its own: torch's agent leaves files open, and signals are meant for it alone."""


@dataclass(frozen=True)
class Ended:
    """How `run_local` ended: the driver's exit code, and (rank, pid, exit code, signal) of the failures."""

    code: int
    failures: list[list[Any]]


class Launched:
    """Two ranks that do what RANK says, started by DRIVER; they leave their process ids in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "a_rank_of_a_test.py").write_text(RANK)

    def run(self, what: str, *acts: Callable[[subprocess.Popen[str]], None], stop_timeout_s: float = 60.0) -> Ended:
        """Start, do `acts` a moment apart once both ranks are there, and wait."""
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *sys.path])
        words = [sys.executable, "-c", DRIVER, what, str(self.folder), str(stop_timeout_s)]
        with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as driver:
            try:
                self.wait_for_ranks(2 if acts else 0)
                for act in acts:
                    time.sleep(0.3)
                    act(driver)
                out, _ = driver.communicate(timeout=60)
            finally:
                driver.kill()
        return Ended(driver.returncode, json.loads(out) if out else [])

    def wait_for_ranks(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.pids()) < count:
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """The processes that were started, by rank."""
        texts = [path.read_text() for path in sorted(self.folder.glob("pid-*"))]
        return [int(text) for text in texts if text]

    def alive(self) -> list[int]:
        """Those of them that still live; the kernel may take a moment."""
        deadline = time.monotonic() + 10
        while (alive := [pid for pid in self.pids() if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive

    def output(self, rank: int) -> str:
        """What a rank has printed."""
        (found,) = (self.folder / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        return found.read_text()


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    return Launched(tmp_path)


def send(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda driver: driver.send_signal(number)


def test_ranks_that_end_well(launched: Launched) -> None:
    assert launched.run("well") == Ended(0, [])
    assert launched.alive() == []
    assert [launched.output(rank) for rank in (0, 1)] == ["rank 0 of 2 threads 1\n", "rank 1 of 2 threads 1\n"]


def test_an_exit_code_is_told_with_its_rank(launched: Launched) -> None:
    ended = launched.run("codes")
    assert ended == Ended(0, [[0, launched.pids()[0], 3, None]])
    assert launched.alive() == []


def test_a_killed_rank_is_told_and_takes_the_others_with_it(launched: Launched) -> None:
    """The cause comes first, then what the agent ended because of it."""
    ended = launched.run("killed")
    first, second = launched.pids()
    assert ended == Ended(0, [[1, second, -9, "SIGKILL"], [0, first, -15, "SIGTERM"]])
    assert launched.alive() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_the_first_signal_asks_to_stop(launched: Launched, number: signal.Signals) -> None:
    assert launched.run("stopped", send(number)) == Ended(0, [])
    assert (launched.folder / "stop").exists()
    assert launched.alive() == []


def test_the_second_signal_kills_even_ranks_that_do_not_listen(launched: Launched) -> None:
    started = time.monotonic()
    assert launched.run("stubborn", send(signal.SIGINT), send(signal.SIGINT)).code == 130
    assert launched.alive() == []
    assert time.monotonic() - started < 30


def test_a_stop_that_takes_too_long_kills_ranks_that_do_not_listen(launched: Launched) -> None:
    started = time.monotonic()
    assert launched.run("stubborn", send(signal.SIGTERM), stop_timeout_s=0.5).code == 1
    assert launched.alive() == []
    assert time.monotonic() - started < 30


def test_ranks_end_with_an_agent_that_was_killed(launched: Launched) -> None:
    """SIGKILL leaves the agent no time to end them; the kernel tells them."""
    assert launched.run("bound", send(signal.SIGKILL)).code == -signal.SIGKILL
    assert launched.alive() == []
