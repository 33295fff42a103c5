"""The watch over real processes: one that is stopped goes on, one that hangs is ended with where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import warm
from shardway.ranks import evidence, hang
from shardway.ranks.evidence import HangEvidence, StackGroup, ask_for_stacks, group_stacks, read_crash
from shardway.ranks.hang import (
    ActivitySpan,
    Hang,
    HangTimeout,
    HeartbeatWatch,
    Sighting,
    StoppedProcess,
    watched,
)
from shardway.ranks.heartbeat import VARIABLE, Activity, heartbeat_path, read_heartbeat

pytestmark = pytest.mark.usefixtures("warm_starts")

RANK = """
import os, sys, time
from shardway.ranks.heartbeat import join_agent
from shardway.ranks.heartbeat import open_heartbeat
from shardway.ranks.heartbeat import Activity

join_agent(os.environ)
heartbeat = open_heartbeat(os.environ, int(os.environ["LOCAL_RANK"]))

def wait_for_ever(step):
    heartbeat.write(Activity.STEP, step, time.monotonic())
    while True:
        time.sleep(3600)

for step in range(10_000_000):
    if step == int(sys.argv[1]):
        wait_for_ever(step)
    heartbeat.write(Activity.STEP, step, time.monotonic())
    time.sleep(0.02)
"""

LOADED_RANK = """
import os, subprocess, sys, time
from shardway.ranks.heartbeat import join_agent
from shardway.ranks.heartbeat import open_heartbeat
from shardway.ranks.heartbeat import Activity

join_agent(os.environ)
heartbeat = open_heartbeat(os.environ, 0)
code = "import time\\nwhile True:\\n    print(flush=True)\\n    time.sleep(0.02)"
with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as loader:
    for step in range(10_000_000):
        heartbeat.write(Activity.DATA, step, time.monotonic())
        assert loader.stdout.readline()
        heartbeat.write(Activity.STEP, step, time.monotonic())
        time.sleep(0.02)
"""

NEVER = 10_000_000
PATIENCE_S = 60.0
"""Guards against a hang alone."""


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.02)


class Node:
    """Ranks that only show steps, as children of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.woken: list[Hang] = []

    def start(self, *hang_at: int) -> None:
        """One rank for each of these steps, at which it hangs."""
        for rank, step in enumerate(hang_at):
            environ = {**os.environ, VARIABLE: str(self.folder), "LOCAL_RANK": str(rank)}
            environ["PYTHONPATH"] = os.pathsep.join(sys.path)
            self.ranks.append(subprocess.Popen([sys.executable, "-c", RANK, str(step)], env=environ))
        self.wait_for_step(3)

    def step(self, rank: int) -> int:
        """The step of a rank; -1 before its first."""
        entry = read_heartbeat(heartbeat_path(self.folder, rank))
        return entry.step if entry is not None and entry.activity is Activity.STEP else -1

    def wait_for_step(self, step: int) -> None:
        """Until every rank has come to this step."""
        for rank in range(len(self.ranks)):
            self.wait_for(rank, step)

    def wait_for(self, rank: int, step: int) -> None:
        """Until a rank has come to this step."""
        wait_until(lambda: self.step(rank) >= step)

    def hang_timeout(self) -> HangTimeout:
        """One that knows how long steps take."""
        hang_timeout = HangTimeout(start_s=60.0, fixed_s=1.5)
        for _ in range(5):
            hang_timeout.observe(ActivitySpan(Activity.STEP), 0.02)
        return hang_timeout

    def watch(self) -> HeartbeatWatch:
        """A watch over these ranks."""
        return HeartbeatWatch(self.folder, len(self.ranks), self.hang_timeout(), self.woken.append)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that can answer are waited for, however busy the machine is."""
    for wait in ("STACKS_WAIT_S", "RECORD_WAIT_S"):
        monkeypatch.setattr(evidence, wait, PATIENCE_S)
    monkeypatch.setattr(hang, "LOOK_EVERY_S", 0.05)


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stopped is seen to be, however slow it would be: it has no need of a margin."""
    monkeypatch.setattr(hang, "MARGIN_S", 0.5)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for rank in node.ranks:
        rank.kill()
        rank.wait()


