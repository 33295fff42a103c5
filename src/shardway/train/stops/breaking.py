"""Ends a validation before its end, on all ranks at the same batch.

All ranks agree before the first batch and then about once a second, by a small sum over CPU tensors that waits for no
device: after how many batches the next one comes follows from the time that all ranks together say the last ones took.

Invariant: at which batches is asked is the same on every rank, whatever their clocks say. This module must not decide
what comes after a validation that was broken off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardway.ranks.agreement import Decision, Wishes, read_decision
from shardway.ranks.start import Ranks
from shardway.train.stops.waiting import Waits, with_stand_ins
from shardway.train.validate import Validation

ASK_EVERY_S = 1.0
GROWTH = 4
"""By how much the batches between two questions may grow at once: the first ones are slow (compilers, caches)."""


def count_until_next(batches: int, seconds: float) -> int:
    """Batches until the ranks ask again, where so many took so long: about ASK_EVERY_S, at least one."""
    if seconds <= 0 or not math.isfinite(seconds):
        return max(1, GROWTH * batches)
    return max(1, min(int(batches * ASK_EVERY_S / seconds), GROWTH * batches))


def agree(ranks: Ranks, wishes: Wishes) -> Decision:
    """What all ranks decide between two steps; called on all of them together."""
    return read_decision(ranks.sum(torch.tensor(wishes.as_numbers(), dtype=torch.float64)).tolist())


class ValidationBreaks:
    """Of one validation; `wishes(missed)` is what this rank wants by now, `decision` what all have agreed on."""

    def __init__(
        self,
        ranks: Ranks,
        waits: Waits,
        wishes: Callable[[bool], Wishes],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._waits, self._wishes, self._clock = ranks, waits, wishes, clock
        self._asked_at = clock()
        self._batch = self._asked_before = self._next = 0
        self.decision = Decision()

    @property
    def batches(self) -> int:
        """How many batches were evaluated."""
        return max(0, self._batch - 1)

    def over(self, validation: Validation) -> Iterator[tuple[Any, bool]]:
        """The batches; once this rank gave up waiting for one, only stand-ins."""
        stream = iter(validation.batches())
        rows = validation.rows() if validation.rows is not None else None
        try:
            yield from with_stand_ins(stream, self._waits, self._ranks.device, rows)
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def breaks_off(self, *, missed: bool, last: bool = False) -> bool:
        """Whether all ranks stop here."""
        if not last:
            self._batch += 1
            if self._batch - 1 < self._next:
                return False
        now, done = self._clock(), self._batch - 1
        asked = torch.tensor([*self._wishes(missed).as_numbers(), now - self._asked_at], dtype=torch.float64)
        *wanted, seconds = self._ranks.sum(asked).tolist()
        self.decision = read_decision(wanted)
        self._next = done + count_until_next(max(1, done - self._asked_before), seconds / self._ranks.world)
        self._asked_at, self._asked_before = now, done
        return bool(self.decision.stop_reason)
