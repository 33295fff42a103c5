"""The watch over real processes: one that is stopped goes on, one that hangs is ended with where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardway.ranks.agent.hang import Hang
from shardway.ranks.agent.page import VARIABLE, page_path, read_page
from shardway.ranks.agent.patience import Patience, Span
from shardway.ranks.agent.stacks import ask_for_stacks, group_stacks
from shardway.ranks.agent.watch import Unwatched, Watch, watched
from shardway.ranks.progress import Activity

pytestmark = pytest.mark.slow

RANK = """
import os, sys, time
from shardway.ranks.agent.join import join_agent
from shardway.ranks.agent.page import open_page
from shardway.ranks.progress import Activity

join_agent(os.environ)
page = open_page(os.environ, int(os.environ["LOCAL_RANK"]))

def wait_for_ever():
    while True:
        time.sleep(0.05)

for step in range(10_000_000):
    page.write(Activity.STEP, step, time.monotonic())
    if step == int(sys.argv[1]):
        wait_for_ever()
    time.sleep(0.02)
"""

NEVER = 10_000_000


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
        entry = read_page(page_path(self.folder, rank))
        return entry.step if entry is not None and entry.activity is Activity.STEP else -1

    def wait_for_step(self, step: int) -> None:
        """Until every rank has come to this step."""
        for rank in range(len(self.ranks)):
            self.wait_for(rank, step)

    def wait_for(self, rank: int, step: int) -> None:
        """Until a rank has come to this step."""
        until = time.monotonic() + 30
        while self.step(rank) < step:
            assert time.monotonic() < until, "the ranks did not come so far"
            time.sleep(0.02)

    def patience(self) -> Patience:
        """One that knows how long steps take."""
        patience = Patience(start_s=60.0, fixed_s=1.5)
        for _ in range(5):
            patience.observe(Span(Activity.STEP), 0.02)
        return patience

    def watch(self) -> Watch:
        """A watch over these ranks."""
        return Watch(self.folder, len(self.ranks), self.patience(), self.woken.append)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for rank in node.ranks:
        rank.kill()
        rank.wait()


def test_a_rank_that_hangs_is_ended_with_all_others(node: Node) -> None:
    node.start(NEVER, 20)
    with node.watch() as watch:
        codes = [rank.wait(timeout=30) for rank in node.ranks]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert watch.found is not None
    assert watch.found.hang.ranks == (1,)
    (place,) = [group.frames for group in watch.found.seen.groups if group.ranks == (1,)]
    assert any(frame.startswith("wait_for_ever (") for frame in place)


def test_a_rank_that_is_stopped_is_told_to_go_on(node: Node) -> None:
    node.start(NEVER, NEVER)
    os.kill(node.ranks[0].pid, signal.SIGSTOP)
    stopped_at = node.step(0)
    with node.watch() as watch:
        until = time.monotonic() + 20
        while not node.woken and time.monotonic() < until:
            time.sleep(0.05)
        node.wait_for_step(stopped_at + 5)
    assert [hang.ranks for hang in node.woken] == [(0,)]
    assert watch.found is None
    assert all(rank.poll() is None for rank in node.ranks)


def test_ranks_are_asked_where_one_of_another_node_hangs_and_go_on(node: Node) -> None:
    node.start(NEVER, 20)
    node.wait_for_step(20)
    with Watch(node.folder, 2, Patience(start_s=60.0, fixed_s=60.0), node.woken.append) as watch:
        watch.is_asked = True
        until = time.monotonic() + 20
        while watch.seen is None and time.monotonic() < until:
            time.sleep(0.05)
        before = node.step(0)
        node.wait_for(0, before + 5)
    assert watch.seen is not None
    assert [group.ranks for group in watch.seen.groups] == [(0,), (1,)]
    assert [record.rank for record in watch.seen.heard.records] == [0, 1]
    assert (watch.found, watch.has_hang) == (None, False)


def test_a_rank_that_hangs_is_left_alone_until_the_others_were_asked(node: Node) -> None:
    node.start(20)
    with Watch(node.folder, 1, node.patience(), node.woken.append, share_s=1.5) as watch:
        until = time.monotonic() + 30
        while not (watch.has_hang and watch.seen is not None) and time.monotonic() < until:
            time.sleep(0.02)
        assert watch.found is None
        time.sleep(0.5)
        assert node.ranks[0].poll() is None
        assert node.ranks[0].wait(timeout=30) == -signal.SIGKILL
    assert watch.found is not None
    assert watch.found.seen == watch.seen


def test_ranks_that_go_on_are_left_alone(node: Node) -> None:
    node.start(NEVER, NEVER)
    with node.watch() as watch:
        time.sleep(3.0)
    assert (watch.found, node.woken) == (None, [])
    assert all(rank.poll() is None for rank in node.ranks)


def test_a_process_of_somebody_else_is_never_touched(node: Node) -> None:
    """A page that names one, from a rank long gone whose number was given out again."""
    node.start(20)
    outer = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {RANK!r}, '20']); p.wait()"
    environ = {**os.environ, VARIABLE: str(node.folder), "LOCAL_RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", outer], env=environ, start_new_session=True) as parent:
        try:
            until = time.monotonic() + 30
            while node.step(1) < 20 and time.monotonic() < until:
                time.sleep(0.02)
            grandchild = read_page(page_path(node.folder, 1))
            assert grandchild is not None
            with Watch(node.folder, 2, node.patience(), node.woken.append):
                assert node.ranks[0].wait(timeout=30) == -signal.SIGKILL
            os.kill(grandchild.pid, 0)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_stacks_are_grouped_and_the_lonely_come_first(node: Node) -> None:
    node.start(20, 20, NEVER)
    node.wait_for_step(20)
    stacks = ask_for_stacks(node.folder, {rank: process.pid for rank, process in enumerate(node.ranks)})
    groups = group_stacks(stacks)
    assert [group.ranks for group in groups] == [(2,), (0, 1)]
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


def test_nobody_looks_where_nobody_shall() -> None:
    with watched(2, None, lambda hang: None) as watch:
        assert watch == Unwatched()
