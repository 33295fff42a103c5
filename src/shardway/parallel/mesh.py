"""The ranks as a grid with named axes; the only creator of process groups beside the default one.

Invariant: a rank's coordinates follow from its number alone (row-major over pp, dp_replicate, dp_shard, cp, tp, so
that tp varies fastest and stays inside a node). This module must not touch a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardway.errors import Bug
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ParallelSection

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the grid, outermost first; ep lives over dp_shard x cp and is no axis of its own."""


@dataclass(frozen=True)
class Mesh:
    """The grid as seen from one rank. `devices` is None for a single process without a process group."""

    degrees: Mapping[str, int]
    rank: int
    devices: DeviceMesh | None

    def coordinate(self, axis: str) -> int:
        """This rank's place on one axis."""
        inner = 1
        for name in reversed(AXES):
            if name == axis:
                return self.rank // inner % self.degrees[name]
            inner *= self.degrees[name]
        raise Bug(f"the mesh has no axis {axis!r}")

    @property
    def data_ranks(self) -> int:
        """Into how many shares a global batch is cut."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def data_rank(self) -> int:
        """Which share of the global batch is this rank's."""
        return self.coordinate("dp_replicate") * self.degrees["dp_shard"] + self.coordinate("dp_shard")

    def part(self, *axes: str) -> DeviceMesh:
        """The sub-grid of these axes that this rank is in; each must have a degree above 1 (or be the only one)."""
        if self.devices is None:
            raise Bug(f"a single process without a group has no sub-grid {axes}")
        return self.devices[axes]


def build_mesh(ranks: Ranks, parallel: ParallelSection) -> Mesh:
    """Lay the ranks out. The degrees are resolved already; that their product fits is a rule of `resolve`."""
    degrees = {axis: int(getattr(parallel, axis)) for axis in AXES}
    devices: DeviceMesh | None = None
    if ranks.grouped:
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        # Each axis costs process groups, and so threads and start-up time: only those that split anything are made.
        split = [axis for axis in AXES if degrees[axis] > 1] or ["dp_shard"]
        shape = tuple(degrees[axis] for axis in split)
        devices = init_device_mesh(ranks.device.type, shape, mesh_dim_names=tuple(split))
    return Mesh(degrees, ranks.rank, devices)
