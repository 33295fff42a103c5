"""The bytes that are counted on ranks in one step of every sort of layout are those of the formulas, all of them."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from traffic_layouts import CASES, Report, report_step

from page_tables import check_table
from pool import RankPool
from speed import picked
from traffic_tracer import Sent

Reports = Callable[[str], Sequence[Report]]
PICKED = (
    *("replicate, 2 micro-batches", "shard, reshard always", "hybrid", "tensor, sequence split"),
    *("pipeline, interleaved", "context, ring", "experts x tensor"),
)
"""One of each axis, for `make test`."""


def leave_report(rank: int, name: str, folder: Path) -> None:
    report = report_step(name, folder / "run")
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(report))


@pytest.fixture(scope="module")
def reports(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What every rank of a case reports."""

    @cache
    def report(name: str) -> Sequence[Report]:
        folder, size = tmp_path_factory.mktemp("case"), CASES[name].ranks
        rank_pool.run(leave_report, size, {"name": name, "folder": folder}, 120.0)
        return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]

    return report


@pytest.mark.parametrize("name", picked(CASES, *PICKED))
def test_every_rank_sends_what_the_formulas_say(name: str, reports: Reports) -> None:
    """To the byte. Of tokens that go to experts, only the sum over a group does not depend on the routers."""
    every = reports(name)
    for report in every:
        assert without_tokens(report.tally) == without_tokens(report.expected())
    assert sum_tokens(report.tally for report in every) == sum_tokens(report.expected() for report in every)


def without_tokens(tally: Mapping[Sent, int]) -> dict[Sent, int]:
    return {sent: count for sent, count in tally.items() if sent.kind != "all_to_all"}


def sum_tokens(tallies: Iterable[Mapping[Sent, int]]) -> Counter[Sent]:
    total = Counter[Sent]()
    for tally in tallies:
        total.update({sent: count for sent, count in tally.items() if sent.kind == "all_to_all"})
    return total


@pytest.mark.exhaustive
def test_the_page_shows_it(reports: Reports, request: pytest.FixtureRequest) -> None:
    head = ("layout", "ranks", "collective", "over", "what", "formula", "counted")
    rows = [row for name in CASES for row in page_rows(name, reports(name))]
    check_table(request, "communication.md", "bytes of a step", [head, *rows])


def page_rows(name: str, reports: Sequence[Report]) -> list[tuple[object, ...]]:
    """A row for each kind and group of rank 0; of tokens the mean over the ranks of the group."""
    first, rows = reports[0], []
    tokens = sum_tokens(report.tally for report in reports)
    for sent, expected in first.expected().items():
        terms = [message for other, message in first.messages if other == sent]
        counted = tokens[sent] // len(sent.ranks) if sent.kind == "all_to_all" else first.tally[sent]
        over = " = ".join(dict.fromkeys(each.dim for each in terms))
        what = " + ".join(f"{each.what} {each.payload_bytes:,}" for each in terms)
        rows.append((name, len(reports), sent.kind, over, what, expected, counted))
    return rows
