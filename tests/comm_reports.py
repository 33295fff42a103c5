"""Measurements of collectives that were not made: reports of jobs on H100 whose times follow from their links."""

from __future__ import annotations

from dataclasses import replace

from shardway.bench.bandwidth import BUS_FACTORS, PairTime, list_rounds, round_size
from shardway.bench.comm_report import CallTimes, CommReport, RankLink, find_known_links

H100 = "NVIDIA H100 80GB HBM3"
SHARES = {"all": 0.9, "within": 0.8, "between": 0.85}
"""What part of its link each scope reaches in the example."""


def make_report(nodes: int, per_node: int, collectives: tuple[str, ...], sizes: tuple[int, ...]) -> CommReport:
    """A job on nodes of H100 with a 400 Gb/s port for each: every call takes 20 us and what its bytes take."""
    place = tuple(node for node in range(nodes) for _ in range(per_node))
    hosts = tuple(f"node{node + 1}" for node in place)
    report = CommReport("nccl", H100, hosts, place, (RankLink(H100, 50e9, 50e9),) * len(place), seconds=19.4)
    known = find_known_links(report)
    for scope, ranks in (("all", nodes * per_node), ("within", per_node), ("between", nodes)):
        for name in collectives:
            limit = known.limit(scope, name, ranks)
            assert limit is not None
            for size in sizes:
                rounded = round_size(name, size, ranks)
                seconds = 20e-6 + rounded * BUS_FACTORS[name](ranks) / (SHARES[scope] * limit.rate)
                report.times.append(CallTimes(scope, name, rounded, ranks, 120, seconds * 1.02, seconds, seconds * 1.3))
    for kind, count in (("within", per_node), ("between", nodes)):
        for first, second in (pair for pairs in list_rounds(count) for pair in pairs):
            for other in range(nodes if kind == "within" else per_node):
                ends = (
                    other * per_node + each if kind == "within" else each * per_node + other for each in (first, second)
                )
                rate = 350e9 if kind == "within" else 44e9
                report.pairs.append(PairTime(*ends, kind, 2**26, 2**26 / rate))
    return report


def slow_down(report: CommReport, first: int, second: int, factor: float) -> CommReport:
    """One pair takes longer, in its round and alone."""
    pairs = [
        replace(pair, seconds=pair.seconds * factor) if (pair.first, pair.second) == (first, second) else pair
        for pair in report.pairs
    ]
    slow = next(pair for pair in pairs if (pair.first, pair.second) == (first, second))
    usual = next(pair for pair in pairs if pair.kind == slow.kind and pair is not slow)
    return replace(report, pairs=pairs, alone=[usual, slow])
