"""The coordinate of a rank on each axis: the arithmetic of the grid, without torch.

Invariant: coordinates follow from the rank and the degrees alone, row-major over `AXES`, so that the axes with most
traffic are nearest: tp varies fastest and stays inside a node, then cp, then the shards. Pipeline stages send only
activations and may cross nodes; copies of the model exchange once a step and are farthest apart. Process groups are
made in `parallel.mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardway.errors import Bug

if TYPE_CHECKING:  # the planner uses layouts without a run file
    from shardway.runfile.schema import ParallelSection

AXES = ("dp_replicate", "pp", "dp_shard", "cp", "tp")
"""Axes of the grid, outermost first; ep lives over dp_shard x cp and is no axis of its own."""

SHARD = "dp_shard_cp"
"""dp_shard and cp as one dim: the ranks that share one copy of the states."""

EXPERT_SHARD = "dp_shard_by_ep"
"""The part of `SHARD` that is left for the states of experts after ep has split them; ep varies faster."""


@dataclass(frozen=True)
class Layout:
    """The degrees of a run. Raises Bug for a layout that is not resolved."""

    degrees: Mapping[str, int]
    ep: int = 1

    @property
    def world(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def data_ranks(self) -> int:
        """The number of shares of a global batch."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    def data_rank(self, rank: int) -> int:
        """The index of a rank's share of the global batch."""
        return self.coordinate(rank, "dp_replicate") * self.degrees["dp_shard"] + self.coordinate(rank, "dp_shard")

    def degree(self, dim: str) -> int:
        """The degree of an axis, or of a dim that combines axes."""
        merged = {
            SHARD: self.degrees["dp_shard"] * self.degrees["cp"],
            EXPERT_SHARD: self.degrees["dp_shard"] * self.degrees["cp"] // self.ep,
            "ep": self.ep,
        }
        return merged[dim] if dim in merged else self.degrees[dim]

    def coordinate(self, rank: int, dim: str) -> int:
        """The index of a rank on an axis, or on a dim that combines axes."""
        return rank // self._inner(dim) % self.degree(dim)

    def peers(self, rank: int, dim: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` in this dim alone, including itself, in the order of their coordinates."""
        inner = self._inner(dim)
        first = rank - self.coordinate(rank, dim) * inner
        return tuple(range(first, first + self.degree(dim) * inner, inner))

    def _inner(self, dim: str) -> int:
        """The difference in rank number between neighbours along a dim."""
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
    """Whether FSDP2 holds the states: if they are sharded, or if they are replicated beside another axis.

    DDP does not take weights that another axis has split, and fails under most pipeline schedules (decision 0009).
    """
    copied = layout.degree("dp_replicate") > 1
    return layout.degree(SHARD) > 1 or (copied and (layout.degree("tp") > 1 or layout.degree("pp") > 1))


IN_ROUNDS = ("interleaved", "zero_bubble")
"""Schedules that run micro-batches in rounds of equal size: as many as there are ranks, or a few more."""


def count_rounds(passes: int, ranks: int) -> int:
    """Rounds of an interleaved schedule as PyTorch makes them: each has as many micro-batches as there are ranks or a
    few more; a single round if there are fewer."""
    return max(1, passes // ranks)


def stages_of_rank(place: int, ranks: int, per_rank: int, schedule: str) -> tuple[int, ...]:
    """The stages that a rank holds: every `ranks`-th, or for zbv one on each arm of a V."""
    if schedule == "zbv":
        return (place, 2 * ranks - 1 - place)
    return tuple(range(place, ranks * per_rank, ranks))


def stages_of_schedule(schedule: str) -> tuple[int, int | None]:
    """The fewest and the most stages that a schedule takes on each rank; None: as many as there are blocks."""
    return {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2)}.get(schedule, (2, None))
