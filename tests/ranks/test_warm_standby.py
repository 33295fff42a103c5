"""Standbys take the places of ranks that start again; they are there when it is time, and gone when not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from left_folders import list_left_folders
from shardway.ranks import heartbeat, local
from shardway.ranks.hang import NO_RANKS, SlowestRank
from shardway.ranks.heartbeat import GATE_VARIABLE, GATES
from shardway.ranks.local import MOST_OF_MEMORY, STANDBY_BYTES, LocalLaunch, RankAssignment, WarmStandby
from shardway.ranks.supervisor import open_standby
from shardway.runfile.schema import RunSection

pytestmark = pytest.mark.usefixtures("warm_starts")

RANK = """
import os, sys, time
from pathlib import Path
from shardway.ranks.heartbeat import GATE_VARIABLE, wait_at_gate

folder, kind = Path(sys.argv[1]), "spare" if GATE_VARIABLE in os.environ else "new"
if not wait_at_gate(os.environ, (folder / f"ready-{os.getpid()}").touch):
    sys.exit(0)
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"rank-{rank}-{start}-{kind}").write_text(str(os.getpid()))
print(f"rank {rank} of start {start}", flush=True)
while not (folder / f"end-{start}").exists():
    time.sleep(0.02)
sys.exit(3 if rank == "1" and start == "0" else 0)
"""

DRIVER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from shardway.ranks.hang import SlowestRank
from shardway.ranks.local import run_local
from shardway.ranks.local import LocalLaunch, RankAssignment
from shardway.ranks.local import WarmStandby

folder, first = Path(sys.argv[1]), int(sys.argv[2])
launch = LocalLaunch(2, "a_rank_of_a_test", [str(folder)], folder / "logs", 1, folder / "stop", 60.0)
steps = iter(range(1000000))
ends = []

def run(start, first, until):
    def look(failed):
        standby.look(SlowestRank((next(steps), 2)))
        if len(list(folder.glob("ready-*"))) >= until:
            (folder / f"end-{start}").touch()
        return False
    seats = RankAssignment(first, 4, 0, 2, "127.0.0.1", 29000 + start, start)
    ends.append([f.exit_code for f in run_local(replace(launch, assignment=seats), lambda: None, look, standby.start)])

with WarmStandby(0.01, bounded=False) as standby:
    run(0, 0, 2)
    run(1, first, 4)
print(json.dumps(ends))
"""
"""Two starts of two ranks, each of which ends once standbys for the next one are ready."""


@pytest.mark.parametrize("first", [0, 2], ids=["the same ranks", "other ranks"])
def test_ranks_that_start_again_are_standbys(tmp_path: Path, first: int) -> None:
    (tmp_path / "a_rank_of_a_test.py").write_text(RANK)
    began = time.time()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(first)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
    assert sorted(json.loads(done.stdout)[0]) in ([-15, 3], [3]), "the other one was ended, or had ended well"
    assert json.loads(done.stdout)[1] == []
    kind = "spare" if first == 0 else "new"
    ranks = {path.name: int(path.read_text()) for path in tmp_path.glob("rank-*")}
    assert set(ranks) == {"rank-0-0-new", "rank-1-0-new", f"rank-{first}-1-{kind}", f"rank-{first + 1}-1-{kind}"}
    ready = {int(path.name.removeprefix("ready-")) for path in tmp_path.glob("ready-*")}
    assert len(ready) >= 4
    assert (ranks[f"rank-{first}-1-{kind}"] in ready) == (kind == "spare")
    assert not any(psutil.pid_exists(pid) for pid in (*ready, *ranks.values()))
    assert list_left_folders(GATES, began) == []
    assert list((tmp_path / "logs").glob("*/waits")) == [], "the output of standbys that are gone is gone too"
    printed = [path.read_text() for path in (tmp_path / "logs").glob("*/attempt_*/*/stdout.log")]
    assert f"rank {first} of start 1\n" in printed


# --- when


@dataclass
class Started:
    """Stands in for processes."""

    gates: list[Path]
    subprocess_handlers: dict[int, Any]

    def close(self, number: int) -> None:
        """Nothing to end."""


