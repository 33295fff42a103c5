"""Further ranks beside a process that talks with a terminal: their variables, their end, and what a failure leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardway.errors import JobError, LostContact
from shardway.ranks import beside
from shardway.ranks.beside import ranks_beside

REPORT = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"


@pytest.fixture(name="code")
def _code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What further ranks run instead of shardway: the one piece of Python that a test puts here."""
    code: list[str] = []
    start = subprocess.Popen

    def run(command: list[str], **options: object) -> object:
        return start([sys.executable, "-c", code[0], *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(beside.subprocess, "Popen", run)
    return code


def test_each_has_its_place_and_this_process_is_rank_0(code: list[str], tmp_path: Path) -> None:
    code.append(REPORT)
    before = dict(os.environ)
    with ranks_beside(3, [str(tmp_path / "rank-")]) as placement:
        assert (placement.rank, placement.world, placement.launcher) == (0, 3, "shardway")
        own = dict(os.environ)
    assert dict(os.environ) == before
    others = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (1, 2)]
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in others] == [
        ("1", "1", "3"),
        ("2", "2", "3"),
    ]
    assert {each["MASTER_PORT"] for each in [*others, own]} == {str(placement.master_port)}


def test_one_that_was_killed_is_named(code: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_LOOK_EVERY_S", 600.0)
    code.append("import os; os.kill(os.getpid(), 9)")
    before = _list_children()
    with pytest.raises(JobError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"), ranks_beside(2, []):
        (pid,) = _list_children() - before
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        raise LostContact("rank 0 lost contact with another rank")


def test_a_wait_for_one_that_has_failed_ends(code: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process would wait for minutes: it ends with what the other one printed."""
    ended: list[tuple[str, int]] = []
    left = threading.Event()

    def leave(words: str, code: int) -> None:
        ended.append((words, code))
        left.set()

    monkeypatch.setattr(beside, "leave_now", leave)
    monkeypatch.setattr(beside, "_LEAVE_S", 0.05)
    monkeypatch.setattr(beside, "_LOOK_EVERY_S", 0.01)
    code.append("import sys; print('shardway: no such model', file=sys.stderr); sys.exit(2)")
    with ranks_beside(2, []):
        assert left.wait(60)
    assert ended == [("rank 1 ended with exit code 2: no such model", 4)]


def test_none_outlives_the_block(code: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_LEAVE_S", 0.05)
    code.append("import time; time.sleep(600)")
    before = _list_children()
    with ranks_beside(3, []):
        assert len(_list_children() - before) == 2
    assert _list_children() == before


def _list_children() -> set[int]:
    """The processes that this thread has started and not awaited."""
    return {int(each) for each in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}
