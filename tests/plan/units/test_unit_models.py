"""Models that are known by their units: states as for any model, and what must hold of any estimate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.errors import UserError
from shardway.plan.case import Machine, machine_of_part
from shardway.plan.data_parallel_estimate import (
    UnitCase,
    UnitEstimate,
    UnitPlanResult,
    estimate_units,
    plan_units,
    render_units,
    unit_plan_facts,
)
from shardway.plan.economy import JobTerms
from shardway.plan.shapes import Measured, Unit, convnet
from shardway.units import Span


def model(parameters: int = 1_000_000_000) -> Measured:
    body = Unit(name="block", parameters=parameters // 10, forward_flops=2e11, saved_bytes=5e7, count=10)
    return Measured(name="body", units=(body,), source="a test")


def machine() -> Machine:
    return machine_of_part("a100-sxm4-80gb")


def price(**changes: object) -> UnitEstimate:
    values = {"model": model(), "global_batch": 64, "precision": "bf16"}
    return estimate_units(UnitCase(**{**values, **changes}), machine())  # type: ignore[arg-type]


@pytest.mark.parametrize(("shard", "share"), [(1, 1), (8, 8)])
def test_states_are_sixteen_bytes_a_parameter(shard: int, share: int) -> None:
    """Weight, gradient and two moments in fp32 (arXiv:1910.02054, section 5), shared or not."""
    assert price(dp_shard=shard).peak.states == pytest.approx(16e9 / share)


def test_activations_follow_the_format_and_the_micro_batch() -> None:
    fp32, bf16 = price(precision="fp32", micro_batch=4), price(precision="bf16", micro_batch=4)
    assert fp32.peak.activations == pytest.approx(4 * 10 * 5e7)
    assert bf16.peak.activations == pytest.approx(fp32.peak.activations / 2)


@given(micro=st.sampled_from([1, 2, 4, 8]), replicas=st.sampled_from([1, 2, 8]), shard=st.sampled_from([1, 2]))
def test_items_add_up_and_nothing_beats_the_peak(micro: int, replicas: int, shard: int) -> None:
    found = price(micro_batch=micro, dp_replicate=replicas, dp_shard=shard, global_batch=128)
    assert sum(found.time.items.values()) == pytest.approx(found.time.seconds)
    assert sum(found.peak.device_items.values()) == pytest.approx(found.peak.device)
    assert 0 < found.mfu < 1
    assert found.time.low < found.time.seconds < found.time.high


def test_copies_cost_gradient_messages_and_shards_their_own() -> None:
    alone, copies, shards = price(), price(dp_replicate=2), price(dp_shard=2)
    assert "gradient messages" not in alone.time.items
    assert copies.time.items["gradient messages"] > 0
    assert shards.time.items["shard messages"] > 0
    assert shards.peak.gathered > 0 == copies.peak.gathered


def test_a_batch_that_does_not_split_is_told() -> None:
    with pytest.raises(UserError, match="10 samples do not split over 4 ranks in micro-batches of 1"):
        price(global_batch=10, dp_replicate=4)


def ask(size: int, world: int = 8) -> UnitPlanResult:
    case = UnitCase(model=model(size), global_batch=64 * world)
    return plan_units(case, machine(), world, JobTerms(), length=Span(1e6, "samples"))


def test_the_run_takes_as_many_steps_as_its_samples() -> None:
    found = ask(10**9)
    assert found.run is not None
    assert found.run.steps == -(-(10**6) // 512)


def test_what_is_too_large_is_shown_as_such() -> None:
    found = ask(10**12)
    assert not found.shown.fits
    assert found.run is None
    assert "does not fit" in render_units(found)


def test_facts_are_those_of_the_table() -> None:
    found = ask(10**9)
    facts, table = unit_plan_facts(found), render_units(found)
    assert facts["plan"]["step_seconds"] == found.shown.time.seconds
    assert f"micro-batch {facts['plan']['layout']['micro_batch']}" in table


def test_our_own_convolutions_are_planned() -> None:
    network = convnet((3, 32, 32), (32, 64), 10)
    found = estimate_units(UnitCase(model=network, global_batch=32, micro_batch=32, precision="fp32"), machine())
    assert found.peak.weights == 4 * network.parameters
