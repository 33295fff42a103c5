"""Runs for the planner: a machine of eight-GPU nodes, models of two sizes, and what a run's layout costs there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resolving import resolve_words

from shardway.plan.case import Machine, machine_of_site
from shardway.plan.planner import Estimate, estimate
from shardway.resolve import Resolved
from shardway.resolve.planned import case_of, shape_of_run
from shardway.sites.load import load_site

H100 = machine_of_site(load_site("dgx-slurm"))
"""Nodes of eight H100 with 80 GB."""
TIGHT = replace(H100, memory_bytes=6 * 2**30)
"""The same with 6 GiB each, so that small models meet limits."""

EIGHT_BILLION = (
    "model.dim=4096",
    "model.layers=32",
    "model.heads=32",
    "model.kv_heads=8",
    "model.ffn_dim=14336",
    "model.vocab=128256",
    "model.tied=false",
    "data.kind=synthetic",
    "data.seq_len=8192",
    "precision.compute=bf16",
    "train.global_batch=64",
)
SMALL = (
    "model.dim=1024",
    "model.layers=8",
    "model.heads=8",
    "model.ffn_dim=4096",
    "model.vocab=32768",
    "model.tied=false",
    "data.kind=synthetic",
    "data.seq_len=1024",
    "precision.compute=bf16",
)
AUTO = "parallel.layout=auto"


def resolve_on(machine: Machine | None, *words: str, ranks: int = 8, **circumstances: Any) -> Resolved:
    """The resolved run on ranks of a machine."""
    return resolve_words(*words, ranks=ranks, machine=machine, accelerators=8 if machine else 0, **circumstances)


def price(resolved: Resolved, machine: Machine) -> Estimate:
    """What the planner says of a resolved run."""
    return estimate(case_of(resolved.values, shape_of_run(resolved.values)), machine)
