"""The breakdown of a rank's memory: states as ZeRO counts them (arXiv:1910.02054), sums, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_cases import case_of, cases, expert_model, gpt_layer, h100s, llama_layer, model_of
from shardway.plan.case import Case, find_engine, load_engines
from shardway.plan.memory import (
    MEMORY_ITEMS,
    StageMemory,
    estimate_memory,
    estimate_peak,
    load_overheads,
    loss_bytes,
)
from shardway.plan.planner import estimate
from shardway.plugins import list_plugins

BRIEF = settings.get_profile("brief")
MODEL = model_of(gpt_layer(), layers=4)


def stages(case: Case) -> tuple[StageMemory, ...]:
    return estimate_memory(case, load_overheads())


def per_parameter(case: Case) -> float:
    """Bytes of states on one rank for each parameter of the model."""
    return stages(case)[0].states / case.model.parameters


# --- ZeRO


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_figure_1_of_zero(ranks: int) -> None:
    """2 + 2 + 12 bytes a parameter; stage 1 splits the 12, stage 2 the gradients too."""
    zero = [
        per_parameter(case_of(MODEL, "deepspeed", dp_shard=ranks, zero=stage, global_batch=ranks))
        for stage in (0, 1, 2)
    ]
    assert zero == pytest.approx([16, 4 + 12 / ranks, 2 + 14 / ranks])


@pytest.mark.parametrize("engine", ["fsdp2", "torchtitan", "shardway"])
@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_stage_3_splits_all_of_it(engine: str, ranks: int) -> None:
    """FSDP gathers from the copy in fp32 that the optimizer updates: 4 + 4 + 8."""
    assert per_parameter(case_of(MODEL, engine, dp_shard=ranks, zero=3)) == pytest.approx(16 / ranks)


@pytest.mark.parametrize("name", load_engines())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_follow_from_what_the_engine_says(name: str, precision: str) -> None:
    """Weights, gradients, and two moments in fp32; beside these a copy in fp32 of weights that are in 16 bits."""
    engine = find_engine(name)
    expected = 4 + 4 + 8
    if precision == "bf16":
        expected = engine.weight_bytes + engine.gradient_bytes + engine.spare_gradient_bytes + engine.master_bytes + 8
    assert per_parameter(case_of(MODEL, name, precision=precision)) == pytest.approx(expected)


def test_what_optimizers_keep() -> None:
    """Two numbers in fp32, two bytes, one number; Adafactor next to nothing."""
    kept = {
        name: stages(case_of(MODEL, "fsdp2", precision="fp32", optimizer=name))[0].optimizer / MODEL.parameters
        for name in (plugin.name for plugin in list_plugins("optimizers") if plugin.package == "shardway")
    }
    assert {name: kept[name] for name in ("adamw", "adamw8bit", "sgd", "muon")} == pytest.approx(
        {"adamw": 8, "adamw8bit": 2, "sgd": 4, "muon": 4}
    )
    assert 0 < kept["adafactor"] < 0.1


def test_experts_are_shared_with_fewer_ranks() -> None:
    """ep ranks split them, and of dp_shard ranks so many more share the rest: together all of dp_shard."""
    model = expert_model()
    case = case_of(model, "fsdp2", dp_shard=8, ep=4, zero=3)
    assert stages(case)[0].states == pytest.approx(16 * model.parameters / 8)
    whole = replace(case, zero=0)
    experts = 8 * sum(each.parameters for each in model.layers[0].matrices if each.part == "experts")
    assert stages(whole)[0].weights == pytest.approx(2 * (model.parameters - experts * 3 / 4))


def test_offloaded_states_lie_elsewhere() -> None:
    case = case_of(MODEL, "fsdp2", dp_shard=4, zero=3)
    here, moved = stages(case)[0], stages(replace(case, offload=True))[0]
    assert moved.states == 0
    assert moved.host == pytest.approx(here.states)
    assert here.host == 0


# --- sums


@BRIEF
@given(cases())
def test_items_add_up(case: Case) -> None:
    for stage in stages(case):
        assert set(stage.items) == set(MEMORY_ITEMS)
        assert all(size >= 0 for size in stage.items.values())
        assert stage.allocated == pytest.approx(sum(stage.items.values()))
        assert stage.allocated <= stage.reserved <= stage.device


@BRIEF
@given(cases())
def test_the_peak_is_that_of_all_stages(case: Case) -> None:
    peak = estimate_peak(case, load_overheads())
    assert peak.device == max(stage.device for stage in stages(case))
    assert peak in stages(case)


@BRIEF
@given(cases(zero=3, tp=1))
def test_ranks_of_a_pipeline_hold_the_whole_model(case: Case) -> None:
    """None of it twice, all shares together."""
    elements = sum(stage.weights for stage in stages(case)) * case.degrees.shards / case.kept_weight_bytes
    assert elements == pytest.approx(case.model.parameters)


def test_a_tied_weight_is_at_both_ends_of_a_pipeline() -> None:
    tied = replace(MODEL, tied=True)
    case = case_of(tied, "fsdp2", pp=2, precision="fp32")
    extra = sum(stage.weights for stage in stages(case)) / 4 - tied.parameters
    assert extra == tied.embedding_parameters
    assert stages(replace(case, degrees=replace(case.degrees, pp=1)))[0].weights == 4 * tied.parameters


# --- what cannot be


@BRIEF
@given(cases(), st.sampled_from([2, 4]))
def test_more_sharding_never_needs_more_states(case: Case, factor: int) -> None:
    by_stage = [max(stage.states for stage in stages(replace(case, zero=zero))) for zero in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    for axis in ("dp_shard", "cp"):
        size = factor * getattr(case.degrees, axis)
        more = replace(case, degrees=replace(case.degrees, **{axis: size}), global_batch=factor * case.global_batch)
        assert all(b.states <= a.states for a, b in zip(stages(case), stages(more), strict=True))


@BRIEF
@given(cases(tp=1), st.sampled_from([2, 8]))
def test_more_tensor_ranks_never_need_more_states(case: Case, tp: int) -> None:
    split = replace(case, degrees=replace(case.degrees, tp=tp))
    assert all(b.states <= a.states for a, b in zip(stages(case), stages(split), strict=True))


@BRIEF
@given(cases(zero=0))
def test_without_sharing_it_does_not_matter_what_the_data_axis_is_called(case: Case) -> None:
    degrees = case.degrees
    swapped = replace(degrees, dp_replicate=degrees.dp_shard, dp_shard=degrees.dp_replicate)
    assert stages(case) == stages(replace(case, degrees=swapped))


@BRIEF
@given(cases(), st.floats(1.0, 10.0), st.integers(1, 10**12))
def test_what_fits_fits_a_larger_device(case: Case, factor: float, size: int) -> None:
    small = estimate(case, h100s(memory_bytes=size))
    assert not small.fits or estimate(case, h100s(memory_bytes=int(size * factor))).fits
    assert small.fits == (small.peak.device <= small.usable_bytes)


@BRIEF
@given(cases())
def test_a_larger_micro_batch_keeps_more_and_a_longer_sequence_too(case: Case) -> None:
    larger = replace(case, micro_batch=2 * case.micro_batch, global_batch=2 * case.global_batch)
    longer = replace(case, seq_len=2 * case.seq_len)
    for here, more, long in zip(stages(case), stages(larger), stages(longer), strict=True):
        assert here.states == more.states == long.states
        assert here.activations < more.activations <= long.activations
        assert here.working <= more.working <= long.working


# --- what comes and goes


def test_weights_are_gathered_layer_by_layer_or_all() -> None:
    """Two layers in 16 bits and one's gradients against all (arXiv:2304.11277, section 3.3)."""
    case = case_of(model_of(llama_layer(), 16, vocab=128), "fsdp2", dp_shard=8, zero=3, reshard=True)
    layer = case.model.layers[0].parameters
    freed, held = (stages(replace(case, reshard=each))[0].gathered for each in (True, False))
    assert 2 * 2 * layer <= freed <= 10.1 * layer
    assert held >= 2 * 16 * layer > freed
    assert stages(replace(case, zero=2))[0].gathered == 0


def test_logits_are_split_with_the_vocabulary() -> None:
    whole = case_of(tp=1)
    assert loss_bytes(replace(whole, degrees=replace(whole.degrees, tp=8), sequence=False)) == pytest.approx(
        loss_bytes(whole) / 8
    )
    assert loss_bytes(replace(whole, fused_loss=True)) < loss_bytes(whole)


def test_gpipe_keeps_every_micro_batch() -> None:
    """And 1F1B as many as stages follow (arXiv:2104.04473, section 2.2)."""
    case = case_of(pp=4, global_batch=16)
    gpipe, one = stages(replace(case, schedule="gpipe")), stages(case)
    assert [stage.in_flight for stage in gpipe] == [16] * 4
    assert [stage.in_flight for stage in one] == [4, 3, 2, 1]
    assert gpipe[1].activations / one[1].activations == pytest.approx(16 / 3)
