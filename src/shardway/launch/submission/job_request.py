"""From the user's request and the site to the job for its scheduler; and what is wrong with a request that can be seen
without its host: the site's limits, names and options, the run file, the earlier run.

Invariants:
- Every value of the job comes from the run file, the command line, the site's profile or a stated default; nothing is
  read from the machine.
- A check returns all of its problems and changes nothing. A limit that the profile does not state is not checked. What
  passes arrives at the scheduler and at the ranks unchanged.
- Run file: what a rank would refuse when it starts is refused before the queue.
- Resumed run: what its ranks would refuse when they resume from the newest checkpoint, or find complete, is refused
  before the queue, as far as this can be decided without the data. Without a checkpoint, or if the record of the run
  cannot be read, nothing is refused.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from shardway.errors import Problem, UserError
from shardway.hardware.catalogue import facts_of_part, load_accelerators
from shardway.hfconfig import OFFLINE_VARIABLES
from shardway.inherited import find_family, name_key
from shardway.launch.containers import all_mounts
from shardway.launch.hosts.base import Host
from shardway.launch.job import (
    SECRETS,
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
from shardway.launch.runs.job_status import Ledger
from shardway.launch.schedulers.base import Scheduler, find_scheduler, list_owners
from shardway.launch.submission.command import CommandRead
from shardway.places import list_variables
from shardway.plugins import list_names, make_plugin
from shardway.refusals import ANOTHER_FOLDER
from shardway.resolve.draft import Circumstances, Resolved
from shardway.resolve.request import (
    ResolveRequest,
    check_same_run,
    find_changes,
    machine_of_known,
    resolve,
    resolve_request,
)
from shardway.rundir.names import find_steps
from shardway.runfile.load import LoadedRunFile, is_text, render_value
from shardway.runfile.schema import SiteSection
from shardway.sites.schema import CPU, Queue, SiteProfile
from shardway.units import format_bytes, render_seconds

# --- the request, and what follows from it and the site

_DEVICE_LISTS = frozenset(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
"""A profile gives the accelerators of a node an order. A job with a part of a node sees only its own, numbered from 0:
a list with higher numbers would hide them all, and the scheduler decides which ones they are."""

PATH_SIGNS = ("/", "~", "$", ".")
"""How an image begins that is a path."""


@dataclass(frozen=True)
class JobRequest:
    """What a job is made of: the run with its site's defaults, the site, and the arguments of the verb.

    `run`: the run directory, and `workdir`: the folder of the ranks, both on the host where the job runs. `read`: how
    the user's command was read, None for a run file. `here`: the Python environment that submits, `python` its
    interpreter where the job finds it. `project`: the folder
    that a snapshot was taken of, if links in the snapshot lead back to it. `source`: the folder that `workdir` is a
    snapshot of, if it is on the host of the job. `code`: the snapshot that provides the code of the run's working
    folder; see `JobEnvironment`. `hub_repos`: the parts of the hub's cache from which the run reads its model and
    data. `hub_variables`: where the submitting shell has the caches of the hub, if the job's host has them too.
    `follows`: the run on that host which has to be finished before this one begins.
    """

    loaded: LoadedRunFile
    profile: SiteProfile
    run: Path
    workdir: Path
    program: Program
    read: CommandRead | None = None
    chain: Chain = field(default_factory=Chain)
    token: str = "0000"
    here: str = ""
    python: str = "python3"
    secret_names: tuple[str, ...] = ()
    project: Path | None = None
    source: Path | None = None
    code: Path | None = None
    hub_repos: tuple[Path, ...] = ()
    hub_variables: Mapping[str, str] = field(default_factory=dict)
    follows: Path | None = None

    @property
    def section(self) -> SiteSection:
        """The [site] section of the run."""
        return self.loaded.values.site

    @cached_property
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

    @property
    def options(self) -> dict[str, str]:
        """The scheduler's options of the site and of the run, by their names without dashes."""
        options = {**self.profile.request.options, **self.section.options}
        return {name.lstrip("-"): str(value) for name, value in options.items()}

    @property
    def memory_options(self) -> list[str]:
        """Options that set memory in another way than a job does; only one way is allowed."""
        return [name for name in self.scheduler.memory_options if name in self.options]

    @property
    def walltime_s(self) -> float | None:
        """Wall-time of an attempt; a day on a machine without a scheduler, None if none is set."""
        if self.section.walltime != "auto":
            return float(self.section.walltime)
        if self.queue is not None and self.queue.max_walltime is not None:
            return self.queue.max_walltime
        return 24 * 3600.0 if self.scheduler.this_machine else None

    @property
    def is_elastic(self) -> bool:
        """Whether the job is a training that may go on with fewer nodes."""
        return self.program.is_training and self.loaded.values.run.elastic != "off"

    @cached_property
    def launcher(self) -> str:
        """As requested, or our own agent for a training, or the site's, or the first that works with its scheduler. One
        process for a server, and for a function that is called once."""
        if self.program.serves:
            return "one_process"
        if self.section.launcher != "auto":
            return self.section.launcher
        if self.program.calls and self.section.nodes == 1 and self.section.ranks_per_node == 1:
            return "one_process"  # a rank alone needs no launcher, and so no torch
        if self.is_elastic or (self.program.is_training and self.scheduler.agent_by_default):
            return "agent"
        possible = list_launchers(self.scheduler)
        return self.profile.launcher if self.profile.launcher in possible else possible[0]

    @property
    def runtime(self) -> str:
        """The container runtime: as requested, or the site's if an image is named, or none."""
        if self.section.container != "auto":
            return self.section.container
        return self.profile.container or "none" if self.section.image else "none"

    @cached_property
    def shape(self) -> Shape:
        """Nodes, and the request of each."""
        section, node, rules = self.section, self.profile.node, self.profile.request
        accelerators = node.accelerators_per_node or 0 if node.accelerator != CPU else 0
        ranks = int(section.ranks_per_node) if section.ranks_per_node != "auto" else max(1, accelerators)
        whole = ranks >= accelerators
        alone = self.scheduler.leaves_one_thread(self.options, " ".join(self.profile.start.srun_options))
        threads = 1 if alone else node.threads_per_core or 1
        cores = node.cores
        if asked := self.scheduler.read_cpus_per_task(self.options):
            tasks = 1 if make_plugin("launchers", self.launcher).one_agent_a_node else ranks
            cores = max(1, asked * tasks // threads)
        elif cores is None and not self.scheduler.this_machine:
            cores = ranks  # without a number a scheduler gives one core, which all ranks of a node would share
        elif cores and not whole:  # a part of a node gets the same part of its cores
            cores = max(1, cores * ranks // accelerators)
        memory = None
        if section.memory != "auto":
            memory = int(section.memory)
        elif rules.memory and node.memory is not None and not self.memory_options:
            memory = node.memory if whole else node.memory * ranks // accelerators
        return Shape(
            nodes=section.nodes,
            ranks_per_node=ranks,
            cores_per_node=cores,
            accelerators_per_node=min(ranks, accelerators),
            memory_bytes=memory,
            whole_nodes=bool(rules.whole_nodes) and whole,
            threads_per_core=threads,
        )

    @cached_property
    def around(self) -> JobEnvironment:
        """What the ranks find around them."""
        section, profile, internet = self.section, self.profile, self.profile.internet
        expanded: dict[str, str] = {}
        if internet.nodes == "none":  # else libraries try for minutes to reach hosts that these nodes cannot reach
            expanded = {**dict.fromkeys(OFFLINE_VARIABLES, "1"), "WANDB_MODE": "offline"}
        elif internet.nodes is None and self.hub_repos:  # what the run needs of the hub is in its folder
            expanded = dict.fromkeys(OFFLINE_VARIABLES, "1")
        elif internet.nodes == "proxy" and internet.proxy:
            expanded |= {"http_proxy": internet.proxy, "https_proxy": internet.proxy}
            expanded |= {"no_proxy": internet.no_proxy} if internet.no_proxy else {}
        whole = self.shape.accelerators_per_node >= (profile.node.accelerators_per_node or 0)
        expanded |= {name: v for name, v in profile.environment.items() if whole or name not in _DEVICE_LISTS}
        literal = {name: v for name, v in self.hub_variables.items() if name not in expanded and self.runtime == "none"}
        venv = "" if section.venv == "none" else section.venv
        if venv == "auto":
            venv = self.here if self.runtime == "none" else ""
        return JobEnvironment(
            workdir=self.workdir,
            source=self.source,
            code=self.code,
            venv=venv,
            modules=(*profile.modules.load, *section.modules),
            purge_modules=profile.modules.purge,
            expanded=expanded,
            literal={**literal, **{name: str(value) for name, value in section.environment.items()}},
            secret_names=self.secret_names,
        )

    @property
    def venv_folder(self) -> str | None:
        """The virtual environment of the job, "" for none; None for a conda environment, which is not searched."""
        return None if self.around.venv.startswith("conda:") else self.around.venv

    def may_add_to(self, name: str) -> bool:
        """Whether modules or a variable of the job may add to PATH or PYTHONPATH what is not visible from here."""
        return bool(self.around.modules) or name in self.around.names

    def problem(self, key: str, what: str, allowed: str = "", remedy: str = "") -> Problem:
        """A problem of a key, by default one of [site], with the origin of its value."""
        key = key if "." in key else f"site.{key}"
        return Problem(key, what, self.loaded.origins[key], allowed, remedy)


def build_job(request: JobRequest, attempt: int) -> Job:
    """The job of one attempt. A missing value becomes a harmless one, which the checks refuse first."""
    profile, section, program, queue = request.profile, request.section, request.program, request.queue
    rules, run = profile.request, request.loaded.values.run
    walltime = request.walltime_s or 0.0
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.run.name).strip("-.")[:180]  # what schedulers accept
    queue_name = section.queue or (queue.name if queue else "")
    restarts = 3 if run.max_restarts == "auto" else run.max_restarts  # ft_launcher counts, and sees no checkpoints
    again = Again(restarts, silent_s=math.inf)
    if run.hang_timeout != "off":
        again = Again(restarts, run.start_timeout, None if run.hang_timeout == "auto" else float(run.hang_timeout))
    preflight = Program(("-m", "shardway", "doctor", "--preflight"), meets_by_itself=True)
    return Job(
        name=name if name[:1].isalpha() else f"run-{name}".rstrip("-"),
        token=request.token,
        site=profile.name,
        scheduler=profile.scheduler,
        launcher=request.launcher,
        run=request.run,
        attempt=attempt,
        program=program,
        shape=request.shape,
        terms=QueueTerms(
            walltime_s=walltime,
            queue=queue_name,
            partition=queue_name if queue is None or queue.partition is None else queue.partition,
            qos=(queue.qos if queue else None) or "",
            account=section.account,
            constraint=rules.constraint or "",
            accelerators=rules.accelerators or request.scheduler.accelerator_requests[0],
            options={**rules.options, **section.options},
            accelerator_type=section.accelerator_type or rules.accelerator_type or "",
        ),
        around=request.around,
        container=_use_container(request),
        meeting=Meeting(profile.network.host_suffix or "", profile.network.resolve == "ipv4"),
        start=profile.start,
        chain=request.chain,
        preflight=preflight if section.preflight else None,
        elastic=request.is_elastic,
        again=again,
        telemetry_s=0.0 if program.meets_by_itself or run.telemetry == "off" else run.telemetry,
        python=request.python,
        follows=request.follows,
        # a program that does not watch the clock is warned a tenth before its end, one to ten minutes
        warn_s=0.0 if program.meets_by_itself else min(max(60.0, walltime / 10), 600.0, walltime / 2),
    )


def _use_container(request: JobRequest) -> ContainerUse:
    runtime, profile = request.runtime, request.profile
    if runtime == "none":
        return ContainerUse()
    part = load_accelerators().get(profile.node.accelerator or CPU)
    mounts = map(parse_mount, (*profile.containers.mounts, *request.section.mounts))
    project = (ContainerMount(str(request.project), str(request.project)),) if request.project else ()
    # all of a repository: the files of a snapshot are links to its blobs
    repos = [ContainerMount(str(folder), str(folder), read_only=True) for folder in request.hub_repos]
    return ContainerUse(
        runtime=runtime,
        image=_name_image(runtime, request.section.image),
        mounts=(*project, *repos, *filter(None, mounts)),
        rules=profile.containers if runtime == profile.container else type(profile.containers)(),
        vendor=part.vendor.lower() if part else "",
    )


def _name_image(runtime: str, text: str) -> str:
    """An image as its runtime names it: either form of a URI in that of the runtime; a path, or an invalid name,
    unchanged."""
    if not text or text.startswith(PATH_SIGNS):
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


# --- checks against the profile of the site


def list_site_problems(request: JobRequest) -> Iterator[Problem]:
    """Everything that is wrong with a request, as far as its site says."""
    yield from _check_limits(request)
    yield from _check_launcher_and_container(request)
    yield from _check_words(request)
    yield from _check_paths(request)


def _check_limits(request: JobRequest) -> Iterator[Problem]:
    """Time, nodes, account, ranks and memory: a job over a limit waits forever, or is refused without naming it."""
    section, profile, queue = request.section, request.profile, request.queue
    node, rules, name = profile.node, profile.request, profile.name
    walltime = request.walltime_s
    if walltime is None:
        unknown = section.queue and queue is None and profile.queues
        limit = f'does not know the queue "{section.queue}"' if unknown else "states no limit"
        what = f"nothing says how long a job may run: the profile of {name} {limit}"
        yield request.problem("walltime", what, 'a time such as "24h"', "set site.walltime, or give --walltime")
    elif queue is not None and queue.max_walltime is not None and walltime > queue.max_walltime:
        limit = render_seconds(queue.max_walltime)
        what = f'{render_seconds(walltime)} is longer than the queue "{queue.name}" of {name} allows'
        remedy = f'set site.walltime = "{limit}"; --until-done goes on in as many jobs as the work needs'
        yield request.problem("walltime", what, f"at most {limit}", remedy)
    nodes = section.nodes
    if request.scheduler.this_machine and nodes > 1:
        remedy = "leave it at 1, or name a site that has nodes: --on SITE"
        yield request.problem("nodes", f"{nodes} nodes, and {name} is one machine", "1", remedy)
    if queue is not None and queue.max_nodes is not None and nodes > queue.max_nodes:
        larger = [q.name for q in profile.queues if (q.max_nodes or nodes) >= nodes and q is not queue]
        remedy = f"choose another queue: {', '.join(larger)}" if larger else "ask for fewer nodes"
        what = f'{nodes} nodes in the queue "{queue.name}"'
        yield request.problem("nodes", what, f"at most {queue.max_nodes}", remedy)
    if queue is not None and queue.min_nodes is not None and nodes < queue.min_nodes:
        yield request.problem("nodes", f'{nodes} nodes in the queue "{queue.name}"', f"at least {queue.min_nodes}")
    if rules.account == "required" and not section.account:
        listing = f"; `{rules.account_command}` lists yours" if rules.account_command else ""
        remedy = f"set site.account{listing}; for good: [defaults] account in a profile of your own (docs/sites.md)"
        yield request.problem("account", f"{name} requires a project account", remedy=remedy)
    ranks = 0 if section.ranks_per_node == "auto" else int(section.ranks_per_node)
    most = node.accelerators_per_node if request.loaded.values.run.device != "cpu" else 0
    if most and ranks > most:  # a rank without an accelerator fails when the job starts, hours later
        remedy = 'lower site.ranks_per_node, or leave it at "auto"; run.device = "cpu" trains on cores'
        what = f"{ranks} ranks on nodes with {most} accelerators"
        yield request.problem("ranks_per_node", what, f"at most {most}", remedy)
    if node.cores and ranks > node.cores:
        what = f"{ranks} ranks on nodes of {node.cores} cores"
        yield request.problem("ranks_per_node", what, f"at most {node.cores}")
    if section.memory != "auto":
        memory = int(section.memory)
        if rules.memory is False:
            what = f"{name} does not take a job that says how much memory it wants"
            yield request.problem("memory", what, '"auto"', "leave it out")
        if node.memory is not None and memory > node.memory:
            what = f"{format_bytes(memory)} of nodes with {format_bytes(node.memory)}"
            yield request.problem("memory", what, f"at most {format_bytes(node.memory)}")


def _check_launcher_and_container(request: JobRequest) -> Iterator[Problem]:
    """The launcher of a scheduler needs that scheduler, an image a runtime, and a runtime an image."""
    section, launcher, runtime, walltime = request.section, request.launcher, request.runtime, request.walltime_s
    possible = list_launchers(request.scheduler)
    if launcher not in possible and launcher != "one_process":
        what = f'"{launcher}" does not go with the scheduler {request.profile.scheduler}'
        yield request.problem("launcher", what, ", ".join(possible))
    if launcher == "agent" and not request.program.is_training:
        what = '"agent" starts the training of a run file alone, and this is a command of your own'
        yield request.problem("launcher", what, ", ".join(name for name in possible if name != "agent"))
    if launcher != "agent" and request.is_elastic:
        what = f'"{launcher}" ends the job where a node is lost, and run.elastic wants it to go on'
        yield request.problem("launcher", what, '"agent" or "auto"', "leave it out, or set run.elastic to off")
    owners = list_owners(f"container={runtime}")
    if owners and not make_plugin("launchers", launcher).works_with_container_of_scheduler:
        what = f'"{launcher}" does not go with {runtime}, whose containers are started by {owners[0].launcher}'
        yield request.problem("launcher", what, f"torchrun, {owners[0].launcher}")
    known = [name for name in list_names("containers") if name != "none"]
    if section.image and runtime == "none":
        what = f'"{section.image}" is named, and the profile of {request.profile.name} knows no container runtime'
        if section.container == "none":
            what = f'"{section.image}" is named, but site.container = "none"'
        yield request.problem("image", what, remedy=f"set site.container to one of {', '.join(sorted(set(known)))}")
    if runtime != "none" and not section.image:
        images = make_plugin("containers", runtime).images
        yield request.problem("container", f'"{runtime}" needs an image', remedy=f"set site.image: {images}")
    if owners and request.scheduler not in owners:
        free = [name for name in known if not list_owners(f"container={name}")]
        yield request.problem("container", f'"{runtime}" is a part of {owners[0].title}', ", ".join(free))
    margin = request.loaded.values.run.stop_margin
    if margin != "auto" and walltime is not None and float(margin) >= walltime:  # it would leave no time to train
        what = f"{render_seconds(float(margin))} before the end of a wall-time of {render_seconds(walltime)} is no time"
        yield request.problem("run.stop_margin", what, "less than the wall-time")


def _check_words(request: JobRequest) -> Iterator[Problem]:
    """Options, variables and names: what schedulers and shells would read otherwise than it is meant."""
    section, scheduler = request.section, request.scheduler
    for name, value in section.options.items():  # of an option and a key of one meaning, either may win
        if found := scheduler.check_option(name.lstrip("-"), value):
            yield request.problem("options", f'"{name}" {found.what}', found.allowed, found.remedy)
        entries = value if isinstance(value, list) else [value]
        plain = all(isinstance(entry, str | int | bool) for entry in entries)
        if not plain or any("\n" in str(entry) for entry in (name, *entries)):
            what = f'"{name}" is not one line of text'
            yield request.problem("options", what, "strings, numbers, true, false, lists of them")
    for name in request.memory_options if section.memory != "auto" else ():  # if only the site sets it, it is replaced
        what = f'"{name}" and site.memory both say the memory of the job, and {scheduler.title} takes one'
        yield request.problem("options", what, remedy="leave out one of them")
    # Other users can read a job script; a variable of the launcher would place every rank at rank 0.
    for name, value in section.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield request.problem("environment", f'"{name}" is no name of a variable', "letters, digits and _")
        elif (family := find_family(name)) and name not in family.settings:
            key = name_key(name)
            what = f'"{name}" ({family.subject}) is not for a run to set'
            yield request.problem("environment", what, remedy=f"set {key} in its place" if key else "leave it out")
        elif re.search(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL|PRIVATE_KEY", name, re.IGNORECASE):
            what = f'"{name}" looks like a secret, and job scripts and run files are read by others'
            remedy = f"write {name}=... into {SECRETS} (chmod 600) on the site"
            yield request.problem("environment", what, remedy=remedy)
        if isinstance(value, dict | list) or "\0" in str(value):
            what = f"{name} = {render_value(value)} is not a string"
            yield request.problem("environment", what, "a string or a number")
    for key in ("queue", "account", "accelerator_type"):
        value = getattr(section, key)
        if not re.fullmatch(r"[A-Za-z0-9_@+=:,./%*-]*", value):
            what = f'"{value}" holds characters that schedulers do not take'
            yield request.problem(key, what, "letters, digits, _ @ + = : , . / % * -")
    # A training stores its own path in `resolved.toml`, which is UTF-8; a user's command does not.
    if request.read is None and not is_text(str(request.run)):
        what = f"the run directory {str(request.run)!a} is not UTF-8 text"
        yield Problem("run.root", what, remedy=ANOTHER_FOLDER)


def _check_paths(request: JobRequest) -> Iterator[Problem]:
    """An image that its runtime starts, mounts that it takes, and folders that the job's shell reads as they are."""
    image, runtime = request.section.image, request.runtime
    container = make_plugin("containers", runtime)
    if image and runtime != "none" and not image.startswith(PATH_SIGNS):
        if container.starts_files:  # an image in a registry must be fetched first
            what = f'"{image}" is no path, and {runtime} starts files'
            yield request.problem("image", what, remedy=container.starts_files.replace("IMAGE", image))
        else:
            from shardway.launch.image.request import parse_uri

            try:
                parse_uri(image)
            except UserError as error:
                allowed = "a path on the site, or docker://REGISTRY/IMAGE:TAG"
                yield request.problem("image", str(error).splitlines()[0], allowed)
    for text in request.section.mounts:
        if parse_mount(text) is None:
            yield request.problem("mounts", f'"{text}" is no mount', "SOURCE:TARGET or SOURCE:TARGET:ro")
    for mount in all_mounts(build_job(request, 1)) if runtime != "none" else ():
        for path in dict.fromkeys((mount.source, mount.target)):
            if found := re.search(container.divider, path):  # some runtimes split paths at more than the colon
                sign = {" ": "a blank", ",": "a comma", ":": "a colon"}.get(found[0], "a control character")
                what = f'{runtime} cannot mount "{path}": it takes {sign} for the end of a path'
                yield request.problem("container", what, remedy="choose a folder with a plain name (run.root, --dir)")
    # The job's shell expands `$NAME` in paths that the user writes, and would do so in the name of an existing folder.
    held: dict[str, str] = {}
    if runtime != "none":
        work = None if request.workdir.is_relative_to(request.run) else request.workdir
        held = {str(path): "run.root" for path in (request.run, work, request.project) if path is not None}
    if request.section.venv == "auto" and request.around.venv:
        held[request.around.venv] = "site.venv"
    for folder, key in held.items():
        if names := list_variables(folder):
            what = f'the folder "{folder}" has ${names[0]} in its name, which the shell of a job takes for a variable'
            yield Problem(key, what, remedy="give it another name, or name another folder")


def list_site_warnings(request: JobRequest) -> Iterator[str]:
    """Warnings about a request that is valid but may not be meant so."""
    shape, profile, queue = request.shape, request.profile, request.section.queue
    idle = (profile.node.accelerators_per_node or 0) - shape.ranks_per_node
    if idle > 0 and profile.request.whole_nodes and shape.accelerators_per_node:
        yield (
            f"{shape.ranks_per_node} ranks a node leave {idle} of {profile.node.accelerators_per_node} accelerators "
            f"idle, and {profile.name} charges whole nodes"
        )
    known = [entry.name for entry in profile.queues]
    if queue and known and queue not in known:
        yield (
            f'the profile of {profile.name} does not know the queue "{queue}" (it knows {", ".join(known)}), '
            "so its limits are not checked"
        )


def warn_of_python(request: JobRequest) -> Iterator[str]:
    """A warning if the user has activated an environment, and `python` is that of another one in the job."""
    if request.runtime != "none" or request.section.venv != "auto" or request.may_add_to("PATH"):
        return
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    python = shutil.which("python") or shutil.which("python3") or ""
    folder, venv = os.path.dirname(os.path.dirname(python)), request.venv_folder
    other = not venv or os.path.realpath(venv) != os.path.realpath(active)
    if active and folder == os.path.normpath(active) and other:
        yield (
            f"`python` is {python} in this shell, and the job takes that of {venv or 'its PATH'} (site.venv): name it "
            f"by its path, or set site.venv={folder}"
        )


# --- the rules of the run file, and those of a run that goes on


def check_run(run_request: ResolveRequest, site: str, request: JobRequest) -> Resolved:
    """Check the run file for the ranks and the machine that the job will have, and return the run as they will have it.

    `site` is that of --on. Raises UserError with every problem."""
    values, profile, shape = request.loaded.values, request.profile, request.shape
    if values.parallel.layout == "auto" or values.model.hf:  # the planner, or the config of a checkpoint, is needed
        machine = machine_of_known(profile) if values.run.device != "cpu" else None
        named = [f"site.name={site}"] if site else []
        run_request = replace(run_request, overrides=(*run_request.overrides, *named))
        return resolve_request(run_request, shape.ranks, shape.ranks_per_node, planned=machine).resolved
    unknown = shape.ranks_per_node if values.run.device == "cuda" else 0
    accelerators = profile.node.accelerators_per_node
    part = load_accelerators().get(profile.node.accelerator or CPU)
    circumstances = Circumstances(
        ranks=shape.ranks,
        ranks_per_node=shape.ranks_per_node,
        usable_cores=profile.node.cores or os.cpu_count() or 1,
        accelerators=unknown if accelerators is None else accelerators,
        site=profile.name,
        own_model=run_request.own_model,
        local_disk=profile.node.local_disk or "",
        devices=(facts_of_part(part),) if part is not None else (),
    )
    return resolve(request.loaded, circumstances)  # the planner, which is slow to import, would only pick a micro-batch


def check_goes_on(host: Host, ledger: Ledger, resolved: Resolved) -> None:
    """Raise UserError if a key has changed that must not change between attempts, or if the run is complete."""
    run, ways_out = ledger.run, "or submit it as another run (`shardway submit` with another run.name or --dir)"
    listed, record = host.run_many([("ls", str(run.checkpoints)), ("cat", str(run.resolved_path))])
    steps = find_steps(listed.out.splitlines())
    if not steps or not record.ok:
        return
    try:
        saved = tomllib.loads(record.out)
    except (ValueError, RecursionError):
        return  # its ranks report what to do about it
    tables = {name: table for name, table in saved.items() if isinstance(table, dict)}
    check_same_run(tables, resolved, str(run.path), ways_out)
    total: object = None
    if resolved.values.train.steps.unit == "steps":
        total = math.ceil(resolved.values.train.steps.amount)
    else:  # it depends on the data: the recorded number, if nothing that decides it has changed
        changes = find_changes(tables, resolved)
        decide = ("train.steps", "train.global_batch")
        if not any(key in decide or key.startswith("data.") for key in changes):
            total = ledger.status.get("total_steps")
    if isinstance(total, int) and steps[-1] >= total:
        raise UserError(
            f"{run.path} has a checkpoint of step {steps[-1]}, and {total} steps are asked for, so a job would have "
            f"nothing to do.\n  To do: raise train.steps, {ways_out}."
        )
