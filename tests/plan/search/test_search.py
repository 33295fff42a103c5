"""The search: that it finds a published layout quickly, that what it offers fits, and what it may not change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_cases import case_of, expert_model, h100s, llama_layer, model_of
from shardway.plan.case import Degrees, divisors
from shardway.plan.huggingface import find_named
from shardway.plan.planner import NEAR, PlanRequest, SearchResult, estimate, list_degrees, search

BRIEF = settings.get_profile("brief")
H100 = h100s()
LLAMA = case_of(find_named("llama3-405b"), "megatron", seq_len=8192, global_batch=2048, attention="flash3")
"""Llama 3 405B as it was trained on 16,384 H100 (arXiv:2407.21783, table 4): tp 8, pp 16, dp 128, 41 % of the peak."""


@dataclass(frozen=True)
class Timed:
    """A search, and the CPU seconds that it took."""

    found: SearchResult
    seconds: float


@pytest.fixture(scope="module")
def timed() -> Timed:
    start = time.process_time()
    found = search(PlanRequest(LLAMA, H100, 16384))
    return Timed(found, time.process_time() - start)


def question(world: int = 16, fixed: Mapping[str, Any] | None = None, **changes: Any) -> PlanRequest:
    """A model of 6.5 billion parameters on some nodes; `fixed` values are set and kept."""
    model = changes.pop("model", None) or model_of(llama_layer(4096, 32, 8), layers=32)
    case = case_of(model, **{"engine": "fsdp2", "global_batch": 32, "seq_len": 8192, "attention": "flash3", **changes})
    kept = dict(fixed or {})
    degrees = {name: kept[name] for name in kept if name in {each.name for each in fields(Degrees)}}
    rest = {name: value for name, value in kept.items() if name not in degrees}
    case = replace(case, degrees=replace(case.degrees, **degrees), **rest) if kept else case
    return PlanRequest(case, H100, world, frozenset(kept))


# --- Llama 3 405B


def test_it_takes_a_moment(timed: Timed) -> None:
    """Half a second of one core of 2.5 GHz; four times that is a search that has grown."""
    assert timed.seconds < 2


def test_the_published_degrees_are_among_the_first(timed: Timed) -> None:
    first = [candidate.estimate.case.degrees for candidate in timed.found.candidates[:5]]
    assert (8, 16) in {(degrees.tp, degrees.pp) for degrees in first}
    assert Degrees(dp_shard=128, tp=8, pp=16) in first


def test_the_published_layout_is_as_fast_as_published() -> None:
    """38 to 43 % over its three layouts, 41 % for this one, within 4 points; scores behind the mask not counted."""
    degrees = Degrees(dp_shard=128, tp=8, pp=16)
    fixed = frozenset({"tp", "pp", "cp", "dp_shard"})
    found = search(PlanRequest(replace(LLAMA, degrees=degrees), H100, 16384, fixed)).best
    assert found is not None
    assert found.case.degrees == degrees
    assert 0.38 - 0.04 < found.mfu(causal=True) < 0.43 + 0.04


# --- what is offered


def all_found(timed: Timed) -> Iterator[SearchResult]:
    yield timed.found
    yield search(question())
    yield search(question(world=8, model=expert_model(8, 8), seq_len=2048))


def test_what_is_offered_fits_and_the_best_is_the_fastest(timed: Timed) -> None:
    for found in all_found(timed):
        assert found.candidates
        assert found.nearest is None
        assert all(candidate.estimate.fits for candidate in found.candidates)
        seconds = [candidate.estimate.time.seconds for candidate in found.candidates]
        assert seconds[0] <= min(seconds) * (1 + NEAR)
        assert seconds[1:] == sorted(seconds[1:])


def test_each_set_of_degrees_is_offered_once_and_on_all_ranks(timed: Timed) -> None:
    degrees = [candidate.estimate.case.degrees for candidate in timed.found.candidates]
    assert len(degrees) == len(set(degrees)) == 10
    assert {each.world for each in degrees} == {16384}


def test_what_is_offered_is_priced_as_a_plan_of_its_own_is(timed: Timed) -> None:
    for candidate in timed.found.candidates:
        assert candidate.estimate == estimate(candidate.estimate.case, H100)


def test_the_others_say_what_they_lose(timed: Timed) -> None:
    best, *others = timed.found.candidates
    assert best.reason == ""
    assert all(each.reason for each in others)
    assert all("%" in each.reason or each.reason == "as fast, with more axes" for each in others)


def test_the_same_question_has_the_same_answer() -> None:
    assert search(question()) == search(question())


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 4},
        {"pp": 2},
        {"cp": 2},
        {"tp": 2, "dp_shard": 2},
        {"micro_batch": 2},
        {"recompute": "full"},
        {"zero": 3, "reshard": True},
        {"tp": 8, "sequence": False},
    ],
    ids=str,
)
def test_what_is_set_is_kept(fixed: dict[str, Any]) -> None:
    found = search(question(fixed=fixed))
    assert found.candidates
    for candidate in found.candidates:
        case = candidate.estimate.case
        values = {name: getattr(case, name, getattr(case.degrees, name, None)) for name in fixed}
        if case.degrees.shards == 1 and "zero" in fixed:  # nobody is there to share with
            continue
        assert values == fixed


def test_what_is_set_is_no_faster_than_what_is_free() -> None:
    free = search(question()).best
    assert free is not None
    for name, size in (("tp", 8), ("pp", 4), ("cp", 2)):
        held = search(question(fixed={name: size})).best
        assert held is not None
        assert held.time.seconds >= free.time.seconds / (1 + NEAR)


def test_where_nothing_fits_the_nearest_is_told() -> None:
    small = replace(H100, memory_bytes=4 * 2**30)
    asked = replace(question(world=8), machine=small, fixed=frozenset({"offload"}))
    found = search(asked)
    assert found.candidates == ()
    assert found.best is None
    assert found.nearest is not None
    assert not found.nearest.fits
    assert found.nearest.case.recompute == "full"
    assert found.looked_at > 0


def test_a_larger_device_is_no_slower() -> None:
    seconds = []
    for size in (40, 80, 160):
        best = search(replace(question(), machine=replace(H100, memory_bytes=size * 2**30))).best
        assert best is not None
        seconds.append(best.time.seconds)
    assert all(more <= less * (1 + NEAR) for less, more in pairwise(seconds))


# --- what is legal


@BRIEF
@given(st.integers(1, 12).map(lambda power: 2**power), st.sampled_from([8192, 131072]), st.booleans())
def test_degrees_are_legal_and_listed_once(world: int, seq: int, mixed: bool) -> None:
    model = expert_model(16, 16) if mixed else model_of(llama_layer(4096, 32, 8), layers=32)
    asked = PlanRequest(case_of(model, seq_len=seq, global_batch=world), H100, world)
    listed = list(list_degrees(asked))
    assert listed
    assert len(listed) == len(set(listed))
    for degrees in listed:
        assert degrees.world == world
        assert degrees.tp <= H100.domain
        assert degrees.pp <= model.depth
        assert degrees.cp == 1 or seq // degrees.cp >= 4096
        assert world % degrees.data == 0
        replace(asked.case, degrees=degrees)  # raises for what does not divide


def test_tensor_ranks_stay_inside_the_fast_link() -> None:
    """Also in racks: 72 ranks are joined, of which 8 x 9 split no power of two of heads."""
    rack = replace(H100, domain=72, per_node=4)
    asked = replace(question(world=64), machine=rack)
    assert {degrees.tp for degrees in list_degrees(asked)} == {1, 2, 4}
    assert {degrees.tp for degrees in list_degrees(question(world=64))} == set(divisors(8))
