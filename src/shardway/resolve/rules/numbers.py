"""Arithmetic that rules share.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

import itertools


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two; found from `wanted` outwards, to 1 at worst."""
    near = ((wanted - away, wanted + away) for away in itertools.count())
    found = (divisor for pair in near for divisor in pair if divisor > 0 and number % divisor == 0)
    return number if wanted > number else next(found)
