"""A run of two hosts whose network is slow, or cut and healed: nothing is lost, and nothing is trained twice.

The hosts are networks of their own with an agent in each; they share the file system, as nodes of a cluster do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import relay
from faults.strike import FIRST, LAST, Struck
from faults.wire import Wire, two_hosts
from notes import noted, seeds
from outcome import compare

from commands import Command, training_commands
from runs import TINY, read_named
from shardway.rundir.directory import RunDir

pytestmark = pytest.mark.exhaustive

SEEDS = pytest.mark.parametrize("seed", seeds())
WORDS = (*TINY, "train.steps=160", "checkpoint.every=20 steps", "data.record_ids=true")
PORT = "29517"
BRIEF_S, LONG_S = 4.0, 25.0
"""Cuts that are over before a node counts as lost (after 10 s), and long after."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, the wire between them, and the run of their agents."""

    wire: Wire
    start: Callable[..., Command]

    def launch(self, *words: str) -> tuple[Command, Command]:
        """Start the agents of both."""
        place = ("--nodes", " ".join(relay.ADDRESSES), "--port", PORT)
        environ = {"GLOO_SOCKET_IFNAME": relay.DEVICE}
        first, second = (
            self.start("run", *place, "--node", str(node), *WORDS, *words, environ=environ, room=room)
            for node, room in enumerate(self.wire.rooms)
        )
        return first, second


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts() as wire, training_commands(tmp_path) as start:
        yield Hosts(wire, start)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two ranks on one host to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_commands(folder) as start:
        start("run", "--nproc", "2", *WORDS).finish()
    return folder / "run"


def wait_for_some_step(agents: Sequence[Command], dice: random.Random) -> None:
    agents[0].wait_for_step(dice.randrange(FIRST, LAST))
    for agent in agents:
        agent.note_processes()


def finish(agents: Sequence[Command]) -> RunDir:
    """Both end well, and leave nobody behind."""
    for agent in agents:
        agent.finish()
    assert [agent.left_alive() for agent in agents] == [[], []]
    return agents[0].run


@SEEDS
def test_a_network_that_is_slow_for_a_while_costs_time_alone(hosts: Hosts, undisturbed: Path, seed: int) -> None:
    with noted("network slow for 8 s", seed) as note:
        dice = random.Random(f"slow network {seed}")
        agents = hosts.launch()
        wait_for_some_step(agents, dice)
        struck = Struck(time.time(), "the network")
        hosts.wire.delay(dice.uniform(0.02, 0.2))
        time.sleep(8.0)
        hosts.wire.heal()
        run = finish(agents)
        compare(run.path, undisturbed, 0.0)
        assert read_named(run.path, "restarted") == []
        note.tell(struck, 1, run)


@SEEDS
def test_a_network_that_is_cut_briefly_costs_time_alone(hosts: Hosts, undisturbed: Path, seed: int) -> None:
    with noted(f"network cut for {BRIEF_S:g} s", seed) as note:
        dice = random.Random(f"brief cut {seed}")
        agents = hosts.launch()
        wait_for_some_step(agents, dice)
        struck = Struck(time.time(), "the network")
        hosts.wire.cut()
        time.sleep(BRIEF_S)
        hosts.wire.heal()
        run = finish(agents)
        compare(run.path, undisturbed, 0.0)
        assert read_named(run.path, "restarted") == []
        note.tell(struck, 1, run)


@SEEDS
def test_both_sides_of_a_long_cut_say_so_and_go_on_once_it_is_healed(
    hosts: Hosts, undisturbed: Path, seed: int
) -> None:
    with noted("network cut until both hosts gave up", seed) as note:
        dice = random.Random(f"long cut {seed}")
        agents = hosts.launch()
        wait_for_some_step(agents, dice)
        struck = Struck(time.time(), "the network")
        hosts.wire.cut()
        ends = [agent.end() for agent in agents]
        assert [code for code, _ in ends] == [4, 4]
        assert "node 1 (10.77.0.2) does not answer any more" in ends[0][1]
        assert "node 0 (10.77.0.1), which led the others, does not answer any more" in ends[1][1]
        assert [agent.left_alive() for agent in agents] == [[], []]
        hosts.wire.heal()
        run = finish(hosts.launch())
        compare(run.path, undisturbed, 0.0)
        note.tell(struck, 2, run)


@SEEDS
def test_one_side_of_a_long_cut_goes_on_where_it_may(hosts: Hosts, undisturbed: Path, seed: int) -> None:
    """Both believe that the other is lost; one holds the run. The other is refused, or finds the run at its end."""
    with noted(f"network cut for {LONG_S:g} s, one host is enough", seed) as note:
        dice = random.Random(f"elastic cut {seed}")
        agents = hosts.launch("run.elastic=[1, 2]")
        wait_for_some_step(agents, dice)
        struck = Struck(time.time(), "the network")
        hosts.wire.cut()
        time.sleep(LONG_S)
        hosts.wire.heal()
        ends = sorted(agent.end() for agent in agents)
        assert ends[0][0] == 0, ends
        assert ends[1][0] == 0 or "another run is training into" in ends[1][1]
        run = agents[0].run
        compare(run.path, undisturbed, 1e-5)
        first, second, *later = [(event["world"], event["step"]) for event in read_named(run.path, "started")]
        assert (first, second[0]) == ((2, 0), 1)
        assert all(step == 160 for _, step in later), "who came late found nothing to do"
        note.tell(struck, 1, run)
