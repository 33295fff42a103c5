"""A run on several nodes with an agent on each: what fails on one of them, and nodes that are lost.

The nodes are processes of this machine with loopback addresses of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import Command, Start, pacing, stalling, training_commands
from pool import RankPool
from ports import free_port
from runs import TINY, pool_ranks, read_column, read_named, train_tiny, worst_difference
from shardway.rundir.attempts import VARIABLE, AttemptStart, Ending
from shardway.rundir.directory import RunDir

WORDS = (*TINY, "checkpoint.every=20 steps", "train.steps=120", "train.global_batch=12", "data.record_ids=true")
SHORT = (*WORDS, "checkpoint.every=10 steps", "train.steps=50")


@dataclass(frozen=True)
class Crew:
    """The agents of a run, by node."""

    agents: list[Command]

    @property
    def run(self) -> RunDir:
        return self.agents[0].run

    def ranks_of(self, node: int) -> list[psutil.Process]:
        """The rank processes of a node."""
        self.agents[node].note_processes()
        return list(self.agents[node].ranks().values())

    def lose(self, node: int) -> None:
        """Kill an agent and its ranks at once, as a node that is switched off."""
        for process in [psutil.Process(self.agents[node].process.pid), *self.ranks_of(node)]:
            process.send_signal(signal.SIGKILL)

    def restarts(self) -> list[dict[str, Any]]:
        return read_named(self.run.path, "restarted")

    def worlds(self) -> list[int]:
        """How many ranks each start had."""
        return [event["world"] for event in read_named(self.run.path, "started")]


Launch = Callable[..., Crew]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """`launch("name", nodes, *words)` with one rank a node."""
    with training_commands(tmp_path) as start:

        def go(name: str, nodes: int, *words: str, environ: Mapping[str, str] | None = None) -> Crew:
            port, addresses = free_port(), " ".join(f"127.0.0.{node + 1}" for node in range(nodes))
            place = ("--nodes", addresses, "--port", str(port))
            return Crew([start(name, *place, "--node", str(node), *words, environ=environ) for node in range(nodes)])

        yield go


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with training_commands(tmp_path) as go:
        yield go


def train_alone(rank: int, folder: Path) -> None:
    """On ranks of one machine."""
    train_tiny(folder, pool_ranks(), *SHORT)


def test_a_rank_that_is_killed_on_another_node_is_started_again(
    launch: Launch, rank_pool: RankPool, tmp_path: Path
) -> None:
    """To the same bits as the ranks of one machine to which nothing happens."""
    stands = tmp_path / "stands"  # however late the kill is, the run has not come to its end before
    crew = launch("crew", 2, *SHORT, environ=stalling(0, 35, stands))
    crew.agents[0].wait_for_step(13)
    (rank,) = crew.ranks_of(1)
    rank.suspend()
    stands.touch()  # it stands once
    rank.kill()
    for agent in crew.agents:
        agent.finish()
    (restart,) = crew.restarts()
    assert restart["reason"].startswith(f"rank 1 (process {rank.pid}) was ended by SIGKILL")
    assert restart["step"] >= 10
    assert all(crew.run.rank_output(rank) for rank in (0, 1))
    rank_pool.run(train_alone, 2, {"folder": tmp_path / "alone"})
    for column in ("loss", "grad_norm"):
        assert read_column(crew.run.path, column) == read_column(tmp_path / "alone", column)
    assert [agent.left_alive() for agent in crew.agents] == [[], []]


@pytest.mark.exhaustive
def test_spares_of_all_nodes_take_the_places_of_ranks_that_start_again(launch: Launch, start: Start) -> None:
    """To the same bits; no process was started for it, and none is left."""
    crew = launch("crew", 2, *WORDS, "run.spares=1s", environ=pacing(0.1))

    def spares() -> set[int]:
        return {pid for node in (0, 1) for pid in (each.pid for each in crew.agents[node].spares())}

    crew.agents[0].wait_for_step(20)
    crew.agents[0].wait_until(lambda: len(spares()) == 2)
    waiting = spares()
    (rank,) = crew.ranks_of(1)
    rank.kill()
    for agent in crew.agents:
        agent.finish()
    (restart,) = crew.restarts()
    assert restart["reason"].startswith(f"rank 1 (process {rank.pid}) was ended by SIGKILL")
    first, second = read_named(crew.run.path, "started")
    assert first["pid"] not in waiting
    assert second["pid"] in waiting
    assert second["step"] == restart["step"]
    start("alone", "--nproc", "2", *WORDS).finish()
    for column in ("loss", "grad_norm"):
        assert read_column(crew.run.path, column) == read_column(crew.run.path.with_name("alone"), column)
    assert [agent.left_alive() for agent in crew.agents] == [[], []]


@pytest.mark.exhaustive
def test_a_run_goes_on_where_the_node_that_led_is_lost(launch: Launch, start: Start) -> None:
    crew = launch("crew", 2, *WORDS, "run.elastic=[1, 2]")
    crew.agents[0].wait_for_step(25)
    crew.ranks_of(1)
    crew.lose(0)
    crew.agents[1].finish()
    assert crew.worlds() == [2, 1]
    assert "node 0 (127.0.0.1), which led the others, does not answer any more" in crew.restarts()[-1]["reason"]
    start("alone", "--nproc", "2", *WORDS).finish()
    alone = RunDir(crew.run.path.with_name("alone"))
    assert worst_difference(read_column(crew.run.path, "loss"), read_column(alone.path, "loss")) < 1e-5


@pytest.mark.exhaustive  # on a real cluster, `make cluster` loses nodes
def test_a_run_goes_on_without_a_node_whose_agent_was_killed_and_not_its_ranks(launch: Launch) -> None:
    """They ask for a stop, since nobody looks after them; it is no end for those that are left."""
    crew = launch("crew", 2, *WORDS, "run.elastic=[1, 2]", environ=pacing(0.1))
    crew.agents[0].wait_for_step(25)
    crew.ranks_of(1)
    psutil.Process(crew.agents[1].process.pid).kill()
    crew.agents[0].finish()
    assert crew.worlds() == [2, 1]
    assert crew.run.read_status()["state"] == "finished"
    assert len(set(read_column(crew.run.path, "step"))) == 120
    assert crew.agents[0].left_alive() == []


def test_an_agent_that_cannot_begin_ends_the_wait_of_the_others(start: Start, tmp_path: Path) -> None:
    """In a job, where it can say so; and it is told as what it was, not as a stop."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/torch.py").write_text('raise ImportError("libcudart.so.13: cannot open shared object file")')
    attempt = RunDir(tmp_path / "crew").attempt(1)
    attempt.make()
    attempt.write_started(AttemptStart("1", started=time.time()))
    place = ("--nodes", "127.0.0.1 127.0.0.2", "--port", str(free_port()), "--node")
    path = os.environ.get("PYTHONPATH", "")
    good = {VARIABLE: str(attempt.path)}
    bad = {**good, "PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), path])}
    first = start("crew", *place, "0", *WORDS, environ=good)
    second = start("crew", *place, "1", *WORDS, environ=bad)
    assert second.end()[0] == 70
    code, said = first.end()
    assert code == 3
    assert "of another node has ended this attempt: ImportError: libcudart.so.13" in said
    result = attempt.read_result()
    assert result is not None
    assert (result.state, result.by, result.exit_code) == (Ending.CRASHED, "shardway train", 70)


@pytest.mark.exhaustive
def test_a_hang_on_another_node_names_what_the_ranks_of_this_one_wait_in(launch: Launch, tmp_path: Path) -> None:
    """And says where the ranks of both were: who waits is asked before it loses contact."""
    words = ("run.max_restarts=0", "run.hang_timeout=3s", *WORDS)
    crew = launch("crew", 2, *words, environ=stalling(1, 5, tmp_path / "stalled"))
    code, said = crew.agents[0].end()
    assert code == 4
    assert "shardway: rank 1 did nothing for" in said
    assert "rank 0 is in all_reduce of " in said
    assert " of ranks 0 and 1 (gloo), which rank 1 has not entered (the last one there was " in said
    (fault,) = [event for event in crew.run.all_events(1) if event["event"] == "fault" and event["kind"] == "Hang"]
    assert sorted(rank for group in fault["stacks"] for rank in group["ranks"]) == [0, 1]
    assert crew.agents[1].end()[0] == 4
    assert [agent.left_alive() for agent in crew.agents] == [[], []]
