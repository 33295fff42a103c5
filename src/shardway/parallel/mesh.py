"""The ranks as a grid with named axes; the only creator of process groups beside the default one.

Invariant: the grid is that of `shardway.layout`; only dims that split something, or that FSDP2 needs, have a group.
This module must not touch a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardway.errors import Bug
from shardway.layout import EXPERT_SHARD, SHARD, Layout, layout_of, needs_sharding
from shardway.ranks.start import Ranks
from shardway.runfile.schema import ParallelSection

DIMS = ("dp_replicate", "pp", SHARD, "tp")
"""Dims of the grid of weights, outermost first."""

EXPERT_DIMS = ("dp_replicate", "pp", EXPERT_SHARD, "ep", "tp")
"""Dims of the grid of experts' weights, outermost first."""

Part = tuple[tuple[str, int], ...]
"""Which part of a parameter: the place on each dim that splits it."""


@dataclass(frozen=True)
class Mesh:
    """The grid as seen from one rank. `devices` is None for a single process without a process group, `experts`
    where experts are not split, `context` where the sequence is not."""

    layout: Layout
    rank: int
    devices: DeviceMesh | None
    experts: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None

    def degree(self, dim: str) -> int:
        return self.layout.degree(dim)

    def coordinate(self, dim: str) -> int:
        return self.layout.coordinate(self.rank, dim)

    @property
    def data_ranks(self) -> int:
        """Into how many shares a global batch is cut."""
        return self.layout.data_ranks

    @property
    def data_rank(self) -> int:
        """Which share of the global batch is this rank's."""
        return self.layout.data_rank(self.rank)

    def answers_for(self, tensor: torch.Tensor) -> bool:
        """Whether no rank before this one holds the same part of a parameter or its gradient.

        True on exactly one of the ranks that hold a part alike; each pipeline stage has parameters of its own.
        """
        if not self._behind:
            return True
        split = _dims_that_split(tensor)
        return all(dim in split for dim in _dims_around(tensor) if dim in self._behind)

    def part_held(self, tensor: torch.Tensor) -> Part:
        """Which part of a parameter this rank holds, its stage of the pipeline among the dims.

        Ranks with the same answer for the same parameter hold the same numbers.
        """
        split = _dims_that_split(tensor) | {"pp"}
        return tuple((dim, self.coordinate(dim)) for dim in _dims_around(tensor) if dim in split)

    @cached_property
    def _behind(self) -> frozenset[str]:
        """The dims on which this rank is not the first, but for stages of a pipeline (asked for at every step)."""
        return frozenset(dim for dim in (*DIMS, *EXPERT_DIMS) if dim != "pp" and self.coordinate(dim) > 0)

    def part(self, *dims: str) -> DeviceMesh:
        return _part(self.devices, dims)

    def expert_part(self, *dims: str) -> DeviceMesh:
        return _part(self.experts, dims)

    def group(self, dim: str) -> dist.ProcessGroup:
        """The process group of one dim of the grid of weights, or of the context axis."""
        if dim != "cp":
            return self.part(dim).get_group()
        if self.context is None:
            raise Bug("the sequence is not split, so there is no context group")
        return self.context


def _part(devices: DeviceMesh | None, dims: tuple[str, ...]) -> DeviceMesh:
    if devices is None:
        raise Bug(f"there is no grid to take {' x '.join(dims)} of")
    return devices[dims] if len(dims) > 1 else devices[dims[0]]


def _dims_around(tensor: torch.Tensor) -> tuple[str, ...]:
    apart = isinstance(tensor, DTensor) and "ep" in (tensor.device_mesh.mesh_dim_names or ())
    return EXPERT_DIMS if apart else DIMS


def _dims_that_split(tensor: torch.Tensor) -> set[str]:
    if not isinstance(tensor, DTensor):
        return set()
    pairs = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return {name for name, placement in pairs if not (placement.is_replicate() or placement.is_partial())}


def build_mesh(ranks: Ranks, parallel: ParallelSection) -> Mesh:
    """Lay the ranks out. The degrees are resolved already; that their product fits is a rule of `resolve`."""
    layout = layout_of(parallel)
    if not ranks.grouped:
        return Mesh(layout, ranks.rank, None)
    if ranks.device.type != "cpu":
        torch.accelerator.set_device_index(ranks.device)
    devices = _grid(ranks.device.type, layout, DIMS)
    experts = _grid(ranks.device.type, layout, EXPERT_DIMS) if layout.ep > 1 else None
    context = None
    if layout.degree("cp") > 1:
        groups = sorted({layout.peers(rank, "cp") for rank in range(layout.world)})
        context, _ = dist.new_subgroups_by_enumeration([list(group) for group in groups])
    return Mesh(layout, ranks.rank, devices, experts, context)


def _grid(device: str, layout: Layout, dims: tuple[str, ...]) -> DeviceMesh:
    """Each dim costs process groups, and so threads and start-up time: only those in use are made.

    FSDP2 wants a dim to shard over also where that has a degree of 1.
    """
    always = {EXPERT_SHARD, *([SHARD] if needs_sharding(layout) or layout.world == 1 else [])}
    needed = tuple(dim for dim in dims if layout.degree(dim) > 1 or dim in always) or (SHARD,)
    return init_device_mesh(device, tuple(layout.degree(dim) for dim in needed), mesh_dim_names=needed)


def build_grid(device: str, degrees: Mapping[str, int]) -> DeviceMesh:
    """All ranks as a grid of these dims, for a library that lays a model out by its own plan."""
    return init_device_mesh(device, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def split_ranks(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """A process group of each of these parts, which share no rank; this rank's own, None where it is in no part.

    Called on all ranks together, with the same parts.
    """
    group, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts])
    return group if any(dist.get_rank() in part for part in parts) else None


def set_apart(ranks: Ranks) -> Ranks:
    """The same ranks over a group of their own on the CPU, for a thread whose messages must not meet those of training.

    Called on all ranks together. A rank may write for long while the others wait: the group has torch's own, longer
    timeout.
    """
    return replace(ranks, group=dist.new_group(backend="gloo")) if ranks.grouped else ranks
