"""The time of a step: its sum, its limits, and its bubble (arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_cases import case_of, cases, expert_model, h100s, llama_layer, model_of
from shardway.plan.case import Case, Ceilings, Machine, load_ceilings
from shardway.plan.shapes import Architecture
from shardway.plan.time import (
    ATTENTION,
    BUBBLE,
    CONTEXT,
    EXPERTS,
    GRADIENTS,
    HOST,
    MOVES,
    OPTIMIZER,
    PRODUCTS,
    REST,
    SHARDS,
    STAGES,
    TENSOR,
    TIME_ITEMS,
    WEIGHTS,
    StepTime,
    estimate_step,
)

BRIEF = settings.get_profile("brief")
H100 = h100s()
CEILINGS = load_ceilings(H100.accelerator)
NO_HOST = replace(CEILINGS, kernel_s=0.0)
"""Operators start at once. Waiting for the host hides no messages in these estimates, so that where there is some, less
to do may show more messages."""
MESSAGES = (TENSOR, CONTEXT, EXPERTS, SHARDS, STAGES, GRADIENTS, WEIGHTS)
COMPUTED = (PRODUCTS, ATTENTION, MOVES, OPTIMIZER, REST)


def step(case: Case, machine: Machine = H100, ceilings: Ceilings = CEILINGS) -> StepTime:
    return estimate_step(case, machine, ceilings)


def item(found: StepTime, name: str) -> float:
    return found.items.get(name, 0.0)


# --- sums


@BRIEF
@given(cases())
def test_items_add_up(case: Case) -> None:
    found = step(case)
    assert found.items.keys() <= TIME_ITEMS.keys()
    assert all(seconds > 0 and math.isfinite(seconds) for seconds in found.items.values())
    assert found.seconds == pytest.approx(sum(found.items.values()))
    assert found.low < found.seconds < found.high


@BRIEF
@given(cases(pp=1))
def test_what_is_not_split_is_not_waited_for(case: Case) -> None:
    found, degrees = step(case), case.degrees
    assert (TENSOR in found.items) == (degrees.tp > 1)
    assert (SHARDS in found.items) == (degrees.shards > 1 and case.zero == 3)
    assert (GRADIENTS in found.items) == (degrees.dp_replicate > 1 or (degrees.shards > 1 and case.zero < 3))
    assert (WEIGHTS in found.items) == (degrees.shards > 1 and case.zero in (1, 2))
    assert not {CONTEXT, EXPERTS, STAGES, BUBBLE} & found.items.keys()


def test_every_axis_has_its_item() -> None:
    case = case_of(expert_model(), dp_shard=8, dp_replicate=2, cp=2, tp=2, pp=2, ep=4, zero=1, seq_len=2048)
    assert set(step(case).items) >= {TENSOR, CONTEXT, EXPERTS, STAGES, BUBBLE, GRADIENTS, WEIGHTS, OPTIMIZER, REST}


# --- limits

NO_WAIT = replace(
    CEILINGS, link_latency_s=0.0, network_latency_s=0.0, hop_s=0.0, half_bytes=0.0, overlap=1.0, kernel_s=0.0
)
WIRELESS = h100s(link=1e30, peer=1e30, network=1e30)
"""Whose messages take no time."""


@pytest.mark.parametrize(
    "case",
    [
        case_of(tp=8),
        case_of(tp=8, sequence=False),
        case_of(cp=4, seq_len=8192),
        case_of(dp_shard=64, zero=3, engine="fsdp2"),
        case_of(dp_shard=64, zero=1),
        case_of(dp_replicate=64),
        case_of(expert_model(), dp_shard=16, ep=8, zero=1),
        case_of(tp=4, dp_shard=16, dp_replicate=2, zero=3, engine="torchtitan"),
    ],
    ids=lambda case: case.degrees.render(),
)
def test_without_messages_a_step_is_what_it_computes(case: Case) -> None:
    """An infinitely fast link and network without latency: messages are nothing, and the rest is unchanged."""
    wired, free = step(case, ceilings=NO_HOST), step(case, WIRELESS, NO_WAIT)
    assert sum(item(free, name) for name in MESSAGES) < 1e-12
    assert sum(item(wired, name) for name in MESSAGES) > 1e-6
    assert {name: item(free, name) for name in COMPUTED} == pytest.approx({n: item(wired, n) for n in COMPUTED})
    assert free.seconds == pytest.approx(sum(item(free, name) for name in COMPUTED))


def test_stages_far_apart_cost_nothing_either() -> None:
    case = case_of(pp=4, dp_replicate=8)
    free = step(case, WIRELESS, NO_WAIT)
    assert item(free, STAGES) < 1e-12 < item(step(case), STAGES)
    assert item(free, BUBBLE) == pytest.approx(item(step(case, ceilings=NO_WAIT), BUBBLE))


@BRIEF
@given(cases(), st.sampled_from(["link", "peer", "network"]), st.floats(1.0, 100.0))
def test_a_faster_wire_never_slows_a_step(case: Case, wire: str, factor: float) -> None:
    faster = replace(H100, **{wire: factor * getattr(H100, wire)})
    assert step(case, faster, NO_HOST).seconds <= step(case, ceilings=NO_HOST).seconds * (1 + 1e-12)


# --- bubbles


def level(layers: int = 16) -> Architecture:
    """Ends that take no time to speak of: all stages are equal."""
    return model_of(llama_layer(2048), layers, vocab=1)


def pass_seconds(found: StepTime) -> float:
    """Of all micro-batches on the slowest stage."""
    return sum(item(found, name) for name in (PRODUCTS, ATTENTION, MOVES, HOST, TENSOR, CONTEXT, EXPERTS, SHARDS))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (8, 64)])
def test_the_bubble_of_equal_stages(schedule: str, p: int, m: int) -> None:
    """(p - 1) / m of the ideal time."""
    found = step(case_of(level(), pp=p, global_batch=m, schedule=schedule))
    assert item(found, BUBBLE) / pass_seconds(found) == pytest.approx((p - 1) / m, rel=0.01)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaving_divides_the_bubble(v: int) -> None:
    """By v; there are v times as many messages."""
    case = case_of(level(), pp=4, global_batch=32)
    plain, found = step(case), step(replace(case, schedule="interleaved", stages_per_rank=v))
    assert item(found, BUBBLE) == pytest.approx(item(plain, BUBBLE) / v)
    assert pass_seconds(found) == pytest.approx(pass_seconds(plain))
    assert 1 < item(found, STAGES) / item(plain, STAGES) <= v


def test_a_backward_pass_in_two_parts_leaves_less_to_wait_for() -> None:
    case = case_of(level(), pp=4, global_batch=32)
    one, zero, v = (
        item(step(replace(case, schedule=name, stages_per_rank=held)), BUBBLE)
        for name, held in (("1f1b", 1), ("zero_bubble", 1), ("zbv", 2))
    )
    assert v < zero < one


@BRIEF
@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 8]))
def test_more_micro_batches_make_the_bubble_less_of_a_step(p: int, factor: int) -> None:
    few, many = (step(case_of(level(), pp=p, global_batch=p * each)) for each in (factor, 2 * factor))
    assert item(many, BUBBLE) == pytest.approx(item(few, BUBBLE))
    assert item(many, BUBBLE) / many.seconds < item(few, BUBBLE) / few.seconds


# --- no faster than paper


@BRIEF
@given(cases())
def test_products_and_attention_are_never_faster_than_the_peak(case: Case) -> None:
    """Of a rank's share of the layers and of the head."""
    found, degrees = step(case), case.degrees
    forward = case.model.forward_flops_per_token(case.seq_len, causal=True)
    core = sum(run.count * run.layer.core_flops_per_token(case.seq_len, True) for run in case.model.runs)
    ranks = degrees.world * H100.peak(case.precision)
    # Of a pipeline the slowest stage is priced, which has its share at least, or the head besides.
    assert item(found, PRODUCTS) >= 3 * (forward - core) * case.tokens_per_step / ranks
    assert item(found, ATTENTION) >= 3 * core * case.tokens_per_step / (degrees.world * H100.peak("bf16"))


