"""Sets of time: the same as counting the points of a grid one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardway.watch.trace import intervals

GRID = 40
spans = st.lists(st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(sorted), max_size=8)


def make(pairs: list[list[int]]) -> np.ndarray:
    found = np.array(pairs, dtype=float).reshape(-1, 2)
    return intervals.unite(found[:, 0], found[:, 1])


def cells(pairs: list[list[int]]) -> set[int]:
    return {cell for low, high in pairs for cell in range(low, high)}


def cells_of(times: np.ndarray) -> set[int]:
    ordered = times.ravel()
    assert (np.diff(ordered) > 0).all()  # sorted, apart, none empty
    return {cell for low, high in times.astype(int).tolist() for cell in range(low, high)}


@given(spans, spans)
def test_sets_agree_with_points(one: list[list[int]], other: list[list[int]]) -> None:
    assert cells_of(make(one)) == cells(one)
    assert cells_of(intervals.join(make(one), make(other))) == cells(one) | cells(other)
    assert cells_of(intervals.intersect(make(one), make(other))) == cells(one) & cells(other)
    assert cells_of(intervals.remove(make(one), make(other))) == cells(one) - cells(other)
    assert intervals.measure(make(one)) == len(cells(one))


@given(spans, spans, st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(sorted))
def test_parts_agree_with_points(one: list[list[int]], windows: list[list[int]], window: list[int]) -> None:
    low, high = window
    inside = cells(one) & set(range(low, high))
    assert cells_of(intervals.clip(make(one), low, high)) == inside
    assert cells_of(intervals.invert(make(one), low, high)) == set(range(low, high)) - inside
    edges = np.array(windows, dtype=float).reshape(-1, 2)
    counted = [len(cells(one) & set(range(*each))) for each in windows]
    assert np.allclose(intervals.measure_within(make(one), edges[:, 0], edges[:, 1]), counted)
