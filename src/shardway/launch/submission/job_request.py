"""From the user's request and the site to the job for its scheduler.

Invariants:
- Every value of the job comes from the run file, the command line, the site's profile or a stated default; nothing is
  read from the machine.
- Nothing is refused here; `site_checks` and `host_checks` do that, on the same request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from shardway.errors import UserError
from shardway.hardware.catalogue import load_accelerators
from shardway.inherited import ACCOUNT
from shardway.launch.job import (
    AGENTS,
    Again,
    Chain,
    ContainerMount,
    ContainerUse,
    Job,
    JobEnvironment,
    Meeting,
    Program,
    QueueTerms,
    Shape,
)
from shardway.launch.job_script import LAUNCHERS
from shardway.launch.submission.command import CommandRead
from shardway.runfile.load import LoadedRunFile
from shardway.runfile.schema import SiteSection
from shardway.sites.schema import CPU, Queue, SiteProfile

DEFAULT_WALLTIME_S = 24 * 3600.0
"""Wall-time on a machine without a scheduler, if none is given."""

RESTARTS = 3
"""How often ft_launcher restarts ranks if a run does not set it: it counts, and does not see checkpoints."""

_AGENT_BY_ITSELF = frozenset(("slurm", "local"))
"""Schedulers under which our own agent starts a training by default; under PBS it was never tested on a real
machine."""

_OFFLINE = MappingProxyType(
    {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
)
"""Without these, libraries try for minutes to reach hosts that compute nodes cannot reach."""

_DEVICE_LISTS = frozenset(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
"""A profile gives the accelerators of a node an order. A job with a part of a node sees only its own, numbered from 0:
a list with higher numbers would hide them all, and the scheduler decides which ones they are."""

_PATH_SIGNS = ("/", "~", "$", ".")

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 180


@dataclass(frozen=True)
class JobRequest:
    """What a job is made of: the run with its site's defaults, the site, and the arguments of the verb.

    `run`: the run directory, and `workdir`: the folder of the ranks, both on the host where the job runs. `here`: the
    Python environment that submits.
    """

    loaded: LoadedRunFile
    profile: SiteProfile
    run: Path
    workdir: Path
    program: Program
    read: CommandRead | None = None
    """How the user's command was read; None for a run file."""
    chain: Chain = field(default_factory=Chain)
    token: str = "0000"
    here: str = ""
    secret_names: tuple[str, ...] = ()
    project: Path | None = None
    """The folder that a snapshot was taken of, if links in the snapshot lead back to it."""
    source: Path | None = None
    """The folder that `workdir` is a snapshot of, if it is on the host of the job."""
    code: Path | None = None
    """The snapshot that provides the code of the run's working folder; see `JobEnvironment`."""

    @property
    def section(self) -> SiteSection:
        """The [site] section of the run."""
        return self.loaded.values.site

    @property
    def queue(self) -> Queue | None:
        """The profile's queue for the job; None if the profile does not list it."""
        name, queues = self.section.queue, self.profile.queues
        if not name:
            return queues[0] if queues else None
        return next((queue for queue in queues if queue.name == name), None)


def with_site_defaults(loaded: LoadedRunFile, profile: SiteProfile) -> LoadedRunFile:
    """The run with the profile's [defaults] for keys that it does not set. Raises UserError for a wrong value."""
    for name, value in profile.defaults.items():
        loaded = loaded.with_default(f"site.{name}", value, f"site {profile.name}, defaults.{name}")
    return loaded


def with_account(loaded: LoadedRunFile, profile: SiteProfile, options: Mapping[str, str]) -> LoadedRunFile:
    """The run with the account from the shell (`inherited.ACCOUNT`), if neither run nor site names one."""
    account = options.get(ACCOUNT, "")
    if profile.scheduler != "slurm" or not account or loaded.values.site.account:
        return loaded
    return loaded.with_default("site.account", account, f"{ACCOUNT} of the shell")


