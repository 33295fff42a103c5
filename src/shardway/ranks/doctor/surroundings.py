"""What checks look at, gathered once where it is cheap (variables, profile, placement, GPUs), and what they say.

Invariant: a `MachineView` is frozen, so that a verdict can be tried on any machine that a test makes up. Nothing here
raises for a machine that is not as it should be. A finding with verdict "warn" or "fail" has a remedy.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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
    """What the run wants of the machine; None or empty for what is not stated. `folder` is where it writes (its nearest
    folder that exists is looked at), `checkpoint_bytes` the size of one checkpoint, `uses_hub` whether model or data
    come from the Hugging Face hub."""

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
    def scheduler(self) -> Any:
        """The site's scheduler (`launch.schedulers.base.Scheduler`)."""
        return make_plugin("schedulers", self.site.scheduler)

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers whose variables may be here: every one of our own, and that of the site."""
        return tuple(dict.fromkeys((*make_own("schedulers"), self.scheduler)))

    @property
    def job(self) -> str:
        """The scheduler's id of the job around this process, or ""."""
        return find_job(self.environ) or self.environ.get(self.scheduler.job_variable, "")

    @property
    def launched(self) -> bool:
        return self.placement is None or self.placement.launcher != "none"

    @property
    def in_job(self) -> bool:
        """Whether this is a node that ranks run on: that of a job, or a machine without a scheduler."""
        return self.scheduler.this_machine or bool(self.job) or self.launched

    @property
    def rank(self) -> int:
        return self.placement.rank if self.placement else 0

    @property
    def world(self) -> int:
        return self.placement.world if self.placement else 1

    @property
    def local_world(self) -> int:
        return self.placement.local_world if self.placement else 1

    @property
    def first_of_node(self) -> bool:
        """Whether this rank looks at what its node has once."""
        return self.placement is None or self.placement.local_rank == 0

    @property
    def several_nodes(self) -> bool:
        return self.local_world < self.world

    @property
    def devices(self) -> int:
        """GPUs of this node that the driver shows."""
        return self.nvidia.visible or self.amd

    @property
    def fast_ports(self) -> tuple[Port, ...]:
        """InfiniBand ports, those in Ethernet mode left out."""
        return tuple(port for port in self.ports if port.link_layer == "InfiniBand")

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
    cores = os.cpu_count() or 1
    # One rank of a node asks nvidia-smi: eight at once would wait for each other in the driver.
    asks = placement is None or placement.local_rank == 0
    return MachineView(
        environ=environ,
        site=site,
        placement=placement,
        trouble=trouble,
        host=socket.gethostname(),
        wanted=wanted,
        nvidia=read_nvidia(gpu_limit_s) if asks else NvidiaState("absent"),
        amd=count_amd(root),
        device_files=has_device_files(root),
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        machine_cores=cores,
        mounts=read_mounts(root),
        ports=list_ports(root),
        root=root,
        deep=deep,
    )


# --- what a check says


class CheckVerdict(StrEnum):
    """The verdict of a check, from the harmless to the worst: unknown here, good, works slowly or by luck, and a job
    will fail or hang."""

    NA = "n/a"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"

    @property
    def weight(self) -> int:
        """Larger is worse."""
        return list(CheckVerdict).index(self)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. Nodes are compared by their `facts`; the runner fills in `check`."""

    verdict: CheckVerdict
    found: str
    remedy: str = ""
    facts: Mapping[str, str | float] = field(default_factory=dict)
    check: str = ""


def good(found: str, **facts: str | float) -> CheckResult:
    """All is well."""
    return CheckResult(CheckVerdict.OK, found, facts=facts)


def poor(found: str, remedy: str, **facts: str | float) -> CheckResult:
    """It will work, slowly or by luck."""
    return CheckResult(CheckVerdict.WARN, found, remedy, facts)


def bad(found: str, remedy: str, **facts: str | float) -> CheckResult:
    """A job will fail or hang."""
    return CheckResult(CheckVerdict.FAIL, found, remedy, facts)


def unknown(found: str) -> CheckResult:
    """No verdict."""
    return CheckResult(CheckVerdict.NA, found)


def parse_finding(table: Mapping[str, Any]) -> CheckResult:
    """A finding from its `asdict`. Raises ValueError, KeyError or TypeError for anything else."""
    facts = {str(name): value for name, value in dict(table["facts"]).items() if isinstance(value, str | int | float)}
    return CheckResult(
        CheckVerdict(table["verdict"]), str(table["found"]), str(table["remedy"]), facts, check=str(table["check"])
    )


@dataclass(frozen=True)
class Report:
    """All findings of one rank."""

    rank: int
    host: str
    findings: tuple[CheckResult, ...]

    def fact(self, name: str) -> str | float | None:
        """A fact of any finding, or None."""
        return next((each.facts[name] for each in self.findings if name in each.facts), None)
