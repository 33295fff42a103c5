"""Which rows of a long table of cases `make test` runs; `make exhaustive` runs every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def picked(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases, of which those of `kept` are a part of `make test`. Raises ValueError where one is no case."""
    rows = list(cases)
    if missing := [each for each in kept if each not in rows]:
        raise ValueError(f"not among the cases: {missing}")
    return [pytest.param(row, marks=() if row in kept else pytest.mark.exhaustive) for row in rows]


def picked_pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Each of the first with each of the second, of which `make test` has each of either at least once: the first ones
    in turn with one of the second."""
    rows, columns = list(first), list(second)
    pairs = [(row, column) for row in rows for column in columns]
    return picked(pairs, *((row, columns[index % len(columns)]) for index, row in enumerate(rows)))


def thin(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The cases, of which the first of `every` in a row is a part of `make test`."""
    return _thin_rows(((case,) for case in cases), every)


def thinned(names: str | tuple[str, ...], cases: Iterable[Any], *, every: int = 3) -> pytest.MarkDecorator:
    """Parametrize by these cases, or by these rows where there are several names, thinned as above."""
    return pytest.mark.parametrize(names, thin(cases, every) if isinstance(names, str) else _thin_rows(cases, every))


def _thin_rows(rows: Iterable[Iterable[Any]], every: int) -> list[Any]:
    further = pytest.mark.exhaustive
    return [pytest.param(*row, marks=further if index % every else ()) for index, row in enumerate(rows)]
