"""Local ranks as processes: how they end is told, and none of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from speed import picked

pytestmark = pytest.mark.usefixtures("warm_starts")

PATIENCE_S = 120.0
"""Guards against a hang alone: each start imports torch."""

RANK = """
import contextlib, os, resource, signal, sys, time
from pathlib import Path
import psutil

agent = os.getppid()

folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']} threads {os.environ['OMP_NUM_THREADS']}", flush=True)

def wait(seconds):
    for _ in range(int(seconds * 50)):
        if (folder / "stop").exists():
            return
        time.sleep(0.02)

def wait_for_start_of(pid_file):
    while not (pid_file.is_file() and pid_file.read_text()):
        time.sleep(0.02)

def wait_for_end_of(pid_file):
    # One that still lives when another fails is ended by the agent, and told too.
    wait_for_start_of(pid_file)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)

def codes():
    if rank == 0:
        wait_for_end_of(folder / "pid-1")
        sys.exit(3)

def killed():
    if rank == 1:
        wait_for_start_of(folder / "pid-0")
        os.kill(os.getpid(), signal.SIGKILL)
    wait(60)

def dumped():
    if rank == 0:
        sys.exit(3)
    wait_for_end_of(folder / "pid-0")
    time.sleep(0.5)  # several looks of the agent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)

def deaf():
    if rank == 1:
        wait_for_start_of(folder / "deaf")
        (folder / "failed").touch()
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "deaf").write_text("0")
    time.sleep(60)

def stopped():
    wait(60)

def signalled():
    signal.signal(signal.SIGTERM, lambda number, frame: ((folder / f"told-{rank}").touch(), sys.exit(0)))
    (folder / f"listens-{rank}").touch()
    time.sleep(60)

def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"deaf-{rank}").touch()
    time.sleep(60)

def bound():
    from shardway.ranks.stop import stop_with_agent

    stop_with_agent(os.environ)
    (folder / f"bound-{rank}").touch()
    wait(60)

def late():
    from shardway.ranks.stop import stop_with_agent

    while os.getppid() == agent:
        time.sleep(0.02)
    stop_with_agent(os.environ)
    wait(60)

def well():
    pass

globals()[sys.argv[1]]()
"""


DRIVER = """
import json, sys
from pathlib import Path
from shardway.errors import LateStop, UserError
from shardway.ranks import local
from shardway.ranks.local import run_local
from shardway.ranks.local import LocalLaunch

local.LATER_S = local.LOOK_EVERY_S = 0.1
if sys.argv[1] == "dumped":  # as the kernel has it until the core dump of rank 1 is written
    local._is_one_ending = lambda handlers: handlers[1].proc.poll() is None
folder = Path(sys.argv[2])

def on_stop():
    if sys.argv[1] == "signalled":
        raise UserError("there can be no stop file")
    (folder / "stop").touch()

launch = LocalLaunch(2, "a_rank_of_a_test", sys.argv[1:], folder / "logs", 1, folder / "stop", float(sys.argv[3]))
try:
    failures = run_local(launch, on_stop)
except KeyboardInterrupt:
    sys.exit(130)
except LateStop as error:
    sys.exit(str(error))
print(json.dumps([[f.rank, f.pid, f.exit_code, f.signal_name] for f in failures]))
"""
"""Calls `run_local` in a process of its own: torch's agent leaves files open, and signals are meant for it alone."""


@dataclass(frozen=True)
class Ended:
    """How `run_local` ended: the driver's exit code, (rank, pid, exit code, signal) of the failures, and how long it
    took after the last act."""

    code: int
    failures: list[list[Any]]
    seconds: float = field(default=0.0, compare=False)


