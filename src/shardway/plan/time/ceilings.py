"""The achieved fraction of rated speeds, and seconds of a collective over fast links, network, or both.

Invariants:
- A factor belongs to a kind of part (a generation of accelerators, a kind of link, a kind of kernel), never to one
  machine, model or publication. The shipped factors are in `ceilings.toml`, which `bench/planner/fit.py` writes.
- Sizes of collectives are those of the whole tensor (the result of an all-gather, the input of a reduce-scatter), on
  one rank.

Sources: rings: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), section 3. Ranks of a node in the same
group carry its messages over all of their adapters (NVIDIA, Doubling all2all performance with NCCL 2.12, 2022).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from shardway.hardware.catalogue import Accelerator
from shardway.plan.machine import Machine

GENERATIONS = {
    "volta": ("v100*",),
    "ampere": ("a100*", "a40*"),
    "hopper": ("h100*", "h200*", "h800*", "gh200*"),
    "ada": ("l40s*", "rtx*"),
    "blackwell": ("b200*", "b300*", "gb200*", "gb300*"),
    "cdna": ("mi*",),
}
"""Kinds of accelerators by the start of their keys; a factor that a kind lacks is the general one."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Factors by name. Rates are fractions of the rated speed, `_s` are seconds, `_bytes` bytes."""

    matmul: float
    """Of the 16-bit peak, for a large product during training."""
    matmul_low: float
    """Of the 8-bit peak."""
    matmul_fp4: float
    """Of the 4-bit peak."""
    matmul_ramp: float
    """Depth of a product at which its time doubles."""
    narrow_ramp: float
    """Width of its narrower side at which its time doubles."""
    misaligned: float
    """Additional time of a product if rows of its matrices are no multiples of 16 bytes."""
    misaligned_batched: float
    """The same for the products of unfused attention, with such a head width."""
    batched: float
    """Of the 16-bit peak, for the many small products of unfused attention."""
    scores_passes: float
    """How often unfused attention moves its scores, forward."""
    flash1: float
    """Of the 16-bit peak, for the forward pass of fused attention: first version; then later ones."""
    flash2: float
    flash3: float
    flash_ramp: float
    """Mean span of scores at which the time of fused attention doubles."""
    flash_backward: float
    """The rate of its backward pass over that of its forward pass."""
    memory: float
    """Of the memory's bandwidth, for operators that only move numbers."""
    stream: float
    """Traffic of operators on the residual stream over the least possible."""
    gates: float
    """The same for activations, rotations and casts."""
    plain_norm: float
    """Moves of a norm that goes through copies; one without copies has 2."""
    sums: float
    """Traffic of an engine that adds gradients apart from products, over the least possible."""
    kernel_s: float
    """Host seconds to start one operator."""
    power: float
    """Rates fall with this power of a part's power limit over that of the part whose peaks it uses."""
    link: float
    """Of the fast link's bandwidth."""
    link_latency_s: float
    network: float
    """Of the network's bandwidth, for large messages."""
    network_latency_s: float
    hop_s: float
    """Added by one more rank in a ring over the network."""
    half_bytes: float
    """Message size of one rank that reaches half of the network's bandwidth."""
    overlap: float
    """Part of the computation behind which messages hide."""
    async_tensor: float
    """Part of a tensor axis' messages that decomposed products hide (not fitted: Wang et al., ASPLOS 2023)."""
    optimizer_passes: float
    """Traffic of the update over the least possible."""
    step_s: float
    """Host time of a step beside its passes."""
    low: float
    """Factors of the interval that holds four of five measured steps."""
    high: float


def load_ceilings(accelerator: Accelerator) -> Ceilings:
    """The shipped factors for an accelerator, general ones where its generation has none."""
    table = _read_table()
    return Ceilings(**{**table["general"], **table.get(generation_of(accelerator.key), {})})


def ceilings_of(machine: Machine) -> Ceilings:
    """The factors for a machine: those measured on it, else the shipped ones for its accelerator."""
    return replace(load_ceilings(machine.accelerator), **machine.measured)


def generation_of(key: str) -> str:
    """The generation of an accelerator of the catalogue; "" if it is none of those known."""
    found = (name for name, patterns in GENERATIONS.items() if any(fnmatchcase(key, each) for each in patterns))
    return next(found, "")


@cache
def _read_table() -> Mapping[str, Mapping[str, Any]]:
    text = files(__package__).joinpath("ceilings.toml").read_text(encoding="utf-8")
    names = {field.name for field in fields(Ceilings)}
    kinds = {kind: row for kind, row in tomllib.loads(text).items() if isinstance(row, dict)}
    return {kind: {name: value for name, value in row.items() if name in names} for kind, row in kinds.items()}


# --- collectives

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class CollectiveGroup:
    """`ranks` ranks, each `stride` after the one before."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True)
class Wires:
    """A machine with its factors; without `rails` each rank's messages use only its own adapter."""

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
        """Seconds before the first byte of a message."""
        if group.ranks == 1:
            return 0.0
        if not self._leaves(group):
            return self.ceilings.link_latency_s
        return self.ceilings.network_latency_s + self.ceilings.hop_s * group.ranks

    def send(self, size: float, stride: int) -> float:
        """Seconds of one message to the rank `stride` further on."""
        leaves = self.machine.spans_nodes(2, stride)
        rate = self.machine.network * self.ceilings.network if leaves else self._link_rate(2)
        return size / rate + (self.ceilings.network_latency_s if leaves else self.ceilings.link_latency_s)

    def _leaves(self, group: CollectiveGroup) -> bool:
        return self.machine.spans_nodes(group.ranks, group.stride)

    def _link_rate(self, ranks: int) -> float:
        """Without a switch a rank reaches each peer over a part of its links."""
        return min(self.machine.link, self.machine.peer * (ranks - 1)) * self.ceilings.link

    def _near(self, group: CollectiveGroup) -> int:
        """Ranks of the group that the fast link joins."""
        return max(1, min(group.ranks, self.machine.domain // group.stride))

    def _network_rate(self, group: CollectiveGroup) -> float:
        near = self._near(group)
        wire = (near if self.rails else 1) * self.machine.network * self.ceilings.network
        return min(wire, self._link_rate(near)) if near > 1 else wire

    def _exchange(self, travels: float, group: CollectiveGroup) -> float:
        """An all-to-all: only messages for ranks of other domains use the network."""
        near = self._near(group)
        inside = travels * (near - 1) / (group.ranks - 1)
        network = (travels - inside) / (self.machine.network * self.ceilings.network)
        return network + (inside / self._link_rate(near) if near > 1 else 0.0)
