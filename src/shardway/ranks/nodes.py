"""The agent of one node of several: it coordinates, or follows the coordinator and succeeds it if it is lost.

The first node coordinates. If it is lost, the next node that is left takes over, if `run.elastic` lets a run go on with
fewer nodes.

Invariants:
- Ranks start on the nodes that `ranks.rendezvous` has gathered, in the order of the nodes, and end before an agent
  does.
- Which nodes are present is decided by `ranks.rendezvous`, what a failure means by `ranks.supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardway.errors import JobError, LateStop, NodeLost, ShardwayError, SiteError, UserError
from shardway.ranks.evidence import merge_evidence
from shardway.ranks.failure import LaunchOutcome, find_attempt
from shardway.ranks.hang import (
    NO_RANKS,
    SHARE_S,
    HangTimeout,
    HeartbeatWatch,
    merge_hangs,
    read_hang_timeout,
)
from shardway.ranks.launcher import NodeSpec
from shardway.ranks.local import LocalLaunch, RankAssignment, WarmStandby, host_store
from shardway.ranks.rendezvous import (
    AgentState,
    Coordinator,
    FollowingAgent,
    News,
    RendezvousMember,
    Unreachable,
    host_kv_store,
    join_kv_store,
)
from shardway.ranks.stop import find_stop_signal
from shardway.ranks.supervisor import (
    NodeGroup,
    Report,
    ask_to_stop,
    build_launch,
    open_standby,
    report_restart,
    run_on_node,
    train_local,
)
from shardway.resolve.request import Resolution, resolve_request
from shardway.rundir.attempts import Result
from shardway.rundir.directory import RunDir
from shardway.units import render_seconds

SUCCEED_S = 30.0
"""How long the next node may take to become the coordinator after a loss, and to gather the nodes that are left."""
ELASTIC_S = 60.0  # how long a run that may start with fewer nodes waits for all of them
REGATHER_S = 150.0  # how long nodes may take to be ready again after a failure: longer than ranks take to be killed
JOIN_S = 10.0  # how long a node tries to reach the first one before it checks whether that node has given up


def train_on_nodes(resolution: Resolution, nodes: NodeSpec, report: Report) -> dict[str, Any] | int:
    """Train together with the agents of the other nodes. Returns the outcome if this node coordinates at the end, else
    the exit code from the coordinator. Raises ShardwayError, KeyboardInterrupt."""
    elastic, count = resolution.resolved.values.run.elastic, len(nodes.addresses)
    if elastic != "off" and not elastic[0] <= count <= elastic[1]:
        raise UserError(
            f"--nodes names {count} node(s), and run.elastic = {elastic} "
            f"({resolution.resolved.origins['run.elastic']}) wants {elastic[0]} to {elastic[1]}.\n"
            "  To do: name as many, or widen run.elastic."
        )
    return _lead(resolution, nodes, report) if nodes.node == 0 else _follow(resolution, nodes, report)


# --- the coordinator


@dataclass(frozen=True)
class MultiNode(NodeGroup):
    """The nodes of the coordinator; `first_wait_s`: how long to wait for nodes before the first start."""

    resolution: Resolution
    nodes: NodeSpec
    coordinator: Coordinator
    first_wait_s: float

    @property
    def least(self) -> int:
        """The smallest number of nodes with which the run may go on."""
        elastic = self.resolution.resolved.values.run.elastic
        return len(self.nodes.addresses) if elastic == "off" else int(elastic[0])

    def start(self, run: RunDir, launch: LocalLaunch, hang_timeout: HangTimeout | None) -> LaunchOutcome:
        """Run the ranks of all nodes to their end. Raises LateStop, KeyboardInterrupt."""
        members, store = self._gather(run), host_store()
        if not members:
            return LaunchOutcome(called_off=True)
        coordinator, news = self.coordinator, self.coordinator.begin(members, store.port)
        agent = NodeAgent(self.nodes, coordinator, self.standby, self.report)
        own = agent.run_ranks(run, launch, hang_timeout, news, leader=self.nodes.node)
        coordinator.publish(AgentState.ENDED, news.start, NO_RANKS, own)
        by_node = coordinator.await_end()
        outcomes = [outcome for outcome in by_node.values() if outcome is not None]
        if any(outcome.interrupted for outcome in outcomes):
            raise KeyboardInterrupt("a second signal on another node")
        if any(outcome.late for outcome in outcomes):
            raise LateStop("the stop took longer than run.stop_timeout on another node, so all ranks were killed.")
        return LaunchOutcome(
            failures=tuple(sorted((one for each in outcomes for one in each.failures), key=lambda one: one.by_agent)),
            hang=merge_hangs([each.hang for each in outcomes if each.hang], launch.ranks * len(by_node)),
            evidence=merge_evidence([each.evidence for each in outcomes]),
            lost=tuple(self.nodes.name(node) for node, outcome in by_node.items() if outcome is None),
        )

    def why_not_again(self) -> str:
        """Why the ranks cannot start again: too few nodes are left; else empty."""
        left = len(self.coordinator.list_present())
        if left >= self.least:
            return ""
        return f"{left} of {len(self.nodes.addresses)} nodes are left, and it needs {self.least} (run.elastic)"

    def _gather(self, run: RunDir) -> tuple[int, ...]:
        """The nodes of the next start, as many as the run file allows (a batch must divide among the ranks); none if a
        stop was requested before enough of them were present."""

        def is_called_off() -> bool:
            return run.stop_requested() or find_stop_signal() is not None or find_result() is not None

        nodes, most = self.nodes, len(self.nodes.addresses)
        wait_s = REGATHER_S if self.coordinator.has_begun else self.first_wait_s
        free = self.coordinator.gather(wait_s, is_called_off)
        refusals: list[UserError] = []
        for count in range(len(free), self.least - 1, -1):
            try:
                if count < most:
                    resolve_request(self.resolution.request, count * nodes.ranks, nodes.ranks)
                return free[:count]
            except UserError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]
        if (result := find_result()) is not None:
            raise SiteError(f"{result.by} of another node has ended this attempt: {result.reason}")
        if is_called_off():
            return ()
        missing = [nodes.name(node) for node in range(most) if node not in free]
        raise SiteError(
            f"{len(free)} of {most} nodes are there after {render_seconds(wait_s)}, and it "
            f"takes {self.least}; missing: {', '.join(missing)}.\n"
            "  To do: start the same command on each of them, with its own --node; look whether they reach "
            f"{nodes.addresses[nodes.node]}:{nodes.port}. run.elastic lets a run start with fewer."
        )


def _lead(resolution: Resolution, nodes: NodeSpec, report: Report, gone: Sequence[int] = ()) -> dict[str, Any]:
    """Coordinate the nodes; those that are `gone` are not waited for."""
    settings = resolution.resolved.values.run
    kv_store = host_kv_store(nodes.port, len(nodes.addresses))
    coordinator, code = Coordinator(kv_store, nodes.node, len(nodes.addresses)), JobError.exit_code
    coordinator.gone.update(gone)
    wait_s = settings.start_timeout if settings.elastic == "off" else min(settings.start_timeout, ELASTIC_S)
    nodes = replace(nodes, port=kv_store.port)
    with coordinator.keep(), open_standby(settings) as standby:
        most, first_wait_s = len(nodes.addresses) * nodes.ranks, SUCCEED_S if gone else wait_s
        group = MultiNode(most, standby, report, resolution, nodes, coordinator, first_wait_s)
        try:
            outcome = train_local(resolution, _build_launch(resolution, nodes), group)
            code = 0
            return outcome
        except ShardwayError as error:
            code = error.exit_code
            raise
        except KeyboardInterrupt:
            code = 130
            raise
        finally:
            coordinator.finish(code)


# --- the follower


def _follow(resolution: Resolution, nodes: NodeSpec, report: Report) -> dict[str, Any] | int:
    """Follow the first node, then each next one that is left, until it ends the run; coordinate if none is left."""
    resolution = replace(resolution, request=replace(resolution.request, fresh=False))  # the coordinator has applied it
    wait_s, leader, count = resolution.resolved.values.run.start_timeout, 0, len(nodes.addresses)
    until, kv_store = time.monotonic() + wait_s, None
    while kv_store is None:  # the first node may start later than this one
        left = until - time.monotonic()
        try:
            kv_store = join_kv_store(nodes.addresses[0], nodes.port, count, max(1.0, min(JOIN_S, left)))
        except Unreachable as error:
            if left > JOIN_S and find_result() is None:
                continue
            raise SiteError(
                f"{nodes.name(nodes.node)} could not meet {nodes.name(0)} at port {nodes.port} within "
                f"{render_seconds(wait_s)}: {error}\n"
                "  To do: start the same command there with --node 0; look whether its address and port can be reached."
            ) from error
    while kv_store is not None:
        follower = FollowingAgent(kv_store, nodes.node)
        code = _obey(resolution, nodes, follower, leader, report)
        if code is not None:
            return code
        lost, kv_store = leader, None
        for node in range(leader + 1, nodes.node):
            with contextlib.suppress(Unreachable):
                kv_store, leader = join_kv_store(nodes.addresses[node], nodes.port, count, SUCCEED_S), node
                break
    words = f"{nodes.name(lost)}, which led the others, does not answer any more"
    if resolution.resolved.values.run.elastic == "off":
        raise NodeLost(
            f"{words}, so the ranks of {nodes.name(nodes.node)} were ended.\n"
            f"  To do: run the same command again: it goes on from {resolution.directory.describe_base()}. "
            "run.elastic lets a run go on with fewer nodes."
        )
    report_restart(resolution.directory, JobError(f"{words}; {nodes.name(nodes.node)} leads now"), failures=1)
    gone = [node for node in range(count) if node < nodes.node or node not in follower.present]
    return _lead(resolution, nodes, report, gone)


def find_result() -> Result | None:
    """How the attempt ended, if that is recorded, such as by an agent that could not start."""
    attempt = find_attempt(os.environ)
    return attempt.read_result() if attempt is not None else None


def _obey(resolution: Resolution, nodes: NodeSpec, follower: FollowingAgent, leader: int, report: Report) -> int | None:
    """Follow the coordinator; return the exit code of the whole, or None when the coordinator is lost."""
    run, launch, settings = resolution.directory, _build_launch(resolution, nodes), resolution.resolved.values.run
    hang_timeout, start = read_hang_timeout(settings), 0

    def pass_signal_on() -> None:
        """Into the stop file, while no ranks run here."""
        if find_stop_signal() is not None and run.exists() and not run.stop_requested():
            ask_to_stop(run, report)

    with follower.keep(), open_standby(settings) as standby:
        agent = NodeAgent(nodes, follower, standby, report)
        while (news := follower.await_order(start, pass_signal_on)) is not None:
            if news.code is not None:
                follower.publish(AgentState.LEFT, start, NO_RANKS)
                return news.code
            start = news.start
            outcome = agent.run_ranks(run, launch, hang_timeout, news, leader)
            follower.publish(AgentState.LEFT if outcome.interrupted else AgentState.ENDED, start, NO_RANKS, outcome)
            if outcome.interrupted:
                raise KeyboardInterrupt("a second signal")
    return None


# --- the ranks of this node


def _build_launch(resolution: Resolution, nodes: NodeSpec) -> LocalLaunch:
    """What the ranks of this node run; in a job, their output also goes to the job's output."""
    launch, attempt = build_launch(resolution, nodes.ranks), find_attempt(os.environ)
    if attempt is None:
        return launch
    return replace(launch, log_folder=attempt.node_log_folder(nodes.node), shown=True)


