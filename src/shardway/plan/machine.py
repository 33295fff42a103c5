"""The machine that a plan is for, in the numbers that time and memory need.

Invariant: every rate is one direction and per accelerator. Efficiency factors are in `plan.time.ceilings`; profiles are
read in `plan.site`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardway.errors import Problem, UserError, render_problems
from shardway.hardware.catalogue import Accelerator, Dtype

SHEET_WATTS = {"h100-sxm5-96gb": 700.0}
"""Power limit of the part whose peaks are also used for a variant with less power."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of `per_node` accelerators; `domain` of them are joined by the fast link (a node, or a rack of nodes).

    `link` and `network` are bytes per second and accelerator, one direction; `peer` is the part between two neighbours.
    """

    name: str
    accelerator: Accelerator
    per_node: int
    link: float
    peer: float
    network: float
    domain: int
    memory_bytes: int
    host_bytes: int | None = None
    """Memory of a node's host that a job may use; None: not known."""
    assumed: tuple[str, ...] = ()
    """Assumptions for what no source states, in sentences."""
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Factors measured on this machine, by name; they override the shipped ones."""

    def bytes_of_node(self, rank_bytes: float, ranks: int) -> float:
        """Bytes on a node's host if each of `ranks` ranks needs `rank_bytes`."""
        return rank_bytes * min(self.per_node, ranks)

    def spans_nodes(self, ranks: int, stride: int = 1) -> bool:
        """Whether a group of ranks, each `stride` from the next, leaves the fast link's domain."""
        return ranks * stride > self.domain

    def peak(self, precision: str) -> float:
        """Rated FLOP/s in a format; fp16 and bf16 run as fp32 on a part without them.

        Raises UserError if the part has no such products.
        """
        names: dict[str, tuple[Dtype, ...]] = {
            "fp32": ("fp32",),
            "tf32": ("tf32", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
            "bf16": ("bf16", "fp32"),
            "fp4": ("fp4", "fp8"),
        }
        wanted = names.get(precision, ("fp8",))
        found = next((peak for name in wanted if (peak := self.accelerator.peak(name))), None)
        if found is None:
            known = ", ".join(self.accelerator.peak_flops) or "none is known"
            what = f'"{precision}" has no rate on {self.accelerator.name}'
            raise UserError(render_problems("the plan", [Problem("precision.compute", what, allowed=known)]))
        return found

    @property
    def power_share(self) -> float:
        """The part's power limit over that of the part whose peaks it uses; 1 for its own peaks."""
        sheet, own = SHEET_WATTS.get(self.accelerator.key), self.accelerator.power_w
        return own / sheet if sheet and own else 1.0
