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
    return [pytest.param(case, marks=_marks(index % every)) for index, case in enumerate(cases)]


def thinned(names: str | tuple[str, ...], cases: Iterable[Any], *, every: int = 3) -> pytest.MarkDecorator:
    """Parametrize by these cases, or by these rows where there are several names, thinned as above."""
    if isinstance(names, str):
        return pytest.mark.parametrize(names, thin(cases, every))
    rows = [pytest.param(*row, marks=_marks(index % every)) for index, row in enumerate(cases)]
    return pytest.mark.parametrize(names, rows)


def _marks(late: int) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow, pytest.mark.exhaustive) if late else ()
