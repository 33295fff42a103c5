"""Which rows of a long table of cases `make check` and `make test` run; `make exhaustive` runs every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(names: Iterable[str], *fast: str) -> list[Any]:
    """The cases by name, all marked slow but those of `fast`: one of each mechanism is enough while writing."""
    cases = list(names)
    if missing := set(fast) - set(cases):
        raise ValueError(f"not among the cases: {sorted(missing)}")
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow, id=name) for name in cases]


def thin(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The cases, of which the first of `every` in a row is a part of `make test`."""
    return _thin_rows(((case,) for case in cases), every)


def thinned(names: str | tuple[str, ...], cases: Iterable[Any], *, every: int = 3) -> pytest.MarkDecorator:
    """Parametrize by these cases, or by these rows where there are several names, thinned as above."""
    return pytest.mark.parametrize(names, thin(cases, every) if isinstance(names, str) else _thin_rows(cases, every))


def _thin_rows(rows: Iterable[Iterable[Any]], every: int) -> list[Any]:
    further = (pytest.mark.slow, pytest.mark.exhaustive)
    return [pytest.param(*row, marks=further if index % every else ()) for index, row in enumerate(rows)]
