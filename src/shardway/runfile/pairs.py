"""Values that change at positions, as a run file writes them: pairs [position, value], from position 0 on.

Invariant: all problems of a list are reported at once, and what is written is read as the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST = 10**18
"""The largest position, as of data.skip, and the largest size of a step in pairs: sums of both fit in 64 bits."""

BATCH_ALLOWED = (
    "an integer of at least 1, or pairs [position, samples] such as [[0, 32], [100000, 64]], from position 0 on"
)


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


# --- train.global_batch


def read_batch(value: Any) -> int | list[list[int]]:
    """The samples of a step: their number, or pairs [position, samples]. Raises ValueError with all that is wrong."""
    if isinstance(value, list):
        if wrong := list_wrong_pairs(value, "size", f"number of samples (1 to {MOST})", _is_size):
            raise ValueError(f"{'; '.join(wrong)}; allowed: {BATCH_ALLOWED}")
        return [list(pair) for pair in value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{_show(value)} is neither an integer nor a list of pairs; allowed: {BATCH_ALLOWED}")
    if value < 1:
        raise ValueError(f"{value} is too small; allowed: {BATCH_ALLOWED}")
    return value


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


_PAIR = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
BATCH_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": _PAIR, "minItems": 1}],
    "examples": [16, [[0, 32], [100000, 64]]],
    "description": "a number of samples, or pairs [position, samples]",
}
"""The JSON Schema of train.global_batch."""
