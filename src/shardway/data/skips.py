"""Spans of positions that no step takes, and where the positions between them are.

Invariant: everything here is a pure function of (position, spans): a step takes the next positions at or after its
beginning that lie in no span, and a span that lies behind changes nothing. This module must not know ranks, steps or
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardway.data.order import Ids


@dataclass(frozen=True)
class Skips:
    """Spans [from, to) of positions: in order, apart from one another, none of them empty (as `data.skip` has them).

    Positions in no span are *kept*; they are counted from 0 on.
    """

    spans: Sequence[Sequence[int]] = ()

    def count_kept(self, position: int) -> int:
        """How many kept positions come before this one."""
        behind = int(np.searchsorted(self._starts, position, side="right"))
        in_them = self._jumped[behind]
        if behind:
            in_them -= max(0, self.spans[behind - 1][1] - position)  # what is left of the span that it lies in
        return position - int(in_them)

    def find_kept(self, numbers: Ids) -> Ids:
        """The kept positions of these numbers (any shape), int64 -> int64."""
        kept_before = self._starts - self._jumped[:-1]
        return numbers + self._jumped[np.searchsorted(kept_before, numbers, side="right")]

    @cached_property
    def _starts(self) -> Ids:
        return np.array([span[0] for span in self.spans], np.int64)

    @cached_property
    def _jumped(self) -> Ids:
        """How many positions lie in the spans before the i-th, and in all of them."""
        return np.cumsum([0, *(end - start for start, end in self.spans)], dtype=np.int64)
