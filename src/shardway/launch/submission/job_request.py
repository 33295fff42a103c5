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
from shardway.inherited import find_account
from shardway.launch.job import (
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
from shardway.launch.launchers import list_launchers
from shardway.launch.schedulers.base import Scheduler, find_scheduler
from shardway.launch.submission.command import CommandRead
from shardway.plugins import make_plugin
from shardway.runfile.load import LoadedRunFile
from shardway.runfile.schema import SiteSection
from shardway.sites.schema import CPU, Queue, SiteProfile

DEFAULT_WALLTIME_S = 24 * 3600.0
"""Wall-time on a machine without a scheduler, if none is given."""

RESTARTS = 3
"""How often ft_launcher restarts ranks if a run does not set it: it counts, and does not see checkpoints."""

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
    def scheduler(self) -> Scheduler:
        """The site's scheduler."""
        return find_scheduler(self.profile.scheduler)

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
    """The run with the account from the shell, if neither run nor site names one."""
    name, account = find_account(find_scheduler(profile.scheduler).inherited, options)
    if not account or loaded.values.site.account:
        return loaded
    return loaded.with_default("site.account", account, f"{name} of the shell")


def shape_of(request: JobRequest) -> Shape:
    """Nodes, and the request of each."""
    section, node = request.section, request.profile.node
    accelerators = node.accelerators_per_node or 0 if node.accelerator != CPU else 0
    ranks = section.ranks_per_node if section.ranks_per_node != "auto" else max(1, accelerators)
    whole = ranks >= accelerators
    launcher_options = " ".join(request.profile.start.srun_options)
    alone = request.scheduler.leaves_one_thread(_options_of(request), launcher_options)
    threads = 1 if alone else node.threads_per_core or 1
    cores = node.cores
    if asked := request.scheduler.read_cpus_per_task(_options_of(request)):
        tasks = 1 if make_plugin("launchers", launcher_of(request)).one_agent_a_node else int(ranks)
        cores = max(1, asked * tasks // threads)
    elif cores is None and not request.scheduler.this_machine:
        cores = int(ranks)  # without a number a scheduler gives one core, which all ranks of a node would share
    elif cores and not whole:  # a part of a node gets the same part of its cores
        cores = max(1, (cores or 1) * int(ranks) // accelerators)
    return Shape(
        nodes=section.nodes,
        ranks_per_node=int(ranks),
        cores_per_node=cores,
        accelerators_per_node=min(int(ranks), accelerators),
        memory_bytes=_memory(request, int(ranks), accelerators),
        whole_nodes=bool(request.profile.request.whole_nodes) and whole,
        threads_per_core=threads,
    )


def _options_of(request: JobRequest) -> dict[str, str]:
    """The scheduler's options of the site and of the run, by their names without dashes."""
    options = {**request.profile.request.options, **request.section.options}
    return {name.lstrip("-"): str(value) for name, value in options.items()}


def _memory(request: JobRequest, ranks: int, accelerators: int) -> int | None:
    asked, node = request.section.memory, request.profile.node
    if asked != "auto":
        return int(asked)
    if not request.profile.request.memory or node.memory is None or list_memory_options(request):
        return None
    return node.memory if ranks >= accelerators else node.memory * ranks // accelerators


def list_memory_options(request: JobRequest) -> list[str]:
    """Options that set memory in another way than a job does; only one way is allowed."""
    options = _options_of(request)
    return [name for name in request.scheduler.memory_options if name in options]


def walltime_of(request: JobRequest) -> float | None:
    """Wall-time of an attempt in seconds; None if none is set."""
    if request.section.walltime != "auto":
        return float(request.section.walltime)
    if request.queue is not None and request.queue.max_walltime is not None:
        return request.queue.max_walltime
    return DEFAULT_WALLTIME_S if request.scheduler.this_machine else None


def launcher_of(request: JobRequest) -> str:
    """The launcher: as requested, or our own agent for a training, or the site's, or the first that works with its
    scheduler."""
    if request.section.launcher != "auto":
        return request.section.launcher
    if is_elastic(request) or (request.program.is_training and request.scheduler.agent_by_default):
        return "agent"
    possible = list_launchers(request.scheduler)
    return request.profile.launcher if request.profile.launcher in possible else possible[0]


def is_elastic(request: JobRequest) -> bool:
    """Whether the job is a training that may go on with fewer nodes."""
    return request.program.is_training and request.loaded.values.run.elastic != "off"


def runtime_of(request: JobRequest) -> str:
    """The container runtime: as requested, or the site's if an image is named, or none."""
    if request.section.container != "auto":
        return request.section.container
    return request.profile.container or "none" if request.section.image else "none"


def name_of(request: JobRequest) -> str:
    """The run's name in characters that schedulers accept: letters, digits, dots, dashes, underlines."""
    name = _NO_NAME.sub("-", request.run.name).strip("-.")[:_LONGEST_NAME]
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def build_job(request: JobRequest, attempt: int) -> Job:
    """The job of one attempt. A missing value becomes a harmless one, which the checks refuse first."""
    profile, program = request.profile, request.program
    walltime = walltime_of(request) or 0.0
    return Job(
        name=name_of(request),
        token=request.token,
        site=profile.name,
        scheduler=profile.scheduler,
        launcher=launcher_of(request),
        run=request.run,
        attempt=attempt,
        program=program,
        shape=shape_of(request),
        terms=_terms(request, walltime),
        around=_around(request),
        container=_container(request),
        meeting=Meeting(profile.network.host_suffix or "", profile.network.resolve == "ipv4"),
        start=profile.start,
        chain=request.chain,
        preflight=_preflight(request),
        elastic=is_elastic(request),
        again=_again(request),
        warn_s=0.0 if program.meets_by_itself else warn_before(walltime),
    )


def _again(request: JobRequest) -> Again:
    run = request.loaded.values.run
    restarts = RESTARTS if run.max_restarts == "auto" else run.max_restarts
    if run.hang_timeout == "off":
        return Again(restarts, silent_s=math.inf)
    return Again(restarts, run.start_timeout, None if run.hang_timeout == "auto" else float(run.hang_timeout))


def _preflight(request: JobRequest) -> Program | None:
    if not request.section.preflight:
        return None
    return Program(("-m", "shardway", "doctor", "--preflight"), meets_by_itself=True)


def warn_before(walltime_s: float) -> float:
    """How long before the end a program is warned that does not watch the clock: a tenth, one to ten minutes."""
    return min(max(60.0, walltime_s / 10), 600.0, walltime_s / 2)


def _terms(request: JobRequest, walltime: float) -> QueueTerms:
    section, rules, queue = request.section, request.profile.request, request.queue
    name = section.queue or (queue.name if queue else "")
    partition = name if queue is None or queue.partition is None else queue.partition
    return QueueTerms(
        walltime_s=walltime,
        queue=name,
        partition=partition,
        qos=(queue.qos if queue else None) or "",
        account=section.account,
        constraint=rules.constraint or "",
        accelerators=rules.accelerators or request.scheduler.accelerator_requests[0],
        options={**rules.options, **section.options},
        accelerator_type=section.accelerator_type or rules.accelerator_type or "",
    )


def _around(request: JobRequest) -> JobEnvironment:
    section, profile = request.section, request.profile
    return JobEnvironment(
        workdir=request.workdir,
        source=request.source,
        code=request.code,
        venv=_venv(request),
        modules=(*profile.modules.load, *section.modules),
        purge_modules=profile.modules.purge,
        expanded={**_internet(profile), **_environment(request)},
        literal={name: str(value) for name, value in section.environment.items()},
        secret_names=request.secret_names,
    )


def _environment(request: JobRequest) -> Mapping[str, str]:
    """The profile's variables; those that list accelerators only if the job has whole nodes."""
    environment, node = request.profile.environment, request.profile.node
    if shape_of(request).accelerators_per_node >= (node.accelerators_per_node or 0):
        return environment
    return {name: value for name, value in environment.items() if name not in _DEVICE_LISTS}


def _venv(request: JobRequest) -> str:
    asked = request.section.venv
    if asked == "auto":
        return request.here if runtime_of(request) == "none" else ""
    return "" if asked == "none" else asked


def _internet(profile: SiteProfile) -> Mapping[str, str]:
    internet = profile.internet
    if internet.nodes == "none":
        return _OFFLINE
    if internet.nodes != "proxy" or not internet.proxy:
        return {}
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), internet.proxy)
    return {**proxy, **({"no_proxy": internet.no_proxy} if internet.no_proxy else {})}


def _container(request: JobRequest) -> ContainerUse:
    runtime, profile = runtime_of(request), request.profile
    if runtime == "none":
        return ContainerUse()
    part = load_accelerators().get(profile.node.accelerator or CPU)
    mounts = (*profile.containers.mounts, *request.section.mounts)
    project = (ContainerMount(str(request.project), str(request.project)),) if request.project else ()
    rules = profile.containers if runtime == profile.container else type(profile.containers)()
    return ContainerUse(
        runtime=runtime,
        image=name_image(runtime, request.section.image),
        mounts=(*project, *(mount for mount in map(parse_mount, mounts) if mount is not None)),
        rules=rules,
        vendor=part.vendor.lower() if part else "",
    )


def name_image(runtime: str, text: str) -> str:
    """An image as its runtime names it: either form of a URI in that of the runtime; a path, or an invalid name,
    unchanged."""
    if not text or text.startswith(_PATH_SIGNS):
        return text
    from shardway.launch.image.request import Reference, parse_uri

    try:
        source = parse_uri(text)
    except UserError:
        return text
    if not isinstance(source, Reference) or source.transport not in ("docker", "oras"):
        return text
    return make_plugin("containers", runtime).name_image(source) or text


def parse_mount(text: str) -> ContainerMount | None:
    """SOURCE:TARGET or SOURCE:TARGET:ro; a SOURCE alone is mounted under the same path. None for anything else."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or mode not in ("", "ro", "rw"):
        return None
    return ContainerMount(source, target or re.sub(r"^~(?=/|$)", "$HOME", source), read_only=mode == "ro")