def shape_of(wish: JobRequest) -> Shape:
    """Nodes, and the request of each."""
    section, node = wish.section, wish.profile.node
    accelerators = node.accelerators_per_node or 0 if node.accelerator != CPU else 0
    ranks = section.ranks_per_node if section.ranks_per_node != "auto" else max(1, accelerators)
    whole = ranks >= accelerators
    threads = 1 if _has_cores_alone(wish) else node.threads_per_core or 1
    cores = node.cores
    if asked := _asked_cpus(wish):
        tasks = 1 if launcher_of(wish) in AGENTS else int(ranks)
        cores = max(1, asked * tasks // threads)
    elif cores is None and wish.profile.scheduler != "local":
        cores = int(ranks)  # without a number a scheduler gives one core, which all ranks of a node would share
    elif cores and not whole:  # a part of a node gets the same part of its cores
        cores = max(1, (cores or 1) * int(ranks) // accelerators)
    return Shape(
        nodes=section.nodes,
        ranks_per_node=int(ranks),
        cores_per_node=cores,
        accelerators_per_node=min(int(ranks), accelerators),
        memory_bytes=_memory(wish, int(ranks), accelerators),
        whole_nodes=bool(wish.profile.request.whole_nodes) and whole,
        threads_per_core=threads,
    )


def _options_of(wish: JobRequest) -> dict[str, str]:
    """The scheduler's options of the site and of the run, by their names without dashes."""
    options = {**wish.profile.request.options, **wish.section.options}
    return {name.lstrip("-"): str(value) for name, value in options.items()}


def _asked_cpus(wish: JobRequest) -> int:
    """The CPUs per task that a Slurm option requests, which its steps must have as well; 0 for none."""
    options = _options_of(wish) if wish.profile.scheduler == "slurm" else {}
    text = options.get("cpus-per-task", options.get("c", ""))
    return int(text) if text.isdecimal() else 0


def _has_cores_alone(wish: JobRequest) -> bool:
    """Whether Slurm options leave one thread of each core, so that its CPUs are cores."""
    options, words = _options_of(wish), " ".join(wish.profile.start.srun_options)
    asked = (options.get("hint") == "nomultithread", options.get("threads-per-core") == "1")
    return any(asked) or "nomultithread" in words or "threads-per-core=1" in words


def _memory(wish: JobRequest, ranks: int, accelerators: int) -> int | None:
    asked, node = wish.section.memory, wish.profile.node
    if asked != "auto":
        return int(asked)
    if not wish.profile.request.memory or node.memory is None or list_memory_options(wish):
        return None
    return node.memory if ranks >= accelerators else node.memory * ranks // accelerators


def list_memory_options(wish: JobRequest) -> list[str]:
    """Slurm options that set memory in another way than a job does; only one way is allowed (sbatch(1), --mem)."""
    options = _options_of(wish) if wish.profile.scheduler == "slurm" else {}
    return [name for name in ("mem-per-cpu", "mem-per-gpu") if name in options]


def walltime_of(wish: JobRequest) -> float | None:
    """Wall-time of an attempt in seconds; None if none is set."""
    if wish.section.walltime != "auto":
        return float(wish.section.walltime)
    if wish.queue is not None and wish.queue.max_walltime is not None:
        return wish.queue.max_walltime
    return DEFAULT_WALLTIME_S if wish.profile.scheduler == "local" else None


def launcher_of(wish: JobRequest) -> str:
    """The launcher: as requested, or our own agent for a training, or the site's, or the first that works with its
    scheduler."""
    if wish.section.launcher != "auto":
        return wish.section.launcher
    if is_elastic(wish) or (wish.program.is_training and wish.profile.scheduler in _AGENT_BY_ITSELF):
        return "agent"
    possible = LAUNCHERS[wish.profile.scheduler]
    return wish.profile.launcher if wish.profile.launcher in possible else possible[0]


def is_elastic(wish: JobRequest) -> bool:
    """Whether the job is a training that may go on with fewer nodes."""
    return wish.program.is_training and wish.loaded.values.run.elastic != "off"


def runtime_of(wish: JobRequest) -> str:
    """The container runtime: as requested, or the site's if an image is named, or none."""
    if wish.section.container != "auto":
        return wish.section.container
    return wish.profile.container or "none" if wish.section.image else "none"


def name_of(wish: JobRequest) -> str:
    """The run's name in characters that schedulers accept: letters, digits, dots, dashes, underlines."""
    name = _NO_NAME.sub("-", wish.run.name).strip("-.")[:_LONGEST_NAME]
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def build_job(wish: JobRequest, attempt: int) -> Job:
    """The job of one attempt. A missing value becomes a harmless one, which the checks refuse first."""
    profile, program = wish.profile, wish.program
    walltime = walltime_of(wish) or 0.0
    return Job(
        name=name_of(wish),
        token=wish.token,
        site=profile.name,
        scheduler=profile.scheduler,
        launcher=launcher_of(wish),
        run=wish.run,
        attempt=attempt,
        program=program,
        shape=shape_of(wish),
        terms=_terms(wish, walltime),
        around=_around(wish),
        container=_container(wish),
        meeting=Meeting(profile.network.host_suffix or "", profile.network.resolve == "ipv4"),
        start=profile.start,
        chain=wish.chain,
        preflight=_preflight(wish),
        elastic=is_elastic(wish),
        again=_again(wish),
        warn_s=0.0 if program.meets_by_itself else warn_before(walltime),
    )


def _again(wish: JobRequest) -> Again:
    run = wish.loaded.values.run
    restarts = RESTARTS if run.max_restarts == "auto" else run.max_restarts
    if run.hang_timeout == "off":
        return Again(restarts, silent_s=math.inf)
    return Again(restarts, run.start_timeout, None if run.hang_timeout == "auto" else float(run.hang_timeout))


def _preflight(wish: JobRequest) -> Program | None:
    if not wish.section.preflight:
        return None
    return Program(("-m", "shardway", "doctor", "--preflight"), meets_by_itself=True)


def warn_before(walltime_s: float) -> float:
    """How long before the end a program is warned that does not watch the clock: a tenth, one to ten minutes."""
    return min(max(60.0, walltime_s / 10), 600.0, walltime_s / 2)


def _terms(wish: JobRequest, walltime: float) -> QueueTerms:
    section, request, queue = wish.section, wish.profile.request, wish.queue
    name = section.queue or (queue.name if queue else "")
    partition = name if queue is None or queue.partition is None else queue.partition
    usual = {"slurm": "gres", "pbs": "ngpus"}.get(wish.profile.scheduler, "none")
    return QueueTerms(
        walltime_s=walltime,
        queue=name,
        partition=partition,
        qos=(queue.qos if queue else None) or "",
        account=section.account,
        constraint=request.constraint or "",
        accelerators=request.accelerators or usual,
        options={**request.options, **section.options},
        accelerator_type=section.accelerator_type or request.accelerator_type or "",
    )


def _around(wish: JobRequest) -> JobEnvironment:
    section, profile = wish.section, wish.profile
    return JobEnvironment(
        workdir=wish.workdir,
        source=wish.source,
        code=wish.code,
        venv=_venv(wish),
        modules=(*profile.modules.load, *section.modules),
        purge_modules=profile.modules.purge,
        expanded={**_internet(profile), **_environment(wish)},
        literal={name: str(value) for name, value in section.environment.items()},
        secret_names=wish.secret_names,
    )


def _environment(wish: JobRequest) -> Mapping[str, str]:
    """The profile's variables; those that list accelerators only if the job has whole nodes."""
    environment, node = wish.profile.environment, wish.profile.node
    if shape_of(wish).accelerators_per_node >= (node.accelerators_per_node or 0):
        return environment
    return {name: value for name, value in environment.items() if name not in _DEVICE_LISTS}


def _venv(wish: JobRequest) -> str:
    asked = wish.section.venv
    if asked == "auto":
        return wish.here if runtime_of(wish) == "none" else ""
    return "" if asked == "none" else asked


def _internet(profile: SiteProfile) -> Mapping[str, str]:
    internet = profile.internet
    if internet.nodes == "none":
        return _OFFLINE
    if internet.nodes != "proxy" or not internet.proxy:
        return {}
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), internet.proxy)
    return {**proxy, **({"no_proxy": internet.no_proxy} if internet.no_proxy else {})}


