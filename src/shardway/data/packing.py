"""Bins: documents of a few tokens share one sequence, long ones are cut into whole sequences.

Invariants:
- Bins follow from the lengths of the documents, in their order, and the capacity alone. For one `PACKING_VERSION` they
  are the same forever, so a bin has a number as any sample has one.
- A document is cut only if it has more pairs than a bin has room, and then as rarely as possible. Pieces overlap by one
  token, so that every token but the first of a document is a target exactly once.
- A bin holds documents of one window of WINDOW documents. This module must not read files.

A document of t tokens gives t - 1 (input, target) pairs; a bin has room for as many pairs as a sequence has inputs.
Best-fit-decreasing (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM
J. Computing 3, 1974): the longest piece first, each into the bin with the least room that still holds it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardway.data.formats.base import Offsets
from shardway.data.order import SampleOrder

PACKING_VERSION = 1
WINDOW = 10_000
"""How many consecutive documents are packed together: enough for bins that are full to some 0.05 %."""
_ORDER_SEED = 0


@dataclass(frozen=True, eq=False)
class Bins:
    """Pieces of documents by bin: those of bin b are `firsts[b]` to `firsts[b + 1]`, in the order of the store.

    `starts`: the first input token of each piece, counted in the store; `pairs`: how many pairs it has. `cuts`: how
    often a document was cut.
    """

    starts: Offsets
    pairs: Offsets
    firsts: Offsets
    cuts: int

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def fill(self, room: int) -> float:
        """The part of the room of all bins that holds pairs."""
        return float(self.pairs.sum()) / max(1, len(self) * room)


def pack_documents(ends: Offsets, room: int, window: int = WINDOW) -> Bins:
    """The bins of `room` pairs for documents that end at the tokens `ends` (the first begins at token 0)."""
    return Bins(*place_documents(ends, room, window, lambda pairs: fit(pairs, room)))


def place_documents(
    ends: Offsets, room: int, window: int, place: Callable[[Offsets], Offsets]
) -> tuple[Offsets, Offsets, Offsets, int]:
    """The fields of `Bins` for documents that end at the tokens `ends` (the first begins at token 0), cut into pieces
    of at most `room` pairs. `place`: the pairs of a window's pieces -> the bin of each, numbered from 0 without gaps.

    The bins of a window are in a fixed random order, so that the last ones of a store, which may be held out, are like
    the others. Documents of fewer than two tokens give nothing.
    """
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else np.zeros(0, np.int64)
    pieces, sizes, offsets, found = [], [], [np.zeros(1, np.int64)], 0
    cuts = 0
    for first in range(0, len(ends), window):
        begins, stops = starts[first : first + window], ends[first : first + window]
        at, pairs = _cut(begins, stops, room)
        if not len(at):
            continue
        cuts += len(at) - int(np.count_nonzero(stops - begins > 1))
        bins = place(pairs)
        count = int(bins.max()) + 1
        order = SampleOrder(count, _ORDER_SEED).ids(np.arange(count))
        bins = order[bins]
        sort = np.lexsort((at, bins))
        pieces.append(at[sort])
        sizes.append(pairs[sort])
        offsets.append(found + np.cumsum(np.bincount(bins, minlength=count)))
        found += len(at)
    none = [np.zeros(0, np.int64)]
    return np.concatenate(pieces or none), np.concatenate(sizes or none), np.concatenate(offsets), cuts


def _cut(starts: Offsets, ends: Offsets, room: int) -> tuple[Offsets, Offsets]:
    """First token and pairs of each piece of some documents: all pieces of a document but the last fill a bin."""
    pairs = ends - starts - 1
    pieces = np.maximum(-(-pairs // room), 0)
    document = np.repeat(np.arange(len(pairs)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    done = number * room
    return starts[document] + done, np.minimum(room, pairs[document] - done)


def fit(sizes: Offsets, room: int) -> Offsets:
    """The bin of each piece by best-fit-decreasing; `sizes` are 1 to `room`."""
    order = np.argsort(-sizes, kind="stable")
    placed: list[int] = []
    rooms: list[int] = []  # that some bins have left, rising
    having: dict[int, list[int]] = {}  # room -> those bins
    bins = 0
    for size in sizes[order].tolist():
        at = bisect_left(rooms, size)
        if at == len(rooms):
            number, left = bins, room - size
            bins += 1
        else:
            least = rooms[at]
            number, left = having[least].pop(), least - size
            if not having[least]:
                del having[least], rooms[at]
        placed.append(number)
        if left in having:
            having[left].append(number)
        elif left:
            having[left] = [number]
            insort(rooms, left)
    found = np.empty(len(sizes), np.int64)
    found[order] = placed
    return found