@BRIEF
@given(cases(recompute="none"))
def test_more_recompute_never_takes_less_time(case: Case) -> None:

    def seconds(mode: str) -> float:
        return step(replace(case, recompute=mode), ceilings=NO_HOST).seconds

    assert seconds("none") < seconds("products") < seconds("operators") < seconds("full")
    assert seconds("none") <= seconds("selective") <= seconds("full")


@pytest.mark.parametrize("engine", ["megatron", "fsdp2", "torchtitan", "shardway", "deepspeed"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_more_nodes_never_make_a_token_cheaper(engine: str, zero: int) -> None:
    """With as much work for each GPU, copies add messages and nothing else: GPU-hours a token grow, or stay."""
    hours = []
    for nodes in (1, 2, 8, 64, 512):
        case = case_of(engine=engine, dp_shard=8, dp_replicate=nodes, zero=zero, micro_batch=2)
        hours.append(step(case).seconds * case.degrees.world / case.tokens_per_step)
    assert hours == sorted(hours)
    assert hours[0] < hours[-1]


@BRIEF
@given(cases(optimizer="adamw", pp=1, dp_shard=8))
def test_shared_states_are_updated_by_shares(case: Case) -> None:
    whole, shared = (step(replace(case, zero=zero)) for zero in (0, 1))
    assert item(shared, OPTIMIZER) == pytest.approx(item(whole, OPTIMIZER) / 8)


@BRIEF
@given(cases(), st.sampled_from([2, 3]))
def test_more_micro_batches_take_that_much_longer_and_no_more_updates(case: Case, factor: int) -> None:
    more = replace(case, global_batch=factor * case.global_batch)
    here, longer = step(case), step(more)
    assert item(longer, PRODUCTS) == pytest.approx(factor * item(here, PRODUCTS))
    assert item(longer, OPTIMIZER) == pytest.approx(item(here, OPTIMIZER))
    assert here.seconds < longer.seconds <= factor * here.seconds * (1 + 1e-12)


@pytest.mark.parametrize(("engine", "gathers"), [("megatron", 6), ("shardway", 4)])
def test_crossings_of_a_tensor_region(engine: str, gathers: int) -> None:
    """Four of each sort a layer (docs/communication.md), and two gathers more where inputs are not kept whole."""
    case = case_of(engine=engine, tp=8, precision="fp32")
    stream = case.tokens * case.model.hidden * 4 * 7 / 8 / H100.link
    ceilings = replace(NO_WAIT, link=1.0)
    found = item(step(case, ceilings=ceilings), TENSOR)
    assert found == pytest.approx(case.model.depth * (gathers + 4) * stream)
