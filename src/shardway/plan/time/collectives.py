"""Seconds of a collective in a group of ranks, over the fast link, the network, or both.

Invariant: sizes are those of the whole tensor (what an all-gather results in, what a reduce-scatter takes), on one
rank. This module must not know why something is sent.

Sources: rings: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), section 3. Ranks of a node that are in the
same group carry its messages over all of their adapters (NVIDIA, Doubling all2all performance with NCCL 2.12, 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardway.plan.machine import Machine
from shardway.plan.time.ceilings import Ceilings

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class CollectiveGroup:
    """`ranks` ranks, each `stride` after the one before."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True)
class Wires:
    """A machine with what is reached on it; without `rails` each rank's messages leave by its own adapter alone."""

    machine: Machine
    ceilings: Ceilings
    rails: bool = True

    def seconds(self, kind: Kind, size: float, group: CollectiveGroup) -> float:
        """One collective of `size` bytes."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        travels = size * (group.ranks - 1) / group.ranks * (2 if kind == "all_reduce" else 1)
        if not self._leaves(group):
            return travels / self._link_rate(group.ranks) + self.start(group)
        if kind == "all_to_all":
            return self._exchange(travels, group) + self.start(CollectiveGroup(2, self.machine.domain))
        rate = self._network_rate(group)
        return travels / rate * (1 + self.ceilings.half_bytes * group.ranks / size) + self.start(group)

    def start(self, group: CollectiveGroup) -> float:
        """What a message costs before its first byte."""
        if group.ranks == 1:
            return 0.0
        if not self._leaves(group):
            return self.ceilings.link_latency_s
        return self.ceilings.network_latency_s + self.ceilings.hop_s * group.ranks

    def send(self, size: float, stride: int) -> float:
        """One message to the rank `stride` further on."""
        leaves = self.machine.spans_nodes(2, stride)
        rate = self.machine.network * self.ceilings.network if leaves else self._link_rate(2)
        return size / rate + (self.ceilings.network_latency_s if leaves else self.ceilings.link_latency_s)

    def _leaves(self, group: CollectiveGroup) -> bool:
        return self.machine.spans_nodes(group.ranks, group.stride)

    def _link_rate(self, ranks: int) -> float:
        """Without a switch a rank reaches each of the others over a part of its links."""
        return min(self.machine.link, self.machine.peer * (ranks - 1)) * self.ceilings.link

    def _near(self, group: CollectiveGroup) -> int:
        """Ranks of the group that the fast link joins."""
        return max(1, min(group.ranks, self.machine.domain // group.stride))

    def _network_rate(self, group: CollectiveGroup) -> float:
        near = self._near(group)
        wire = (near if self.rails else 1) * self.machine.network * self.ceilings.network
        return min(wire, self._link_rate(near)) if near > 1 else wire

    def _exchange(self, travels: float, group: CollectiveGroup) -> float:
        """Of an all-to-all only what is for ranks of other domains leaves by the network."""
        near = self._near(group)
        inside = travels * (near - 1) / (group.ranks - 1)
        network = (travels - inside) / (self.machine.network * self.ceilings.network)
        return network + (inside / self._link_rate(near) if near > 1 else 0.0)
