"""What each rank of a pipeline does at every moment of a step: the schedule run with given seconds of a pass.

Invariant: a rank does one thing at a time, and nothing begins before what it needs is there. Messages take no time
here: the plan counts them apart. This module must not draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shardway.errors import Bug
from shardway.plan.case import Case
from shardway.plan.page.orders import SPLIT, Action, Kind, count_held, list_orders


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage: forward, backward for its input, backward for its weights."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Box:
    """A pass and when it is, in seconds from the start."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """All passes, those of a rank in their order; `held` stages a rank."""

    ranks: int
    held: int
    boxes: tuple[Box, ...]

    @cached_property
    def seconds(self) -> float:
        """From the first forward pass to the end of the last backward pass."""
        return max(box.end for box in self.boxes)

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        """What one rank does."""
        return tuple(box for box in self.boxes if box.rank == rank)

    def idle_seconds(self, rank: int) -> float:
        """For which a rank waits, before its first pass and after its last too."""
        return self.seconds - sum(box.end - box.start for box in self.of_rank(rank))

    def in_flight(self, rank: int) -> float:
        """Micro-batches whose activations a rank holds at once at most, in units of all of its stages."""
        own = self.of_rank(rank)
        frees: Kind = "weight" if any(box.action.kind == "weight" for box in own) else "backward"
        held = accumulate((box.action.kind == "forward") - (box.action.kind == frees) for box in own)
        return max(held) / self.held


def simulate_pipeline(case: Case, seconds: Sequence[StageSeconds]) -> Simulated:
    """Run the schedule of a case; `seconds` has one entry a pipeline rank, for each of its stages."""
    orders, parts = list_orders(case), case.schedule in SPLIT
    last = case.degrees.pp * count_held(case) - 1
    ends: dict[Action, float] = {}
    free = [0.0] * len(orders)
    places = [0] * len(orders)
    boxes: list[Box] = []
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = len(boxes)
        for rank, order in enumerate(orders):
            for action in order[places[rank] :]:
                ready = _ready(action, last, ends)
                if ready is None:
                    break
                start = max(ready, free[rank])
                free[rank] = ends[action] = start + _takes(action, seconds[rank], parts)
                boxes.append(Box(rank, action, start, free[rank]))
                places[rank] += 1
        if len(boxes) == before:
            raise Bug(f"the schedule {case.schedule} of {case.micro_batches} micro-batches waits for itself")
    return Simulated(len(orders), last // len(orders) + 1, tuple(boxes))


def _ready(action: Action, last: int, ends: dict[Action, float]) -> float | None:
    """When everything that a pass needs is there; None where some of it has not been reached yet."""
    needed = [ends.get(each) for each in _needs(action, last)]
    known = [end for end in needed if end is not None]
    return max(known, default=0.0) if len(known) == len(needed) else None


def _needs(action: Action, last: int) -> Iterable[Action]:
    """Passes that come before one."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "forward":
        return [Action("forward", stage - 1, number)] if stage > 0 else []
    if action.kind == "weight":
        return [Action("backward", stage, number)]
    after = [Action("backward", stage + 1, number)] if stage < last else []
    return [Action("forward", stage, number), *after]


def _takes(action: Action, seconds: StageSeconds, parts: bool) -> float:
    """Seconds of a pass; a backward pass that is not parted has both of its parts."""
    if action.kind == "forward":
        return seconds.forward
    if action.kind == "weight":
        return seconds.weight
    return seconds.backward if parts else seconds.backward + seconds.weight
