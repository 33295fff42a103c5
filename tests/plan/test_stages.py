"""Stages of a pipeline: which layers a rank has, and how many micro-batches it keeps, by schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import case_of, llama_layer, model_of
from shardway.errors import UserError
from shardway.plan.case import Case, kept_micro_batches, layers_of_stages, list_stages
from shardway.plan.shapes import LayerRun

MODEL = model_of(llama_layer(), layers=16)


def pipelined(schedule: str, ranks: int = 4, per_rank: int = 1, passes: int = 16) -> Case:
    return case_of(MODEL, pp=ranks, schedule=schedule, stages_per_rank=per_rank, global_batch=passes)


def in_flight(case: Case) -> list[float]:
    return [kept_micro_batches(case, rank) for rank in range(case.degrees.pp)]


# --- layers


@given(st.integers(1, 200), st.data())
def test_layers_are_cut_evenly_and_the_ends_are_not_the_larger_ones(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = layers_of_stages(case_of(model_of(llama_layer(), layers), pp=stages))
    assert len(sizes) == stages
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    if layers % stages < stages - 1:
        assert sizes[0] == sizes[-1] == min(sizes)


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2)])
@pytest.mark.parametrize("layers", [16, 18])
def test_every_layer_is_on_one_rank(schedule: str, per_rank: int, layers: int) -> None:
    case = replace(pipelined(schedule, per_rank=per_rank), model=model_of(llama_layer(), layers))
    stages = list_stages(case)
    assert [stage.rank for stage in stages] == [0, 1, 2, 3]
    assert sum(run.count for stage in stages for run in stage.layers) == layers
    assert [stage.first for stage in stages] == [True, False, False, False]
    assert sum(stage.last for stage in stages) == 1


def test_a_v_ends_where_it_begins() -> None:
    """Qi et al., arXiv:2401.10241, section 6: embedding and head are on the same rank."""
    stages = list_stages(pipelined("zbv", per_rank=2))
    assert (stages[0].first, stages[0].last) == (True, True)
    assert not any(stage.last for stage in stages[1:])


def test_kinds_of_layers_stay_in_their_order() -> None:
    """Dense layers before experts, an encoder before its decoder: a stage has what stands at its places."""
    dense, wide = llama_layer(), llama_layer(2048)
    model = replace(MODEL, runs=(LayerRun(dense, 6), LayerRun(wide, 10)))
    stages = list_stages(replace(pipelined("1f1b"), model=model))
    counts = [{run.layer: run.count for run in stage.layers} for stage in stages]
    assert counts == [{dense: 4}, {dense: 2, wide: 2}, {wide: 4}, {wide: 4}]


# --- what is kept


@pytest.mark.parametrize("passes", [1, 2, 4, 16])
def test_schedules_keep_what_their_papers_say(passes: int) -> None:
    """GPipe all; 1F1B as many as there are stages from here on (arXiv:2104.04473, section 2.2); zero bubble and V
    as many as there are ranks, on all of them, since gradients of weights wait (arXiv:2401.10241, sections 2, 6)."""
    here = [min(passes, 4 - rank) for rank in range(4)]
    assert in_flight(pipelined("gpipe", passes=passes)) == [passes] * 4
    assert in_flight(pipelined("1f1b", passes=passes)) == here
    assert in_flight(pipelined("zero_bubble", passes=passes)) == [min(passes, 4)] * 4
    assert in_flight(pipelined("zbv", per_rank=2, passes=passes)) == [min(passes, 4)] * 4


@pytest.mark.parametrize("per_rank", [2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaving_keeps_what_its_warm_up_starts(ranks: int, per_rank: int) -> None:
    """Chunks begun before the first way back: 2 (p - rank - 1) + (v - 1) p + 1, each 1 / v of a rank's layers; on the
    first rank p (1 + (p - 1) / (p v)) micro-batches (arXiv:2205.05198, section 4.2.3)."""
    found = in_flight(pipelined("interleaved", ranks, per_rank))
    chunks = [2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1 for rank in range(ranks)]
    assert found == [each / per_rank for each in chunks]
    assert found[0] == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * per_rank)))


def test_nothing_is_kept_twice_without_a_pipeline() -> None:
    assert in_flight(pipelined("gpipe", ranks=1)) == [1.0]


@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_no_more_is_kept_than_there_is_nor_than_before(schedule: str, per_rank: int, passes: int) -> None:
    found = in_flight(pipelined(schedule, per_rank=per_rank, passes=passes))
    assert all(0 < each <= passes for each in found)
    assert found == sorted(found, reverse=True)


def test_a_v_of_other_than_two_stages_a_rank_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel.pp_stages_per_rank: 1 stages a rank make no V \(zbv\)"):
        list_stages(pipelined("zbv"))
