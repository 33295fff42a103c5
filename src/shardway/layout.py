"""Where a rank stands on each axis: the arithmetic of the grid, without torch.

Invariant: a rank's coordinates follow from its number and the degrees alone, row-major over `AXES`: who talks most is
nearest. So tp varies fastest and stays inside a node, then cp, then the shards; pipeline stages send only activations
and may cross nodes, and copies of the model, which talk once a step, are farthest apart. This module must not make
process groups (that is `parallel.mesh`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardway.errors import Bug

if TYPE_CHECKING:  # the planner asks where ranks stand without a run file
    from shardway.runfile.schema import ParallelSection

AXES = ("dp_replicate", "pp", "dp_shard", "cp", "tp")
"""Axes of the grid, outermost first; ep lives over dp_shard x cp and is no axis of its own."""

SHARD = "dp_shard_cp"
"""dp_shard and cp seen as one: the ranks that share one copy of the states."""

EXPERT_SHARD = "dp_shard_by_ep"
"""What is left of `SHARD` for the states of experts once ep has split them; ep varies faster."""


@dataclass(frozen=True)
class Layout:
    """The degrees of a run. Raises Bug for one that was not resolved."""

    degrees: Mapping[str, int]
    ep: int = 1

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(self.degrees.values())

    @property
    def data_ranks(self) -> int:
        """Into how many shares a global batch is cut."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch is a rank's."""
        return self.coordinate(rank, "dp_replicate") * self.degrees["dp_shard"] + self.coordinate(rank, "dp_shard")

    def degree(self, dim: str) -> int:
        """The degree of an axis, or of a dim made of axes."""
        merged = {
            SHARD: self.degrees["dp_shard"] * self.degrees["cp"],
            EXPERT_SHARD: self.degrees["dp_shard"] * self.degrees["cp"] // self.ep,
            "ep": self.ep,
        }
        return merged[dim] if dim in merged else self.degrees[dim]

    def coordinate(self, rank: int, dim: str) -> int:
        """A rank's place on an axis, or on a dim made of axes."""
        return rank // self._inner(dim) % self.degree(dim)

    def peers(self, rank: int, dim: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` in this dim alone, itself among them, in the order of their places."""
        inner = self._inner(dim)
        first = rank - self.coordinate(rank, dim) * inner
        return tuple(range(first, first + self.degree(dim) * inner, inner))

    def _inner(self, dim: str) -> int:
        """By how much the rank grows with one step along a dim."""
        tp, cp, shard = self.degrees["tp"], self.degrees["cp"], self.degrees["dp_shard"]
        whole = tp * cp * shard
        inner = {
            "tp": 1,
            "cp": tp,
            SHARD: tp,
            "ep": tp,
            EXPERT_SHARD: tp * self.ep,
            "dp_shard": tp * cp,
            "pp": whole,
            "dp_replicate": whole * self.degrees["pp"],
        }
        if dim not in inner:
            raise Bug(f"the grid has no axis {dim!r}")
        return inner[dim]


def layout_of(parallel: ParallelSection) -> Layout:
    """The layout of a resolved run file."""
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    if "auto" in degrees.values():
        raise Bug(f"the degrees {degrees} are not resolved")
    return Layout(degrees, parallel.ep)


def needs_sharding(layout: Layout) -> bool:
    """Whether the states go through FSDP2: where they are shared, and where they are copied beside another axis.

    DDP takes no weights that another axis has split, and fails under most pipeline schedules (decision 0009).
    """
    copied = layout.degree("dp_replicate") > 1
    return layout.degree(SHARD) > 1 or (copied and (layout.degree("tp") > 1 or layout.degree("pp") > 1))


IN_ROUNDS = ("interleaved", "zero_bubble")
"""Schedules that take micro-batches in rounds of equal size, of as many as there are ranks or a few more."""


def count_rounds(passes: int, ranks: int) -> int:
    """Rounds of an interleaved schedule as PyTorch makes them: each of as many micro-batches as there are ranks, or a
    few more; one where there are fewer."""
    return max(1, passes // ranks)


def stages_of_rank(place: int, ranks: int, per_rank: int, schedule: str) -> tuple[int, ...]:
    """Which stages a rank holds: every `ranks`-th, or for zbv there and back like a V."""
    if schedule == "zbv":
        return (place, 2 * ranks - 1 - place)
    return tuple(range(place, ranks * per_rank, ranks))