def test_a_rank_that_is_stopped_is_told_to_go_on(node: Node, in_a_hurry: None) -> None:
    node.start(NEVER, NEVER)
    os.kill(node.ranks[0].pid, signal.SIGSTOP)
    stopped_at = node.step(0)
    with node.watch() as watch:
        wait_until(lambda: bool(node.woken))
        node.wait_for_step(stopped_at + 5)
    assert [hang.ranks for hang in node.woken] == [(0,)]
    assert watch.found is None
    assert all(rank.poll() is None for rank in node.ranks)


def test_a_loader_process_that_is_stopped_is_told_to_go_on(node: Node, in_a_hurry: None) -> None:
    environ = {**os.environ, VARIABLE: str(node.folder), "PYTHONPATH": os.pathsep.join(sys.path), warm.COLD: "1"}
    node.ranks.append(subprocess.Popen([sys.executable, "-c", LOADED_RANK], env=environ))
    node.wait_for_step(3)
    (loader,) = psutil.Process(node.ranks[0].pid).children()
    loader.suspend()
    stopped_at = node.step(0)
    with node.watch() as watch:
        wait_until(lambda: bool(node.woken))
        node.wait_for_step(stopped_at + 5)
    assert [(hang.ranks, hang.sighting.stopped) for hang in node.woken] == [((0,), StoppedProcess.LOADER)]
    assert watch.found is None


def test_ranks_are_asked_where_one_of_another_node_hangs_and_go_on(node: Node) -> None:
    node.start(NEVER, 20)
    node.wait_for_step(20)
    with HeartbeatWatch(node.folder, 2, HangTimeout(start_s=60.0, fixed_s=60.0), node.woken.append) as watch:
        watch.is_asked = True
        wait_until(lambda: watch.seen is not None)
        before = node.step(0)
        node.wait_for(0, before + 5)
    assert watch.seen is not None
    assert [group.ranks for group in watch.seen.groups] == [(0,), (1,)]
    assert [record.rank for record in watch.seen.records] == [0, 1]
    assert (watch.found, watch.has_hang) == (None, False)


class Stamped(HeartbeatWatch):
    """Says when the ranks had been asked, and whether the hang was known to others by then."""

    asked_at = float("inf")
    was_known = False

    def _ask(self, folder: Path, sightings: Mapping[int, Sighting]) -> HangEvidence:
        self.was_known = self.has_hang
        seen = super()._ask(folder, sightings)
        self.asked_at = time.monotonic()
        return seen


def test_a_rank_that_hangs_is_ended_with_all_others_and_left_alone_until_these_were_asked(node: Node) -> None:
    node.start(NEVER, 20)
    with Stamped(node.folder, 2, node.hang_timeout(), node.woken.append, share_s=1.0) as watch:
        codes = [rank.wait(timeout=PATIENCE_S) for rank in node.ranks]
        assert time.monotonic() - watch.asked_at >= 1.0
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert watch.was_known
    assert watch.found is not None
    assert watch.found.ranks == (1,)
    assert watch.seen is not None
    (place,) = [group.frames for group in watch.seen.groups if group.ranks == (1,)]
    assert any(frame.startswith("wait_for_ever (") for frame in place)


def test_ranks_that_go_on_are_left_alone(node: Node) -> None:
    """For longer than a hang takes, since each step takes 0.02 s."""
    node.start(NEVER, NEVER)
    with node.watch() as watch:
        node.wait_for_step(max(map(node.step, range(2))) + 100)
    assert (watch.found, node.woken) == (None, [])
    assert all(rank.poll() is None for rank in node.ranks)


