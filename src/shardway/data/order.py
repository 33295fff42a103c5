"""The order of samples of one source, and of a blend of several, as a pure function of (seed, position); and spans of
positions that no step takes.

Invariants:
- For one `ORDER_VERSION` the same (samples, weights, seed, shuffle, position) gives the same id forever; golden vectors
  in the tests check it.
- A part of a blend takes its samples in an order of its own, which does not depend on the weights: no change of them
  repeats or loses a sample within an epoch of the part, or changes the order before it.
- Skips: a step takes the next positions at or after its beginning that lie in no span. A span that lies behind changes
  nothing.

A *position* counts the samples that come before it over all ranks. A step that begins at position p takes G(p) samples
(`batch_ramp`): the positions [p, p + G(p)), or as many later ones if some are skipped (`data.skip`), and each rank a
contiguous share of those rows. The next step begins behind them.
Position p is row i of epoch e with (e, i) = divmod(p, samples), and the sample is pi(i) under a permutation keyed by
(seed, e). There is no state but the position itself.

In a blend, weights become whole numbers of slots c_d of a *cycle* of C slots. Cycle k is a permutation of the slots,
keyed by (seed, k), so that each cycle has exactly c_d samples of part d. Position p is slot j of cycle k with
(k, j) = divmod(p, C); if r slots before it in its cycle belong to its part d, it takes the sample that the part's own
order has at k c_d + r. Where weights change, a new *segment* begins with a cycle of its own, and the parts go on with
the next of their samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.batch_ramp import BatchRamp
from shardway.errors import UserError

ORDER_VERSION = 1
TABLE_SAMPLES = 65536
"""The most samples for which the permutation is a sorted table: a Feistel network on a tiny domain is visibly not
random (on 16 samples its chi-square is several times the limit), and the table is cheap there."""
MOST_SLOTS = 65536
"""The most slots of a cycle: the weights of a blend are exact to about 1/131072 of all samples, or quite exact if a
smaller cycle holds their ratio."""

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_KEPT_FROM = 2048
"""Permutations of so many numbers are kept between calls: making one takes longer than a call should."""
_KEYS_OF_PARTS, _KEYS_OF_CYCLES = 2**63, 2**63 + 2**62
"""Counters of the keys of a blend, above all epochs."""
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
        _check_seed(self.seed)

    def ids(self, positions: Ids) -> Ids:
        """The sample at each position (any shape, from 0 on), int64 -> int64."""
        epochs, rows = np.divmod(positions, np.int64(self.samples))
        if not self.shuffle:
            return rows
        permute = self._permute_table if self.samples <= TABLE_SAMPLES else self._permute_feistel
        return permute(epochs.ravel(), rows.ravel()).reshape(positions.shape)

    def epochs(self, positions: Ids) -> Ids:
        """The epoch at each position (any shape), int64 -> int64."""
        return positions // np.int64(self.samples)

    def find_positions(self, sample: int, start: int) -> Iterator[int]:
        """The positions of a sample from `start` on, without end."""
        for epoch in itertools.count(start // self.samples):
            position = epoch * self.samples + (self._find_row(epoch, sample) if self.shuffle else sample)
            if position >= start:
                yield position

    def _epoch_keys(self, epochs: Ids) -> Words:
        return derive_keys(np.array([self.seed], np.uint64), epochs)

    def _permute_table(self, epochs: Ids, rows: Ids) -> Ids:
        """Look each row up in its epoch's permutation; a bounded number of them at a time."""
        distinct, which = np.unique(epochs, return_inverse=True)
        block = max(1, TABLE_SAMPLES // self.samples)
        ids = np.empty_like(rows)
        for first in range(0, len(distinct), block):
            tables = draw_permutations(self._epoch_keys(distinct[first : first + block]), self.samples)
            if len(distinct) <= block:
                return tables[which, rows].astype(np.int64, copy=False)
            here = (which >= first) & (which < first + block)
            ids[here] = tables[which[here] - first, rows[here]]
        return ids

    def _permute_feistel(self, epochs: Ids, rows: Ids) -> Ids:
        return permute_large(rows, self._epoch_keys(epochs), np.uint64(self.samples), *find_radices(self.samples))

    def _find_row(self, epoch: int, sample: int) -> int:
        """The row of a sample in an epoch: the inverse of the permutation."""
        return find_row(self._epoch_keys(np.array([epoch])), self.samples, sample)


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= _MASK:
        raise UserError(f"train.seed is {seed}; allowed: 0 to {_MASK}")


# --- permutations: of few numbers as tables, of many as a cipher


def draw_permutations(keys: Words, count: int) -> npt.NDArray[np.integer]:
    """For each key a permutation of 0 .. count - 1, [keys, count]: the stable order of splitmix64 outputs."""
    if count >= _KEPT_FROM:
        return np.stack([_keep_permutation(key, count) for key in keys.tolist()])
    return np.argsort(derive_keys(keys[:, None], np.arange(count)[None, :]), axis=1, kind="stable")


@lru_cache(maxsize=32)
def _keep_permutation(key: int, count: int) -> npt.NDArray[np.integer]:
    drawn = derive_keys(np.array([key], np.uint64), np.arange(count))
    return np.argsort(drawn, kind="stable").astype(np.uint16 if count <= 2**16 else np.int64)


def find_row(key: Words, count: int, number: int) -> int:
    """The row that a permutation of 0 .. count - 1 with one key takes to a number."""
    if count <= TABLE_SAMPLES:
        return int(np.flatnonzero(draw_permutations(key, count)[0] == number)[0])
    words = decrypt(np.array([number], np.uint64), key, *find_radices(count))
    while words[0] >= count:
        words = decrypt(words, key, *find_radices(count))
    return int(words[0])


Radix = np.uint64 | Words


def find_radices(samples: int) -> tuple[np.uint64, np.uint64]:
    """The radices a = ceil(sqrt(samples)) and b = ceil(samples / a) of a domain a*b that holds `samples`."""
    left = math.isqrt(samples - 1) + 1
    return np.uint64(left), np.uint64(-(-samples // left))


def permute_large(rows: Ids, keys: Words, samples: Radix, left: Radix, right: Radix) -> Ids:
    """Encrypt each row; a result outside the samples is encrypted again until it falls inside. `samples` and the
    radices are those of all rows, or of each."""
    words = encrypt(rows.astype(np.uint64), keys, left, right)
    outside = np.flatnonzero(words >= samples)
    while outside.size:
        own = [each[outside] if isinstance(each, np.ndarray) else each for each in (samples, left, right)]
        words[outside] = encrypt(words[outside], keys[outside], own[1], own[2])
        outside = outside[words[outside] >= own[0]]
    return words.astype(np.int64)


def encrypt(words: Words, keys: Words, radix_left: Radix, radix_right: Radix) -> Words:
    """A keyed bijection of the domain radix_left * radix_right.

    A Feistel network over a mixed radix (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
    2002, section 5): a word is (left, right) in Z_a x Z_b and each round adds a keyed function of one half to the
    other. With the radices of `find_radices` the domain exceeds `samples` by less than a, that is by less than 1 %
    above `TABLE_SAMPLES`, so that few words need a second encryption.
    """
    left, right = np.divmod(words, radix_right)
    for turn in range(_ROUNDS):
        if turn % 2 == 0:
            left = _wrap(left + _round(right, keys, turn, radix_left), radix_left)
        else:
            right = _wrap(right + _round(left, keys, turn, radix_right), radix_right)
    return left * radix_right + right


def decrypt(words: Words, keys: Words, radix_left: Radix, radix_right: Radix) -> Words:
    """The inverse of `encrypt`."""
    left, right = np.divmod(words, radix_right)
    for turn in reversed(range(_ROUNDS)):
        if turn % 2 == 0:
            left = _wrap(left + radix_left - _round(right, keys, turn, radix_left), radix_left)
        else:
            right = _wrap(right + radix_right - _round(left, keys, turn, radix_right), radix_right)
    return left * radix_right + right


def _round(half: Words, keys: Words, turn: int, radix: Radix) -> Words:
    """A keyed function of the other half, below radix < 2^32."""
    drawn = mix64(keys + half * np.uint64(_GAMMA) + np.uint64((turn + 1) * 0xD1B54A32D192ED03 & _MASK))
    return (drawn >> np.uint64(32)) * radix >> np.uint64(32)


def _wrap(total: Words, radix: Radix) -> Words:
    """total mod radix, for total < 2 radix."""
    return np.where(total >= radix, total - radix, total)


# --- a blend of several sources


@dataclass(frozen=True)
class BlendSegment:
    """From position `start` on, each cycle has `counts` slots of each part."""

    start: int
    counts: tuple[int, ...]

    @property
    def slots(self) -> int:
        return sum(self.counts)


def count_slots(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """How many slots of a cycle each part has: in the ratio of the weights as they are written in decimal, if a cycle
    of at most `MOST_SLOTS` has it; else by largest remainder, and each part with a weight has at least one slot.

    Weights are 0 or above; one must be above 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [each / sum(exact) for each in exact]
    slots = math.lcm(*(share.denominator for share in shares))
    if slots <= MOST_SLOTS:
        return tuple(int(share * slots) for share in shares)
    counts = [max(1, int(share * MOST_SLOTS)) if share else 0 for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda part: counts[part] - shares[part] * MOST_SLOTS)
    for part in by_remainder[: max(0, MOST_SLOTS - sum(counts))]:
        counts[part] += 1
    while sum(counts) > MOST_SLOTS:  # of many parts with less than a slot
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@dataclass(frozen=True)
class BlendOrder:
    """The endless sequence of sample ids of several parts: each cycle has a fixed number of samples of each part, and
    each part its samples once in each of its own epochs.

    `sizes`: the samples of each part; ids number all parts one after the other. `weights`: for each part pairs
    (position, weight), the first from position 0. Without `shuffle` a part goes through its samples in order, and every
    cycle spreads the parts evenly: use i of c_d stands at (i + 1/2) / c_d of the cycle.

    Raises UserError for an empty part, and for a seed that does not fit in 64 bits.
    """

    sizes: tuple[int, ...]
    weights: tuple[tuple[tuple[int, float | Fraction], ...], ...]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise UserError("there are no samples to put in order; each part of a blend must have at least one")
        _check_seed(self.seed)

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    @cached_property
    def segments(self) -> tuple[BlendSegment, ...]:
        """Where the ratio of the parts changes, from position 0 on; one that keeps it is none."""
        found: list[BlendSegment] = []
        for start in sorted({start for steps in self.weights for start, _ in steps}):
            weights = [[weight for begin, weight in steps if begin <= start][-1] for steps in self.weights]
            counts = count_slots(weights)
            if not found or found[-1].counts != counts:
                found.append(BlendSegment(start, counts))
        return tuple(found)

    def ids(self, positions: Ids) -> Ids:
        """The sample at each position (any shape, from 0 on), int64 -> int64."""
        parts, numbers = self.locate(positions.ravel())
        epochs, rows = np.divmod(numbers, self._sizes[parts])
        if self.shuffle:
            large = self._is_large[parts]
            if large.all():
                rows = self._permute_large(parts, epochs, rows)
            else:
                rows[large] = self._permute_large(parts[large], epochs[large], rows[large])
                for part in np.unique(parts[~large]).tolist():
                    here = parts == part
                    rows[here] = self._orders[part]._permute_table(epochs[here], rows[here])
        return (self._firsts[parts] + rows).reshape(positions.shape)

    def epochs(self, positions: Ids) -> Ids:
        """The epoch of its own part at each position (any shape), int64 -> int64."""
        parts, numbers = self.locate(positions.ravel())
        return (numbers // self._sizes[parts]).reshape(positions.shape)

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """For each position [n] its part, and how many samples of that part come before it."""
        starts = np.array([segment.start for segment in self.segments])
        if len(starts) == 1 or (positions.size and positions.min() >= starts[-1]):
            return self._locate_within(len(starts) - 1, positions)
        which = np.searchsorted(starts, positions, side="right") - 1
        parts, numbers = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(which).tolist():
            here = which == number
            parts[here], numbers[here] = self._locate_within(number, positions[here])
        return parts, numbers

    def part_counts(self, position: int) -> Ids:
        """How many samples of each part come before a position."""
        starts = [segment.start for segment in self.segments]
        number = int(np.searchsorted(starts, position, side="right")) - 1
        return self._counts_before[number] + self._count_within(number, position - starts[number])

    def find_positions(self, sample: int, start: int) -> Iterator[int]:
        """The positions of a sample from `start` on: without end, unless its part is not taken any more."""
        part = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        numbers = self._orders[part].find_positions(
            sample - int(self._firsts[part]), int(self.part_counts(start)[part])
        )
        for number in numbers:
            if not self.segments[-1].counts[part] and number >= self.part_counts(self.segments[-1].start)[part]:
                return
            yield self._find_position(part, number)

    # --- the cycles

    def _locate_within(self, number: int, positions: Ids) -> tuple[Ids, Ids]:
        """As `locate`, for positions of one segment."""
        segment, before = self.segments[number], self._counts_before[number]
        cycles, slots = np.divmod(positions - segment.start, np.int64(segment.slots))
        distinct, which = np.unique(cycles, return_inverse=True)
        block = max(1, MOST_SLOTS // segment.slots)
        parts, ranks = np.empty_like(positions), np.empty_like(positions)
        for first in range(0, len(distinct), block):
            of_slots, ranks_of_slots = self._draw_cycles(segment, distinct[first : first + block])
            if len(distinct) <= block:
                parts, ranks = of_slots[which, slots], ranks_of_slots[which, slots]
            else:
                here = (which >= first) & (which < first + block)
                place = which[here] - first, slots[here]
                parts[here], ranks[here] = of_slots[place], ranks_of_slots[place]
        parts = parts.astype(np.int64, copy=False)
        return parts, before[parts] + cycles * np.array(segment.counts)[parts] + ranks

    def _draw_cycles(self, segment: BlendSegment, cycles: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The part of each slot of some cycles, and how many slots before it in its cycle have the same part: both
        [cycles, slots]."""
        if not self.shuffle:
            parts, ranks = _spread_cycle(segment.counts)
            return np.broadcast_to(parts, (len(cycles), len(parts))), np.broadcast_to(ranks, (len(cycles), len(ranks)))
        seed = derive_keys(np.array([self.seed], np.uint64), np.array([_KEYS_OF_CYCLES + segment.start], np.uint64))
        keys = derive_keys(seed, cycles)
        if segment.slots < _KEPT_FROM:
            return _deal(draw_permutations(keys, segment.slots), segment.counts)
        kept = [_keep_cycle(key, segment.counts) for key in keys.tolist()]
        return np.stack([parts for parts, _ in kept]), np.stack([ranks for _, ranks in kept])

    def _count_within(self, number: int, length: int) -> Ids:
        """How many of the first `length` samples of a segment belong to each part."""
        segment = self.segments[number]
        cycle, slot = divmod(length, segment.slots)
        whole = np.array(segment.counts, np.int64) * cycle
        if not slot:
            return whole
        parts, _ = self._draw_cycles(segment, np.array([cycle]))
        return whole + np.bincount(parts[0, :slot], minlength=len(self.sizes))

    def _find_position(self, part: int, number: int) -> int:
        """The position of the sample of a part before which `number` others come, which must exist."""
        within = int(np.flatnonzero([before[part] <= number for before in self._counts_before])[-1])
        segment = self.segments[within]
        cycle, rank = divmod(number - int(self._counts_before[within][part]), segment.counts[part])
        parts, _ = self._draw_cycles(segment, np.array([cycle]))
        return segment.start + cycle * segment.slots + int(np.flatnonzero(parts[0] == part)[rank])

    # --- facts of the parts

    @cached_property
    def _counts_before(self) -> list[Ids]:
        """For each segment, how many samples of each part come before it."""
        found = [np.zeros(len(self.sizes), np.int64)]
        for number, (segment, following) in enumerate(itertools.pairwise(self.segments)):
            found.append(found[-1] + self._count_within(number, following.start - segment.start))
        return found

    @cached_property
    def _sizes(self) -> Ids:
        return np.array(self.sizes, np.int64)

    @cached_property
    def _firsts(self) -> Ids:
        """The id of the first sample of each part."""
        return np.cumsum([0, *self.sizes[:-1]], dtype=np.int64)

    @cached_property
    def _orders(self) -> list[SampleOrder]:
        counters = np.arange(len(self.sizes)).astype(np.uint64) + np.uint64(_KEYS_OF_PARTS)
        seeds = derive_keys(np.array([self.seed], np.uint64), counters).tolist()
        return [SampleOrder(size, seed, self.shuffle) for size, seed in zip(self.sizes, seeds, strict=True)]

    @cached_property
    def _is_large(self) -> npt.NDArray[np.bool_]:
        return self._sizes > TABLE_SAMPLES

    @cached_property
    def _ciphers(self) -> Words:
        """Seed, samples and radices of each part, [4, parts]."""
        rows = [(order.seed, order.samples, *find_radices(order.samples)) for order in self._orders]
        return np.array(rows, np.uint64).T

    def _permute_large(self, parts: Ids, epochs: Ids, rows: Ids) -> Ids:
        seeds, samples, left, right = self._ciphers[:, parts]
        return permute_large(rows, derive_keys(seeds, epochs), samples, left, right)


def _deal(permutations: npt.NDArray[Any], counts: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The part of each slot, and its rank among those of its part, by permutations of the slots: both [n, slots]."""
    parts = np.repeat(np.arange(len(counts)).astype(np.uint16), counts)[permutations]
    # Slots by part, those of a part in their order: their ranks are 0 .. count - 1 of each part.
    by_part = np.argsort(parts, axis=1, kind="stable")
    ranks = np.empty(parts.shape, np.int32)
    np.put_along_axis(ranks, by_part, np.concatenate([np.arange(count) for count in counts])[None, :], axis=1)
    return parts, ranks


@lru_cache(maxsize=32)
def _keep_cycle(key: int, counts: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    parts, ranks = _deal(_keep_permutation(key, sum(counts))[None, :], counts)
    return parts[0], ranks[0]


@lru_cache(maxsize=32)
def _spread_cycle(counts: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """A cycle without chance: use i of a part's c stands at (i + 1/2) / c of it; of two at one place, the first part's
    comes first."""
    places = np.concatenate([(np.arange(count) * 2 + 1) / (2 * max(1, count)) for count in counts])
    parts, ranks = _deal(np.argsort(places, kind="stable")[None, :], counts)
    return parts[0], ranks[0]


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

    def number_ramp(self, batch: int | BatchRamp) -> BatchRamp:
        """The samples of a step as a function of the number of its first kept position: steps follow each other there
        without gaps."""
        return BatchRamp.of([(self.count_kept(start), size) for start, size in BatchRamp.of(batch).pairs])

    @cached_property
    def _starts(self) -> Ids:
        return np.array([span[0] for span in self.spans], np.int64)

    @cached_property
    def _jumped(self) -> Ids:
        """For each span the number of skipped positions before it, and at the end their total."""
        return np.cumsum([0, *(end - start for start, end in self.spans)], dtype=np.int64)
