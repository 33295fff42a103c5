"""Numbers of a table that add up as they are shown.

Invariant: rounded parts sum to the rounded total, and none is off by a whole last digit. This module must not choose
units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def round_parts(parts: Sequence[float], decimals: int) -> list[float]:
    """Parts of at least 0, rounded so that they add up to their rounded sum: those nearest above are rounded up."""
    scale = 10**decimals
    scaled = [part * scale for part in parts]
    floors = [math.floor(each) for each in scaled]
    missing = round(sum(scaled)) - sum(floors)
    order = sorted(range(len(parts)), key=lambda place: floors[place] - scaled[place])
    raised = set(order[:missing])
    return [(floor + (place in raised)) / scale for place, floor in enumerate(floors)]
