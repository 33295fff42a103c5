"""The agent that leads several nodes, before ranks run: who is there, which of them take part, what is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import TINY, Shardway, write_text

from shardway.cli.options import print_line
from shardway.cli.train import _read_nodes
from shardway.errors import SiteError, UserError
from shardway.ranks import nodes as cli_nodes
from shardway.ranks.failure import LaunchOutcome
from shardway.ranks.launcher import NodeSpec
from shardway.ranks.local import WarmStandby
from shardway.ranks.nodes import MultiNode, train_on_nodes
from shardway.ranks.rendezvous import host_kv_store
from shardway.ranks.supervisor import build_launch
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.rundir.directory import RunDir

PLACE = NodeSpec(("a", "b", "c", "d"), 0, 29600, 1)


@dataclass
class Lead:
    """As many nodes as a test says are there."""

    free: tuple[int, ...]
    has_begun: bool = False

    def gather(self, wait_s: float, is_called_off: Callable[[], bool]) -> tuple[int, ...]:
        return self.free

    def list_present(self) -> tuple[int, ...]:
        return self.free


def multi_node(folder: Path, *free: int, words: tuple[str, ...] = ()) -> MultiNode:
    request = ResolveRequest(directory=folder / "run", overrides=("site.nodes=4", *words))
    return MultiNode(4, WarmStandby(None), print_line, resolve_request(request, 4, 1), PLACE, Lead(free), 5.0)  # type: ignore[arg-type]


def begin(group: MultiNode) -> LaunchOutcome:
    run = group.resolution.directory
    return group.start(run, build_launch(group.resolution, 1), None)


def test_without_all_nodes_the_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as told:
        begin(multi_node(tmp_path, 0, 2))
    assert str(told.value).startswith(
        "2 of 4 nodes are there after 5s, and it takes 4; missing: node 1 (b), node 3 (d).\n  To do: start the same "
    )


def test_a_stop_before_all_nodes_are_there_calls_it_off(tmp_path: Path) -> None:
    group = multi_node(tmp_path, 0, 2)
    group.resolution.directory.create()
    group.resolution.directory.request_stop("by hand")
    assert begin(group) == LaunchOutcome(called_off=True)


def test_the_most_nodes_take_part_with_which_the_run_file_makes_sense(tmp_path: Path) -> None:
    """Three ranks are no whole number of tensor groups of two: the third node waits as a spare."""
    group = multi_node(tmp_path, 0, 1, 3, words=("run.elastic=[1, 4]", "parallel.tp=2"))
    assert group._gather(RunDir(tmp_path / "run")) == (0, 1)
    divides = multi_node(tmp_path, 0, 1, 3, words=("run.elastic=[1, 4]",))
    assert divides._gather(RunDir(tmp_path / "run")) == (0, 1, 3)


def test_where_no_number_of_nodes_makes_sense_the_reason_is_told(tmp_path: Path) -> None:
    group = multi_node(tmp_path, 0, 1, 3, words=("run.elastic=[3, 4]", "parallel.tp=2"))
    with pytest.raises(UserError, match=r"tp 2 does not divide the number of ranks, 3"):
        begin(group)


def test_how_many_nodes_have_to_be_left(tmp_path: Path) -> None:
    assert multi_node(tmp_path, 0, 1, 2, words=("run.elastic=[2, 4]",)).why_not_again() == ""
    few = multi_node(tmp_path, 0, words=("run.elastic=[2, 4]",))
    assert few.why_not_again() == "1 of 4 nodes are left, and it needs 2 (run.elastic)"
    assert multi_node(tmp_path, 0, 1, 2).why_not_again() == "3 of 4 nodes are left, and it needs 4 (run.elastic)"


def test_as_many_nodes_as_the_run_may_have(tmp_path: Path) -> None:
    resolution = resolve_request(ResolveRequest(directory=tmp_path / "run", overrides=("run.elastic=[1, 2]",)), 4, 1)
    with pytest.raises(UserError, match=r"--nodes names 4 node\(s\), and run.elastic = \[1, 2\] \(command line\)"):
        train_on_nodes(resolution, PLACE, print_line)


@pytest.mark.parametrize(
    "words",
    [("--nodes", "a b"), ("--node", "0"), ("--nodes", "a b", "--node", "2"), ("--nodes", " ", "--node", "0")],
    ids=["no node", "no nodes", "a node too far", "no address"],
)
def test_options_that_do_not_say_where_this_machine_stands(shardway: Shardway, words: tuple[str, ...]) -> None:
    ended = shardway("train", "--dir", "run", *words)
    assert ended.code == 2
    assert "give the same --nodes" in ended.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("node", "elastic", "ends"), [(1, "off", True), (1, "[1, 2]", False), (0, "[1, 2]", True), (0, "off", True)]
)
def test_a_node_without_which_others_may_go_on_ends_no_attempt(
    node: int, elastic: str, ends: bool, shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object) -> int:
        raise SiteError("its library is not there")

    write_text(tmp_path)
    attempt = RunDir(tmp_path / "run").attempt(1)
    attempt.make()
    monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(attempt.path))
    monkeypatch.setattr(cli_nodes, "train_on_nodes", fail)
    words = (*TINY, f'run.elastic="{elastic}"' if elastic == "off" else f"run.elastic={elastic}", "--dir", "run")
    ended = shardway("train", *words, "--nodes", "a b", "--node", str(node))
    assert (ended.code, "its library is not there" in ended.err) == (3, True)
    assert (attempt.read_result() is not None) == ends


@pytest.mark.parametrize(
    "variables",
    [{"LSF_PM_TASKID": "1"}, {"PMIX_RANK": "0"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}],
    ids=["blaunch", "prun", "an operator"],
)
def test_what_starts_an_agent_need_not_place_it_among_ranks(
    variables: dict[str, str], shardway: Shardway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = shardway("train", *TINY, "--dir", "run", "--nodes", "a b", "--node", "1", "--dry-run")
    assert (ended.code, ended.out.partition("\n")[0]) == (0, "# would train with 2 rank(s) into run")


@pytest.mark.parametrize("address", ["10.0.0.2:29600", "ssh://b", "n[1-2]", "[fd00::2]:29600"])
def test_what_is_no_address_of_a_machine_is_told_at_once(shardway: Shardway, address: str) -> None:
    ended = shardway("train", "--dir", "run", "--nodes", f"a {address}", "--node", "0")
    assert (ended.code, Path("run").exists()) == (2, False)
    assert f'--nodes: "{address}" is no host name or address.' in ended.err
    assert "name each machine by itself, and the port by --port" in ended.err


def test_machines_may_be_named_as_in_urls() -> None:
    assert _read_nodes("[fd00::1],fe80::2%eth0 n3.cluster", 1, 29600, None).addresses == (
        *("fd00::1", "fe80::2%eth0", "n3.cluster"),
    )


def test_who_holds_the_port_of_the_agents_is_told() -> None:
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(SiteError, match=rf"nodes meet: port {port} is held by process {os.getpid()} "):
            host_kv_store(port, 2)
