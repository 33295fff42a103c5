"""Arrays in plain Python give what numpy gives, and have every name that reports ask them for."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from shardway.plain_arrays import PlainArray, find_arrays

SOURCE = Path(__file__).parents[1] / "src" / "shardway"


@pytest.fixture(name="plain")
def _plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part in plain Python, as where numpy cannot be imported."""
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "numpy", None)
        return find_arrays()


def test_numpy_is_taken_where_it_is_installed(plain: Any) -> None:
    assert plain is not numpy
    assert find_arrays() is numpy


def test_every_name_that_a_caller_uses_is_there(plain: Any) -> None:
    callers = [path for path in SOURCE.rglob("*.py") if "np = find_arrays()" in path.read_text(encoding="utf-8")]
    assert len(callers) >= 15
    missing = []
    for path in callers:
        for name in sorted(set(re.findall(r"\bnp\.([a-zA-Z_0-9.]+)", path.read_text(encoding="utf-8")))):
            found = plain
            for part in name.split("."):
                found = getattr(found, part, None)
            missing += [f"{path.name}: np.{name}"] if found is None else []
    assert missing == []


def _draw(rng: random.Random, count: int) -> list[float]:
    return [rng.choice((math.nan, math.inf, 0.0, rng.uniform(-9, 9), float(rng.randint(-3, 3)))) for _ in range(count)]


def _flags(rng: random.Random, count: int) -> list[bool]:
    return [rng.random() < 0.5 for _ in range(count)]


def _planes(np: Any) -> Any:
    return np.frombuffer(bytes(range(8)), np.uint8).reshape(4, -1)


