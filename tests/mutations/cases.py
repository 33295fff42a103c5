"""The cases: a file, a number, and the damage that follows from both; how many, and how a failure is told.

    SHARDWAY_MUTATIONS=20 python -m pytest tests/mutations        twenty times as many cases
    SHARDWAY_MUTATION="status.json 17" python -m pytest tests/mutations      this one alone

Invariant: a case is the same in every run. This module must not know what is called.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from mutate import Mutant, mutate

TIMES = int(os.environ.get("SHARDWAY_MUTATIONS", "1"))
ALONE = os.environ.get("SHARDWAY_MUTATION", "")
MOST_TOLD = 12


@dataclass(frozen=True)
class Case:
    """Damage number `number` of the file `name`."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    def dice(self) -> random.Random:
        """What is drawn for this case beside its damage."""
        return random.Random(f"{self} more")

    def mutant(self, data: bytes, form: str) -> Mutant:
        """The damage of this content."""
        return mutate(data, random.Random(str(self)), form)


def few_and_many(few: int, many: int) -> pytest.MarkDecorator:
    """The argument `numbers` of a test: the first few numbers of each file; for `make exhaustive`, all the others."""
    rest = pytest.param(range(few, many * TIMES), id="many", marks=pytest.mark.exhaustive)
    return pytest.mark.parametrize("numbers", [pytest.param(range(few), id="few"), rest])


def cases(names: Iterable[str], numbers: Iterable[int]) -> Iterator[Case]:
    """Every number of every file, or the one that the environment asks for."""
    for case in (Case(name, number) for name in names for number in numbers):
        if ALONE in ("", str(case)):
            yield case


def check_all(chosen: Iterable[Case], find_complaints: Callable[[Case], Sequence[str]]) -> int:
    """Try every case and fail with those that have complaints, each with what repeats it; how many were tried."""
    tried, failed = 0, []
    for case in chosen:
        tried += 1
        if complaints := find_complaints(case):
            failed.append(f"SHARDWAY_MUTATION={str(case)!r}: " + "\n    ".join(complaints))
    if failed:
        more = f"\n... and {len(failed) - MOST_TOLD} more" if len(failed) > MOST_TOLD else ""
        pytest.fail(f"{len(failed)} of {tried} cases\n" + "\n".join(failed[:MOST_TOLD]) + more, pytrace=False)
    return tried
