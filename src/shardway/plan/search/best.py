"""The best layouts of a question, and why the others lost.

Invariant: of two layouts the one that takes less time for a step wins; within `NEAR` of each other the simpler one. A
layout is only offered where its memory fits. This module must not list what is legal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from shardway.plan.case import Case, Degrees, Recompute
from shardway.plan.estimate import Estimate, estimate, holds
from shardway.plan.machine import Machine
from shardway.plan.memory.breakdown import StageMemory, estimate_peak
from shardway.plan.memory.overheads import load_overheads
from shardway.plan.search.space import DegreeCandidates, Question, list_degrees, list_ways
from shardway.plan.time.ceilings import ceilings_of
from shardway.plan.time.step import estimate_step

NEAR = 0.02
"""Layouts whose steps differ by less are equal: the estimate is not that sharp."""


@dataclass(frozen=True)
class Candidate:
    """The best way to run some degrees, and what it loses against the best of all."""

    estimate: Estimate
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """Layouts that fit, best first, one for each set of degrees; how many were looked at; the nearest miss."""

    candidates: tuple[Candidate, ...]
    looked_at: int
    nearest: Estimate | None
    """Where nothing fits: what needs least memory."""

    @property
    def best(self) -> Estimate | None:
        """The layout to take."""
        return self.candidates[0].estimate if self.candidates else None


def search(question: Question, most: int = 10) -> SearchResult:
    """Look at every legal layout and return the `most` best; with states on the host where nothing else fits."""
    found = _search(question, most)
    if found.candidates or question.case.offload or "offload" in question.fixed:
        return found
    offloaded = _search(replace(question, case=replace(question.case, offload=True)), most)
    looked_at = found.looked_at + offloaded.looked_at
    return replace(offloaded if offloaded.candidates else found, looked_at=looked_at)


def _search(question: Question, most: int) -> SearchResult:
    pricer = _Pricer(question.machine)
    fitting: list[_Priced] = []
    nearest: _Priced | None = None
    for degrees in list_degrees(question):
        found, smallest = pricer.best_of(question, degrees)
        if found is not None:
            fitting.append(found)
        elif smallest is not None and (nearest is None or smallest.peak.device < nearest.peak.device):
            nearest = smallest
    ordered = [Candidate(estimate(each.case, question.machine)) for each in _order(fitting)[:most]]
    explained = tuple(replace(each, reason=explain_loss(ordered[0].estimate, each.estimate)) for each in ordered)
    missed = estimate(nearest.case, question.machine) if nearest is not None and not explained else None
    return SearchResult(explained, pricer.looked_at, missed)


@dataclass(frozen=True)
class _Priced:
    """A case whose memory is known, and its time where that was worth asking."""

    case: Case
    peak: StageMemory
    seconds: float = math.inf


class _Pricer:
    """Prices cases of one machine, memory first: what does not fit is not timed."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.looked_at = machine, 0
        self.ceilings, self.overheads = ceilings_of(machine), load_overheads()

    def _fits(self, priced: _Priced) -> bool:
        return holds(self.machine, priced.peak, priced.case.degrees.world)

    def best_of(self, question: Question, degrees: Degrees) -> tuple[_Priced | None, _Priced | None]:
        """The fastest way to run some degrees that fits, and the one that needs least memory where none does."""
        best: _Priced | None = None
        smallest: _Priced | None = None
        for way in list_ways(question, degrees):
            for found in self._walk(way, question.ladder):
                if self._fits(found):
                    timed = self._time(found)
                    best = timed if best is None or timed.seconds < best.seconds else best
                elif smallest is None or found.peak.device < smallest.peak.device:
                    smallest = found
        return best, smallest

    def _time(self, found: _Priced) -> _Priced:
        return replace(found, seconds=estimate_step(found.case, self.machine, self.ceilings).seconds)

    def _walk(self, way: DegreeCandidates, ladder: Sequence[Recompute]) -> Iterator[_Priced]:
        """Each micro-batch with as little recompute as fits, up to the first that does not fit with the most.

        What was too much for a micro-batch is too much for a larger one.
        """
        modes = list(ladder)
        for case in way.cases:
            found = self._weigh(case, modes[0])
            while not self._fits(found) and len(modes) > 1:
                modes.pop(0)
                found = self._weigh(case, modes[0])
            yield found
            if not self._fits(found):
                return

    def _weigh(self, case: Case, mode: Recompute) -> _Priced:
        self.looked_at += 1
        tried = case if mode == case.recompute else replace(case, recompute=mode)
        return _Priced(tried, estimate_peak(tried, self.overheads))


def _order(priced: Sequence[_Priced]) -> list[_Priced]:
    """Fastest first, but the simplest of those that are as fast as the fastest."""
    ordered = sorted(priced, key=lambda each: each.seconds)
    if not ordered:
        return []
    equal = [each for each in ordered if each.seconds <= ordered[0].seconds * (1 + NEAR)]
    first = min(equal, key=lambda each: (count_axes(each.case.degrees), each.case.recompute != "none"))
    return [first, *(each for each in ordered if each is not first)]


def count_axes(degrees: Degrees) -> int:
    """Axes that split something: fewer are simpler."""
    return sum(getattr(degrees, each.name) > 1 for each in fields(degrees))


def explain_loss(best: Estimate, other: Estimate) -> str:
    """What a layout spends more time on than the best: "bubble +11 %, tensor messages +4 %"; "" for the best."""
    if other is best:
        return ""
    lost = sorted(_differences(best, other), reverse=True)
    told = [f"{name} +{share:.0%}" for share, name in lost[:2] if share >= 0.01]
    more = count_axes(other.case.degrees) > count_axes(best.case.degrees)
    return ", ".join(told) or ("as fast, with more axes" if more else "as fast")


def _differences(best: Estimate, other: Estimate) -> Iterator[tuple[float, str]]:
    for name, seconds in other.time.items.items():
        yield (seconds - best.time.items.get(name, 0.0)) / best.time.seconds, name
