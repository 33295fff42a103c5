"""What a measurement says of a site's links, as the planner takes it: measured ceilings in a profile of the user's own.

Invariants:
- A ceiling is a part of what the site's profile and the catalogue rate a link at; where they rate none, there is none.
- The names are those of the planner's ceilings (`plan.case.Ceilings`); a profile that has another is refused there.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from statistics import median

from shardway.bench.comm_report import CollectiveFit, CommReport, KnownLinks
from shardway.errors import UserError, list_some
from shardway.hardware.catalogue import load_accelerators
from shardway.plan.case import load_ceilings
from shardway.runfile.load import render_value
from shardway.sites.schema import FORMAT, SiteProfile
from shardway.watch.words import render_plural

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


def render_measured_profile(
    name: str, site: SiteProfile, parent: str, report: CommReport, known: KnownLinks, day: datetime.date
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
    lines = [
        "# Written by `shardway bench comm --save`. A plan takes these factors in place of the shipped ones.",
        "",
        f"format = {FORMAT}",
        f"name = {render_value(name)}",
        f"title = {render_value(f'{site.title}, links measured')}",
        f"extends = {render_value(parent)}",
        "",
        "[measured]",
        *(f"{key} = {value!r}" for key, value in ceilings.items()),
        "",
        "[sources]",
        f"measured = {{ source = {render_value(source)}, date = {day.isoformat()} }}",
    ]
    return "\n".join(lines) + "\n"
