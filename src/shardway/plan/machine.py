"""The machine that a plan is for: rated speeds, the part of them that is reached, seconds of a collective.

Invariants:
- Every rate is one direction and per accelerator. Sizes of collectives are those of the whole tensor (the result of an
  all-gather, the input of a reduce-scatter), on one rank.
- A factor belongs to a kind of part (a generation of accelerators, a kind of link, a kind of kernel), never to one
  machine, model or publication. The shipped factors are in `ceilings.toml`, which `bench/planner/fit.py` writes.
- What neither profile nor catalogue states is either marked as assumed, or refused with an error if no plan is possible
  without it; no accelerator is guessed.

Sources: rings: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), section 3. Ranks of a node in the same group
carry its messages over all of their adapters (NVIDIA, Doubling all2all performance with NCCL 2.12, 2022).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

from shardway.errors import Problem, UserError, check_no_problems, render_problems
from shardway.hardware.catalogue import Accelerator, Dtype, Link, load_accelerators, load_links
from shardway.sites.schema import CPU, SiteProfile

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


# --- the part of rated speeds that is reached

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
        near = self._near(group)
        rate = (near if self.rails else 1) * self.machine.network * self.ceilings.network
        rate = min(rate, self._link_rate(near)) if near > 1 else rate
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

    def _exchange(self, travels: float, group: CollectiveGroup) -> float:
        """An all-to-all: only messages for ranks of other domains use the network."""
        near = self._near(group)
        inside = travels * (near - 1) / (group.ranks - 1)
        network = (travels - inside) / (self.machine.network * self.ceilings.network)
        return network + (inside / self._link_rate(near) if near > 1 else 0.0)


# --- the machine of a site profile, or of an accelerator alone

RACK_DOMAINS = {"gb200": 72, "gb300": 72}
"""Accelerators that a fast link joins beyond a node (NVL72; NVIDIA GB200 NVL72 data sheet)."""

USUAL_NODE = 8
"""Accelerators per node if only the part is named."""

USUAL_HOST_BYTES = 2 * 10**12
"""Memory of a node's host if only the part is named."""

USUAL_NETWORK = 25e9
"""Bytes per second of an accelerator between nodes if nothing states it: one adapter of 200 Gb/s each."""


def machine_of_site(site: SiteProfile) -> Machine:
    """The machine of a site. Raises UserError that names every missing fact that planning needs."""
    node, problems = site.node, []
    if node.accelerator is None or node.accelerator == CPU:
        what = "no accelerator" if node.accelerator is None else "nodes without accelerators"
        problems.append(_lacks(site, "node.accelerator", f"names {what}"))
    elif not node.accelerators_per_node:
        problems.append(_lacks(site, "node.accelerators_per_node", "does not say how many accelerators a node has"))
    check_no_problems(f"the site {site.name}", problems)
    accelerator = load_accelerators()[str(node.accelerator)]
    per_node = int(node.accelerators_per_node or 1)
    network, assumed = _network_of(site, per_node)
    machine = _machine(site.name, accelerator, per_node, node.link or accelerator.link, network, assumed)
    names = [each.name for each in fields(Ceilings)]
    unknown = [name for name in site.measured if name not in names]
    check_no_problems(
        f"the site {site.name}",
        [Problem(f"measured.{name}", "is no ceiling of the planner", allowed=", ".join(names)) for name in unknown],
    )
    return replace(machine, host_bytes=node.memory, measured=MappingProxyType(dict(site.measured)))


def _lacks(site: SiteProfile, where: str, what: str) -> Problem:
    remedy = f"copy the profile {site.name}, say it there, and name the copy with --on; or name a part with --gpu"
    return Problem(where, f'the site "{site.name}" {what}', allowed="a key of the catalogue", remedy=remedy)


@cache
def load_aliases() -> Mapping[str, str]:
    """Short names of accelerators, each with the key of the most common variant."""
    return tomllib.loads(files(__package__).joinpath("aliases.toml").read_text(encoding="utf-8"))


def machine_of_part(name: str) -> Machine:
    """Nodes of eight of an accelerator, with the network that such nodes usually have; a short name means the most
    common variant. Raises UserError."""
    parts = load_accelerators()
    short = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = short if short in parts else load_aliases().get(short, name)
    if key not in parts:
        near = [each for each in parts if key and each.startswith(key)]
        near = near or difflib.get_close_matches(key, parts, n=3, cutoff=0.3)
        what = f'"{key}" is not in the catalogue of accelerators'
        allowed = ", ".join(parts)
        remedy = f"did you mean {' or '.join(near)}?" if near else ""
        problem = Problem("--gpu", what, allowed=allowed, remedy=remedy)
        raise UserError(render_problems("the plan", [problem]), [problem])
    part = parts[key]
    network = f"{USUAL_NETWORK * 8 / 1e9:g} Gb/s for each accelerator"
    note = f"nodes of {USUAL_NODE} with {network} and {USUAL_HOST_BYTES / 1e12:g} TB of memory"
    others = [each for each in parts if each != key and each.startswith(short)]
    variant = f"{part.name} for --gpu {name}" + (f" (also: {', '.join(others)})" if others else "")
    assumed = (note,) if short == key else (variant, note)
    machine = _machine(key, part, USUAL_NODE, part.link, USUAL_NETWORK, assumed)
    return replace(machine, host_bytes=USUAL_HOST_BYTES)


def _machine(
    name: str, part: Accelerator, per_node: int, link: str | None, network: float, assumed: Sequence[str]
) -> Machine:
    missing = [
        Problem(f"accelerator {part.key}", f"the catalogue does not know its {what}")
        for what, known in (("memory", part.memory_bytes), ("peak rates", part.peak_flops))
        if not known
    ]
    check_no_problems("the catalogue of accelerators", missing)
    rate, peer, notes = _link_rates(load_links().get(link or ""), per_node)
    return Machine(
        name=name,
        accelerator=part,
        per_node=per_node,
        link=rate,
        peer=peer,
        network=network,
        domain=RACK_DOMAINS.get(part.key, per_node),
        memory_bytes=int(part.memory_bytes or 0),
        assumed=(*assumed, *notes),
    )


def _network_of(site: SiteProfile, per_node: int) -> tuple[float, tuple[str, ...]]:
    """Bytes per second of an accelerator between nodes, and the assumptions made for it."""
    link = load_links().get(site.network.link or "")
    if link is None or not link.bandwidth_bytes_per_s:
        return USUAL_NETWORK, (f"{USUAL_NETWORK * 8 / 1e9:g} Gb/s for each accelerator between nodes",)
    adapters = site.network.adapters_per_node
    notes = () if adapters else ("one adapter for each accelerator",)
    return link.bandwidth_bytes_per_s * (adapters or per_node) / per_node, notes


def _link_rates(link: Link | None, per_node: int) -> tuple[float, float, tuple[str, ...]]:
    """Bytes per second of all links of an accelerator, and to one neighbour."""
    if link is None or not (link.bandwidth_bytes_per_s or link.peer_bandwidth_bytes_per_s):
        rate = 32e9
        return rate, rate / max(1, per_node - 1), ("PCIe 4.0 between accelerators of a node",)
    peer = link.peer_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s or 0.0
    return link.bandwidth_bytes_per_s or peer * max(1, per_node - 1), peer, ()