class Launched:
    """Two ranks that do what RANK says, started by DRIVER; they leave their process ids in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "a_rank_of_a_test.py").write_text(RANK)

    def run(self, what: str, *acts: Act, stop_timeout_s: float = 60.0) -> Ended:
        """Start, do `acts` once both ranks are there, and wait."""
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *sys.path])
        words = [sys.executable, "-c", DRIVER, what, str(self.folder), str(stop_timeout_s)]
        with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as driver:
            try:
                self.wait_for_ranks(2 if acts else 0)
                for act in acts:
                    act(self, driver)
                began = time.monotonic()
                out, _ = driver.communicate(timeout=PATIENCE_S)
            finally:
                driver.kill()
        return Ended(driver.returncode, json.loads(out) if out else [], time.monotonic() - began)

    def wait_for_ranks(self, count: int) -> None:
        self.wait_until(lambda: len(self.pids()) >= count)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """The processes that were started, by rank."""
        texts = [path.read_text() for path in sorted(self.folder.glob("pid-*"))]
        return [int(text) for text in texts if text]

    def alive(self) -> list[int]:
        """Those of them that still live; the kernel may take a moment."""
        deadline = time.monotonic() + 30
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


Act = Callable[[Launched, "subprocess.Popen[str]"], None]


def send(number: signal.Signals, after: str = "") -> Act:
    """Send a signal to the driver; once such files are there, where they are named."""

    def act(launched: Launched, driver: subprocess.Popen[str]) -> None:
        launched.wait_until(lambda: all((launched.folder / name).exists() for name in after.split()))
        driver.send_signal(number)

    return act


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


def test_a_core_dump_is_written_to_its_end(launched: Launched) -> None:
    """Although the other rank, which lost contact, has ended before."""
    ended = launched.run("dumped")
    first, second = launched.pids()
    assert ended == Ended(0, [[0, first, 3, None], [1, second, -11, "SIGSEGV"]])
    assert launched.alive() == []


def test_a_rank_that_hears_nothing_does_not_keep_the_others_from_starting_again(launched: Launched) -> None:
    """As one does that waits for all at the start."""
    ended = launched.run("deaf")
    first, second = launched.pids()
    assert ended == Ended(0, [[1, second, 3, None], [0, first, -9, "SIGKILL"]])
    assert time.time() - (launched.folder / "failed").stat().st_mtime < 25, "not the 30 s that torch would wait"
    assert launched.alive() == []


@pytest.mark.parametrize("number", picked([signal.SIGINT, signal.SIGTERM, signal.SIGUSR2], signal.SIGUSR2))
def test_the_first_signal_asks_to_stop(launched: Launched, number: signal.Signals) -> None:
    """SIGINT and SIGTERM do so where ranks do not listen, below."""
    assert launched.run("stopped", send(number)) == Ended(0, [])
    assert (launched.folder / "stop").exists()
    assert launched.alive() == []


def test_where_there_can_be_no_stop_file_the_ranks_get_a_signal(launched: Launched) -> None:
    """As on a file system that is full: the agent died of it, and its ranks with it."""
    assert launched.run("signalled", send(signal.SIGINT, "listens-0 listens-1")) == Ended(0, [])
    assert sorted(path.name for path in launched.folder.glob("told-*")) == ["told-0", "told-1"]


def test_the_second_signal_kills_even_ranks_that_do_not_listen(launched: Launched) -> None:
    """The second once the first was heard: two of one kind that come together are one."""
    ended = launched.run("stubborn", send(signal.SIGINT, "deaf-0 deaf-1"), send(signal.SIGINT, "stop"))
    assert ended.code == 130
    assert launched.alive() == []
    assert ended.seconds < 20, "not the time that ranks have which are asked to end"


def test_a_stop_that_takes_too_long_kills_ranks_that_do_not_listen(launched: Launched) -> None:
    ended = launched.run("stubborn", send(signal.SIGTERM, "deaf-0 deaf-1"), stop_timeout_s=0.5)
    assert ended.code == 1
    assert launched.alive() == []
    assert ended.seconds < 20, "not the time that ranks have which are asked to end"


def test_ranks_end_with_an_agent_that_was_killed(launched: Launched) -> None:
    """SIGKILL leaves the agent no time to end them; the kernel tells them."""
    assert launched.run("bound", send(signal.SIGKILL, "bound-0 bound-1")).code == -signal.SIGKILL
    assert launched.alive() == []


def test_ranks_end_with_an_agent_that_was_killed_while_they_started(launched: Launched) -> None:
    """Before they could ask the kernel to tell them."""
    assert launched.run("late", send(signal.SIGKILL)).code == -signal.SIGKILL
    assert launched.alive() == []
