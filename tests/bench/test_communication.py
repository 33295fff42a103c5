"""Measuring between ranks: all seven on real ones, times of the slowest, wrong data and slow pairs named, time kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_bandwidth import PERFORMANCE_MD
from torch.testing._internal.distributed.fake_pg import FakeStore

from pool import ranks
from runs import place, pool_ranks
from shardway.bench import communication
from shardway.bench.bandwidth import BUS_FACTORS
from shardway.bench.collectives import CALLS, CollectiveBuffers
from shardway.bench.comm_report import CommReport, find_known_links, list_verdict
from shardway.bench.communication import (
    CommBench,
    CommRequest,
    HostTimer,
    RankPlaces,
    TimeBox,
    find_places,
    measure_communication,
)
from shardway.errors import LostContact, UserError
from shardway.ranks.start import Ranks

SIZES = (4096, 100_000)


class GatheringAlone(Ranks):
    """One rank of many that are not there: each has the same to say."""

    def gather(self, value: object) -> list:  # type: ignore[type-arg, override]
        return [value] * self.world


@dataclass
class FakeClock:
    """Calls take what it says; `peer` is the last rank that something was exchanged with."""

    rank: int
    describe: Callable[[FakeClock], float]
    calls: int = 0
    peer: int = -1

    def seconds(self, call: Callable[[], None], align: Callable[[], None], count: int) -> list[float]:
        align()
        call()
        self.calls += count
        return [self.describe(self)] * count


@dataclass
class FakeTime:
    """A time that goes on by so much each time that it is asked for."""

    step_s: float
    asked: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self) -> float:
        return next(self.asked) * self.step_s


@contextmanager
def fake_group(world: int) -> Iterator[GatheringAlone]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield GatheringAlone(place(0, world), torch.device("cpu"), grouped=True)
    finally:
        dist.destroy_process_group()


def bench(
    ranks: Ranks, places: RankPlaces, describe: Callable[[FakeClock], float], request: CommRequest, step_s: float = 1e-4
) -> CommBench:
    box = TimeBox(ranks, request.seconds, FakeTime(step_s))
    return CommBench(ranks, places, request, box, FakeClock(ranks.rank, describe))


@pytest.mark.parametrize("world", range(2, 9))
def test_every_collective_is_reported_as_nccl_tests_would(world: int) -> None:
    with fake_group(world) as own:
        places = RankPlaces((0,) * world, ("a",) * world)
        report = bench(own, places, lambda clock: 0.0023, CommRequest(sizes=SIZES)).run()
    assert [(each.collective, each.ranks) for each in report.times] == [(name, world) for name in CALLS for _ in SIZES]
    for each in report.times:
        algorithm = Fraction(each.size) / Fraction(0.0023)
        assert each.algorithm == pytest.approx(float(algorithm), rel=1e-12, abs=0)
        bus = float(algorithm * PERFORMANCE_MD[each.collective](world))
        assert each.bus == pytest.approx(bus, rel=1e-12, abs=0)
    assert len(report.pairs) == world * (world - 1) // 2


def test_time_is_kept_and_what_is_left_out_is_named() -> None:
    """Each word between the ranks takes a second here: five seconds are over after the first sizes."""
    with fake_group(2) as own:
        places = RankPlaces((0, 0), ("a", "a"))
        request = CommRequest(sizes=(4, 1024, 4096, 2**20), seconds=5.0)
        report = bench(own, places, lambda clock: 1e-6, request, step_s=1.0).run()
    assert 5 <= report.seconds < 15
    measured = {(each.scope, each.collective, each.size) for each in report.times}
    assert measured
    assert not measured & set(report.left_out)
    for name in CALLS:
        assert sum(each[1] == name for each in (*measured, *report.left_out)) in (4, 3)  # the parts of two are equal
    verdict = list_verdict(report, find_known_links(report))
    assert any("left out for lack of time (--seconds): send_recv over all ranks of" in line for line in verdict)


class FewCalls(HostTimer):
    """Times three calls, whatever number is asked for."""

    def seconds(self, call: Callable[[], None], align: Callable[[], None], count: int) -> list[float]:
        return (super().seconds(call, align, min(count, 3)) * count)[:count]


@pytest.mark.slow
@ranks(2)
def test_all_seven_run_and_their_data_are_right(rank: int) -> None:
    own = pool_ranks()
    whole = bench(own, find_places(own, "h"), lambda clock: 0.0, CommRequest(sizes=(1, 1024, 300_000), seconds=1e6))
    report = replace(whole, clock=FewCalls()).run()
    assert [each.collective for each in report.times] == [name for name in BUS_FACTORS for _ in range(3)]
    assert report.wrong == []
    assert all(0 < each.p10_s <= each.median_s <= each.p99_s for each in report.times)
    assert [(pair.first, pair.second, pair.kind) for pair in report.pairs] == [(0, 1, "within")]


@pytest.mark.slow
@ranks(4)
def test_nodes_are_measured_within_and_between(rank: int) -> None:
    own = pool_ranks()
    seat = replace(own.placement, local_rank=rank % 2, local_world=2, node=rank // 2, nodes=2)
    own = replace(own, placement=seat)
    places = find_places(own, "one machine")
    assert places.nodes == (0, 0, 1, 1)
    assert places.list_parts() == {"all": [[0, 1, 2, 3]], "within": [[0, 1], [2, 3]], "between": [[0, 2], [1, 3]]}
    report = bench(own, places, lambda clock: 1e-3, CommRequest(sizes=(1024,), seconds=60.0)).run()
    assert report.wrong == []
    assert {(each.scope, each.ranks) for each in report.times} == {("all", 4), ("within", 2), ("between", 2)}
    assert len(report.times) == 3 * 7
    pairs = {(pair.first, pair.second): pair.kind for pair in report.pairs}
    assert pairs == {(0, 1): "within", (2, 3): "within", (0, 2): "between", (1, 3): "between"}


@ranks(3)
def test_ranks_that_are_in_no_group_of_a_scope_wait_for_none(rank: int) -> None:
    """The second node has one rank, so it has no part in what is measured within nodes."""
    own = pool_ranks()
    own = replace(own, placement=replace(own.placement, node=min(rank // 2, 1), nodes=2))
    places = find_places(own, "h")
    report = bench(own, places, lambda clock: 1e-3, CommRequest(("all_gather",), (1024,), 60.0)).run()
    assert report.wrong == []
    assert [(each.scope, each.ranks) for each in report.times] == [("all", 3), ("within", 2), ("between", 2)]


@ranks(2)
def test_the_slowest_rank_gives_the_time(rank: int) -> None:
    own = pool_ranks()
    slower = bench(own, find_places(own, "h"), lambda clock: 1e-3 * (1 + clock.rank), CommRequest(("reduce",), (64,)))
    report = slower.run()
    assert [(each.median_s, each.p99_s) for each in report.times] == [(2e-3, 2e-3)]
    assert [pair.seconds for pair in report.pairs] == [2e-3]


@ranks(2)
def test_wrong_data_are_reported_on_every_rank_with_their_rank(rank: int) -> None:
    """Of one collective, at one size, on one rank."""

    def corrupted(buffers: CollectiveBuffers) -> None:
        CALLS["all_gather"](buffers)
        if rank == 1 and buffers.size == 4096:
            buffers.received[700] += 1

    own = pool_ranks()
    whole = bench(own, find_places(own, "node7"), lambda clock: 1e-3, CommRequest(sizes=SIZES))
    report = replace(whole, calls={**CALLS, "all_gather": corrupted}).run()
    assert [(each.collective, each.size, each.rank) for each in report.wrong] == [("all_gather", 4096, 1)]
    [line] = [each for each in list_verdict(report, find_known_links(report)) if "wrong data" in each]
    assert line.startswith("all_gather of 4KiB gave rank 1 (node7) wrong data: 1 wrong, the first is element 700: ")


@ranks(2)
def test_a_collective_that_is_late_by_one_call_is_found(rank: int) -> None:
    before: dict[int, torch.Tensor] = {}

    def late(buffers: CollectiveBuffers) -> None:
        CALLS["all_reduce"](buffers)
        result = buffers.received.clone()
        buffers.received.copy_(before.get(buffers.size, torch.zeros_like(result)))
        before[buffers.size] = result

    own = pool_ranks()
    whole = bench(own, find_places(own, "h"), lambda clock: 1e-3, CommRequest(("all_reduce",), (1024,)))
    report = replace(whole, calls={"all_reduce": late}).run()
    assert [each.rank for each in report.wrong] == [0, 1]


SLOW = {0, 3}


@ranks(4)
def test_the_slow_pair_is_named(rank: int) -> None:
    """One pair takes four times as long, alone too; another one only while all exchange at once."""
    own = pool_ranks()
    rounds = {"seen": 0}

    def describe(clock: FakeClock) -> float:
        pair = {clock.rank, clock.peer}
        rounds["seen"] += 1
        disturbed = pair == {1, 2} and rounds["seen"] <= 6  # trial and times of the first three rounds
        return 4e-3 if pair == SLOW or disturbed else 1e-3

    whole = bench(own, find_places(own, "n"), describe, CommRequest((), (2**20,), 60.0))
    clock = whole.clock
    assert isinstance(clock, FakeClock)

    def record(sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        assert to == source
        clock.peer = to

    real, communication.exchange = communication.exchange, record  # type: ignore[assignment]
    try:
        report = whole.run()
    finally:
        communication.exchange = real
    slow = report.find_slow_pairs()
    assert [({pair.first, pair.second}, times) for pair, times in slow] == [(SLOW, 4.0)]
    verdict = list_verdict(report, find_known_links(report))
    assert "slow pair: ranks 0 and 3 (n) at 0.262 GB/s each way, 4.0 times the time of a usual pair" in verdict
    assert not any("none is slow" in line for line in verdict)


@ranks(2)
def test_a_rank_that_is_lost_ends_it_in_words(rank: int) -> None:
    def broken(buffers: CollectiveBuffers) -> None:
        raise RuntimeError("[../gloo/pair.cc:589] Connection closed by peer [127.0.0.1]:12345")

    own = pool_ranks()
    whole = bench(own, find_places(own, "h"), lambda clock: 1e-3, CommRequest(("broadcast",), (64,)))
    with pytest.raises(LostContact) as caught:
        replace(whole, calls={"broadcast": broken}).run()
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        f"rank {rank} lost contact with another rank while broadcast was measured: Connection closed"
    )
    assert "To do: look for the rank whose own message is an error" in second
    assert "checkpoint" not in str(caught.value)


@ranks(2)
def test_a_size_that_memory_does_not_hold_is_refused_on_every_rank(rank: int) -> None:
    real = communication.read_memory_left
    communication.read_memory_left = lambda: 2**30 * (2 if rank == 0 else 1)
    try:
        with pytest.raises(UserError) as caught:
            measure_communication(pool_ranks(), "small", CommRequest(sizes=(1024, 2**28)))
    finally:
        communication.read_memory_left = real
    text = str(caught.value)
    assert "--sizes (command line)" in text
    assert "256MiB needs about 768MiB a rank, and rank 1 (small) has about 512MiB left" in text
    assert "allowed: up to 170MiB" in text


def test_one_rank_is_refused() -> None:
    with pytest.raises(UserError, match="1 rank cannot be measured") as caught:
        measure_communication(Ranks(place(0, 1, "none"), torch.device("cpu"), grouped=False), "h", CommRequest())
    assert "allowed: 2 ranks or more" in str(caught.value)


def test_calls_of_the_host_are_timed_after_the_alignment() -> None:
    done: list[str] = []
    times = HostTimer().seconds(lambda: done.append("call"), lambda: done.append("align"), 3)
    assert done == ["align", "call"] * 3
    assert len(times) == 3
    assert min(times) >= 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_pair_of_a_node_and_of_nodes_is_met_once(ranks_of_nodes: list[int]) -> None:
    nodes = tuple(node for node, count in enumerate(ranks_of_nodes) for _ in range(count))
    places = RankPlaces(nodes, ("h",) * len(nodes))
    met = [(kind, pair) for kind, pairs in places.list_pair_rounds() for pair in pairs]
    assert len(met) == len(set(met))
    assert {pair for kind, pair in met if kind == "within"} == {
        (a, b) for b in range(len(nodes)) for a in range(b) if nodes[a] == nodes[b]
    }
    between = {tuple(sorted((nodes[a], nodes[b]))) for kind, (a, b) in met if kind == "between"}
    assert between == {(a, b) for b in range(len(ranks_of_nodes)) for a in range(b)}
    for _, pairs in places.list_pair_rounds():
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))


def test_nodes_without_numbers_are_told_apart_by_their_hosts() -> None:
    own = GatheringAlone(replace(place(0, 4), node=None, nodes=None), torch.device("cpu"), grouped=True)
    assert find_places(own, "h").nodes == (0, 0, 0, 0)
    assert CommReport("gloo", "CPU", ("a", "b"), (0, 1), ()).node_count == 2
