"""The events of rank 0 as a report holds them: those of steps as columns of numbers, so that a run of days fits.

Invariant: the order in which events were written is kept, and a number is the one that was written: NaN for null and
for what is no number.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from shardway.plain_arrays import find_arrays
from shardway.rundir.events import Event
from shardway.watch.facts import measured, seconds, whole

NUMBERS = ("loss", "tokens_per_s", "samples_per_s", "grad_norm", "lr", "seconds")
"""What is kept of a step, besides its number and its time."""


@dataclass(frozen=True)
class StepSeries:
    """Values of consecutive steps, as arrays: the step, the value (may be NaN) and the time (Unix seconds, or 0)."""

    step: Any
    value: Any
    time: Any

    def __len__(self) -> int:
        return len(self.step)

    def select(self, places: Any) -> StepSeries:
        """Some of them, by a mask, a slice or places."""
        return StepSeries(self.step[places], self.value[places], self.time[places])


class EventLog:
    """`others`: every event but those of steps. Add all events before the columns are looked at."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.others: list[Event] = []
        self._steps, self._times, self._places = array("d"), array("d"), array("q")
        self._columns, self._known = {name: array("d") for name in NUMBERS}, array("B")
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """The next event."""
        if event["event"] != "step":
            self.others.append(event)
            return
        step = whole(event, "step")
        self._steps.append(math.nan if step is None else step)
        self._times.append(seconds(event, "time") or 0.0)
        self._places.append(len(self.others))
        known = 0
        for bit, (name, column) in enumerate(self._columns.items()):
            column.append(measured(event, name))
            known |= (name in event) << bit
        self._known.append(known)

    @property
    def steps(self) -> int:
        """How many steps there are, undone ones too."""
        return len(self._steps)

    def column(self, name: str) -> Any:
        """A number of every step, NaN where it has none: float64."""
        return _view(self._columns[name])

    @cached_property
    def times(self) -> Any:
        """The time of every step (Unix seconds, or 0)."""
        return _view(self._times)

    @cached_property
    def numbers(self) -> Any:
        """The number of every step; NaN where it has none."""
        return _view(self._steps)

    @cached_property
    def places(self) -> Any:
        """For every step, how many of the other events were written before it."""
        return _view(self._places)

    def walk(self) -> Iterator[tuple[Sequence[Event], float, float, float]]:
        """Each step in order: the other events since the one before, its number, time and seconds."""
        before = 0
        columns = self._places, self._steps, self._times, self._columns["seconds"]
        for place, step, at, took in zip(*columns, strict=True):
            yield self.others[before:place], step, at, took
            before = place

    def list_parts(self, *names: str) -> Any:
        """For every step, how many events of these names were written before it."""
        np = find_arrays()

        return np.array([0, *accumulate(event["event"] in names for event in self.others)])[self.places]

    def list_series(self, name: str) -> list[StepSeries]:
        """A number of the steps that state it, null included, in parts within which time goes on and steps follow each
        other: attempts, and what lies between two steps of a clock."""
        np = find_arrays()

        if name not in self._columns:
            return []
        has = (_view(self._known) >> NUMBERS.index(name) & 1 > 0) & np.isfinite(self.numbers)
        found = StepSeries(self.numbers[has], self.column(name)[has], self.times[has])
        part = self.list_parts("started", "rolled_back")[has]
        cuts = np.flatnonzero((part[1:] != part[:-1]) | (found.time[1:] < found.time[:-1])) + 1
        edges = [0, *cuts.tolist(), len(found)]
        return [found.select(slice(low, high)) for low, high in pairwise(edges) if high > low]

    def find_valid(self) -> Any:
        """A mask of the steps of the last start that no rollback undid."""
        np = find_arrays()

        starts = [place for place, event in enumerate(self.others) if event["event"] == "started"]
        numbers = np.nan_to_num(self.numbers)
        valid = self.places > (starts[-1] if starts else -1)
        for place, event in enumerate(self.others):
            if event["event"] == "rolled_back" and (not starts or place > starts[-1]):
                base = event.get("step")
                valid &= (self.places > place) | (numbers <= (base if isinstance(base, int) else 0))
        return valid


def _view(column: array[Any]) -> Any:
    np = find_arrays()

    return np.frombuffer(column, column.typecode) if column else np.empty(0, column.typecode)
