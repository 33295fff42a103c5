"""The factor on the loss: its course against torch's own scaler, its state, and when it gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardway.errors import JobError
from shardway.train.loss import LOWEST, LossScale


def course_of_torch(start: LossScale, overflows: list[bool]) -> list[tuple[float, int]]:
    """The scales and counts of torch.amp.GradScaler over the same steps."""
    scaler = torch.amp.GradScaler("cpu", start.scale, start.growth, start.backoff, start.interval)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    course = []
    for overflow in overflows:
        weight.grad = scaler.scale(torch.full((1,), float("inf") if overflow else 1.0))
        scaler.step(optimizer)
        scaler.update()
        course.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return course


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    scale=st.sampled_from([65536.0, 2.0**120, 3.0]),
    growth=st.sampled_from([2.0, 4.0, 1.5]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 5),
)
def test_the_course_is_that_of_torch(
    overflows: list[bool], scale: float, growth: float, backoff: float, interval: int
) -> None:
    state = LossScale(scale, growth, backoff, interval)
    for overflow, expected in zip(overflows, course_of_torch(state, overflows), strict=True):
        if overflow and state.scale * backoff < LOWEST:
            break
        state = state.after(overflow)
        assert (state.scale, state.good_steps) == (pytest.approx(expected[0], rel=1e-5), expected[1])


def test_defaults_are_those_of_torch() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert LossScale() == LossScale(
        scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    )


def test_good_steps_count_from_the_last_change() -> None:
    state = LossScale(8.0, interval=3)
    for found_inf in (False, False, True, False, False):
        state = state.after(found_inf)
    assert (state.scale, state.good_steps) == (4.0, 2)
    assert state.after(False) == replace(state, scale=8.0, good_steps=0)


def test_a_scale_that_reaches_nothing_ends_the_job() -> None:
    state = LossScale(2 * LOWEST).after(True)
    assert state.scale == LOWEST
    with pytest.raises(JobError, match="overflow however small the loss is scaled"):
        state.after(True)


def test_saved_numbers_continue_under_the_rules_of_today() -> None:
    saved = LossScale(128.0, interval=100, good_steps=57).as_numbers()
    assert LossScale(interval=100).with_numbers(saved) == LossScale(128.0, interval=100, good_steps=57)
    shorter = LossScale(interval=10).with_numbers(saved)
    assert shorter.good_steps == 9
    assert shorter.after(False).scale == 256.0


@pytest.mark.parametrize("numbers", [(), (1.0,), (0.0, 1), (float("nan"), 0), (1.0, float("inf"))])
def test_numbers_that_are_no_state_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(JobError, match="loss scale"):
        LossScale().with_numbers(numbers)
