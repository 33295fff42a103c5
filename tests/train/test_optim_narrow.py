"""States in bf16: rounding without bias, alike in every slice, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_layouts import LR, everything, make_model, train
from torch import nn

from shardway.runfile.schema import OptimSection
from shardway.train.optim.base import ParameterPart, noise_of, round_stochastically, split_rows, update_widened
from shardway.train.optim.kinds import build_optimizer


def part_of(shape: tuple[int, ...], step: int = 1, states: int = 1) -> ParameterPart:
    """A whole parameter with zero states in bf16."""
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(states)]
    return ParameterPart(
        torch.zeros(shape),
        torch.zeros(shape),
        tuple(tensors),
        step,
        torch.tensor(float(step)),
        shape,
        (0,) * len(shape),
    )


# --- the noise


def test_noise_is_uniform_and_differs_by_step() -> None:
    """Each of 32 bits is set in half of the elements, and no more often together with those of the next step."""
    size = 2**16
    first, second = noise_of(part_of((size,), 1)), noise_of(part_of((size,), 2))
    limit = 5 * (0.25 / size) ** 0.5  # five standard deviations of a fair coin
    for bit in range(32):
        ones = (first >> bit) & 1
        assert abs(ones.float().mean().item() - 0.5) < limit
        assert abs((ones ^ (second >> bit & 1)).float().mean().item() - 0.5) < limit
        assert abs((ones[1:] ^ ones[:-1]).float().mean().item() - 0.5) < limit


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    step=st.integers(1, 10**9),
    data=st.data(),
)
def test_a_slice_draws_what_the_whole_does(shape: tuple[int, ...], step: int, data: Any) -> None:
    whole = noise_of(part_of(shape, step))
    cut = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    held = torch.zeros([end - first for first, end in cut])
    part = part_of(shape, step)._replace(parameter=held, offset=tuple(first for first, _ in cut))
    assert torch.equal(noise_of(part), whole[tuple(slice(first, end) for first, end in cut)])


# --- rounding


@settings(max_examples=50)
@given(value=st.floats(-(2.0**120), 2.0**120, width=32))
def test_rounding_has_the_exact_value_as_its_mean(value: float) -> None:
    """Over all 2**16 noises the mean is the value, exactly, and the results are its two neighbours in bf16."""
    noise = torch.arange(2**16, dtype=torch.int32)
    rounded = torch.full((2**16,), value)
    round_stochastically(rounded, noise)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert rounded.double().mean().item() == torch.tensor(value, dtype=torch.float32).double().item()
    assert len(rounded.unique()) <= 2


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FFFFFFF, 0x7FC00000, -0x400000, 0])
def test_rounding_keeps_infinity_nan_and_zero(bits: int) -> None:
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    rounded = value.clone()
    round_stochastically(rounded, torch.tensor([2**16 - 1], dtype=torch.int32))
    assert torch.equal(rounded.isnan(), value.isnan())
    assert value.isnan().item() or torch.equal(rounded, value)


def test_nearest_rounding_would_stall_the_second_moment() -> None:
    """Why it is stochastic: without gradients v falls by 0.999 a step; to the nearest, it never moves from 1."""
    nearest, part = torch.ones(4096, dtype=torch.bfloat16), part_of((4096,))
    part.states[0].fill_(1.0)
    for step in range(1, 501):
        nearest = (nearest.float() * 0.999).bfloat16()
        update_widened([part._replace(step=step)], decay_states)
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert part.states[0].float().mean().item() == pytest.approx(0.999**500, rel=0.01)


def decay_states(parts: Sequence[ParameterPart]) -> None:
    for part in parts:
        for state in part.states:
            state.mul_(0.999)


# --- in pieces


@settings(max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    working=st.integers(1, 200),
)
def test_the_size_of_pieces_changes_no_value(shapes: list[tuple[int, ...]], working: int) -> None:
    def add_place(parts: Sequence[ParameterPart]) -> None:
        for part in parts:
            for place, state in enumerate(part.states):
                state.add_(part.gradient * (place + 1.7))

    ends = []
    for size in (working, 10**6):
        parts = [part_of(shape, 3, states=2) for shape in shapes]
        for part in parts:
            part.gradient.copy_(torch.linspace(0, 1, part.gradient.numel()).view(part.gradient.shape))
        update_widened(parts, add_place, size)
        ends.append([state for part in parts for state in part.states])
    assert all(torch.equal(few, many) for few, many in zip(*ends, strict=True))


def test_pieces_are_no_larger_than_asked() -> None:
    pieces = list(split_rows(part_of((10, 4)), 12))
    assert [tuple(piece.parameter.shape) for piece in pieces] == [(3, 4), (3, 4), (3, 4), (1, 4)]
    assert [piece.offset for piece in pieces] == [(0, 0), (3, 0), (6, 0), (9, 0)]
    assert [tuple(p.parameter.shape) for p in split_rows(part_of((2, 4)), 3)] == [(1, 4), (1, 4)]
    assert list(split_rows(part_of((0, 4)), 3)) == []


# --- in an optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_narrow_states_follow_those_in_fp32(name: Any) -> None:
    ends = []
    for dtype in ("fp32", "bf16"):
        model = make_model()
        optimizer = build_optimizer(OptimSection(name=name, state_dtype=dtype), model, LR)  # type: ignore[arg-type]
        train(model, optimizer, range(20))
        ends.append(everything(model, optimizer))
    start = {f"{n} weight": p.detach() for n, p in make_model().named_parameters()}
    for key, weight in start.items():
        moved, error = (ends[0][key] - weight).norm(), (ends[1][key] - ends[0][key]).norm()
        assert 0 < error < 0.03 * moved, key  # bf16 keeps 8 bits: 0.4 %, and errors of 20 steps do not add up
    assert {t.dtype for k, t in ends[1].items() if k.split()[1] in ("exp_avg", "exp_avg_sq", "momentum_buffer")} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_small_updates_of_bf16_weights_are_not_lost(name: Any) -> None:
    """Steps of about 1/2000 of a weight: to the nearest each would vanish, and none would ever arrive."""
    linear = nn.Linear(64, 64, bias=False)
    nn.init.ones_(linear.weight)
    model = nn.Sequential(nn.Sequential(linear)).to(torch.bfloat16)
    section = OptimSection(name=name, weight_decay=0.01, momentum=0.0)
    optimizer = build_optimizer(section, model, 0.05)
    for _ in range(100):
        linear.weight.grad = torch.zeros_like(linear.weight)
        optimizer.step()
    expected = (1 - 0.05 * 0.01) ** 100
    assert linear.weight.float().mean().item() == pytest.approx(expected, rel=0.002)


def test_narrow_states_take_half_the_bytes_and_survive_a_state_dict() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(OptimSection(state_dtype="bf16"), model, LR)
    model.weight.grad = torch.randn(64, 64)
    optimizer.step()
    saved = optimizer.state_dict()
    other = build_optimizer(OptimSection(state_dtype="bf16"), model, LR)
    other.load_state_dict(saved)
    state = other.state[model.weight]
    moments = [state["exp_avg"], state["exp_avg_sq"]]
    assert sum(moment.untyped_storage().nbytes() for moment in moments) == 64 * 64 * 4
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_parameter_without_dims_has_a_state_too() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = build_optimizer(OptimSection(state_dtype="bf16"), model, LR)
    model.scale.grad = torch.tensor(0.5)
    optimizer.step()
    assert model.scale.item() == pytest.approx(1 - LR, rel=1e-4)
