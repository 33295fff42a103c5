"""How often a host may be connected to: sites shut out machines that come too often in a short time.

Invariant: two new connections are never closer than `GAP_S`, and the more of them failed in a row, the longer the
gap. This module must not connect; calls that ride a connection which is open cost nothing here.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from shardway.rundir.atomic import write_json

GAP_S = 5.0
"""Seconds between two new connections while all is well."""
LONGEST_GAP_S = 300.0


@dataclass(frozen=True)
class Budget:
    """What is known of the connections to one host: failures in a row, and when the last was tried (Unix seconds)."""

    failures: int = 0
    last: float = 0.0

    @property
    def gap_s(self) -> float:
        """Seconds that have to lie between the last connection and the next: doubled for each failure in a row."""
        return min(GAP_S * 2.0 ** min(self.failures, 30), LONGEST_GAP_S)

    def wait_s(self, now: float) -> float:
        """Seconds until the next connection may be tried; a clock that was set back does not lengthen them."""
        return min(max(self.last + self.gap_s - now, 0.0), self.gap_s)

    def after(self, now: float, ok: bool) -> Budget:
        """What is known after one more connection was tried."""
        return Budget(0 if ok else self.failures + 1, now)


def read_budget(path: Path) -> Budget:
    """What earlier calls, perhaps of other processes, left; a fresh one where there is nothing to read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        table = json.loads(path.read_text(encoding="utf-8"))
        last = float(table["last"])
        return Budget(max(int(table["failures"]), 0), last) if math.isfinite(last) else Budget()
    return Budget()


def write_budget(path: Path, budget: Budget) -> None:
    """Keep it for the next call; a full disk is no reason not to connect."""
    with contextlib.suppress(OSError):
        write_json(path, asdict(budget), durable=False)
