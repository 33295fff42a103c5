"""What measurements say of a site's links and devices, as the planner takes it: measured ceilings in a profile of the
user's own.

Invariants:
- A ceiling is a part of what the site's profile and the catalogue rate a link or a device at; where they rate none,
  there is none.
- The names are those of the planner's ceilings (`plan.case.Ceilings`); a profile that has another is refused there.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from statistics import median

from shardway.bench.comm_report import CollectiveFit, CommReport, KnownLinks
from shardway.bench.device_report import DeviceReport
from shardway.errors import UserError, list_some
from shardway.hardware.catalogue import find_accelerator, load_accelerators
from shardway.plan.case import ceilings_of, generation_of, load_ceilings, machine_of_site
from shardway.plan.time import FLASH_BACKWARD_FLOPS, clock_share, product_ramp, span_ramp
from shardway.runfile.load import render_value
from shardway.sites.schema import FORMAT, SiteProfile
from shardway.units import render_plural

# --- links

_STANDS_FOR_ALL = ("all_reduce", "all_gather", "reduce_scatter")
"""The planner has one factor a link for these, which carry nearly all bytes of a training."""


def find_ceilings(report: CommReport, known: KnownLinks, site: SiteProfile) -> Mapping[str, float]:
    """The planner's ceilings of links, by the fits: `link` and `network` as parts of the rated bandwidth, and the
    seconds before the first byte. Empty where nothing is rated."""
    inside = _find_fits(report, known, "within" if report.node_count > 1 else "all")
    outside = _find_fits(report, known, "between" if report.ranks_per_node > 1 else "all")
    found: dict[str, float] = {}
    if inside and report.ranks_per_node > 1:
        found |= {"link": median(share for share, _ in inside), "link_latency_s": median(start for _, start in inside)}
    if outside and report.node_count > 1:
        part = load_accelerators().get(site.node.accelerator or "")
        hops = load_ceilings(part).hop_s * report.node_count if part is not None else 0.0  # the planner adds these
        start = median(start for _, start in outside)
        found |= {"network": median(share for share, _ in outside), "network_latency_s": max(start - hops, start / 10)}
    return {name: float(f"{value:.4g}") for name, value in found.items() if value > 0}


def _find_fits(report: CommReport, known: KnownLinks, scope: str) -> list[tuple[float, float]]:
    """The part of the rated bandwidth and the seconds before the first byte, by collective."""
    found = []
    for fit in report.list_fits():
        if fit.scope == scope and fit.collective in _STANDS_FOR_ALL and (each := _rate(fit, known)) is not None:
            found.append(each)
    return found


def _rate(fit: CollectiveFit, known: KnownLinks) -> tuple[float, float] | None:
    limit = known.limit_of(fit)
    return None if limit is None or fit.bus is None or fit.cost is None else (fit.bus / limit.rate, fit.cost.alpha_s)


def render_links_profile(
    name: str, site: SiteProfile, parent: str, day: datetime.date, report: CommReport, known: KnownLinks
) -> str:
    """The text of a profile called `name` that extends `parent`, the name or path of `site`. Raises UserError where no
    link was measured that is rated."""
    ceilings = find_ceilings(report, known, site)
    if not ceilings:
        raise UserError(
            f"--save: nothing was measured that {site.name} and the catalogue rate, so there is no ceiling to keep.\n"
            f"  allowed: {', '.join(_STANDS_FOR_ALL)} of two sizes or more, over NCCL, on a site whose profile names "
            "an accelerator of the catalogue or node.link, or network.link and network.adapters_per_node"
        )
    hosts = list_some(list(dict.fromkeys(report.hosts)), 4)
    ranks, nodes = render_plural(len(report.nodes), "rank"), render_plural(report.node_count, "node")
    source = f"`shardway bench comm` over {ranks} on {nodes} ({hosts})"
    return _render_profile(name, f"{site.title}, links measured", parent, ceilings, source, day)


# --- a device

_KERNELS = {"flash3": "cudnn", "flash2": "flash"}
"""The planner's kernels of attention, each with the backend of torch that is of its kind."""


