"""A case that can be priced is complete; one that cannot names everything that does not divide."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import case_of, cases, expert_model
from shardway.errors import UserError
from shardway.plan.case import Case, Degrees, divisors, find_engine, load_engines


def refusal(**changes: Any) -> str:
    with pytest.raises(UserError) as told:
        case_of(**changes)
    return str(told.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dp_shard": 3, "global_batch": 8}, "train.global_batch"),
        ({"cp": 3}, "parallel.cp"),
        ({"tp": 3}, "parallel.tp"),
        ({"pp": 9}, "parallel.pp"),
        ({"pp": 4, "stages_per_rank": 3}, "parallel.pp"),
        ({"ep": 2}, "has no experts"),
        ({"model": expert_model(), "dp_shard": 8, "ep": 3}, "3 does not divide 8 experts"),
        ({"model": expert_model(), "dp_shard": 2, "ep": 4}, "4 does not divide the 2 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told(changes: dict[str, Any], told: str) -> None:
    assert told in refusal(**changes)


def test_everything_is_told_at_once() -> None:
    message = refusal(tp=3, cp=5, pp=100, global_batch=7, dp_shard=2)
    assert all(where in message for where in ("parallel.tp", "parallel.cp", "parallel.pp", "train.global_batch"))
    assert "1, 2, 4, 8, 16" in message  # what would divide the heads


@given(cases())
def test_a_batch_is_cut_without_a_rest(case: Case) -> None:
    assert case.micro_batches * case.micro_batch * case.degrees.data == case.global_batch
    assert case.tokens * case.degrees.cp == case.micro_batch * case.seq_len
    passes = case.tokens * case.degrees.cp * case.micro_batches * case.degrees.data
    assert passes == case.tokens_per_step == case.global_batch * case.seq_len


@given(st.builds(Degrees, **{name: st.sampled_from([1, 2, 4]) for name in ("dp_replicate", "dp_shard", "cp", "tp")}))
def test_ranks_are_the_product_of_the_degrees(degrees: Degrees) -> None:
    assert degrees.world == degrees.data * degrees.cp * degrees.tp * degrees.pp
    assert degrees.shards * degrees.dp_replicate * degrees.tp == degrees.world
    told = degrees.render().split(" x ")
    assert told == [f"{name} {size}" for name, size in asdict(degrees).items() if size > 1] or told == ["one rank"]


def test_experts_share_their_states_with_what_their_own_axis_leaves() -> None:
    assert Degrees(dp_shard=16, tp=4, ep=8).expert_shards == 8
    assert Degrees(dp_shard=16, tp=4, ep=8, etp=4).expert_shards == 2
    assert Degrees().expert_shards == 1


@pytest.mark.parametrize("name", load_engines())
def test_an_engine_says_in_which_formats_it_keeps_what(name: str) -> None:
    """In fp32 all engines keep the same; in 16 bits what is updated is fp32."""
    engine = find_engine(name)
    wide, narrow = (case_of(engine=name, precision=each) for each in ("fp32", "bf16"))
    assert (wide.value_bytes, wide.kept_weight_bytes, wide.gradient_bytes, wide.splits_copy) == (4, 4, 4, False)
    assert narrow.value_bytes == 2
    assert narrow.kept_weight_bytes == 4
    assert narrow.splits_copy == (engine.weight_bytes == 2)
    assert narrow.gradient_bytes in (2, 4)


def test_an_unknown_engine_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"shardway.*torchtitan.*megatron"):
        find_engine("megatorn")


def test_the_residual_stream_has_the_format_of_products() -> None:
    """In a model of another library under autocast that of the weights, unless these are gathered in 16 bits."""
    alone, shared = case_of(engine="shardway"), case_of(engine="shardway", dp_shard=2, zero=3)
    assert (alone.stream_bytes, shared.stream_bytes) == (2, 2)
    assert (alone.casts_weights, shared.casts_weights) == (True, False)
    assert not alone.casts_each
    theirs, gathered = replace(alone, foreign=True), replace(shared, foreign=True)
    assert (theirs.stream_bytes, gathered.stream_bytes) == (4, 2)
    assert theirs.casts_each
    assert case_of(engine="megatron").stream_bytes == 2
    assert not replace(case_of(engine="shardway", precision="fp32"), foreign=True).casts_each


def test_fp16_leaves_the_stream_wide() -> None:
    """Its range is too small for a stream; weights that are gathered in 16 bits bring it along."""
    alone, shared = (case_of(engine="shardway", precision="fp16", **more) for more in ({}, {"dp_shard": 2, "zero": 3}))
    assert (alone.stream_bytes, alone.casts_each) == (4, True)
    assert (shared.stream_bytes, shared.casts_each) == (2, False)


def test_what_a_search_changes_decides_on_loss_host_and_attention() -> None:
    """The layout is open when a case is made: each candidate has its own answer."""
    alone = replace(case_of(engine="shardway"), fused_loss=True, fuses_whole=True, replayed=True, attention="flash3")
    assert (alone.fuses_loss, alone.replays, alone.attention_kernel) == (True, True, "flash3")
    split = replace(alone, degrees=Degrees(tp=2))
    assert (split.fuses_loss, split.replays) == (False, False)
    assert replace(split, fuses_whole=False).fuses_loss
    for changes in ({"recompute": "full"}, {"offload": True}, {"dropout": True}, {"precision": "fp16"}):
        assert not replace(alone, **changes).replays
    ring = replace(alone, degrees=Degrees(cp=2), seq_len=4096)
    assert ring.attention_kernel == "flash2"
    assert replace(alone, precision="tf32").attention_kernel == "flash2"
    assert replace(ring, engine=find_engine("megatron")).attention_kernel == "flash3"


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
    assert divisors(0) == []
