"""The spans of `data.skip`: read from what a run file says, sorted and merged.

Invariant: what is returned is accepted again and stays as it is; all that is wrong is said at once. This module must
not know what a position is.
"""

from __future__ import annotations

from typing import Any

MOST = 10**18
"""The largest position: sums of it and of a batch still fit in 64 bits."""

ALLOWED = f"pairs [from, to] of whole numbers, from less than to, 0 to {MOST}, such as [[120000, 121000]]"


def read_skips(value: Any) -> list[list[int]]:
    """Pairs [from, to], in order, those that overlap or touch as one. Raises ValueError with all that is wrong."""
    entries = value if isinstance(value, list) else [value]
    wrong = [what for entry in entries if (what := _find_wrong(entry))]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; allowed: {ALLOWED}")
    merged: list[list[int]] = []
    for start, end in sorted(entries):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def _find_wrong(entry: Any) -> str:
    if not isinstance(entry, list) or len(entry) != 2:
        return f"{entry!r} is no pair"
    if any(isinstance(number, bool) or not isinstance(number, int) for number in entry):
        return f"{entry!r} holds what is no whole number"
    start, end = entry
    if start < 0 or end > MOST:
        return f"{entry!r} reaches out of the order"
    return "" if start < end else f"{entry!r} ends where or before it begins"