def _container(wish: JobRequest) -> ContainerUse:
    runtime, profile = runtime_of(wish), wish.profile
    if runtime == "none":
        return ContainerUse()
    part = load_accelerators().get(profile.node.accelerator or CPU)
    mounts = (*profile.containers.mounts, *wish.section.mounts)
    project = (ContainerMount(str(wish.project), str(wish.project)),) if wish.project else ()
    rules = profile.containers if runtime == profile.container else type(profile.containers)()
    return ContainerUse(
        runtime=runtime,
        image=name_image(runtime, wish.section.image),
        mounts=(*project, *(mount for mount in map(parse_mount, mounts) if mount is not None)),
        rules=rules,
        vendor=part.vendor.lower() if part else "",
    )


def name_image(runtime: str, text: str) -> str:
    """An image as its runtime names it: either form of a URI in that of Pyxis, Apptainer or Podman; a path, or an
    invalid name, unchanged."""
    if not text or text.startswith(_PATH_SIGNS) or runtime not in ("pyxis", "apptainer", "podman"):
        return text
    from shardway.launch.image.request import Reference, parse_uri, render_docker, render_enroot

    try:
        source = parse_uri(text)
    except UserError:
        return text
    if not isinstance(source, Reference) or source.transport not in ("docker", "oras"):
        return text
    if runtime == "pyxis":
        return render_enroot(source).removeprefix("docker://")
    return f"{source.transport}://{render_docker(source)}" if runtime == "apptainer" else render_docker(source)


def parse_mount(text: str) -> ContainerMount | None:
    """SOURCE:TARGET or SOURCE:TARGET:ro; a SOURCE alone is mounted under the same path. None for anything else."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or mode not in ("", "ro", "rw"):
        return None
    return ContainerMount(source, target or re.sub(r"^~(?=/|$)", "$HOME", source), read_only=mode == "ro")
