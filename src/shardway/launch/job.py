"""One job for a scheduler, a launcher and a container runtime: everything that its script is made of.

Invariant: a `Job` is complete and consistent. All that depends on the site, the run file or this machine was decided
before it was made (`launch.submission.job_request`), and the same job always gives the same script. No file is read
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardway.places import LENT
from shardway.plugins import make_plugin
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.sites.schema import ContainerRules, Options, StartRules
from shardway.telemetry.start import VARIABLE as TELEMETRY

OWN_VARIABLES = (
    *("SHARDWAY_ATTEMPT_DIR", "SHARDWAY_STOP_FILE", "SHARDWAY_JOB", "SHARDWAY_NODES"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "PYTHONUNBUFFERED"),
)
"""Variables that every job script sets for its ranks; a run may set the last two otherwise."""

SECRETS = "~/.config/shardway/secrets.env"
"""Where a person keeps what must not stand in scripts and run files, on the machine where the job runs."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_@+=,./-]+")


def is_plain_path(path: str) -> bool:
    """Whether a scheduler takes a path as it is: without what it interprets (blanks, %, quotes, colons)."""
    return _PLAIN_PATH.fullmatch(path) is not None


@dataclass(frozen=True)
class Shape:
    """Nodes and what of each is wanted; 0 accelerators for none, None where the site does not want it said.

    `threads_per_core`: CPUs of Slurm in each core: those that a task is given are threads of the same cores (from 22.05
    on).
    """

    nodes: int
    ranks_per_node: int
    cores_per_node: int | None = None
    accelerators_per_node: int = 0
    memory_bytes: int | None = None
    whole_nodes: bool = False
    threads_per_core: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cores_per_rank(self) -> int | None:
        """At least 1."""
        return max(1, self.cores_per_node // self.ranks_per_node) if self.cores_per_node else None


@dataclass(frozen=True)
class QueueTerms:
    """What is asked of the queue; an empty text is not said to the scheduler. `accelerators` is the form in which they
    are asked for: gres, gpus-per-node, ngpus, none."""

    walltime_s: float
    queue: str = ""
    partition: str = ""
    qos: str = ""
    account: str = ""
    constraint: str = ""
    accelerators: str = "none"
    options: Options = field(default_factory=dict)
    accelerator_type: str = ""


@dataclass(frozen=True)
class ContainerMount:
    """A folder of the host that the container sees at `target`."""

    source: str
    target: str
    read_only: bool = False

    def render(self) -> str:
        """SOURCE:TARGET, with :ro where it is read only, as every runtime takes it."""
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


@dataclass(frozen=True)
class ContainerUse:
    """The runtime ("none": ranks on the host), its image, the maker of the accelerators ("nvidia", "amd" or "")."""

    runtime: str = "none"
    image: str = ""
    mounts: tuple[ContainerMount, ...] = ()
    rules: ContainerRules = field(default_factory=ContainerRules)
    vendor: str = ""


@dataclass(frozen=True)
class Program:
    """What every rank runs: a Python script or module with its arguments, or, with `python` False, any program.

    `interpreter`: the Python that such a program is, where it is another one than the environment's.
    `meets_by_itself`: it finds its rank and the others in the variables of any launcher (Shardway's own verbs do);
    other programs get torch's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `serves`: it is one process
    that starts an inference server (`launch.serving`). `calls`: it calls a Python function (`launch.calls`).
    """

    words: tuple[str, ...]
    python: bool = True
    meets_by_itself: bool = False
    interpreter: str = ""
    serves: bool = False
    calls: bool = False

    @property
    def is_training(self) -> bool:
        return self.meets_by_itself and self.words[:3] == ("-m", "shardway", "train")


@dataclass(frozen=True)
class JobEnvironment:
    """What the ranks find around them. `literal` variables arrive unchanged, in `expanded` ones the shell of the job
    replaces $NAMES. `secrets_file` is read by the job where it is there; it is never written. `secret_names`: names,
    never values, of what it sets: some runtimes pass on only what is named.

    `source`: the folder that `workdir` is a snapshot of, for a job that is submitted by hand; None where it is not
    here. `code`: the snapshot that `workdir`, the working folder of the run, takes its code from; None where it is the
    snapshot itself, or a folder of the person.
    """

    workdir: Path
    venv: str = ""
    modules: tuple[str, ...] = ()
    purge_modules: bool = False
    expanded: Mapping[str, str] = field(default_factory=dict)
    literal: Mapping[str, str] = field(default_factory=dict)
    secrets_file: str = SECRETS
    source: Path | None = None
    code: Path | None = None
    secret_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the variables that are set."""
        return tuple(dict.fromkeys((*self.expanded, *self.literal)))


@dataclass(frozen=True)
class Meeting:
    """How the nodes of this site name each other; see `sites.schema.Network`."""

    host_suffix: str = ""
    resolve: bool = False


@dataclass(frozen=True)
class Again:
    """How often a launcher with restarts starts its ranks again, and after how many seconds of silence (`start_s`:
    while they start). `silent_s`: None for the launcher's own limit, infinity for no limit."""

    restarts: int = 0
    start_s: float = math.inf
    silent_s: float | None = None


@dataclass(frozen=True)
class Chain:
    """How the job goes on until the work is done. `after`: the attempt that this one follows in its chain, 0 for none.
    `ahead`: links are submitted from here, all at once, because jobs may not submit jobs; else each link submits the
    next one."""

    until_done: bool = False
    max_attempts: int = 1
    after: int = 0
    ahead: bool = False


@dataclass(frozen=True)
class Job:
    """Everything that a job script says.

    `warn_s`: how long before the end of the wall-time the script asks the program to stop; 0: the program looks itself.
    `preflight`: what looks at the nodes before the program starts. `elastic`: it goes on with fewer nodes where one is
    lost. `telemetry_s`: how often the script has each node's hardware sampled, with `python`; 0: the program does that
    itself, or it is not wanted. `follows`: the directory of the run that has to be finished before this one begins.
    """

    name: str
    token: str
    site: str
    scheduler: str
    launcher: str
    run: Path
    attempt: int
    program: Program
    shape: Shape
    terms: QueueTerms
    around: JobEnvironment
    container: ContainerUse = ContainerUse()
    meeting: Meeting = Meeting()
    start: StartRules = field(default_factory=StartRules)
    chain: Chain = Chain()
    warn_s: float = 0.0
    preflight: Program | None = None
    elastic: bool = False
    again: Again = Again()
    telemetry_s: float = 0.0
    python: str = "python3"
    follows: Path | None = None

    @property
    def one_agent_a_node(self) -> bool:
        """Whether the scheduler starts one process on each node, which starts the ranks there."""
        one: bool = make_plugin("launchers", self.launcher).one_agent_a_node
        return one

    @property
    def folder(self) -> Attempt:
        """The attempt's folder on the host where the job runs, for the names of files in it."""
        return RunDir(self.run).attempt(self.attempt)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of what a rank on another node or in a container has to get, the secrets left out."""
        lent = (LENT,) if self.container.runtime != "none" else ()
        sampled = (TELEMETRY,) if self.telemetry_s else ()
        return tuple(dict.fromkeys((*OWN_VARIABLES, *lent, *sampled, *self.around.names)))

    @property
    def log_for_scheduler(self) -> str:
        """Where the scheduler writes what the job prints. A path that is not plain is not given to it: the script then
        sends its output there itself."""
        path = str(self.folder.job_log)
        return path if is_plain_path(path) else "/dev/null"

    @property
    def scheduler_name(self) -> str:
        """Name of the job at the scheduler: unique, so that a submission whose answer was lost is found again."""
        return f"{self.name}.{self.attempt:04d}.{self.token}"

    def successor(self) -> Job:
        """The next link of the chain."""
        return replace(self, attempt=self.attempt + 1, chain=replace(self.chain, after=self.attempt))