def test_a_process_of_somebody_else_is_never_touched(node: Node) -> None:
    """A heartbeat that names one, from a rank long gone whose number was given out again."""
    node.start(20)
    outer = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {RANK!r}, '20']); p.wait()"
    environ = {**os.environ, VARIABLE: str(node.folder), "LOCAL_RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", outer], env=environ, start_new_session=True) as parent:
        try:
            node.wait_for(1, 20)
            grandchild = read_heartbeat(heartbeat_path(node.folder, 1))
            assert grandchild is not None
            with HeartbeatWatch(node.folder, 2, node.hang_timeout(), node.woken.append):
                assert node.ranks[0].wait(timeout=PATIENCE_S) == -signal.SIGKILL
            os.kill(grandchild.pid, 0)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_stacks_are_grouped_and_the_lonely_come_first(node: Node) -> None:
    node.start(20, 20, NEVER)
    node.wait_for_step(20)
    groups: list[StackGroup] = []

    def have_come_to_their_wait() -> bool:
        """A heartbeat is there a moment before its rank waits."""
        groups[:] = group_stacks(ask_for_stacks(node.folder, {rank: each.pid for rank, each in enumerate(node.ranks)}))
        return [group.ranks for group in groups] == [(2,), (0, 1)]

    wait_until(have_come_to_their_wait)
    assert groups[1].frames[0].startswith("wait_for_ever (<string>:")


def test_who_did_not_promise_an_answer_is_not_asked(node: Node, tmp_path: Path) -> None:
    """The signal would end it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            assert ask_for_stacks(tmp_path, {0: other.pid}) == {}
            time.sleep(0.2)
            assert other.poll() is None
        finally:
            other.kill()


SLOWLY = """
import signal, sys, time

def answer(number, frame):
    with open(sys.argv[1], "a") as file:
        for line in ("Thread 0x1 (most recent call first):", '  File "b.py", line 1 in _bootstrap', "",
                     "Current thread 0x2 (most recent call first):", '  File "a.py", line 2 in wait',
                     '  File "a.py", line 9 in <module>'):
            print(line, file=file, flush=True)
            time.sleep(0.1)

signal.signal(signal.SIGURG, answer)
open(sys.argv[1], "w").close()
while True:
    time.sleep(1)
"""


def test_stacks_are_read_once_they_are_whole(tmp_path: Path) -> None:
    """A busy machine may let a rank wait in the middle of its answer."""
    with subprocess.Popen([sys.executable, "-c", SLOWLY, str(tmp_path / "stacks-3")]) as rank:
        try:
            wait_until((tmp_path / "stacks-3").exists)
            answers = ask_for_stacks(tmp_path, {3: rank.pid})
        finally:
            rank.kill()
    assert group_stacks(answers) == [StackGroup((3,), ("wait (a.py:2)", "<module> (a.py:9)"))]


def test_nobody_looks_where_nobody_shall() -> None:
    with watched(2, None, lambda hang: None) as watch:
        assert (watch.folder, watch.found, watch.seen, watch.has_hang) == (None, None, None, False)


CRASH = """a warning
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 327 in wait
  File "/lib/threading.py", line 1002 in _bootstrap

{0} 0x00007f02 (most recent call first):
  File "/torch/_ops.py", line 1279 in __call__
  File "/job/model.py", line 7 in forward

Extension modules: numpy, torch._C (total: 2)
"""


@pytest.mark.parametrize("thread", ["Current thread", "Thread"])
def test_a_crash_is_read_from_what_was_printed(thread: str) -> None:
    """A thread that never ran Python has no frames: then the main thread, which comes last, says most."""
    frames = ("__call__ (/torch/_ops.py:1279)", "forward (/job/model.py:7)")
    assert read_crash(CRASH.format(thread)) == frames
    assert read_crash(CRASH.replace("model", "earlier").format(thread) + CRASH.format(thread)) == frames


@pytest.mark.parametrize("printed", ["", "a warning\n", "Fatal Python error: Aborted\n", CRASH.split("Fatal")[0]])
def test_no_frames_where_none_were_printed(printed: str) -> None:
    assert read_crash(printed) == ()
