"""The learning rate's course: golden values, bounds, ends."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.train.loop_state import LR_SCHEDULES, LRSchedule, lr_factor

GOLDEN = {
    # total 12, warm-up 4, decay 4, final 0.2, by hand: (step + 1) / 4, then the course over steps 4 to 12
    "cosine": [0.25, 0.5, 0.75, 1.0, 1.0, 0.2 + 0.4 * (1 + math.cos(math.pi / 8)), 0.2 + 0.4 * (1 + math.sqrt(0.5))],
    "linear": [0.25, 0.5, 0.75, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2],
    "constant": [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "wsd": [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str) -> None:
    lr_schedule = LRSchedule(total=12, warmup=4, decay=4, final=0.2)
    found = [lr_factor(name, lr_schedule, step) for step in range(len(GOLDEN[name]))]
    assert found == pytest.approx(GOLDEN[name], rel=1e-12)


def test_every_schedule_of_the_run_file_has_a_course() -> None:
    assert set(LR_SCHEDULES) == {"cosine", "linear", "constant", "wsd"}


@st.composite
def courses(draw: st.DrawFn) -> LRSchedule:
    total = draw(st.integers(1, 500))
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    return LRSchedule(total, warmup, decay, draw(st.floats(0.0, 1.0)))


names = st.sampled_from(sorted(LR_SCHEDULES))


@given(names, courses(), st.integers(0, 600))
def test_the_factor_stays_within_its_bounds(name: str, lr_schedule: LRSchedule, step: int) -> None:
    factor = lr_factor(name, lr_schedule, step)
    lowest = lr_schedule.final if step >= lr_schedule.warmup else 0.0
    assert lowest - 1e-12 <= factor <= 1.0 + 1e-12


@given(names, courses())
def test_the_warm_up_starts_low_and_meets_the_peak(name: str, lr_schedule: LRSchedule) -> None:
    rising = [lr_factor(name, lr_schedule, step) for step in range(lr_schedule.warmup)]
    assert rising == [(step + 1) / lr_schedule.warmup for step in range(lr_schedule.warmup)]
    if lr_schedule.warmup < lr_schedule.total:
        assert lr_factor(name, lr_schedule, lr_schedule.warmup) == pytest.approx(1.0)


@given(names, courses())
def test_after_the_warm_up_it_never_rises(name: str, lr_schedule: LRSchedule) -> None:
    falling = [lr_factor(name, lr_schedule, step) for step in range(lr_schedule.warmup, lr_schedule.total + 3)]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(falling))


@given(st.sampled_from(["cosine", "linear"]), courses())
def test_the_end_is_the_final_factor(name: str, lr_schedule: LRSchedule) -> None:
    if lr_schedule.warmup < lr_schedule.total:
        assert lr_factor(name, lr_schedule, lr_schedule.total) == pytest.approx(lr_schedule.final, abs=1e-12)
        assert lr_factor(name, lr_schedule, lr_schedule.total + 100) == pytest.approx(lr_schedule.final, abs=1e-12)


@given(courses())
def test_the_stable_part_lasts_until_the_decay(lr_schedule: LRSchedule) -> None:
    for step in range(lr_schedule.warmup, lr_schedule.total - lr_schedule.decay):
        assert lr_factor("wsd", lr_schedule, step) == 1.0
    if lr_schedule.decay:
        assert lr_factor("wsd", lr_schedule, lr_schedule.total) == pytest.approx(lr_schedule.final, abs=1e-12)
