"""Random state comes back whole, and a rank's generators are its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.checkpoint.state import random_state, seed_all, set_random_state


@pytest.fixture(autouse=True)
def own_generators() -> object:
    """The generators are the process's; put them back."""
    before = random_state()
    yield
    set_random_state(before)


def draw() -> tuple[float, ...]:
    """Something of every generator, also of those that hold half a pair back."""
    return (
        torch.rand(3).sum().item(),
        torch.randn(3).sum().item(),
        float(np.random.standard_normal()),
        float(np.random.random()),
        random.gauss(0.0, 1.0),
        random.random(),
    )


@settings(max_examples=25)
@given(seed=st.integers(0, 2**63 - 1), rank=st.integers(0, 10**6), drawn=st.integers(0, 5))
def test_a_state_put_back_gives_the_same_draws(seed: int, rank: int, drawn: int) -> None:
    seed_all(seed, rank)
    for _ in range(drawn):
        draw()
    state = random_state()
    expected = [draw() for _ in range(3)]
    seed_all(seed + 1, rank)
    set_random_state(state)
    assert [draw() for _ in range(3)] == expected


@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), rank=st.integers(0, 5000))
def test_a_state_has_one_shape_whatever_it_holds(seed: int, rank: int) -> None:
    """A checkpoint is read into a template of the same shape."""
    seed_all(0, 0)
    template = {name: tensor.shape for name, tensor in random_state().items()}
    seed_all(seed, rank)
    draw()
    assert {name: tensor.shape for name, tensor in random_state().items()} == template


def test_ranks_draw_differently_and_alike_each_time() -> None:
    drawn = []
    for rank in (0, 1, 2, 0):
        seed_all(7, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    for column in zip(*drawn[:3], strict=True):
        assert len(set(column)) == 3
