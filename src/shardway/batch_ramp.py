"""The samples of a step as a function of the position where it begins: a constant, or a ramp of several sizes.

Invariant: a step that begins at position p takes `size_at(p)` samples, whatever came before it. So a position says all
of a run that resumes, and a ramp may change where no step has begun yet.

Everything is exact integer arithmetic that takes one turn for each size of the ramp, however many steps it counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BatchRamp:
    """Pairs (position, samples) in rising order of position, the first from 0: steps that begin there or later take so
    many samples, over all ranks. No two neighbours have the same size."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, batch: int | Sequence[Sequence[int]] | BatchRamp) -> BatchRamp:
        """The ramp of what a run file says (a number of samples, or pairs); of pairs with one position the last
        counts."""
        if isinstance(batch, BatchRamp):
            return batch
        if isinstance(batch, int):
            return cls(((0, batch),))
        pairs: list[tuple[int, int]] = []
        for start, size in batch:
            if pairs and pairs[-1][0] == start:
                pairs.pop()
            if not pairs or pairs[-1][1] != size:
                pairs.append((start, size))
        return cls(tuple(pairs))

    def __str__(self) -> str:
        """For a person: "32 samples, 64 from position 100000 on"."""
        later = "".join(f", {size} from position {start} on" for start, size in self.pairs[1:])
        return f"{self.pairs[0][1]} sample{'s' * (self.pairs[0][1] != 1)}{later}"

    @property
    def is_constant(self) -> bool:
        return len(self.pairs) == 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, each once, in the order of their first use."""
        return tuple(dict.fromkeys(size for _, size in self.pairs))

    @property
    def largest(self) -> int:
        return max(size for _, size in self.pairs)

    @property
    def smallest(self) -> int:
        return min(size for _, size in self.pairs)

    @property
    def last(self) -> int:
        """The size from the last position on."""
        return self.pairs[-1][1]

    def size_at(self, position: int) -> int:
        """The samples of a step that begins at a position."""
        return self.pairs[bisect_right(self._starts, position) - 1][1]

    def runs(self, start: int = 0) -> Iterator[tuple[int, int, int | None]]:
        """The steps that follow each other from `start` on, those of one size together: (where the first begins, its
        size, how many); the last without end (None)."""
        for number in range(bisect_right(self._starts, start) - 1, len(self.pairs) - 1):
            size, end = self.pairs[number][1], self.pairs[number + 1][0]
            if start < end:
                count = -(-(end - start) // size)
                yield start, size, count
                start += count * size
        yield start, self.last, None

    def count_steps(self, end: float, start: int = 0) -> int:
        """How many steps from `start` on it takes until one would begin at `end` or later."""
        last, steps = math.ceil(end), 0
        for first, size, count in self.runs(start):
            if count is None or last <= first + count * size:
                return steps + max(0, -(-(last - first) // size))
            steps += count
        return steps

    def find_start(self, steps: int, start: int = 0) -> int:
        """Where a step begins that has `steps` others between it and `start`."""
        for first, size, count in self.runs(start):
            if count is None or steps < count:
                return first + steps * size
            steps -= count
        return start

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.pairs)