def describe_other_part(device: str, site: SiteProfile) -> str:
    """Why a device of this driver's name says nothing of a site's; "" where it does."""
    part = find_accelerator(device)
    if part is not None and part.key == site.node.accelerator:
        return ""
    measured = "which the catalogue does not have" if part is None else f"{part.key} in the catalogue"
    return f"{device} ({measured}) is measured, and {site.name} has {site.node.accelerator or 'no accelerator'}"


def find_device_ceilings(report: DeviceReport, site: SiteProfile) -> Mapping[str, float]:
    """The planner's ceilings of one device of a site: such that its formulas give back the times that were measured of
    a layer's products, of the largest copy and of fused attention. Empty where nothing of these is rated. Raises
    UserError for a site that cannot be planned on."""
    machine = machine_of_site(site)
    shipped, part = ceilings_of(machine), machine.accelerator
    clock = clock_share(machine, shipped)
    found: dict[str, float] = {}
    layers = {layer.format: layer for layer in report.layers}
    wide = layers.get("bf16", layers.get("fp16"))
    for name, layer in (("matmul", wide), ("matmul_low", layers.get("fp8"))):
        if layer is not None and (peak := part.peak(layer.format)) is not None:
            ramped = sum(2 * m * n * k * product_ramp(shipped, m, n, k) for m, n, k in layer.shapes)
            found[name] = ramped / layer.times.median_s / (peak * clock)
    if (copy := report.memory_copy) is not None and part.memory_bandwidth_bytes_per_s:
        found["memory"] = copy.bytes_per_s / part.memory_bandwidth_bytes_per_s
    attention = {each.backend: each for each in report.attention}
    newest = generation_of(part.key) in ("hopper", "blackwell")
    for name in ("flash3", "flash2") if newest else ("flash2",):
        each = attention.get(_KERNELS[name])
        if each is not None and (peak := part.peak(each.format)) is not None:
            ramped = each.flops * span_ramp(shipped, (each.seq + 1) / 2)
            found[name] = ramped / each.forward.median_s / (peak * clock)
            # One factor for all kernels: that of the newest one, which is what an engine takes.
            found.setdefault("flash_backward", FLASH_BACKWARD_FLOPS * each.forward.median_s / each.backward.median_s)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def render_device_profile(name: str, site: SiteProfile, parent: str, day: datetime.date, report: DeviceReport) -> str:
    """The text of a profile called `name` that extends `parent`, the name or path of `site`. Raises UserError where
    nothing was measured that is rated."""
    ceilings = find_device_ceilings(report, site)
    if not ceilings:
        raise UserError(
            f"--save: nothing was measured that the catalogue rates of {report.name}, so there is no ceiling to keep.\n"
            "  allowed: bf16, fp16 or fp8 products, and copies, of a part whose peaks and memory the catalogue has"
        )
    source = f"`shardway bench device` on one {report.name}, {report.software}"
    return _render_profile(name, f"{site.title}, device measured", parent, ceilings, source, day)


# --- the profile


def _render_profile(
    name: str, title: str, parent: str, ceilings: Mapping[str, float], source: str, day: datetime.date
) -> str:
    """What `parent` has measured besides stays measured, with its source: tables of profiles are merged key by key."""
    verb = source.split("`")[1]
    lines = [
        f"# Written by `{verb} --save`. A plan takes these factors in place of the shipped ones.",
        "",
        f"format = {FORMAT}",
        f"name = {render_value(name)}",
        f"title = {render_value(title)}",
        f"extends = {render_value(parent)}",
        "",
        "[measured]",
        *(f"{key} = {value!r}" for key, value in ceilings.items()),
        "",
        "[sources]",
        f"measured = {{ source = {render_value(source)}, date = {day.isoformat()} }}",
    ]
    return "\n".join(lines) + "\n"
