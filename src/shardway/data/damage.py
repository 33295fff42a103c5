"""Damaged samples: what takes their place in a batch, and which ones a rank has left out.

Invariants:
- The batch keeps its rows and their order. A whole sample has the values that it has without the damage. The row of a
  damaged one does not count: its targets are -100, and the rest of it is another whole sample of the batch, or zeros.
- Only `DamagedData` is damage: bytes that are not what an index or a checksum promises, a file that ends too early, a
  record or an image that cannot be decoded, a file of one sample that is gone. A shard that cannot be opened or read
  (JobError) is none: a file system that is away looks the same, and comes back. Nor is a copy on the node's own disk,
  of which the data themselves are whole, and which other nodes may read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardway.data.formats.base import DamagedData
from shardway.data.sources.base import Arrays, Ids
from shardway.data.sources.packed import NOT_COUNTED

_EMPTY_GROUP = np.zeros((1, 1), np.int64)
"""Stands for a group of documents (an object in its array) where no group of the batch is whole."""


@dataclass(frozen=True)
class LeftOut:
    """A sample that was left out: its number, the damaged file ("" where that is not known) and byte, and why."""

    sample: int
    file: str
    offset: int
    reason: str


def gather_whole(gather: Callable[[slice], Arrays], ids: Ids) -> tuple[Arrays, tuple[LeftOut, ...]]:
    """The samples `ids` of a source, without those that are damaged, and which these are. `gather` reads a span of
    them.

    Raises what `gather` raises; DamagedData too if it is of a copy, or if targets have no value that does not count
    (they are neither signed integers nor arrays of them).
    """
    try:
        return gather(slice(0, len(ids))), ()
    except DamagedData as error:
        if error.of_copy:
            raise
        first = error
    whole, left_out = dict[int, Arrays](), list[LeftOut]()
    for row, sample in enumerate(ids.tolist()):
        try:
            whole[row] = gather(slice(row, row + 1))
        except DamagedData as error:
            if error.of_copy:
                raise
            left_out.append(_describe(sample, error))
    some = next(iter(whole.values()), None)
    like = some or gather(slice(0, 0))
    if left_out and like["targets"].dtype.kind not in "iO":
        raise first
    arrays = {name: np.zeros((len(ids), *values.shape[1:]), values.dtype) for name, values in like.items()}
    for name, values in arrays.items():
        for row in range(len(ids)):
            found = whole.get(row, some)
            value = found[name][0] if found else _EMPTY_GROUP if values.dtype == object else values[row]
            values[row] = value if row in whole or name != "targets" else np.full_like(value, NOT_COUNTED)
    return arrays, tuple(left_out)


def _describe(sample: int, error: DamagedData) -> LeftOut:
    file, offset = (str(error.place.path), error.place.offset) if error.place is not None else ("", 0)
    return LeftOut(sample, file, offset, str(error).splitlines()[0])


@dataclass
class DamageFound:
    """What a rank has left out since its attempt began: the samples of each place, a place being what messages call
    it."""

    by_place: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    """A sample is ("train" or "validation", its number), and counts once, however often it comes."""

    @property
    def samples(self) -> int:
        """How many different samples."""
        return len(set().union(*self.by_place.values()))

    def add(self, of: str, left_out: Sequence[LeftOut]) -> list[LeftOut]:
        """Count samples; returns those that show a place for the first time."""
        new = []
        for each in left_out:
            if each.reason not in self.by_place:
                new.append(each)
            self.by_place.setdefault(each.reason, set()).add((of, each.sample))
        return new

    def join(self, other: DamageFound) -> None:
        """Count what another rank has left out."""
        for place, samples in other.by_place.items():
            self.by_place.setdefault(place, set()).update(samples)
