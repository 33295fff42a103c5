"""Losses and gradient norms far above those of the last steps.

Invariant: pure: what is told of a value follows from the values before it alone. This module must not act on it.

A value is compared with the median of the last ones in units of their spread, which is 1.4826 times the median absolute
deviation: the standard deviation where values are normal, and hardly moved by single outliers (Hampel, "The influence
curve and its role in robust estimation", JASA 69, 1974).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

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
