"""Groups: documents of similar length, which fill a rectangle of rows and places together.

Invariants:
- Groups follow from the lengths of the documents, in their order, the length of a sequence and the tokens of a group
  alone. For one `GROUPING_VERSION` they are the same forever, so a group has a number as any sample has one.
- A document is cut only if it is longer than a sequence, as `shardway.data.packing` cuts it.
- A group holds documents of one window of WINDOW documents. This module must not read files.

Pieces are sorted by length, and groups are runs of them. Their number is the least that is possible, which it is if
each group from the longest piece on takes as many rows as fit. Among all divisions into so many groups the one with the
fewest places is chosen, by dynamic programming over the ends of groups: k groups end between the earliest place from
which the other groups reach the end, and the last one that k groups reach. These ranges do not overlap, so the work
grows with the pieces and not with pieces times groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardway.data.formats.base import Offsets
from shardway.data.order import SampleOrder
from shardway.data.packing import Bins, place_documents
from shardway.errors import UserError

GROUPING_VERSION = 1
WINDOW = 2**20
"""How many consecutive documents are grouped together."""


@dataclass(frozen=True, eq=False)
class DocumentGroups(Bins):
    """Bins that are groups: a row for each piece, padded to the longest of the group."""

    @cached_property
    def lengths(self) -> Offsets:
        """The pairs of the longest piece of each group."""
        return np.maximum.reduceat(self.pairs, self.firsts[:-1]) if len(self) else np.zeros(0, np.int64)

    @property
    def places(self) -> int:
        """The places of all groups: rows x length of each."""
        return int((np.diff(self.firsts) * self.lengths).sum())

    @property
    def padding(self) -> float:
        """The part of all places that holds no pair."""
        return 1 - float(self.pairs.sum()) / max(1, self.places) if len(self) else 0.0


def group_documents(ends: Offsets, seq_len: int, tokens: int, window: int = WINDOW) -> DocumentGroups:
    """The groups of documents that end at the tokens `ends` (the first begins at token 0), each of at most `tokens`
    places (at least `seq_len`)."""

    def place(pairs: Offsets) -> Offsets:
        by_length = np.argsort(-pairs, kind="stable")
        bounds = divide(pairs[by_length], tokens)
        groups = np.empty(len(pairs), np.int64)
        groups[by_length] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        return groups

    return DocumentGroups(*place_documents(ends, seq_len, window, place))


class LengthGroupedBatches:
    """Batches of samples of similar length for a script's own dataset, as the `batch_sampler` of `run.loader` or of
    torch's DataLoader; its `collate_fn` pads them.

    `lengths`: that of each sample. A batch has at most `tokens` places, its samples times the longest of them; batches
    are as few as possible, with the least padding that this allows. Their order, and which of the samples of one length
    are together, follow from `seed` and the epoch (`set_epoch`). Raises UserError for a length that is not 1 to
    `tokens`.
    """

    def __init__(self, lengths: Sequence[int], tokens: int, seed: int = 0) -> None:
        self.lengths, self.seed, self.epoch = np.asarray(lengths, np.int64), seed, 0
        wrong = np.flatnonzero((self.lengths < 1) | (self.lengths > tokens))
        if len(wrong):
            raise UserError(
                f"sample {wrong[0]} has the length {self.lengths[wrong[0]]}, and a batch is to have at most {tokens} "
                "tokens.\n  Allowed: lengths of 1 to that number."
            )
        self._bounds = divide(np.sort(self.lengths)[::-1], tokens)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[list[int]]:
        samples = self._shuffle(len(self.lengths), self.seed)
        samples = samples[np.argsort(-self.lengths[samples], kind="stable")]
        for number in self._shuffle(len(self), self.seed + 1).tolist():
            yield samples[self._bounds[number] : self._bounds[number + 1]].tolist()

    def _shuffle(self, count: int, seed: int) -> Offsets:
        return SampleOrder(count, seed).ids(self.epoch * count + np.arange(count)) if count else np.zeros(0, np.int64)


def divide(lengths: Offsets, tokens: int) -> Offsets:
    """Bounds of the groups of some pieces whose lengths do not rise: the fewest groups of at most `tokens` places,
    and of these divisions the one with the fewest places in all. A group is as long as its first piece."""
    pieces = len(lengths)
    # A group that begins at a piece ends at the latest here. This does not fall from piece to piece.
    reach = np.minimum(np.arange(pieces) + tokens // lengths, pieces)
    last = [0]
    while last[-1] < pieces:
        last.append(int(reach[last[-1]]))
    number = len(last) - 1
    first = [pieces]
    for _ in range(number):
        first.append(int(np.searchsorted(reach, first[-1])))
    first.reverse()
    changes = np.flatnonzero(np.diff(lengths)) + 1

    least, chosen = np.zeros(1, np.int64), list[Offsets]()
    for k in range(1, number + 1):
        begin, end = first[k - 1], last[k - 1]
        ends = np.arange(first[k], last[k] + 1)
        # Of pieces of equal length the first that reaches so far is the best to begin with: what is left to the
        # group before costs more there.
        own = changes[np.searchsorted(changes, begin, "right") : np.searchsorted(changes, end, "right")]
        alike = np.concatenate((np.array([begin]), own))
        begins = np.maximum(alike[:, None], np.searchsorted(reach, ends))
        places = least[begins - begin] + (ends - begins) * lengths[begins]
        best = places.argmin(axis=0)
        columns = np.arange(len(ends))
        least = places[best, columns]
        chosen.append(begins[best, columns])
    bounds = [pieces]
    for k in range(number, 0, -1):
        bounds.append(int(chosen[k - 1][bounds[-1] - first[k]]))
    return np.array(bounds[::-1], np.int64)
