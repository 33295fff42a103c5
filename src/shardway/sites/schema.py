"""The schema of a site profile, format 1.

Invariants:
- A `SiteProfile` is frozen and checked; what a profile leaves out is `None`, which means unknown.
- A new kind of fact is a new optional key, so older profiles stay valid.
- No file and no property of the machine is read here.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.plugins import PluginName
from shardway.units import parse_bytes, parse_seconds, render_seconds

FORMAT = 1
"""The format of profiles that this version reads and writes."""

CPU = "cpu"
"""The accelerator of a node that has none."""

DETECTABLE = ("cores", "memory", "accelerator", "accelerators_per_node")
"""Facts of a node whose value in a file may be "detect": that of the machine that reads it."""


def _parsed(parse: Callable[[str], float]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _matching(pattern: str, rest: str) -> AfterValidator:
    """A text of this form; `rest` is what a message says after any other."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f'"{text}" {rest}')
        return text

    return AfterValidator(check)


def _in_catalogue(what: str, list_keys: Callable[[], Iterable[str]], *others: str) -> AfterValidator:
    def check(key: str) -> str:
        if key not in others and key not in list_keys():
            raise ValueError(f'"{key}" is not in the catalogue of {what}')
        return key

    return AfterValidator(check)


def _check_option(value: Any) -> Any:
    value = tuple(value) if isinstance(value, list) else value
    texts = isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
    if not (texts or isinstance(value, bool | int | str)):
        raise ValueError(f"{value!r} is no value of an option; allowed: true, false, an integer, a string, strings")
    return value


Bytes = Annotated[
    int,
    Field(strict=True, gt=0),
    _parsed(parse_bytes),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["512GiB"]}),
]
"""A size: "512GiB" in the profile, bytes in Python."""

Seconds = Annotated[
    float,
    Field(strict=True, gt=0, allow_inf_nan=False),
    _parsed(parse_seconds),
    WithJsonSchema({"type": ["string", "number"], "examples": ["24h"]}),
]
"""A time: "24h" in the profile, seconds in Python."""

Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, Field(min_length=1)]
Place = Annotated[str, Field(pattern=r"^[/~$]")]
"""A path on the site: absolute, or from ~ or a $VARIABLE, which the job's shell resolves."""

Mount = Annotated[
    str,
    _matching(
        r"[/~$][^:]*:/[^:]*(:ro)?", "is no mount; allowed: SOURCE:TARGET or SOURCE:TARGET:ro, both absolute paths"
    ),
]
"""SOURCE:TARGET[:ro]; the source may start with ~ or a $VARIABLE."""

VariableName = Annotated[
    str,
    _matching("[A-Za-z_][A-Za-z0-9_]*", "is no name of a variable; allowed: letters, digits and _, no digit first"),
]
AcceleratorKey = Annotated[str, _in_catalogue("accelerators", load_accelerators, CPU)]
LinkKey = Annotated[str, _in_catalogue("links", load_links)]
Bind = Annotated[
    str,
    _matching(
        "mask_cpu:(0x)?[0-9a-fA-F]+(,(0x)?[0-9a-fA-F]+)*",
        "is no list of CPU masks; allowed: mask_cpu:0xMASK,0xMASK,...",
    ),
]
Proxy = Annotated[
    str,
    _matching(
        r"https?://[^\s/@:]+:\d{1,5}/?", "is no proxy; allowed: http://HOST:PORT, without a user name or password"
    ),
]


def fact(description: str) -> Any:
    """A key that a profile may leave out, which means unknown."""
    return Field(None, description=description)


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(_Table):
    """One compute node, as a job that takes the whole of it sees it."""

    architecture: Literal["x86_64", "aarch64"] | None = fact("what wheels and container images are built for")
    cores: Count | None = fact("cores that a job may use")
    threads_per_core: Count | None = fact(
        "hardware threads of a core, where Slurm counts these as CPUs (scontrol show node: CPUTot)"
    )
    memory: Bytes | None = fact("memory that a job may use")
    accelerator: AcceleratorKey | None = fact('key of the catalogue of accelerators, or "cpu" where a node has none')
    accelerators_per_node: Annotated[int, Field(strict=True, ge=0)] | None = fact(
        "accelerators of a node, as many as a process there can see"
    )
    link: LinkKey | None = fact("link between accelerators, where not the part's usual one")
    local_disk: Place | None = fact("folder on the node's own disk")

    @model_validator(mode="after")
    def _check_cpu_has_no_accelerators(self) -> Self:
        if self.accelerator == CPU and self.accelerators_per_node:
            raise ValueError(
                f'accelerator is "{CPU}" but accelerators_per_node is {self.accelerators_per_node}; '
                "allowed: 0 of them, or the key of an accelerator"
            )
        return self


