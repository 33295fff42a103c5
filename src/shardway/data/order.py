"""The order of samples as a pure function of (seed, position), and spans of positions that no step takes.

Invariants:
- For one `ORDER_VERSION` the same (samples, seed, shuffle, position) gives the same id forever; golden vectors in the
  tests check it.
- Skips: a step takes the next positions at or after its beginning that lie in no span. A span that lies behind changes
  nothing.

A *position* counts the samples that come before it over all ranks. Step s of global batch G takes positions
[sG, (s+1)G), or as many later ones if some are skipped (`data.skips`), and each rank a contiguous share of those rows.
Position p is row i of epoch e with (e, i) = divmod(p, samples), and the sample is pi(i) under a permutation keyed by
(seed, e). There is no state but the position itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardway.errors import UserError

ORDER_VERSION = 1
TABLE_SAMPLES = 65536
"""The most samples for which the permutation is a sorted table: a Feistel network on a tiny domain is visibly not
random (on 16 samples its chi-square is several times the limit), and the table is cheap there."""

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 6
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix64(words: Words) -> Words:
    """The output function of splitmix64, a bijection of 64-bit words (Steele, Lea, Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def derive_keys(key: Words, counters: npt.NDArray[np.integer]) -> Words:
    """Independent keys: output `counter` of the splitmix64 stream that starts at mix64(key).

    `key` and `counters` broadcast against each other.
    """
    return mix64(mix64(key) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA))


@dataclass(frozen=True)
class SampleOrder:
    """The endless sequence of sample ids of one source: every sample once an epoch, a new order each epoch.

    Raises UserError for an empty source or a seed that does not fit in 64 bits (two seeds must not silently give
    one order).
    """

    samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError("there are no samples to put in order; the data must have at least one")
        if not 0 <= self.seed <= _MASK:
            raise UserError(f"train.seed is {self.seed}; allowed: 0 to {_MASK}")

    def ids(self, positions: Ids) -> Ids:
        """The sample at each position (any shape, from 0 on), int64 -> int64."""
        epochs, rows = np.divmod(positions, np.int64(self.samples))
        if not self.shuffle:
            return rows
        permute = self._permute_table if self.samples <= TABLE_SAMPLES else self._permute_feistel
        return permute(epochs.ravel(), rows.ravel()).reshape(positions.shape)

    def _epoch_keys(self, epochs: Ids) -> Words:
        return derive_keys(np.array([self.seed], np.uint64), epochs)

    def _permute_table(self, epochs: Ids, rows: Ids) -> Ids:
        """Look each row up in its epoch's permutation, the stable order of splitmix64 outputs; a bounded number of
        tables at a time."""
        distinct, which = np.unique(epochs, return_inverse=True)
        block = max(1, TABLE_SAMPLES // self.samples)
        ids = np.empty_like(rows)
        for first in range(0, len(distinct), block):
            keys = self._epoch_keys(distinct[first : first + block])
            drawn = derive_keys(keys[:, None], np.arange(self.samples)[None, :])
            tables = np.argsort(drawn, axis=1, kind="stable").astype(np.int64, copy=False)
            here = (which >= first) & (which < first + block)
            ids[here] = tables[which[here] - first, rows[here]]
        return ids

    def _permute_feistel(self, epochs: Ids, rows: Ids) -> Ids:
        """Encrypt each row; a result outside the samples is encrypted again until it falls inside."""
        keys = self._epoch_keys(epochs)
        words = encrypt(rows.astype(np.uint64), keys, self.samples)
        outside = np.flatnonzero(words >= np.uint64(self.samples))
        while outside.size:
            words[outside] = encrypt(words[outside], keys[outside], self.samples)
            outside = outside[words[outside] >= np.uint64(self.samples)]
        return words.astype(np.int64)


def encrypt(words: Words, keys: Words, samples: int) -> Words:
    """A keyed bijection of the domain a*b, a = ceil(sqrt(samples)), b = ceil(samples / a), which holds `samples`.

    A Feistel network over a mixed radix (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
    2002, section 5): a word is (left, right) in Z_a x Z_b and each round adds a keyed function of one half to the
    other. The domain exceeds `samples` by less than a, that is by less than 1 % above `TABLE_SAMPLES`, so that
    few words need a second encryption.
    """
    radix_left = math.isqrt(samples - 1) + 1
    radix_right = -(-samples // radix_left)
    left, right = np.divmod(words, np.uint64(radix_right))
    for turn in range(_ROUNDS):
        if turn % 2 == 0:
            left = _add_round(left, right, keys, turn, radix_left)
        else:
            right = _add_round(right, left, keys, turn, radix_right)
    return left * np.uint64(radix_right) + right


def _add_round(half: Words, other: Words, keys: Words, turn: int, radix: int) -> Words:
    """(half + f(other)) mod radix, for half < radix < 2^32."""
    drawn = mix64(keys + other * np.uint64(_GAMMA) + np.uint64((turn + 1) * 0xD1B54A32D192ED03 & _MASK))
    total = half + ((drawn >> np.uint64(32)) * np.uint64(radix) >> np.uint64(32))
    return np.where(total >= np.uint64(radix), total - np.uint64(radix), total)


def position_share(global_batch: int, rank: int, ranks: int) -> range:
    """The rows of a global batch that `rank` takes: floor(G r / W) up to floor(G (r+1) / W).

    The shares of all ranks are the batch, in order, for any W; W need not divide G and may exceed it.
    """
    return range(global_batch * rank // ranks, global_batch * (rank + 1) // ranks)


# --- skipped spans of positions


@dataclass(frozen=True)
class Skips:
    """Spans [from, to) of positions: in order, not touching, none of them empty (as in `data.skip`).

    Positions in no span are *kept*; they are numbered from 0.
    """

    spans: Sequence[Sequence[int]] = ()

    def count_kept(self, position: int) -> int:
        behind = int(np.searchsorted(self._starts, position, side="right"))
        in_them = self._jumped[behind]
        if behind:
            in_them -= max(0, self.spans[behind - 1][1] - position)  # the rest of the span around it
        return position - int(in_them)

    def find_kept(self, numbers: Ids) -> Ids:
        """The kept positions with these numbers (any shape), int64 -> int64."""
        kept_before = self._starts - self._jumped[:-1]
        return numbers + self._jumped[np.searchsorted(kept_before, numbers, side="right")]

    @cached_property
    def _starts(self) -> Ids:
        return np.array([span[0] for span in self.spans], np.int64)

    @cached_property
    def _jumped(self) -> Ids:
        """For each span the number of skipped positions before it, and at the end their total."""
        return np.cumsum([0, *(end - start for start, end in self.spans)], dtype=np.int64)
