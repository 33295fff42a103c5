"""The rules of a run file, for the ranks and the machine that the job will have.

Invariant: what a rank would refuse when it begins is refused before the queue. This module must not look at the host.
"""

from __future__ import annotations

import os
from dataclasses import replace

from shardway.hardware.catalogue import load_accelerators
from shardway.hardware.device import facts_of_part
from shardway.launch.submission.job_request import JobRequest, shape_of
from shardway.resolve.build import resolve
from shardway.resolve.request import ResolveRequest, machine_of_known, resolve_request
from shardway.resolve.resolved import Circumstances, Resolved
from shardway.sites.schema import CPU


def check_run(request: ResolveRequest, site: str, wish: JobRequest) -> Resolved:
    """The rules of the run file itself, for the ranks and the machine that the job will have; `site` is that of --on.

    The run as they will have it. Raises UserError with every problem.
    """
    values, profile, shape = wish.loaded.values, wish.profile, shape_of(wish)
    if values.parallel.layout == "auto" or values.model.hf:
        return _check_planned(request, site, wish)
    unknown = shape.ranks_per_node if values.run.device == "cuda" else 0
    accelerators = profile.node.accelerators_per_node
    part = load_accelerators().get(profile.node.accelerator or CPU)
    circumstances = Circumstances(
        ranks=shape.ranks,
        ranks_per_node=shape.ranks_per_node,
        usable_cores=profile.node.cores or os.cpu_count() or 1,
        accelerators=unknown if accelerators is None else accelerators,
        site=profile.name,
        own_model=request.own_model,
        devices=(facts_of_part(part),) if part is not None else (),
    )
    return resolve(wish.loaded, circumstances)  # the planner, which is slow to import, would only pick a micro-batch


def _check_planned(request: ResolveRequest, site: str, wish: JobRequest) -> Resolved:
    """The same where the layout is the planner's, or a checkpoint's config has to be read."""
    shape = shape_of(wish)
    machine = machine_of_known(wish.profile) if wish.loaded.values.run.device != "cpu" else None
    named = [f"site.name={site}"] if site else []
    request = replace(request, overrides=(*request.overrides, *named))
    return resolve_request(request, shape.ranks, shape.ranks_per_node, planned=machine).resolved
