"""Which rows of a long table of cases `make check` runs; `make test` runs every one."""

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
