"""Machines that tests of the doctor make up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardway.hardware.probe import NvidiaState
from shardway.ranks.doctor.surroundings import CheckResult, CheckVerdict, MachineNeeds, MachineView
from shardway.ranks.launcher import Placement
from shardway.sites.schema import SiteProfile

SITE: dict[str, Any] = {"format": 1, "name": "made-up", "title": "A made-up site", "scheduler": "slurm"}
A100 = "a100-sxm4-40gb"
GPU_NODE = {"accelerator": A100, "accelerators_per_node": 4}


def make_site(**tables: Any) -> SiteProfile:
    """A Slurm site with these tables."""
    return SiteProfile.model_validate({**SITE, **tables})


def make_placement(rank: int = 0, world: int = 8, per_node: int = 4, **changes: Any) -> Placement:
    """A rank that srun started, `per_node` ranks a node."""
    placed = Placement(
        rank=rank,
        world=world,
        local_rank=rank % per_node,
        local_world=per_node,
        node=rank // per_node,
        nodes=world // per_node,
        master_addr="10.0.0.1",
        master_port=15213,
        launcher="srun",
    )
    return replace(placed, **changes)


def make_nvidia(count: int = 4, **columns: tuple[str, ...]) -> NvidiaState:
    """GPUs of one kind that tell these columns."""
    return NvidiaState("ok", "", ("NVIDIA A100-SXM4-40GB",) * count, 0, columns)


def make(site: SiteProfile | None = None, environ: dict[str, str] | None = None, **changes: Any) -> MachineView:
    """The first rank of eight on two nodes of a Slurm job."""
    base = MachineView(
        environ={"SLURM_JOB_ID": "77", **(environ or {})},
        site=site or make_site(),
        placement=make_placement(),
        host="n1",
        wanted=MachineNeeds(),
        usable_cores=16,
        machine_cores=64,
    )
    return replace(base, **changes)


def check(finding: CheckResult, verdict: str, *words: str) -> None:
    """A finding has this verdict, these words in what it found or in its remedy, and a remedy where it needs one."""
    assert finding.verdict == verdict, finding
    text = f"{finding.found} | {finding.remedy}"
    for word in words:
        assert word in text, (word, text)
    assert bool(finding.remedy) == (finding.verdict in (CheckVerdict.WARN, CheckVerdict.FAIL)), finding
