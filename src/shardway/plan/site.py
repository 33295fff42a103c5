"""The machine of a site profile, or of an accelerator alone, as the planner sees it.

Invariant: what neither profile nor catalogue states is either marked as assumed, or refused with an error if no plan is
possible without it; no accelerator is guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType

from shardway.errors import Problem, UserError, check_no_problems, render_problems
from shardway.hardware.catalogue import Accelerator, Link, load_accelerators, load_links
from shardway.plan.machine import Machine
from shardway.plan.time.ceilings import Ceilings
from shardway.sites.schema import CPU, SiteProfile

RACK_DOMAINS = {"gb200": 72, "gb300": 72}
"""Accelerators that a fast link joins beyond a node (NVL72; NVIDIA GB200 NVL72 data sheet)."""

COMMON = {
    "v100": "v100-sxm2-32gb",
    "a100": "a100-sxm4-80gb",
    "a100-40gb": "a100-sxm4-40gb",
    "a100-80gb": "a100-sxm4-80gb",
    "a100-sxm": "a100-sxm4-80gb",
    "a100-sxm4": "a100-sxm4-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "h100": "h100-sxm5-80gb",
    "h100-80gb": "h100-sxm5-80gb",
    "h100-sxm": "h100-sxm5-80gb",
    "h100-sxm5": "h100-sxm5-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-nvl": "h100-nvl-94gb",
    "h800": "h800-sxm5-80gb",
    "h200": "h200-sxm-141gb",
    "gh200": "gh200-96gb",
    "b200": "b200-sxm-180gb",
    "b300": "b300-sxm-288gb",
    "mi250": "mi250x-gcd",
    "mi250x": "mi250x-gcd",
}
"""A short name -> the most common variant."""

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
        told = "no accelerator" if node.accelerator is None else "nodes without accelerators"
        problems.append(_lacks(site, "node.accelerator", f"names {told}"))
    elif not node.accelerators_per_node:
        problems.append(_lacks(site, "node.accelerators_per_node", "does not say how many accelerators a node has"))
    check_no_problems(f"the site {site.name}", problems)
    accelerator = load_accelerators()[str(node.accelerator)]
    per_node = int(node.accelerators_per_node or 1)
    network, assumed = _network_of(site, per_node)
    machine = _machine(site.name, accelerator, per_node, node.link or accelerator.link, network, assumed)
    return replace(machine, host_bytes=node.memory, measured=_check_measured(site))


def _check_measured(site: SiteProfile) -> Mapping[str, float]:
    """The values measured on the site. Raises UserError with every name that is no ceiling."""
    names = [each.name for each in fields(Ceilings)]
    unknown = [name for name in site.measured if name not in names]
    check_no_problems(
        f"the site {site.name}",
        [Problem(f"measured.{name}", "is no ceiling of the planner", allowed=", ".join(names)) for name in unknown],
    )
    return MappingProxyType(dict(site.measured))


def _lacks(site: SiteProfile, where: str, what: str) -> Problem:
    remedy = f"copy the profile {site.name}, say it there, and name the copy with --on; or name a part with --gpu"
    return Problem(where, f'the site "{site.name}" {what}', allowed="a key of the catalogue", remedy=remedy)


def machine_of_part(name: str) -> Machine:
    """Nodes of eight of an accelerator, with the network that such nodes usually have; a short name means the most
    common variant. Raises UserError."""
    parts = load_accelerators()
    short = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = short if short in parts else COMMON.get(short, name)
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
    told = f"nodes of {USUAL_NODE} with {network} and {USUAL_HOST_BYTES / 1e12:g} TB of memory"
    others = [each for each in parts if each != key and each.startswith(short)]
    variant = f"{part.name} for --gpu {name}" + (f" (also: {', '.join(others)})" if others else "")
    assumed = (told,) if short == key else (variant, told)
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
    rate, peer, told = _link_rates(load_links().get(link or ""), per_node)
    return Machine(
        name=name,
        accelerator=part,
        per_node=per_node,
        link=rate,
        peer=peer,
        network=network,
        domain=RACK_DOMAINS.get(part.key, per_node),
        memory_bytes=int(part.memory_bytes or 0),
        assumed=(*assumed, *told),
    )


def _network_of(site: SiteProfile, per_node: int) -> tuple[float, tuple[str, ...]]:
    """Bytes per second of an accelerator between nodes, and the assumptions made for it."""
    link = load_links().get(site.network.link or "")
    if link is None or not link.bandwidth_bytes_per_s:
        return USUAL_NETWORK, (f"{USUAL_NETWORK * 8 / 1e9:g} Gb/s for each accelerator between nodes",)
    adapters = site.network.adapters_per_node
    told = () if adapters else ("one adapter for each accelerator",)
    return link.bandwidth_bytes_per_s * (adapters or per_node) / per_node, told


def _link_rates(link: Link | None, per_node: int) -> tuple[float, float, tuple[str, ...]]:
    """Bytes per second of all links of an accelerator, and to one neighbour."""
    if link is None or not (link.bandwidth_bytes_per_s or link.peer_bandwidth_bytes_per_s):
        rate = 32e9
        return rate, rate / max(1, per_node - 1), ("PCIe 4.0 between accelerators of a node",)
    peer = link.peer_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s or 0.0
    return link.bandwidth_bytes_per_s or peer * max(1, per_node - 1), peer, ()
