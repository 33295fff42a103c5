"""Several ranks: which collectives are one and the same, and how far apart the ranks begin them.

Every trace is made so that the true spread is known: rank 1 comes `LATE_US` later to each collective of the groups that
it is in, so that its part in it is so much shorter. A match that is shifted by one would show another spread, because
the lengths of a step's collectives differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_traces import NVJET, MadeTrace

from shardway.watch.trace.analysis import TraceAnalysis, analyse_ranks, analyse_trace, merge_ranks
from shardway.watch.trace.collectives import ArrivalSpread, measure_arrival
from shardway.watch.trace.text import render_analysis

ALL, PAIR_0, PAIR_1 = ("0", (0, 1, 2, 3)), ("7", (0, 1)), ("8", (2, 3))
LENGTHS = (900.0, 400.0, 1500.0, 700.0)
LATE_US = 100.0
STEPS = 4

Lost = Callable[[int, int], bool]


def nothing(step: int, place: int) -> bool:
    return False


def make_rank(
    path: Path,
    rank: int,
    *,
    groups: Sequence[tuple[str, tuple[int, ...]]] = (ALL,),
    numbered: bool = True,
    described: bool = True,
    lost: Lost = nothing,
    sizes: Sequence[int] = (4096, 4096, 4096, 4096),
    marked: bool = True,
) -> Path:
    """Steps with four collectives of each group that the rank is in; `lost(step, place)`: not in this trace."""
    made = MadeTrace(rank=rank)
    made.random.uniform = lambda low, high: 1.0  # type: ignore[method-assign]
    sequence = dict.fromkeys(groups, 40)
    for step in range(STEPS):
        begin = made.now
        made.product(4096, 4096, 4096)
        for place, length in enumerate(LENGTHS):
            for group in groups:
                name, ranks = group
                if rank not in ranks:
                    continue
                sequence[group] += 1
                if lost(step, place):
                    continue
                about = {
                    "Collective name": "allreduce",
                    "In msg nelems": sizes[place],
                    "Process Group Name": name,
                    "Process Group Description": "default_pg",
                    "Process Group Ranks": str(list(ranks)),
                }
                start = made.now
                made.launch(
                    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                    length - (LATE_US if rank == 1 else 0.0),
                    stream=20,
                    **(about if described else {}),
                )
                number = {"Seq": sequence[group]} if numbered else {}
                made.spend(2)
                made.event(
                    "cpu_op",
                    "record_param_comms",
                    start,
                    made.now - start,
                    **{"External id": made.number, **(about if described else {}), **number},
                )
        made.streams[7] = made.streams.get(20, made.streams[7])
        made.operator("aten::mul_", [[64]], ["float"], NVJET, 5)
        made.wait_for_device()
        if marked:
            made.annotate(f"ProfilerStep#{step + 2}", begin)
    return made.write(path / f"rank{rank}.json")


def arrival(*paths: Path) -> ArrivalSpread:
    found = measure_arrival([each.collectives for each in analyse_ranks(paths)])
    assert found is not None
    return found


def first_lost(step: int, place: int) -> bool:
    """A trace that began later: the first collective of the first kept step is missing."""
    return (step, place) == (1, 0)


def one_lost(step: int, place: int) -> bool:
    """An event that the profiler lost."""
    return (step, place) == (1, 1)


@pytest.mark.parametrize("numbered", [True, False])
def test_the_same_collectives_are_matched(numbered: bool, tmp_path: Path) -> None:
    found = arrival(*(make_rank(tmp_path, rank, numbered=numbered) for rank in (0, 1)))
    assert (found.matched, found.by_number) == (8, 8 if numbered else 0)
    assert found.per_step_ms == pytest.approx(4 * LATE_US / 1e3, abs=0.002)
    assert found.most_ms == pytest.approx(LATE_US / 1e3, abs=0.002)


@pytest.mark.parametrize("lost", [first_lost, one_lost])
def test_a_missing_collective_does_not_shift_the_rest(lost: Lost, tmp_path: Path) -> None:
    found = arrival(make_rank(tmp_path, 0), make_rank(tmp_path, 1, lost=lost))
    assert (found.matched, found.by_number) == (7, 7)
    assert found.most_ms == pytest.approx(LATE_US / 1e3, abs=0.002)


@pytest.mark.parametrize("lost", [first_lost, one_lost])
def test_what_fits_in_several_places_is_not_matched_by_order(lost: Lost, tmp_path: Path) -> None:
    paths = [make_rank(tmp_path, 0, numbered=False), make_rank(tmp_path, 1, numbered=False, lost=lost)]
    found = arrival(*paths)
    assert found.matched == 4  # those of the other step
    assert found.most_ms == pytest.approx(LATE_US / 1e3, abs=0.002)


@pytest.mark.parametrize(("marked", "missing", "matched"), [(True, 5, 7), (False, 3, 13)])
def test_what_fits_in_one_place_is_matched_by_order(marked: bool, missing: int, matched: int, tmp_path: Path) -> None:
    """Also in a capture that counts as one step, where a later beginning is the usual case."""
    how: dict[str, Any] = {"numbered": False, "sizes": (100, 200, 300, 400), "marked": marked}
    later = make_rank(tmp_path, 1, lost=lambda step, place: step * 4 + place < missing, **how)
    found = arrival(make_rank(tmp_path, 0, **how), later)
    assert found.matched == matched
    assert found.most_ms == pytest.approx(LATE_US / 1e3, abs=0.002)


def test_ranks_that_send_different_amounts_are_matched(tmp_path: Path) -> None:
    paths = [make_rank(tmp_path, rank, numbered=False, sizes=(rank + 1,) * 4) for rank in (0, 1)]
    assert arrival(*paths).matched == 8


@pytest.mark.parametrize("numbered", [True, False])
def test_groups_are_matched_among_their_own_ranks(numbered: bool, tmp_path: Path) -> None:
    """Rank 1 is late in its pair and in the group of all; the pair of ranks 2 and 3 waits for nothing."""
    groups = (ALL, PAIR_0, PAIR_1)
    ranks = analyse_ranks([make_rank(tmp_path, rank, groups=groups, numbered=numbered) for rank in range(4)])
    found = measure_arrival([each.collectives for each in ranks])
    assert found is not None
    assert found.matched == 3 * 8
    assert found.per_step_ms == pytest.approx(2 * 4 * LATE_US / 1e3, abs=0.005)
    pair = measure_arrival([[c for c in each.collectives if c.group.startswith("8 ")] for each in ranks])
    assert pair is not None
    assert pair.most_ms < 0.002


def test_without_metadata_all_collectives_are_one_group(tmp_path: Path) -> None:
    paths = [make_rank(tmp_path, rank, numbered=False, described=False) for rank in (0, 1)]
    assert arrival(*paths).matched == 8


def test_the_count_is_in_json_and_text(tmp_path: Path) -> None:
    ranks = analyse_ranks([make_rank(tmp_path, rank) for rank in (0, 1)])
    found = merge_ranks(ranks)["arrival_spread_ms"]
    assert found == {"per_step": pytest.approx(0.4, abs=0.01), "most": pytest.approx(0.1, abs=0.01)} | {
        "matched": 8,
        "matched_by_number": 8,
    }
    assert "8 matched" in render_analysis(ranks)


def test_sends_are_no_collectives_and_kernels_of_one_number_are_one(tmp_path: Path) -> None:
    def analyse(rank: int) -> TraceAnalysis:
        made = MadeTrace(rank=rank)
        about = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        for number, name in ((1, "allgather"), (1, "allgather"), (2, "send"), (2, "allreduce")):
            start = made.now
            made.launch("ncclDevKernel_Generic(x)", 50, stream=20, **about, **{"Collective name": name})
            args = {"External id": made.number, "Collective name": name, "Seq": number, **about}
            made.event("cpu_op", "record_param_comms", start, made.now - start, **args)
        return analyse_trace(made.write(tmp_path / f"{rank}.json"))

    calls = analyse(0).collectives
    assert [(call.name, call.sequence) for call in calls] == [("allgather", 1), ("allreduce", 2)]
    assert calls[0].length == pytest.approx(100, rel=0.1)


def test_collectives_of_a_cpu_are_matched(tmp_path: Path) -> None:
    """Gloo's work is annotated and has no group."""
    paths = []
    for rank in (0, 1):
        made = MadeTrace(gpu=None, rank=rank)
        for step in range(4):
            begin = made.now
            made.spend(1000 + 300 * rank)
            made.event("cpu_op", "aten::mm", begin, made.now - begin)
            work = made.now
            made.spend(500 - 300 * rank)
            made.annotate("gloo:all_reduce", work)
            made.annotate(f"ProfilerStep#{step}", begin)
        paths.append(made.write(tmp_path / f"rank{rank}.json"))
    found = arrival(*paths)
    assert (found.matched, found.by_number) == (2, 0)
    assert found.per_step_ms == pytest.approx(0.3, abs=0.001)
