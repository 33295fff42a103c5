"""Schedules of a pipeline: what no order may do, and the lengths and counts that the papers print."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.layout import stages_of_rank
from shardway.plan.case import Case, Degrees, Schedule, kept_micro_batches
from shardway.plan.huggingface import find_named
from shardway.plan.schedule import Action, Box, Simulated, StageSeconds, simulate_pipeline, split_rounds

MODEL = find_named("llama3-405b")
SPLIT = ("zero_bubble", "zbv")


def case(schedule: Schedule, ranks: int, per_rank: int, passes: int) -> Case:
    return Case(
        model=MODEL,
        seq_len=64,
        global_batch=passes,
        degrees=Degrees(pp=ranks),
        schedule=schedule,
        stages_per_rank=per_rank,
    )


def run(of: Case, forward: int = 1, backward: int = 1, weight: int = 1) -> Simulated:
    return simulate_pipeline(of, [StageSeconds(forward, backward, weight)] * of.degrees.pp)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule: Schedule = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")))
    per_rank = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(schedule) or draw(st.integers(1, 4))
    return case(schedule, draw(st.integers(2, 6)), per_rank, draw(st.integers(1, 14)))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Case, Simulated]:
    """Whole numbers of seconds, different on every rank, so that ends can be compared exactly."""
    of = draw(cases())
    seconds = st.builds(StageSeconds, st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
    return of, simulate_pipeline(of, [draw(seconds) for _ in range(of.degrees.pp)])


def ends_of(simulated: Simulated) -> dict[Action, Box]:
    return {box.action: box for box in simulated.boxes}


# --- what no schedule may do


@settings(max_examples=30, deadline=None)
@given(runs())
def test_each_pass_comes_once_on_the_rank_that_has_its_stage(drawn: tuple[Case, Simulated]) -> None:
    of, simulated = drawn
    kinds = ("forward", "backward", "weight") if of.schedule in SPLIT else ("forward", "backward")
    expected = {
        (rank, Action(kind, stage, number))
        for rank in range(of.degrees.pp)
        for stage in stages_of_rank(rank, of.degrees.pp, of.stages_per_rank, of.schedule)
        for number in range(of.micro_batches)
        for kind in kinds
    }
    assert Counter((box.rank, box.action) for box in simulated.boxes) == Counter(expected)


@settings(max_examples=30, deadline=None)
@given(runs())
def test_nothing_begins_before_what_it_needs(drawn: tuple[Case, Simulated]) -> None:
    of, simulated = drawn
    boxes, last = ends_of(simulated), of.stages - 1
    for action, box in boxes.items():
        stage, number = action.stage, action.micro_batch
        needs = {
            "forward": [Action("forward", stage - 1, number)] if stage else [],
            "backward": [
                Action("forward", stage, number),
                *([Action("backward", stage + 1, number)] if stage < last else []),
            ],
            "weight": [Action("backward", stage, number)],
        }[action.kind]
        assert all(boxes[need].end <= box.start for need in needs)


@settings(max_examples=30, deadline=None)
@given(runs())
def test_a_rank_does_one_thing_at_a_time(drawn: tuple[Case, Simulated]) -> None:
    _, simulated = drawn
    for rank in range(simulated.ranks):
        own = simulated.of_rank(rank)
        assert all(before.end <= after.start for before, after in pairwise(own))
        assert simulated.idle_seconds(rank) == simulated.seconds - sum(box.end - box.start for box in own) >= 0


# --- what the papers say of stages that are equal

RANKS, PASSES, SECONDS = st.integers(2, 8), st.integers(1, 20), st.integers(1, 6)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(("gpipe", "1f1b")), RANKS, PASSES, SECONDS, SECONDS, st.integers(0, 6))
def test_one_stage_a_rank(schedule: Schedule, ranks: int, passes: int, forward: int, back: int, weight: int) -> None:
    """(m + p - 1)(f + b): Narayanan et al., section 2.2.1."""
    simulated = run(case(schedule, ranks, 1, passes), forward, back, weight)
    assert simulated.seconds == (passes + ranks - 1) * (forward + back + weight)


@settings(max_examples=30, deadline=None)
@given(RANKS, st.integers(2, 5), PASSES)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(ranks: int, per_rank: int, passes: int) -> None:
    """(p - 1)(f + b) / v, section 2.2.2, with at least as many micro-batches as ranks; each that is missing leaves all
    stages but one of a rank waiting once more."""
    simulated = run(case("interleaved", ranks, per_rank, passes))
    missing = (per_rank - 1) * max(0, ranks - passes)
    assert simulated.seconds == 3 * (passes * per_rank + ranks - 1 + missing)


@settings(max_examples=30, deadline=None)
@given(RANKS, st.integers(1, 4), st.integers(0, 16))
def test_zero_bubble_leaves_a_third_of_it(ranks: int, per_rank: int, more: int) -> None:
    """(p - 1)(f + b - w) of a stage where f = b = w: Qi et al., table 1, ZB-H1."""
    simulated = run(case("zero_bubble", ranks, per_rank, ranks + more))
    assert simulated.seconds == 3 * per_rank * (ranks + more) + ranks - 1


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(0, 8))
def test_a_v_leaves_one_forward_pass_of_a_stage_for_each_other_rank(ranks: int, more: int) -> None:
    """Where f = b = w and there are micro-batches enough: a sixth of what a micro-batch takes on a rank."""
    passes = 2 * ranks - 1 + more
    assert run(case("zbv", ranks, 2, passes)).seconds == 6 * passes + ranks - 1


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 3), ("zbv", 2)]
)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_no_more_is_kept_than_the_memory_of_the_plan_counts(schedule: Schedule, per_rank: int, ranks: int) -> None:
    """On every rank; interleaved in whole rounds, as libraries take them."""
    numbers = range(1, 4 * ranks) if schedule != "interleaved" else (1, ranks - 1, ranks, 2 * ranks, 4 * ranks)
    for passes in filter(None, numbers):
        of = case(schedule, ranks, per_rank, passes)
        simulated = run(of)
        assert all(simulated.in_flight(rank) <= kept_micro_batches(of, rank) + 1e-9 for rank in range(ranks))


@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
def test_as_much_is_kept_as_the_memory_of_the_plan_counts(schedule: Schedule, per_rank: int) -> None:
    """Not less either, once the pipeline is full."""
    of = case(schedule, 4, per_rank, 16)
    assert [run(of).in_flight(rank) for rank in range(4)] == pytest.approx(
        [kept_micro_batches(of, rank) for rank in range(4)]
    )


@pytest.mark.parametrize("per_rank", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_zero_bubble_keeps_as_much_on_every_rank(ranks: int, per_rank: int) -> None:
    """As many micro-batches as there are ranks, since gradients of weights wait (Qi et al., section 3); never more than
    the plan counts for the first rank."""
    of = case("zero_bubble", ranks, per_rank, 3 * ranks)
    simulated = run(of)
    assert {simulated.in_flight(rank) for rank in range(ranks)} == {ranks}
    assert kept_micro_batches(of, 0) >= ranks


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 40))
def test_rounds_take_every_micro_batch(passes: int, ranks: int) -> None:
    rounds = split_rounds(passes, ranks)
    assert sum(rounds) == passes
    assert max(rounds) - min(rounds) <= 1
    assert min(rounds) >= min(passes, ranks)
    assert max(rounds) < 2 * ranks or passes < 2 * ranks
