"""Who is there: nodes whose notes change.

Invariant: pure but for its own memory. A node's silence grows only by what its observer lived through: one that was
asleep itself (a stopped process, a machine that swaps) accuses nobody. This module must not talk to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOST_S = 10.0
"""A node whose note did not change for so long is lost."""

LONGEST_TICK_S = 1.0
"""The most that one look adds to a silence."""


@dataclass
class _Seen:
    count: int
    silent_s: float = 0.0


class Membership:
    """Looks at the counts of notes, by node; a node that was never seen is neither there nor lost."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._looked_at: float | None = None

    def look(self, counts: Mapping[int, int], now: float) -> None:
        """What the notes say at `now`, in monotonic seconds."""
        tick = min(now - self._looked_at, LONGEST_TICK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        for node, count in counts.items():
            known = self._seen.get(node)
            if known is None or known.count != count:
                self._seen[node] = _Seen(count)
            else:
                known.silent_s += tick

    @property
    def present(self) -> tuple[int, ...]:
        """Nodes that are there."""
        return tuple(sorted(node for node, seen in self._seen.items() if seen.silent_s <= LOST_S))

    def is_lost(self, node: int) -> bool:
        """Whether a node was there and has fallen silent."""
        return node in self._seen and self._seen[node].silent_s > LOST_S
