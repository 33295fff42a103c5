"""Everything that checks look at and that is cheap to know, gathered once: variables, profile, placement, GPUs.

Invariant: a `MachineView` is frozen, so that a verdict can be tried on any machine that a test makes up. Nothing here
raises for a machine that is not as it should be.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardway.errors import SiteError
from shardway.hardware.mounts import MountedFileSystem, read_mounts
from shardway.hardware.probe import NvidiaState, Port, count_amd, has_device_files, list_ports, read_nvidia
from shardway.plugins import make_own, make_plugin
from shardway.ranks.launcher import Placement, find_job, find_placement
from shardway.sites.schema import SiteProfile


@dataclass(frozen=True)
class MachineNeeds:
    """What the run wants of the machine; None or empty for what is not stated.

    `folder` is where it writes (its nearest folder that exists is looked at), `checkpoint_bytes` the size of one
    checkpoint, `uses_hub` whether model or data come from the Hugging Face hub.
    """

    folder: Path | None = None
    checkpoint_bytes: float | None = None
    keep: int = 1
    device: str = "auto"
    account: str = ""
    uses_hub: bool | None = None
    container: str = ""


@dataclass(frozen=True)
class MachineView:
    """One process's view of its machine. `trouble`: why the launcher's variables give no placement."""

    environ: Mapping[str, str]
    site: SiteProfile
    placement: Placement | None
    trouble: str = ""
    host: str = ""
    wanted: MachineNeeds = field(default_factory=MachineNeeds)
    nvidia: NvidiaState = field(default_factory=lambda: NvidiaState("absent"))
    amd: int = 0
    device_files: bool = False
    usable_cores: int = 1
    machine_cores: int = 1
    mounts: tuple[MountedFileSystem, ...] = ()
    ports: tuple[Port, ...] = ()
    root: Path = Path("/")
    deep: bool = False

    @property
    def in_job(self) -> bool:
        """Whether this is a node that ranks run on: that of a job, or a machine without a scheduler."""
        return self.scheduler.this_machine or bool(self.job) or self.launched

    @property
    def scheduler(self) -> Any:
        """The site's scheduler (`launch.schedulers.base.Scheduler`)."""
        return make_plugin("schedulers", self.site.scheduler)

    @property
    def launched(self) -> bool:
        """Whether something started this process as one of several ranks, or tried to."""
        return self.placement is None or self.placement.launcher != "none"

    @property
    def job(self) -> str:
        """The scheduler's id of the job around this process, or ""."""
        return find_job(self.environ) or self.environ.get(self.scheduler.job_variable, "")

    @property
    def rank(self) -> int:
        """This process's rank; 0 without a placement."""
        return self.placement.rank if self.placement else 0

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.placement.world if self.placement else 1

    @property
    def local_world(self) -> int:
        """Ranks on this node."""
        return self.placement.local_world if self.placement else 1

    @property
    def first_of_node(self) -> bool:
        """Whether this rank looks at what its node has once."""
        return self.placement is None or self.placement.local_rank == 0

    @property
    def has_first_rank(self) -> bool:
        """Whether rank 0 is on this node, so that it may meet itself here."""
        return self.placement is not None and self.placement.rank == self.placement.local_rank

    @property
    def several_nodes(self) -> bool:
        """Whether ranks are on more than one node."""
        return self.local_world < self.world

    @property
    def devices(self) -> int:
        """GPUs of this node that the driver shows."""
        return self.nvidia.visible or self.amd

    @property
    def fast_ports(self) -> tuple[Port, ...]:
        """InfiniBand ports, those in Ethernet mode left out."""
        return tuple(port for port in self.ports if port.link_layer == "InfiniBand")

    @property
    def hosts(self) -> list[str]:
        """Nodes of this job as the scheduler names them; empty where it does not."""
        for scheduler in self.schedulers:
            try:
                if found := scheduler.find_hosts(self.environ, scheduler.launcher, ""):
                    return list(dict.fromkeys(found[1]))
            except SiteError:
                return []
        return []

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers whose variables may be here: every one of our own, and that of the site."""
        return tuple(dict.fromkeys((*make_own("schedulers"), self.scheduler)))

    @property
    def cores_given(self) -> int | None:
        """Hardware threads that the scheduler gave to this rank; None where it does not say."""
        counts = (scheduler.count_cores(self.environ, self.local_world) for scheduler in self.schedulers)
        return next((count for count in counts if count is not None), None)

    @property
    def gpus_given(self) -> int | None:
        """GPUs of this node that the scheduler gave to the job; None where it does not say."""
        counts = (scheduler.count_accelerators(self.environ) for scheduler in self.schedulers)
        return next((count for count in counts if count is not None), None)

    def describe_remedy(self, name: str) -> str:
        """A remedy in the words of each scheduler that has some (`Scheduler.remedies`): "Slurm: --mem=0; PBS: ..."."""
        ways = ((each.title, each.remedies[name]) for each in self.schedulers if name in each.remedies)
        return "; ".join(f"{title}: {way.format(host=self.host)}" for title, way in ways)


def look_around(
    environ: Mapping[str, str],
    site: SiteProfile,
    wanted: MachineNeeds,
    *,
    deep: bool = False,
    gpu_limit_s: float = 20.0,
    root: Path = Path("/"),
) -> MachineView:
    """Look at this machine; asks nvidia-smi, for at most `gpu_limit_s` seconds twice. Never raises."""
    try:
        placement, trouble = find_placement(environ), ""
    except SiteError as error:
        placement, trouble = None, str(error)
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineView(
        environ=environ,
        site=site,
        placement=placement,
        trouble=trouble,
        host=socket.gethostname(),
        wanted=wanted,
        nvidia=_ask_nvidia(placement, gpu_limit_s),
        amd=count_amd(root),
        device_files=has_device_files(root),
        usable_cores=affine,
        machine_cores=os.cpu_count() or 1,
        mounts=read_mounts(root),
        ports=list_ports(root),
        root=root,
        deep=deep,
    )


def _ask_nvidia(placement: Placement | None, limit_s: float) -> NvidiaState:
    """One rank of a node asks: eight at once would wait for each other in the driver."""
    if placement is not None and placement.local_rank > 0:
        return NvidiaState("absent")
    return read_nvidia(limit_s)
