"""What real ranks answer when they are asked for their last collectives, and what is made of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from shardway.ranks import evidence
from shardway.ranks.evidence import (
    SIZE,
    HangEvidence,
    Record,
    answer_with_record,
    ask_for_records,
    choose_recording,
    explain_collectives,
)
from shardway.ranks.heartbeat import VARIABLE

pytestmark = pytest.mark.usefixtures("warm_starts")

RANK = """
import ctypes, os, sys, time
from pathlib import Path
from shardway.ranks.heartbeat import join_agent

join_agent(os.environ)
import torch
import torch.distributed as dist

rank, folder = int(os.environ["RANK"]), Path(os.environ["SHARDWAY_PROGRESS"])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
pairs = [dist.new_group([0, 1], group_desc="mesh_tp"), dist.new_group([1, 2], group_desc="mesh_tp")]

def all_reduce(*sizes, group=None):
    dist.all_reduce(torch.ones(*sizes), group=group)

def hold_lock():
    release = os.open(f"{folder}/release", os.O_RDWR)  # unlike CDLL, PyDLL does not give the lock back
    ctypes.PyDLL(None).read(release, ctypes.create_string_buffer(1), 1)

for number, line in enumerate(sys.stdin):
    Path(f"{folder}/began-{rank}-{number}").touch()
    exec(line)
    Path(f"{folder}/done-{rank}-{number}").touch()
