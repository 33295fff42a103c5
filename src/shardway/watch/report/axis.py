"""The time axis that every figure of a report shares: wall time, in which long waits between attempts are short.

Invariants:
- A place is from 0 (the first sign of life) to 1 (the last) and never decreases with time.
- Time in which the run was alive has one scale everywhere; only time between its spans is squeezed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.plain_arrays import find_arrays

GAP_SHARE = 0.025  # a wait between two spans is drawn at most this wide, as a share of the time alive
GAPS_SHARE = 0.25  # all of them together
_JOINED_S = 30.0  # spans that are no further apart are one
_LATEST_S = 1e11  # dates beyond the year 5138 are damage
_TICK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


@dataclass(frozen=True)
class Tick:
    """A labelled place."""

    place: float
    label: str


@dataclass(frozen=True)
class TimeAxis:
    """Spans (first and last Unix second) in which the run was alive, increasing and disjoint; at least one."""

    spans: tuple[tuple[float, float], ...]

    @property
    def start(self) -> float:
        return self.spans[0][0]

    @property
    def end(self) -> float:
        return self.spans[-1][1]

    @property
    def alive_s(self) -> float:
        """Seconds in all spans."""
        return sum(end - start for start, end in self.spans)

    @property
    def knots(self) -> tuple[list[float], list[float]]:
        """Times and their places, between which the axis is linear."""
        alive = self.alive_s
        waits = [after[0] - before[1] for before, after in zip(self.spans, self.spans[1:], strict=False)]
        widths = [min(wait, GAP_SHARE * alive) for wait in waits]
        shrink = min(1.0, GAPS_SHARE * alive / sum(widths)) if widths else 1.0
        times, places, at = [], [], 0.0
        for (start, end), width in zip(self.spans, [*widths, 0.0], strict=True):
            times += [start, end]
            places += [at, at + end - start]
            at += end - start + width * shrink
        return times, [place / places[-1] for place in places]

    def place(self, times: Any) -> Any:
        """The places of times (a number or an array); those outside are at the ends."""
        np = find_arrays()

        return np.interp(times, *self.knots)

    def time(self, places: Any) -> Any:
        """The times at places."""
        np = find_arrays()

        times, knots = self.knots
        return np.interp(places, knots, times)

    def breaks(self) -> list[tuple[float, float, float]]:
        """Waits between spans: the places where they begin and end, and their seconds."""
        times, places = self.knots
        inner = range(1, len(times) - 1, 2)
        return [(places[at], places[at + 1], times[at + 1] - times[at]) for at in inner]

    def ticks(self, most: int = 8) -> list[Tick]:
        """About `most` round times since the start, inside the spans, no two closer than labels are wide."""
        step = next((each for each in _TICK_STEPS if self.alive_s / each <= most), 0)
        step = step or 86400 * max(1, math.ceil(self.alive_s / 86400 / most))
        ticks: list[Tick] = []
        for first, last in self.spans:
            number = math.ceil((first - self.start) / step - 1e-9)
            while number * step <= last - self.start + 1e-6 and len(ticks) < 4 * most:
                place = float(self.place(self.start + number * step))
                if not ticks or place - ticks[-1].place >= 0.6 / most:
                    ticks.append(Tick(place, render_since(number * step)))
                number += 1
        return ticks


def render_since(seconds: float) -> str:
    """ "0", "45 s", "2:30 min", "30 min", "1 h 30", "2 d", "2 d 6 h": a round time since the start."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole else "0"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min" if whole % 60 else f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60:02d}" if whole % 3600 else "")
    return f"{whole // 86400} d" + (f" {whole % 86400 // 3600} h" if whole % 86400 >= 3600 else "")


def make_axis(spans: Iterable[Sequence[float]]) -> TimeAxis | None:
    """The axis of spans in any order; None where none of them is a time."""
    known = sorted(
        (float(first), float(max(first, last)))
        for first, last in spans
        if math.isfinite(first) and math.isfinite(last) and 0 < first < _LATEST_S and last < _LATEST_S
    )
    merged: list[tuple[float, float]] = []
    for first, last in known:
        if merged and first - merged[-1][1] <= _JOINED_S:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    if not merged:
        return None
    if sum(last - first for first, last in merged) < 1.0:  # one moment still needs a width
        merged[-1] = (merged[-1][0], merged[-1][1] + 1.0)
    return TimeAxis(tuple(merged))
