"""Curves that are cheap to draw: bounded while they grow, or thinned once they are whole.

Invariant: thinning never hides an extreme: the least and the greatest value of every bucket stay. This module must
not know how a curve is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class CurvePoint:
    """A value at a step; `value` may be NaN."""

    step: int
    value: float


class GrowingCurve:
    """Means of equally many consecutive values, at most `capacity` of them (even): full, it joins neighbours."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._stride = 1
        self._means: list[CurvePoint] = []
        self._pending: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Append a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._means.append(CurvePoint(step, _mean(self._pending)))
            self._pending.clear()
        if len(self._means) == self._capacity:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [CurvePoint(right.step, _mean([left.value, right.value])) for left, right in pairs]
            self._stride *= 2

    def undo_after(self, step: int) -> None:
        """Forget what came after `step`."""
        self._means = [point for point in self._means if point.step <= step]
        self._pending.clear()

    def columns(self, width: int) -> list[float]:
        """The curve as at most `width` means of equal parts, oldest first."""
        values = [point.value for point in self._means]
        return [_mean(part) for part in _split(values, min(width, len(values)))]


def thin(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """At most `limit` + 2 points (limit even): first, last, and the extremes of limit/2 buckets.

    A bucket without a finite value leaves one NaN, so that a gap stays a gap.
    """
    if len(points) <= limit:
        return list(points)
    kept = [point for bucket in _split(points, limit // 2) for point in _extremes(bucket)]
    first = [points[0]] if kept[0].step != points[0].step else []
    last = [points[-1]] if kept[-1].step != points[-1].step else []
    return first + kept + last


def smooth(points: Sequence[CurvePoint], half_window: int) -> list[CurvePoint]:
    """At each finite point the mean of it and of `half_window` finite ones on either side.

    Near the ends both sides shrink alike, so that the mean does not lag behind a slope. Points that are not finite
    are left out.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    sums = list(accumulate((point.value for point in finite), initial=0.0))
    means = []
    for index, point in enumerate(finite):
        reach = min(half_window, index, len(finite) - 1 - index)
        means.append(CurvePoint(point.step, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return means


def _extremes(bucket: Sequence[CurvePoint]) -> list[CurvePoint]:
    finite = [point for point in bucket if math.isfinite(point.value)]
    if not finite:
        return [CurvePoint(bucket[0].step, math.nan)]
    low, high = min(finite, key=lambda point: point.value), max(finite, key=lambda point: point.value)
    return sorted({low, high}, key=lambda point: point.step)


def _split(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """`values` cut into parts of nearly equal length."""
    return [values[len(values) * part // parts : len(values) * (part + 1) // parts] for part in range(parts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