@dataclass(frozen=True)
class NodeAgent:
    """The agent of this node, as a member of the rendezvous; it runs the ranks of this node in each common start."""

    nodes: NodeSpec
    member: RendezvousMember
    standby: WarmStandby
    report: Report

    def run_ranks(
        self, run: RunDir, launch: LocalLaunch, hang_timeout: HangTimeout | None, news: News, leader: int
    ) -> LaunchOutcome:
        """Run the ranks of this node in the start of these news, in contact with the other nodes. All ranks meet at
        node `leader`. Outside a job, the log folder is named by the first rank number."""
        nodes, member, start = self.nodes, self.member, news.start
        index, count = news.members.index(nodes.node), len(news.members)
        first, world, address = index * nodes.ranks, count * nodes.ranks, nodes.addresses[leader]
        launch = replace(
            launch,
            assignment=RankAssignment(first, world, index, count, address, news.port, start),
            log_folder=launch.log_folder if launch.shown else launch.log_folder / f"from-{first}",
        )

        def exchange(watch: HeartbeatWatch, failed: bool) -> bool:
            watch.elsewhere, watch.is_asked = member.elsewhere, member.is_asked(start)
            state = AgentState.HANGS if watch.has_hang else AgentState.RUNNING
            member.publish(AgentState.FAILED if failed else state, start, watch.slowest)
            return member.is_over(start)

        share_s = SHARE_S if count > 1 else 0.0
        try:
            return run_on_node(run, launch, hang_timeout, self.standby, self.report, exchange, share_s)
        except LateStop:
            return LaunchOutcome(late=True)
        except KeyboardInterrupt:
            return LaunchOutcome(interrupted=True)
