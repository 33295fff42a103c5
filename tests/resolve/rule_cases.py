"""What a rule derives or refuses, as data: the tables in `cases_*.py` are lists of these.

Invariant: each table belongs to one or two modules of `shardway.resolve.rules`; `test_rules.py` runs them all and
knows that no rule is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Derives:
    """With these words, a rule gives a key a value for a reason."""

    rule: str
    words: tuple[str, ...]
    key: str
    value: Any
    reason: str
    circumstances: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}-{self.value}"


@dataclass(frozen=True)
class Refuses:
    """With these words, there is one problem: that of a rule, told so."""

    rule: str
    words: tuple[str, ...]
    told: str
    circumstances: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}-{' '.join(self.words)}"


CONVNET = ("model.kind=convnet", "data.kind=synthetic")
LATENT = ("model.kv_rank=16",)
GPU = {"accelerators": 2}
EMULATED = ("precision.compute=float8", "precision.float8_emulate=true")
PIPELINE = ("parallel.pp=2", "model.tied=false")
