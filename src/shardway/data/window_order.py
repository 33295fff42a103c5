"""The order of samples that visits the files of a data set a few at a time, as a pure function of (seed, position).

Invariants:
- For one `WINDOW_ORDER_VERSION` the same (block ends, blocks of a window, seed, position) gives the same id forever;
  golden vectors in the tests check it.
- Each sample comes once an epoch, whatever the blocks are. Nothing here depends on the machine.
- The samples of a window come one after the other, so a step of fewer samples than any window has touches at most two.

Samples are divided into consecutive *blocks*, the samples of one file each. In each epoch the blocks are permuted, and
the permutation is cut into *windows* of almost the same number of blocks; the samples of a window come in a random
order. Position p is row i of epoch e with (e, i) = divmod(p, samples); row i lies in window k, and a permutation keyed
by (seed, e, k) says which sample of the window it is.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardway.data.order import (
    TABLE_SAMPLES,
    Ids,
    SampleOrder,
    Words,
    derive_keys,
    draw_permutations,
    find_radices,
    find_row,
    permute_large,
)
from shardway.errors import UserError

WINDOW_ORDER_VERSION = 1

_KEYS_OF_EPOCHS = 2**63 + 2**60
"""Counters of the keys of epochs, apart from those of other orders."""
_KEY_OF_BLOCKS = 2**63
"""The counter of the key that permutes blocks, above all windows of an epoch."""
_KEPT_EPOCHS = 4


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The blocks of an epoch in their order: `blocks` by number, `ends` the row behind each of them. `windows`: the row
    behind each window; `key` is that of the epoch, one word."""

    blocks: Ids
    ends: Ids
    windows: Ids
    key: Words


@dataclass(frozen=True, eq=False)
class WindowOrder:
    """The endless sequence of sample ids of one source, window by window.

    `ends`: the end of each block, rising (a block may be empty); the last is the number of samples. A window has at
    most `blocks_at_once` of the blocks that are not empty, and all windows the same number but for one.

    Raises UserError for an empty source, and for a seed that does not fit in 64 bits.
    """

    ends: Sequence[int]
    blocks_at_once: int
    seed: int
    _epochs: OrderedDict[int, _Epoch] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        if not len(self.ends):
            raise UserError("there are no samples to put in order; the data must have at least one")
        SampleOrder(self.samples, self.seed)  # checks both

    def __getstate__(self) -> dict[str, Any]:
        return {"ends": self.ends, "blocks_at_once": self.blocks_at_once, "seed": self.seed, "_epochs": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def samples(self) -> int:
        return int(self.ends[-1])

    @property
    def windows(self) -> int:
        """The number of windows of an epoch."""
        return -(-len(self._filled) // self.blocks_at_once)

    @property
    def filled(self) -> list[int]:
        """The blocks that have samples."""
        found: list[int] = self._filled.tolist()
        return found

    @property
    def least_samples(self) -> int:
        """Samples that every window has at least."""
        return int(np.sort(self._sizes[self._filled])[: len(self._filled) // self.windows].sum())

    def ids(self, positions: Ids) -> Ids:
        """The sample at each position (any shape, from 0 on), int64 -> int64."""
        epochs, rows = np.divmod(np.asarray(positions, np.int64).ravel(), np.int64(self.samples))
        found = np.empty_like(rows)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            found[here] = self._ids_of_rows(self._find_epoch(epoch), rows[here])
        return found.reshape(np.shape(positions))

    def epochs(self, positions: Ids) -> Ids:
        """The epoch at each position (any shape), int64 -> int64."""
        return positions // np.int64(self.samples)

    def find_positions(self, sample: int, start: int) -> Iterator[int]:
        """The positions of a sample from `start` on, without end."""
        block = int(np.searchsorted(self._ends, sample, side="right"))
        for number in itertools.count(start // self.samples):
            epoch = self._find_epoch(number)
            place = int(np.flatnonzero(epoch.blocks == block)[0])
            row = int(epoch.ends[place]) - int(self._ends[block]) + sample
            window = int(np.searchsorted(epoch.windows, row, side="right"))
            first, end = self._bounds(epoch, window)
            inner = find_row(self._window_key(epoch, window), end - first, row - first)
            position = number * self.samples + first + inner
            if position >= start:
                yield position

    # --- windows, numbered through all epochs

    def windows_at(self, positions: Ids) -> list[int]:
        """The windows of positions, each once, in order."""
        epochs, rows = np.divmod(np.asarray(positions, np.int64).ravel(), np.int64(self.samples))
        found: set[int] = set()
        for epoch in np.unique(epochs).tolist():
            own = np.searchsorted(self._find_epoch(epoch).windows, rows[epochs == epoch], side="right")
            found.update(epoch * self.windows + each for each in np.unique(own).tolist())
        return sorted(found)

    def blocks_of(self, window: int) -> list[int]:
        """The blocks of a window, those without samples left out."""
        number, inner = divmod(window, self.windows)
        cuts = self._cuts
        return self._find_epoch(number).blocks[cuts[inner] : cuts[inner + 1]].tolist()

    # --- one epoch

    @cached_property
    def _ends(self) -> Ids:
        return np.asarray(self.ends, np.int64)

    @cached_property
    def _sizes(self) -> Ids:
        return np.diff(self._ends, prepend=np.int64(0))

    @cached_property
    def _filled(self) -> Ids:
        """The blocks that have samples."""
        return np.flatnonzero(self._sizes).astype(np.int64)

    @cached_property
    def _cuts(self) -> list[int]:
        """The places in the permuted blocks at which a window begins, and their number."""
        return [len(self._filled) * window // self.windows for window in range(self.windows + 1)]

    def _find_epoch(self, number: int) -> _Epoch:
        found = self._epochs.get(number)
        if found is None:
            key = derive_keys(np.array([self.seed], np.uint64), np.array([_KEYS_OF_EPOCHS + number], np.uint64))
            of_blocks = derive_keys(key, np.array([_KEY_OF_BLOCKS], np.uint64))
            blocks = self._filled[draw_permutations(of_blocks, len(self._filled))[0]]
            ends = np.cumsum(self._sizes[blocks])
            found = _Epoch(blocks, ends, ends[np.array(self._cuts[1:]) - 1], key)
            while len(self._epochs) >= _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
            self._epochs[number] = found
        return found

    def _bounds(self, epoch: _Epoch, window: int) -> tuple[int, int]:
        """The first row of a window, and the one behind it."""
        return int(epoch.windows[window - 1]) if window else 0, int(epoch.windows[window])

    def _window_key(self, epoch: _Epoch, window: int) -> Words:
        return derive_keys(epoch.key, np.array([window]))

    def _ids_of_rows(self, epoch: _Epoch, rows: Ids) -> Ids:
        which = np.searchsorted(epoch.windows, rows, side="right")
        places = np.empty_like(rows)
        for window in np.unique(which).tolist():
            here = np.flatnonzero(which == window)
            first, end = self._bounds(epoch, window)
            places[here] = first + _permute(self._window_key(epoch, window), end - first, rows[here] - first)
        block = np.searchsorted(epoch.ends, places, side="right")
        found: Ids = self._ends[epoch.blocks[block]] - epoch.ends[block] + places
        return found


def _permute(key: Words, count: int, rows: Ids) -> Ids:
    """Each row of 0 .. count - 1 under a permutation of them."""
    if count <= TABLE_SAMPLES:
        return draw_permutations(key, count)[0][rows].astype(np.int64)
    return permute_large(rows, np.broadcast_to(key, rows.shape), np.uint64(count), *find_radices(count))
