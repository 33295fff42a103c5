"""What a device holds beyond the tensors, and how far off an estimate may be.

Invariant: the numbers are read from `overheads.toml`, which says what they were fitted on; this module must not hold
one itself.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """`fragment_share`: of what comes and goes within a step; `context_bytes`: outside of the allocator.

    `usable`: the part of a device's memory that a plan may count on. `low` and `high`: factors of the interval that
    holds four of five measured peaks.
    """

    fragment_share: float
    context_bytes: float
    usable: float
    low: float
    high: float


@cache
def load_overheads() -> Overheads:
    """The shipped numbers."""
    text = files(__package__).joinpath("overheads.toml").read_text(encoding="utf-8")
    return Overheads(**tomllib.loads(text)["overheads"])
