"""Splits records into parts of consecutive ones that have about equal bytes.

Invariants:
- The parts depend on the records alone, and every record is in one of them.
- Few places are asked for, at most about 2 log2(records) for each part, so that a split of billions takes no time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from shardway.data.formats.base import Records

_LOOKED_AT = 33
"""So many records, evenly spread, show whether a format says where its records lie."""


class RecordBytes:
    """Where records lie in the bytes of all their files, one file after the other. Records for which a format states
    one place, such as those of a group of rows, share its bytes equally; where a format states nothing, all do."""

    def __init__(self, records: Records) -> None:
        self._records, self._count = records, len(records)
        sizes = [file.size for file in records.parts.files]
        starts = [0, *itertools.accumulate(sizes)]
        self._starts: dict[Path, int] = {records.parts.path(number): starts[number] for number in range(len(sizes))}
        self._sizes: dict[Path, int] = {records.parts.path(number): size for number, size in enumerate(sizes)}
        self.total = max(1, starts[-1])
        """Bytes of all files."""
        places = np.unique(np.linspace(0, self._count - 1, _LOOKED_AT).astype(np.int64)).tolist()
        found = [self._find(number) for number in places]
        self._known = None not in found and found == sorted(found, key=lambda each: each or 0) and (found[-1] or 0) > 0

    def start(self, number: int) -> float:
        """Where a record begins; of the number after the last one, the end of all."""
        if number >= self._count or not self._known:
            return self.total * number / self._count
        here = self._begin(number)
        first, behind = self._find_tied(here)
        return here + (self._begin(behind) - here) * (number - first) / (behind - first)

    def size(self, number: int) -> float:
        """How many bytes a record has."""
        return self.start(number + 1) - self.start(number)

    def split(self, parts: int) -> tuple[tuple[int, int], ...]:
        """Up to so many parts, each as (first record, record after the last)."""
        cuts = {self._cut(self.total * part / parts) for part in range(1, parts)} - {0, self._count}
        return tuple(itertools.pairwise(sorted({0, self._count, *cuts})))

    def _cut(self, target: float) -> int:
        """The record whose start is next to a place."""
        if not self._known:
            return round(target * self._count / self.total)
        behind = bisect_right(range(self._count), target, key=self._begin)
        if not behind:
            return 0
        here = self._begin(behind - 1)
        first, behind = self._find_tied(here)
        each = (self._begin(behind) - here) / (behind - first)
        return first + (round((target - here) / each) if each else 0)

    def _find_tied(self, here: int) -> tuple[int, int]:
        """The records that begin at one place, as (first, after the last)."""
        numbers = range(self._count)
        return bisect_left(numbers, here, key=self._begin), bisect_right(numbers, here, key=self._begin)

    def _begin(self, number: int) -> int:
        """The place that the format states for a record."""
        return self.total if number >= self._count else self._find(number) or 0

    def _find(self, number: int) -> int | None:
        extent = self._records.extent(number)
        start = self._starts.get(extent.path)
        if start is None or extent.offset > self._sizes[extent.path]:
            return None
        return start + extent.offset
