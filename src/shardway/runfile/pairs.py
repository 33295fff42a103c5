"""Values that change at positions, as a run file writes them: pairs [position, value], from position 0 on.

Invariant: all problems of a list are reported at once, and what is written is read as the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST = 10**18
"""The largest position, and the largest size of a step in pairs: sums of both fit in 64 bits."""


def list_wrong_pairs(pairs: list[Any], what: str, wanted: str, fits: Callable[[Any], bool]) -> list[str]:
    """What is wrong with pairs; `what` is the value of one ("weight"), `wanted` one that `fits` in words."""
    wrong, last = [], -1
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            wrong.append(f"{what} {pair!r} is no pair")
            continue
        start, value = pair
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= MOST:
            wrong.append(f"{what} {pair!r} is from no position (0 to {MOST})")
        elif start <= last:
            wrong.append(f"{what} {pair!r} does not come after position {last}")
        else:
            last = start
        if not fits(value):
            wrong.append(f"{what} {pair!r} is to no {wanted}")
    if not pairs or (isinstance(pairs[0], list) and pairs[0][:1] != [0]):
        wrong.insert(0, f"{what} does not begin at position 0")
    return wrong
