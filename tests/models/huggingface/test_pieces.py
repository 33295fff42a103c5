"""Pieces cover a parameter once, and any part of it is found again in the files' tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.models.huggingface.weights import Arrangement, ExpertNames, Shape, TensorRegion, keep_name, part_of, stack

SIZES = st.integers(1, 5)


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[Shape, Arrangement]:
    kind = draw(st.sampled_from(["keep", "stack", "part"]))
    shape = tuple(draw(st.lists(SIZES, min_size=2 if kind == "stack" else 1, max_size=3)))
    if kind == "keep":
        return shape, keep_name("w", shape)
    if kind == "stack":
        return shape, stack([f"w{index}" for index in range(shape[0])], shape)
    parts = draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, part_of("w", shape, dim, draw(st.integers(0, parts - 1)), parts)


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> TensorRegion:
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return TensorRegion(
        start, tuple(draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True))
    )


def in_files(values: np.ndarray, arrangement: Sequence) -> dict[str, np.ndarray]:
    """Files' tensors that hold the parameter; -1 where they hold something else."""
    files: dict[str, np.ndarray] = {}
    for piece in arrangement:
        tensor = files.setdefault(piece.name, np.full(piece.whole, -1))
        source = piece.source_of(piece.region)
        assert (tensor[source.slices] == -1).all()
        tensor[source.slices] = values[piece.region.slices].reshape(source.shape)
    return files


@given(st.data())
def test_every_part_of_a_parameter_is_found_in_the_files(data: st.DataObject) -> None:
    shape, arrangement = data.draw(arrangements())
    values = np.arange(np.prod(shape)).reshape(shape)
    files = in_files(values, arrangement)
    wanted = data.draw(regions(shape))
    found = np.full(shape, -1)
    for piece in arrangement:
        part = wanted.meet(piece.region)
        if not part.is_empty:
            assert (found[part.slices] == -1).all()
            found[part.slices] = files[piece.name][piece.source_of(part).slices].reshape(part.shape)
    assert np.array_equal(found[wanted.slices], values[wanted.slices])
    assert (found == -1).sum() == values.size - np.prod(wanted.shape)


@given(st.data())
def test_what_two_regions_have_in_common(data: st.DataObject) -> None:
    shape = (4, 3)
    one, other = data.draw(regions(shape)), data.draw(regions(shape))
    marked = np.zeros(shape, dtype=int)
    marked[one.slices] += 1
    marked[other.slices] += 1
    both = one.meet(other)
    assert both.is_empty or (marked[both.slices] == 2).all()
    assert (marked == 2).sum() == np.prod(both.shape)


NAMES = ExpertNames("moe", "w1", "w3", "w2")


@pytest.mark.parametrize(
    ("name", "shape", "apart", "stacked"),
    [
        ("l.mlp.gate.weight", (4, 8), "l.moe.gate.weight", "l.mlp.gate.weight"),
        ("l.mlp.experts.up", (4, 6, 8), "l.moe.experts.0.w3.weight", "l.mlp.experts.gate_up_proj"),
        ("l.mlp.experts.down", (4, 8, 6), "l.moe.experts.0.w2.weight", "l.mlp.experts.down_proj"),
        ("l.self_attn.o_proj.weight", (8, 8), "l.self_attn.o_proj.weight", "l.self_attn.o_proj.weight"),
    ],
)
def test_experts_stand_apart_or_in_stacks(name: str, shape: Shape, apart: str, stacked: str) -> None:
    each, whole = NAMES(name, shape)
    assert (each[0].name, whole[0].name) == (apart, stacked)
    assert (len(each), len(whole)) == (4 if ".experts." in name else 1, 1)


def test_up_is_the_second_half_of_the_stack() -> None:
    (gate,), (up,) = (NAMES(f"l.mlp.experts.{leaf}", (4, 6, 8))[1] for leaf in ("gate", "up"))
    assert (gate.whole, up.whole) == ((4, 12, 8), (4, 12, 8))
    assert (gate.start, up.start) == ((0, 0, 0), (0, 6, 0))