class Network(_Table):
    """What joins the nodes, and how one of them names another on it."""

    link: LinkKey | None = fact("key of the catalogue of links: one adapter of a node")
    adapters_per_node: Count | None = fact("such adapters that a node has")
    host_suffix: Text | None = fact(
        "what turns a node's short name into that of its fast interface: MASTER_ADDR is name + suffix"
    )
    resolve: Literal["ipv4"] | None = fact(
        "MASTER_ADDR is the numeric address that a node's name resolves to, not the name"
    )


class Queue(_Table):
    """What a job is sent to: a PBS queue, a Slurm partition, or a partition with a quality of service."""

    name: Text = Field(description="name that the user chooses it by")
    partition: str | None = fact('Slurm partition, where it is not the name; "" asks for none')
    qos: Text | None = fact("quality of service that Slurm is asked for")
    max_walltime: Seconds | None = fact("longest wall-time of a job")
    default_walltime: Seconds | None = fact("wall-time of a job that names none")
    max_nodes: Count | None = fact("most nodes of a job")
    min_nodes: Count | None = fact("fewest nodes of a job")

    @model_validator(mode="after")
    def _check_limits_are_ordered(self) -> Self:
        if self.min_nodes and self.max_nodes and self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}; allowed: max_nodes, {self.max_nodes}, or fewer")
        if self.default_walltime and self.max_walltime and self.default_walltime > self.max_walltime:
            default, most = render_seconds(self.default_walltime), render_seconds(self.max_walltime)
            raise ValueError(f"default_walltime is {default}; allowed: max_walltime, {most}, or less")
        return self


OptionValue = bool | int | str | tuple[str, ...]
"""A scheduler's option: true is the bare option, false leaves it out, a list gives it several times."""

Options = Mapping[str, Annotated[OptionValue, BeforeValidator(_check_option)]]


class RequestRules(_Table):
    """How this site wants a job to ask for nodes."""

    account: Literal["required", "optional"] | None = fact("whether a job names an account")
    account_command: Text | None = fact("command that lists a user's accounts and budgets")
    accelerators: Text | None = fact("option that asks for accelerators (Slurm: gres, gpus-per-node; PBS: ngpus)")
    accelerator_type: Text | None = fact("type of accelerator that a job asks for (Slurm: gpu:TYPE:N)")
    whole_nodes: bool | None = fact("whether a job gets nodes for itself alone")
    memory: bool | None = fact("whether a job says how much memory it wants; false: it must not")
    constraint: Text | None = fact("node feature that every job asks for (Slurm)")
    options: Options = Field({}, description="other options of the scheduler for every job")
    submit_from_nodes: bool | None = fact("whether a job may submit jobs")
    max_jobs: Count | None = fact("most jobs of a user, queued and running")


class StartRules(_Table):
    """How ranks are started here."""

    srun_options: tuple[str, ...] = Field((), description="options of every srun")
    mpirun: Text | None = fact("path of Open MPI's mpirun")
    mpirun_options: tuple[str, ...] = Field((), description="options of every mpirun")
    bind: Bind | None = fact("CPU mask of each local rank, in srun's form mask_cpu:0x..,0x..")

    @property
    def masks(self) -> tuple[str, ...]:
        """The CPU mask of each local rank, 0x...; none where ranks are not bound."""
        return tuple(self.bind.removeprefix("mask_cpu:").split(",")) if self.bind else ()


class ContainerRules(_Table):
    """How the container runtime is used here."""

    command: Text | None = fact("its command, where that has another name (singularity)")
    mounts: tuple[Mount, ...] = Field((), description="SOURCE:TARGET[:ro] of every container")
    options: tuple[str, ...] = Field((), description="options of every start of a container")
    by_scheduler: bool | None = fact(
        "PBS makes the container: container_engine in select, container_image and container_name"
    )
    data_path: Place | None = fact("folder in which enroot keeps the containers of a job")


class Modules(_Table):
    """Environment modules (Lmod) of every job."""

    purge: bool = Field(False, description="unload what the login shell loaded first")
    load: tuple[str, ...] = Field((), description="modules with versions, in order")


class Internet(_Table):
    """What can be reached outside."""

    nodes: Literal["none", "proxy", "direct"] | None = fact("from compute nodes")
    login: Literal["none", "proxy", "direct"] | None = fact("from login nodes")
    proxy: Proxy | None = fact("http://HOST:PORT of the proxy")
    no_proxy: Text | None = fact("what is reached without it")