"""


def wait_until(is_so: Callable[[], bool], instead: object = "") -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until, f"it did not come to that: {instead}"
        time.sleep(0.02)


@dataclass
class Told:
    """Three ranks that do what they are told, and how many lines each was told."""

    folder: Path
    ranks: list[subprocess.Popen[str]]
    lines: list[int]

    def tell(self, rank: int, line: str, *, wait: bool = False) -> None:
        """Have a rank do something; it has begun then, or is done with it."""
        pipe = self.ranks[rank].stdin
        assert pipe is not None
        pipe.write(f"{line}\n")
        pipe.flush()
        path = self.folder / f"{'done' if wait else 'began'}-{rank}-{self.lines[rank]}"
        self.lines[rank] += 1
        wait_until(path.exists)

    def ask(self) -> HangEvidence:
        return ask_for_records(self.folder, range(3))

    def wait_for(self, *told: str) -> None:
        """Until this is what comes of their answers: who was told to enter something may take its time."""
        last: list[tuple[str, ...]] = []

        def is_so() -> bool:
            last[:] = [explain_collectives(self.ask())]
            return last == [told]

        wait_until(is_so, last)

    def settle(self, rank: int) -> None:
        """Wait until a rank is done with what it was told."""
        wait_until((self.folder / f"done-{rank}-{self.lines[rank] - 1}").exists)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(evidence, "RECORD_WAIT_S", 1.0)
    ranks = []
    for rank in range(3):
        environ = {**os.environ, VARIABLE: str(tmp_path), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        environ |= {"PYTHONPATH": os.pathsep.join(sys.path), **choose_recording(os.environ)}
        ranks.append(subprocess.Popen([sys.executable, "-c", RANK], env=environ, stdin=subprocess.PIPE, text=True))
    yield Told(tmp_path, ranks, [0, 0, 0])
    for process in ranks:
        process.kill()
        process.communicate()


def test_what_ranks_tell_of_their_collectives(told: Told) -> None:
    """One start of three ranks, one thing after another: torch takes seconds to be imported."""
    for rank in range(3):
        told.tell(rank, "all_reduce(4)")
    for rank in range(3):
        told.settle(rank)
    told.wait_for()
    a_rank_does_not_enter(told)
    a_rank_is_stopped(told)
    a_rank_holds_the_lock(told)
    a_rank_waits_in_another_group(told)
    ranks_call_different_collectives(told)
    assert all(process.poll() is None for process in told.ranks)


def a_rank_does_not_enter(told: Told) -> None:
    for rank in (0, 2):
        told.tell(rank, "all_reduce(2, 3)")
    told.tell(1, "time.sleep(0.01)", wait=True)
    told.wait_for(
        "ranks 0 and 2 are in all_reduce of 2x3 float32, number 2 of ranks 0 to 2 (gloo), which rank 1 has not entered "
        "(the last one there was all_reduce of 4 float32, number 1)",
    )
    told.tell(1, "all_reduce(2, 3)")
    told.settle(0)


def a_rank_is_stopped(told: Told) -> None:
    told.tell(0, "all_reduce(1)")
    told.tell(2, "all_reduce(1)")
    told.ranks[1].send_signal(signal.SIGSTOP)
    told.wait_for(
        "ranks 0 and 2 are in all_reduce of 1 float32, number 3 of ranks 0 to 2 (gloo), rank 1 did not answer "
        "(stopped, or Python's lock is held)",
    )
    told.ranks[1].send_signal(signal.SIGCONT)
    told.tell(1, "all_reduce(1)")
    told.settle(0)


def a_rank_holds_the_lock(told: Told) -> None:
    release = told.folder / "release"
    os.mkfifo(release)
    told.tell(0, "all_reduce(1)")
    told.tell(1, "hold_lock()")

    def is_silent_alone() -> bool:
        collectives = told.ask()
        return (collectives.silent, [record.rank for record in collectives.records]) == ((1,), [0, 2])

    wait_until(is_silent_alone)
    release.write_bytes(b".")
    told.settle(1)
    for rank in (1, 2):
        told.tell(rank, "all_reduce(1)")
    told.settle(0)
    wait_until(lambda: told.ask().silent == ())


def a_rank_waits_in_another_group(told: Told) -> None:
    """Rank 1 is not in the collective of all, for the sake of rank 2 alone."""
    told.tell(0, "all_reduce(7)")
    told.tell(1, "all_reduce(5, group=pairs[1])")
    told.wait_for(
        "rank 1 is in all_reduce of 5 float32, number 1 of group tp of ranks 1 and 2 (gloo), which rank 2 has not "
        "entered (none there yet)",
        "rank 0 is in all_reduce of 7 float32, number 5 of ranks 0 to 2 (gloo), which rank 2 has not entered (the last "
        "one there was all_reduce of 1 float32, number 4)",
    )
    told.tell(2, "all_reduce(5, group=pairs[1])")
    told.settle(1)
    for rank in (1, 2):
        told.tell(rank, "all_reduce(7)")
    told.settle(0)


def ranks_call_different_collectives(told: Told) -> None:
    told.tell(0, "all_reduce(4)")
    told.tell(1, "dist.barrier()")
    told.tell(2, "all_reduce(4)")
    told.wait_for(
        "the ranks do not call the same collectives (a mistake in the code): of ranks 0 to 2 (gloo) at number 6 rank 1 "
        "in barrier; ranks 0 and 2 in all_reduce of 4 float32",
    )


def hear_one(folder: Path) -> HangEvidence:
    """What a rank that has just been started answers: its pipe may be there before anybody reads from it."""
    collectives = [HangEvidence()]

    def has_answered() -> bool:
        collectives[:] = [ask_for_records(folder, [0])]
        return bool(collectives[0].records)

    wait_until(has_answered)
    return collectives[0]


def test_without_torch_a_rank_has_no_groups(tmp_path: Path) -> None:
    code = "from pathlib import Path; from shardway.ranks import evidence; import sys, time\n"
    code += f"evidence.answer_with_record(Path({str(tmp_path)!r}), 0); assert 'torch' not in sys.modules\n"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), warm.COLD: "1"}
    with subprocess.Popen([sys.executable, "-c", f"{code}time.sleep(60)"], env=environ) as rank:
        (record,) = hear_one(tmp_path).records
        assert rank.poll() is None
        rank.kill()
    assert (record.rank, record.lines, record.whole) == (0, (), True)
    assert ask_for_records(tmp_path, [0]) == HangEvidence()  # it is gone, and who is gone is not asked


def test_a_recorder_that_says_what_nobody_knows(tmp_path: Path) -> None:
    """Another torch: the rank answers, and accuses itself of nothing."""
    code = (
        "import json, sys, time, types\nfrom pathlib import Path\nfrom shardway.ranks import evidence\n"
        "library = types.SimpleNamespace(_dump_fr_trace_json=lambda: json.dumps({'entries': [{'odd': 1}]}))\n"
        "sys.modules['torch'] = types.SimpleNamespace(_C=types.SimpleNamespace(_distributed_c10d=library))\n"
        "world = types.SimpleNamespace(pg_map={1: 1}, pg_names={1: '0'}, pg_group_ranks={1: {0: 0}})\n"
        "sys.modules['torch.distributed.distributed_c10d'] = types.SimpleNamespace(_world=world)\n"
        f"evidence.answer_with_record(Path({str(tmp_path)!r}), 0)\ntime.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as rank:
        collectives = hear_one(tmp_path)
        rank.kill()
    assert collectives == HangEvidence((Record(0, whole=False),))


def test_who_did_not_promise_an_answer_is_not_asked(tmp_path: Path) -> None:
    assert ask_for_records(tmp_path, [0, 1]) == HangEvidence()


def test_a_folder_without_room_for_a_pipe(tmp_path: Path) -> None:
    answer_with_record(tmp_path / "none", 0)
    assert ask_for_records(tmp_path / "none", [0]) == HangEvidence()


@pytest.mark.parametrize("name", evidence.VARIABLES)
def test_what_somebody_has_set_stays(name: str) -> None:
    assert choose_recording({}) == {evidence.VARIABLES[0]: str(SIZE)}
    assert choose_recording({name: "0"}) == {}
