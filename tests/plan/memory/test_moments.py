"""What a rank holds while a checkpoint is written and read."""

from __future__ import annotations

import pytest

from plan_cases import case_of
from shardway.plan.case import machine_of_part
from shardway.plan.memory import BetweenSteps
from shardway.plan.planner import estimate


def moments(**changes: object) -> BetweenSteps:
    return estimate(case_of(engine="shardway", **changes), machine_of_part("a100-sxm4-80gb")).between_steps


def test_a_checkpoint_is_weights_and_two_moments_in_fp32() -> None:
    case = case_of(engine="shardway")
    found = moments()
    assert found.kept == found.copied == pytest.approx(12 * case.model.parameters)


def test_shards_hold_their_part_and_resume_with_one_tensor_more() -> None:
    alone, shared = moments(), moments(dp_shard=8, zero=3)
    assert shared.kept == pytest.approx(alone.kept / 8)
    assert shared.resuming - shared.kept == pytest.approx((alone.resuming - alone.kept) / 8)
    assert alone.kept < alone.resuming < 1.5 * alone.kept


def test_what_lies_on_the_host_is_staged_as_well() -> None:
    there = moments(dp_shard=8, zero=3, offload=True)
    here = moments(dp_shard=8, zero=3)
    assert there.kept == 0
    assert there.copied == pytest.approx(here.copied + 4 * case_of().model.parameters / 8)  # gradients lie there too
