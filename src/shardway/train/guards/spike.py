"""Losses and gradient norms far above those of the last steps.

Invariant: pure: what is told of a value follows from the values before it alone, so that whoever has the same values
finds the same spikes. This module must not act on it.

A value is compared with the median of the last ones in units of their spread, which is 1.4826 times the median absolute
deviation: the standard deviation where values are normal, and hardly moved by single outliers (Hampel, "The influence
curve and its role in robust estimation", JASA 69, 1974).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

WINDOW = 100
"""Values that the next is compared with."""
LEAST = 20
"""Values before which nothing is told."""
SMALLEST_SPREAD = 1e-3
"""The least spread, relative to the median: where a loss hardly moves, a breath is no spike."""


@dataclass(frozen=True)
class Spike:
    """A value so many `deviations` above the `median` of those before it."""

    value: float
    median: float
    deviations: float


@dataclass(frozen=True)
class Recent:
    """The last finite values of one number of a run, oldest first."""

    values: tuple[float, ...] = ()

    def after(self, value: float) -> Recent:
        """With one more value; one that is not finite is left out."""
        return Recent((*self.values, value)[-WINDOW:]) if math.isfinite(value) else self

    def find_spike(self, value: float, threshold: float) -> Spike | None:
        """Whether the next value lies more than `threshold` deviations above the last ones; None where it does not."""
        if len(self.values) < LEAST or not math.isfinite(value):
            return None
        median = statistics.median(self.values)
        spread = 1.4826 * statistics.median(abs(each - median) for each in self.values)
        deviations = (value - median) / max(spread, SMALLEST_SPREAD * abs(median), math.ulp(0.0))
        return Spike(value, median, deviations) if deviations > threshold else None


@dataclass(frozen=True)
class Spikes:
    """The last values of each number that is looked at, how many steps in a row up to now held a spike, and the first
    of them (0: none did)."""

    recent: Mapping[str, Recent] = field(default_factory=lambda: MappingProxyType({}))
    in_a_row: int = 0
    first: int = 0

    def find(self, values: Mapping[str, float], threshold: float) -> dict[str, Spike]:
        """The spikes among the numbers of the next step, by name."""
        found = {name: self._recent(name).find_spike(value, threshold) for name, value in values.items()}
        return {name: spike for name, spike in found.items() if spike is not None}

    def after(self, step: int, values: Mapping[str, float], found: Mapping[str, Spike]) -> Spikes:
        """With one more step. One whose numbers are not finite neither belongs to a row nor ends it."""
        recent = {name: self._recent(name).after(value) for name, value in values.items()}
        if not found and not all(map(math.isfinite, values.values())):
            return replace(self, recent=recent)
        return Spikes(recent, self.in_a_row + 1, self.first or step) if found else Spikes(recent)

    def as_numbers(self) -> dict[str, Any]:
        """For a checkpoint's manifest: whoever goes on from it finds what this run would find."""
        recent = {name: list(each.values) for name, each in self.recent.items()}
        return {"recent": recent, "in_a_row": self.in_a_row, "first": self.first}

    def _recent(self, name: str) -> Recent:
        return self.recent.get(name, Recent())


def read_spikes(numbers: Mapping[str, Any]) -> Spikes:
    """Those of a manifest; the window begins anew where it has none."""
    recent = {name: Recent(tuple(map(float, values))) for name, values in numbers.get("recent", {}).items()}
    return Spikes(recent, int(numbers.get("in_a_row", 0)), int(numbers.get("first", 0)))
