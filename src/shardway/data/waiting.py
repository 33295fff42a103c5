"""How long a rank waits for its batches, and what follows: loader processes that are started where they help
(data.workers = "auto"), and a line for a run that waits long.

Loader processes are worth their start only to a run that waits. So the rank reads its batches itself until it has
waited as long as a start takes. Then it goes on with loader processes from the position where it stands, and keeps the
number of them with which it is fastest.

Invariants:
- The samples of a step do not depend on what is measured here. Each rank decides alone, by its own times.
- A change comes between two batches, and the loader processes before it have ended. A loader process that dies while a
  number is tried does not end the run.
- This module reads no data and knows no ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from shardway.data.loader import Batch
from shardway.data.workers import Unsendable, WorkerDied

Clock = Callable[[], float]
Begin = Callable[[int, int], Iterator[Batch]]
"""Number of loader processes, position -> the batches from there on."""

START_S = 3.0
"""About the seconds that loader processes take to start: so long a rank waits for data before it starts some."""
LEAST = 0.05
"""The share of the time that may be spent waiting for data."""
GAIN = 0.05
"""A larger number of loader processes is kept if a step takes this much less time."""
MOST = 16
"""The most loader processes that are tried: each imports torch, some hundred megabytes of memory."""
_FEW = 4
_TRIAL_S = 1.0
_SPARE = 1.25
"""Loader processes for each one that would suffice by its time for a batch, which varies."""


@dataclass(frozen=True)
class WaitedStep:
    """Seconds of a step: waiting for its batch, and the rest."""

    waiting: float
    rest: float

    @property
    def whole(self) -> float:
        return self.waiting + self.rest

    @property
    def share(self) -> float:
        """The part spent waiting."""
        return self.waiting / self.whole if self.whole > 0 else 0.0


@dataclass(frozen=True)
class WorkerChoice:
    """The number of loader processes that a rank has settled on: the time of a step with them and `before`, without.

    `tried`: the most that were tried; `trouble`: what went wrong with them.
    """

    workers: int
    before: WaitedStep
    now: WaitedStep
    tried: int
    trouble: str = ""

    def __str__(self) -> str:
        before, now = _percent(self.before.share), _percent(self.now.share)
        if self.workers:
            return f"data.workers: auto took {self.workers}: waiting for data fell from {before} to {now}"
        tried = f"{self.tried} loader process{'es did' if self.tried > 1 else ' did'} not make it faster"
        return f"data.workers: auto stays at 0: {before} of the time is spent waiting for data, and " + (
            self.trouble or tried
        )


class WorkerSearch:
    """Finds the fastest number of loader processes, from 0 to `most`, from the times of steps. `choice` is None until
    it has settled."""

    def __init__(self, most: int, prefetch: int) -> None:
        self.workers = 0
        self.choice: WorkerChoice | None = None
        self._most, self._prefetch = most, prefetch
        self._found: dict[int, WaitedStep] = {}
        self._skip, self._waited, self._whole = 1, 0.0, 0.0  # files are opened for the first batch
        self._waits: list[float] = []
        self._rests: list[float] = []

    def add(self, waited: float, rest: float) -> int | None:
        """Add a step: seconds in which its batch was waited for, and all others until the next was asked for. Returns
        the number of loader processes to go on with if it changes."""
        if self._skip:
            self._skip -= 1
            return None
        self._waits.append(waited)
        self._rests.append(rest)
        self._waited, self._whole = self._waited + waited, self._whole + waited + rest
        return self._look_at_trial() if self._found else self._look_at_first()

    def give_up(self, trouble: str) -> int:
        """The number to go on with after loader processes failed."""
        fitting = {workers: each for workers, each in self._found.items() if workers < self.workers}
        return self._settle(min(fitting, key=lambda workers: fitting[workers].whole), trouble)

    def _begin(self, skip: int) -> None:
        self._skip, self._waited, self._whole = skip, 0.0, 0.0
        self._waits, self._rests = [], []

    def _look_at_first(self) -> int | None:
        """The rank reads itself: has it waited for as long as a start takes, and not in a single step?"""
        if self._waited >= START_S and len(self._waits) >= _FEW:
            time_now = WaitedStep(median(self._waits), median(self._rests))
            if time_now.share > LEAST:
                self._found[0] = time_now
                return self._try(math.ceil(_SPARE * time_now.waiting / max(time_now.rest, time_now.waiting / MOST)))
            self._begin(skip=0)
        elif self._whole > START_S / LEAST:
            self._begin(skip=0)
        return None

    def _look_at_trial(self) -> int | None:
        # The batches of several loader processes come several at a time, so waits are averaged.
        if len(self._waits) < max(8, 4 * self.workers) or self._whole < _TRIAL_S:
            return None
        now = self._found[self.workers] = WaitedStep(fmean(self._waits), median(self._rests))
        others = {workers: each for workers, each in self._found.items() if workers != self.workers}
        best = min(others, key=lambda workers: others[workers].whole)
        if now.whole > (1 - GAIN) * others[best].whole:
            return self._settle(best)
        if now.share <= LEAST or self.workers >= self._most:
            self._settle(self.workers)
            return None
        return self._try(2 * self.workers)

    def _try(self, workers: int) -> int:
        self.workers = min(max(1, workers), self._most)
        self._begin(skip=self.workers * (self._prefetch + 1) + 1)
        return self.workers

    def _settle(self, workers: int, trouble: str = "") -> int:
        tried = max(self.workers, *self._found)
        self.workers = workers
        self.choice = WorkerChoice(workers, self._found[0], self._found[workers], tried, trouble)
        return workers


def tuned_batches(
    begin: Begin,
    position: int,
    most: int,
    prefetch: int,
    tell: Callable[[WorkerChoice], object],
    slow: Callable[[float], object],
    clock: Clock = time.perf_counter,
) -> Iterator[Batch]:
    """The batches from `position` on, read by as many loader processes (0 to `most`) as make the run fastest; `tell` is
    given the choice once, and then `slow` as by `watched_batches`.

    Closing the iterator closes what `begin` has returned. An error of the data passes unchanged.
    """
    search = WorkerSearch(most, prefetch)
    reading = begin(0, position)
    try:
        while search.choice is None:
            asked, wanted = clock(), None
            try:
                batch = next(reading, None)
            except (Unsendable, WorkerDied) as error:
                if not search.workers:
                    raise
                wanted = search.give_up(str(error).partition("\n")[0])
            else:
                if batch is None:
                    return
                came, position = clock(), batch.next_position
                yield batch
                wanted = search.add(came - asked, clock() - came)
            if wanted is not None:
                _close(reading)
                reading = begin(wanted, position)
        tell(search.choice)
        yield from watched_batches(reading, slow, clock)
    finally:
        _close(reading)


def _close(reading: Iterator[Batch]) -> None:
    if (close := getattr(reading, "close", None)) is not None:
        close()


# --- a run that waits long is reported

MANY = 0.1
"""The share of the time from which waiting is reported."""
WINDOW_S = 60.0


def watched_batches(
    batches: Iterator[Batch], tell: Callable[[float], object], clock: Clock = time.perf_counter
) -> Iterator[Batch]:
    """The batches; `tell` is given the share of the time that was spent waiting for them, once, when it is more than
    MANY of about WINDOW_S seconds. The first batch, for which files are opened, does not count."""
    try:
        first = next(batches, None)
        if first is None:
            return
        yield first
        began, waited = clock(), 0.0
        while True:
            asked = clock()
            if asked - began >= WINDOW_S:
                if waited > MANY * (asked - began):
                    tell(waited / (asked - began))
                    break
                began, waited = asked, 0.0
            batch = next(batches, None)
            if batch is None:
                return
            waited += clock() - asked
            yield batch
        yield from batches
    finally:
        _close(batches)


def describe_waiting(share: float, workers: int, *, tunes: bool, in_sequence: bool = False) -> str:
    """The line for a run that waits this share of its time, and what to do. `tunes`: data.workers = "auto" is in
    effect, with `workers` of them. `in_sequence`: an iterable dataset is read, by one process at most."""
    if in_sequence:
        faster = "make its samples cheaper, or the dataset map-style, which several loader processes can read"
        remedy = faster if workers else "set data.workers = 1, so that a loader process reads ahead"
        return f"data: {_percent(share)} of the time is spent waiting for batches. To do: {remedy}."
    if tunes:
        remedy = f"give each rank more cores (data.workers: auto has {workers})"
    else:
        remedy = f'set data.workers = "auto"{f", or more than {workers}" if workers else ""}'
    return (
        f"data: {_percent(share)} of the time is spent waiting for batches. To do: {remedy}; `shardway data bench PATH`"
        " shows which layer limits."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
