"""Arithmetic that rules share, shares of a global batch among it.

Invariants:
- Whole numbers stay whole (a run file may hold larger ones than a float can), and a search ends.
- A degree that is still "auto" counts as 1, which is so only where another rule has refused it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from shardway.resolve.draft import Draft

REACH = 4096
"""How far from a wanted number another one is looked for."""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two; 1 where there is none within reach."""
    return nearest_where(lambda divisor: number % divisor == 0, wanted, number)


def nearest_where(fits: Callable[[int], bool], wanted: int, most: int) -> int:
    """Of 1 to `most` the number nearest to `wanted` that fits, the smaller of two; 1 where there is none within reach.

    Whoever calls it knows that 1 fits.
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
    """One, two or more words as they stand in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def count_of(number: int, what: str) -> str:
    """A number and what it counts: 1 stage, 2 stages, 2 micro-batches."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


# --- How a global batch is cut over the ranks: arithmetic on a draft that rules share


def replicas_of(draft: Draft) -> int:
    """Over how many ranks a global batch is shared."""
    degrees = (draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard"))
    return math.prod(degree for degree in degrees if degree != "auto")


def share_of(draft: Draft) -> int:
    """The most samples of a step that a rank has."""
    return ceil_div(draft.get("train.global_batch"), replicas_of(draft))


def accumulation_of(draft: Draft) -> int:
    """Into how many micro-batches a rank's share is cut."""
    return ceil_div(share_of(draft), draft.get("train.micro_batch"))
