"""The findings of a probe, each with the command that printed it; and the time formats of schedulers.

Invariant: a finding's path is that of a key of a site profile, as a tuple, since a queue's name may contain a dot. No
command is run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str, ...]
"""("queues", "gpu", "max_walltime")"""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_PLACES = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}
_PLACES_AFTER_DAYS = {1: (3600,), 2: (3600, 60), 3: (3600, 60, 1)}
_DAY_S = 86400.0


@dataclass(frozen=True)
class ProbedFact:
    """One fact of a profile, in bytes or seconds where it is a size or a time, and the command that said it."""

    path: KeyPath
    value: Any
    command: str


@dataclass(frozen=True)
class ProbedFacts:
    """What was found, and what a person should know besides: each note is a sentence or two."""

    facts: tuple[ProbedFact, ...] = ()
    notes: tuple[str, ...] = ()

    def get(self, *path: str) -> Any:
        """The value at a path; None where nothing was found."""
        return next((fact.value for fact in self.facts if fact.path == path), None)

    def __add__(self, other: ProbedFacts) -> ProbedFacts:
        return ProbedFacts(self.facts + other.facts, self.notes + other.notes)


def collect(facts: Iterable[tuple[KeyPath, Any, str]], notes: Iterable[str] = ()) -> ProbedFacts:
    """Findings of those facts whose value is known (not None)."""
    known = (ProbedFact(path, value, command) for path, value, command in facts if value is not None)
    return ProbedFacts(tuple(known), tuple(notes))


def parse_time(value: Any) -> float | None:
    """Seconds from a scheduler's time: "1-00:00:00", "120:00:00", "5:00" (minutes, seconds), "30" (minutes; sbatch,
    --time) or a number of seconds (PBS' JSON); None for "UNLIMITED", "NONE" and whatever else is no time."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if value > 0 else None
    match = _TIME.fullmatch(str(value).strip())
    if match is None:
        return None
    numbers = [int(part) for part in match["clock"].split(":")]
    places = (_PLACES_AFTER_DAYS if match["days"] else _PLACES)[len(numbers)]
    seconds = sum(number * place for number, place in zip(numbers, places, strict=True))
    return seconds + _DAY_S * int(match["days"] or 0) or None
