"""Arithmetic that rules share, including the shares of a global batch.

Invariants:
- Integers stay exact (a run file may hold larger ones than a float can), and every search is bounded.
- A degree that is still "auto" counts as 1, which happens only if another rule has refused it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from shardway.resolve.draft import Draft

REACH = 4096
"""The largest distance from a wanted number that is searched."""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two; 1 if there is none within reach."""
    return nearest_where(lambda divisor: number % divisor == 0, wanted, number)


def nearest_where(fits: Callable[[int], bool], wanted: int, most: int) -> int:
    """The number of 1 to `most` nearest to `wanted` that fits, the smaller of two; 1 if there is none within reach.

    The caller guarantees that 1 fits.
    """
    start = min(wanted, most)
    near = ((start - away, start + away) for away in itertools.count())
    reachable = (number for pair in itertools.islice(near, REACH) for number in pair if 1 <= number <= most)
    return next((number for number in reachable if fits(number)), 1)


def nearest_multiple(unit: int, wanted: int) -> int:
    """The multiple of `unit` nearest to `wanted`, the larger of two; at least `unit`."""
    return max(1, (2 * wanted + unit) // (2 * unit)) * unit


def ceil_div(number: int, parts: int) -> int:
    """number / parts, rounded up."""
    return -(-number // parts)


def join_words(words: Sequence[str]) -> str:
    """One, two or more words in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def count_of(number: int, what: str) -> str:
    """A number with its noun: 1 stage, 2 stages, 2 micro-batches."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


# --- shares of a global batch


def replicas_of(draft: Draft) -> int:
    """The number of ranks that share a global batch."""
    degrees = (draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard"))
    return math.prod(degree for degree in degrees if degree != "auto")


def share_of(draft: Draft) -> int:
    """The most samples of a step that a rank has."""
    return ceil_div(draft.get("train.global_batch"), replicas_of(draft))


def accumulation_of(draft: Draft) -> int:
    """The number of micro-batches of a rank's share."""
    return ceil_div(share_of(draft), draft.get("train.micro_batch"))