CASES: dict[str, Callable[[Any, random.Random], Any]] = {
    "masks": lambda np, rng: np.array(_draw(rng, 9))[np.array(_flags(rng, 9)) | (np.arange(9) > 5)],
    "places": lambda np, rng: np.array(_draw(rng, 9))[np.array([3, -1, 0])],
    "slices": lambda np, rng: np.array(_draw(rng, 9))[::-2],
    "arithmetic": lambda np, rng: (2 - np.array(_draw(rng, 8)) * 3) / np.array([1.0, 2, 0, -1, 4, 5, 6, 7]),
    "integers": lambda np, rng: (np.arange(7) * 5 // 2 & 6 ^ 1) << 2 >> 1,
    "rows": lambda np, rng: np.array(_draw(rng, 4))[:, None],
    "broadcast": lambda np, rng: np.arange(3)[:, None] * np.arange(4) - np.array([1, 1, 2, 2]),
    "any of rows": lambda np, rng: np.array([_flags(rng, 4), _flags(rng, 4)]).any(axis=0),
    "sum of columns": lambda np, rng: np.array([[1.5, 2], [3, 4], [5, 6]]).sum(axis=1),
    "count": lambda np, rng: np.array([[True, False], [True, True]]).sum(axis=0),
    "deviation": lambda np, rng: [np.array([1.0, 2, 4, 9]).std(), np.array([1.0, 2, 4, 9]).var()],
    "where": lambda np, rng: np.where(np.isfinite(np.array(_draw(rng, 9))), 1.5, np.nan),
    "two of a kind": lambda np, rng: np.where(np.array([True, False, True]), np.array([1, 2, 3]), 7),
    "no nan": lambda np, rng: np.nan_to_num(np.array([1.0, math.nan, -2.0]), nan=5.0).clip(0),
    "differences": lambda np, rng: np.diff(np.array([1.0, 4, 9]), prepend=0.5),
    "sums so far": lambda np, rng: np.cumsum(np.array([[1, 2, 3], [4, 5, 6]]), axis=1),
    "searched": lambda np, rng: np.searchsorted(np.array([1.0, 2, 2, 5]), [0, 2, 9], side="right"),
    "unique": lambda np, rng: list(np.unique(np.array([3, 1, 3, 2, 1, 1]), return_counts=True)),
    "quantiles": lambda np, rng: np.quantile(np.array([3.0, 1, 4, 1, 5]), [0.1, 0.5, 1.0]),
    "median": lambda np, rng: np.median(np.array([3.0, 1, 4, 1])),
    "interpolated": lambda np, rng: np.interp([-1.0, 0.5, 1.5, 9], [0.0, 1, 3], [0.0, 10, 30]),
    "line": lambda np, rng: np.polyfit(np.arange(9) * 1.0, np.array([1.0, 2, 4, 3, 5, 7, 6, 8, 9]), 1),
    "smoothed": lambda np, rng: np.convolve(np.array([1.0, 5, 2, 8, 1]), np.ones(3) / 3, mode="same"),
    "smoothed by two": lambda np, rng: np.convolve(np.array([1.0, 5, 2, 8, 1]), np.ones(2) / 2, mode="same"),
    "split": lambda np, rng: [len(part) for part in np.array_split(np.arange(11), 4)],
    "cut": lambda np, rng: [part.tolist() for part in np.split(np.arange(6), np.array([2, 3]))],
    "largest of parts": lambda np, rng: np.fmax.reduceat(np.array([1.0, math.nan, 3, 2]), [0, 1, 2]),
    "largest rows": lambda np, rng: np.fmax.reduceat(np.array([[1.0, 2], [3, math.nan], [0, 9]]), [0, 2], axis=0),
    "sums of parts": lambda np, rng: np.add.reduceat(np.array([1, 2, 3, 4]), np.array([0, 3])),
    "smallest": lambda np, rng: np.fmin.reduce(np.array([[1.0, math.nan], [0.5, math.nan]]), axis=0),
    "bytes": lambda np, rng: np.frombuffer(bytes(range(16)), "<i4", 3, 4).astype(np.int64),
    "planes": lambda np, rng: np.ascontiguousarray(_planes(np).T).view("<u4"),
    "wraps": lambda np, rng: np.array([-1, 70000]).astype(np.uint16),
    "float bits": lambda np, rng: np.array([1078530011]).astype(np.uint32).view(np.float32),
    "order": lambda np, rng: np.argsort(np.array([3, 1, 2, 1]), kind="stable"),
    "joined": lambda np, rng: np.concatenate([np.array([[1, 2]]), np.array([[3, 4]])], axis=1),
    "with flags": lambda np, rng: np.array([1.0, 2.0, 3.0]) * np.array([True, False, True]),
    "no place": lambda np, rng: np.flatnonzero(np.array([False, False])),
}


def _plain_list(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return [_plain_list(each) for each in found]
    return found.tolist() if hasattr(found, "tolist") else found


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_numpy_gives(name: str, plain: Any) -> None:
    for seed in range(5):
        wanted = _plain_list(CASES[name](numpy, random.Random(seed)))
        found = _plain_list(CASES[name](plain, random.Random(seed)))
        if not (isinstance(wanted, list) and wanted and isinstance(wanted[0], list)):
            wanted, found = [wanted], [found]
        for each, other in zip(wanted, found, strict=True):
            assert other == pytest.approx(each, nan_ok=True)


def test_parts_are_set_as_numpy_sets_them(plain: Any) -> None:
    found = []
    for np in (numpy, plain):
        values, table = np.full(6, 1.0), np.full((3, 2), 5, np.int64)
        values[np.array([True, False, False, False, True, True])] = np.array([7.0, 8.0, 9.0])
        values[1:3] = 0.5
        values[-2] += 0.25
        table[np.array([True, False, True])] = np.array([1, 2])[:, None]
        table[1] = [8, 9]
        found.append((values.tolist(), table.tolist()))
    assert found[0] == found[1]


def test_shapes_that_do_not_go_together_are_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="do not go together"):
        plain.arange(3) + plain.arange(4)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(plain.arange(3) > 1)
    assert isinstance(plain.arange(3), PlainArray)