class Access(_Table):
    """How people get in; nothing of it is a secret."""

    login: tuple[str, ...] = Field((), description="login nodes")
    transfer: tuple[str, ...] = Field((), description="nodes for copying data")
    note: Text | None = fact("what to know before the first connection")


Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Storage(_Table):
    """Folders on file systems that all nodes share."""

    home: Place | None = fact("small and backed up")
    project: Place | None = fact("kept as long as the project")
    scratch: Place | None = fact("large, fast, and purged")


class FactSource(_Table):
    """Where a fact comes from, and when it was read there."""

    source: Text = Field(description="document, command or person")
    date: datetime.date = Field(strict=True, description="day on which the source said so")

    @property
    def is_unsure(self) -> bool:
        """Whether the source itself states that the fact is unverified."""
        return "unverified" in self.source.lower()


class SiteProfile(_Table):
    """What a site offers a job. Each key of `sources` is the key path of a fact here, or the start of one."""

    format: Annotated[int, Field(strict=True, ge=FORMAT, le=FORMAT)] = Field(description="1, the schema's version")
    name: Text = Field(description="short name of the site")
    title: Text = Field(description="name for people")
    extends: Text | None = fact("name or path of one other profile, whose facts hold here too")
    replaces: bool = Field(False, description="whether a profile of yours stands for a shipped one of the same name")
    scheduler: Annotated[str, PluginName("schedulers")] = Field(description="what starts jobs")
    launcher: Annotated[str, PluginName("launchers")] | None = fact(
        "what starts the ranks of a command of your own, and under PBS those of a training"
    )
    container: Annotated[str, PluginName("containers")] | None = fact("container runtime of the nodes")
    node: Node = Field(Node(), description="one compute node")
    network: Network = Field(Network(), description="what joins the nodes")
    queues: tuple[Queue, ...] = Field((), description="queues or partitions; the first is the default")
    request: RequestRules = Field(RequestRules(), description="how a job asks for nodes")
    start: StartRules = Field(StartRules(), description="how ranks are started")
    containers: ContainerRules = Field(ContainerRules(), description="how containers are used")
    modules: Modules = Field(Modules(), description="environment modules of every job")
    internet: Internet = Field(Internet(), description="what can be reached outside")
    access: Access = Field(Access(), description="how people get in")
    defaults: Mapping[str, Any] = Field(
        {}, description="keys of a run file's [site], for runs that do not set them: account, queue, venv, image ..."
    )
    environment: Mapping[VariableName, str] = Field({}, description="environment variables of every job")
    storage: Storage = Field(Storage(), description="shared file systems")
    measured: Mapping[str, Rate] = Field(
        {}, description="what benchmarks and finished runs reached here, by the names of the planner's ceilings"
    )
    sources: Mapping[str, FactSource] = Field({}, description="key path -> where the fact comes from")

    @model_validator(mode="after")
    def _check_queues_differ(self) -> Self:
        names = [queue.name for queue in self.queues]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"queues has {', '.join(twice)} more than once; allowed: each name once")
        return self


def profile_schema() -> dict[str, Any]:
    """The JSON Schema of a profile's file, for editors. A file has no null, and one that extends another may leave out
    what is required of the whole; keys of parts and links are those of the catalogues."""
    found = SiteProfile.model_json_schema()
    tables = [found, *found["$defs"].values()]
    for table in tables:
        table["properties"] = {name: _without_null(rule) for name, rule in table["properties"].items()}
    found.pop("required", None)
    parts = {
        "Node": {"accelerator": [*load_accelerators(), CPU], "link": [*load_links()]},
        "Network": {"link": [*load_links()]},
    }
    for table, keys in parts.items():
        for name, allowed in keys.items():
            found["$defs"][table]["properties"][name]["enum"] = allowed
    node = found["$defs"]["Node"]["properties"]
    for name in DETECTABLE:
        rule = node[name]
        about = {key: rule.pop(key) for key in ("title", "description") if key in rule}
        node[name] = {**about, "anyOf": [rule, {"const": "detect", "type": "string"}]}
    return found


def _without_null(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule without its null, which stands for a key that is not there."""
    kept = [each for each in rule.get("anyOf", []) if each != {"type": "null"}]
    plain = {key: value for key, value in rule.items() if key != "anyOf" and not (key == "default" and value is None)}
    return {**plain, **(kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {})}