LAUNCH = LocalLaunch(2, "none", [], Path("/none"), 1, Path("/none/stop"), 60.0)
SEATS = RankAssignment(0, 2, 0, 1, "127.0.0.1", 29500)
ORDER = 2
"""Of what a rank does within a step."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """What was started as standbys."""
    found: list[Started] = []

    def start(launch: LocalLaunch, seats: RankAssignment, gates: tuple[dict[str, str], ...] = ()) -> Started:
        begun = Started([Path(each[GATE_VARIABLE]) for each in gates], {})
        if gates:
            found.append(begun)
        return begun

    monkeypatch.setattr(local, "start_program", start)
    monkeypatch.setattr(local, "handlers_of", lambda processes: processes.subprocess_handlers)
    monkeypatch.setattr(local, "output_folder", lambda processes: Path("/none"))
    return found


def test_standbys_come_some_time_after_the_first_step(started: list[Started]) -> None:
    now = [0.0]
    with WarmStandby(60.0, bounded=False, clock=lambda: now[0]) as standby:
        standby.look(SlowestRank((40, ORDER)))
        standby.start(LAUNCH, SEATS)
        for slowest in (NO_RANKS, SlowestRank((0, 0)), SlowestRank((40, ORDER)), SlowestRank((40, ORDER))):
            standby.look(slowest)
            now[0] += 100.0
        assert started == [], "no step was done"
        standby.look(SlowestRank((41, ORDER)))
        now[0] += 59.0
        standby.look(SlowestRank((70, ORDER)))
        assert started == []
        now[0] += 1.0
        standby.look(SlowestRank((71, ORDER)))
        standby.look(SlowestRank((72, ORDER)))
        assert [len(each.gates) for each in started] == [2]
        standby.start(LAUNCH, SEATS)
        now[0] += 100.0
        standby.look(SlowestRank((60, ORDER)))
        assert len(started) == 1, "a start anew, whose first step is not done"
        assert started[0].gates[0].exists(), "a spare may still be on its way there"
    assert not started[0].gates[0].parent.exists()


def test_standbys_come_at_once_where_a_rank_that_trained_has_failed(started: list[Started]) -> None:
    with WarmStandby(60.0, bounded=False, clock=lambda: 0.0) as standby:
        standby.start(LAUNCH, SEATS)
        standby.look(SlowestRank((0, 0)), ends=True)
        assert started == [], "no step was done: what failed may fail again at once"
        standby.look(SlowestRank((40, ORDER)))
        standby.look(SlowestRank((41, ORDER)))
        assert started == []
        standby.look(NO_RANKS, ends=True)
        standby.look(NO_RANKS, ends=True)
        assert [len(each.gates) for each in started] == [2]
        assert standby.start(LAUNCH, SEATS) is started[0]


@pytest.mark.parametrize(("left", "count"), [(2 * STANDBY_BYTES / MOST_OF_MEMORY, 1), (2 * STANDBY_BYTES, 0)])
def test_standbys_need_memory_to_spare(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, left: float, count: int
) -> None:
    monkeypatch.setattr(local, "read_memory_left", lambda: int(left))
    with WarmStandby(1.0, clock=iter(range(100)).__next__) as standby:
        standby.start(LAUNCH, SEATS)
        for step in range(10):
            standby.look(SlowestRank((step, ORDER)))
    assert len(started) == count


def test_no_standbys_where_none_are_wanted(started: list[Started]) -> None:
    with WarmStandby(None) as standby:
        standby.start(LAUNCH, SEATS)
        for step in range(10):
            standby.look(SlowestRank((step, ORDER)))
        standby.look(NO_RANKS, ends=True)
    assert started == []


@pytest.mark.parametrize(
    ("keys", "count"), [({}, 1), ({"spares": "0.5s"}, 1), ({"spares": "off"}, 0), ({"max_restarts": 0}, 0)]
)
def test_standbys_are_for_ranks_that_start_again(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], count: int
) -> None:
    monkeypatch.setattr(local, "read_memory_left", lambda: 1 << 40)
    with open_standby(RunSection(**keys)) as standby:
        standby.start(LAUNCH, SEATS)
        standby.look(SlowestRank((0, ORDER)))
        standby.look(SlowestRank((1, ORDER)))
        standby.look(NO_RANKS, ends=True)
    assert len(started) == count


def test_a_machine_that_gives_no_more_processes_goes_without(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse_standbys(launch: LocalLaunch, seats: RankAssignment, gates: tuple[dict[str, str], ...] = ()) -> Started:
        if gates:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Started([], {})

    monkeypatch.setattr(local, "start_program", refuse_standbys)
    monkeypatch.setattr(heartbeat, "find_memory", lambda: tmp_path)
    with WarmStandby(1.0, bounded=False, clock=iter(range(100)).__next__) as standby:
        standby.start(LAUNCH, SEATS)
        for step in range(10):
            standby.look(SlowestRank((step, ORDER)))
        assert standby.start(LAUNCH, SEATS) is not None
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_room_for_gates_goes_without(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(heartbeat, "find_memory", lambda: tmp_path / "none")
    with WarmStandby(1.0, bounded=False, clock=iter(range(100)).__next__) as standby:
        standby.start(LAUNCH, SEATS)
        for step in range(10):
            standby.look(SlowestRank((step, ORDER)))
        assert standby.start(LAUNCH, SEATS) is not None
    assert started == []


def test_a_mark_that_cannot_be_taken_away_does_not_keep_standbys_from_being_ranks(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where the file system of the run is read-only by now."""
    monkeypatch.setattr(local, "output_folder", lambda processes: tmp_path)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with WarmStandby(1.0, bounded=False, clock=iter(range(100)).__next__) as standby:
        standby.start(LAUNCH, SEATS)
        for step in range(10):
            standby.look(SlowestRank((step, ORDER)))
        with monkeypatch.context() as within:
            within.setattr(Path, "unlink", refuse)
            assert standby.start(LAUNCH, SEATS) is started[0]
