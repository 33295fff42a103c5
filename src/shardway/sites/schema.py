"""The schema of a site profile, format 1.

Invariant: a `SiteProfile` is frozen and checked; what a profile leaves out is `None`, which means unknown. A new
kind of fact is a new optional key, so that profiles written before it stay valid. This module must not read
files, nor look at the machine.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.units import parse_bytes, parse_seconds

FORMAT = 1
"""The format of profiles that this version reads and writes."""

CPU = "cpu"
"""The accelerator of a node that has none."""

Scheduler = Literal["local", "slurm", "pbs"]
Starter = Literal["torchrun", "srun", "mpirun"]
Container = Literal["none", "pyxis", "enroot", "apptainer", "podman"]


def _parse_size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _parse_time(value: Any) -> Any:
    return parse_seconds(value) if isinstance(value, str) else value


def _check_accelerator(key: str) -> str:
    if key != CPU and key not in load_accelerators():
        raise ValueError(f'"{key}" is not in the catalogue of accelerators')
    return key


def _check_link(key: str) -> str:
    if key not in load_links():
        raise ValueError(f'"{key}" is not in the catalogue of links')
    return key


Bytes = Annotated[int, Field(strict=True, gt=0), BeforeValidator(_parse_size)]
"""A size: "512GiB" in the profile, bytes in Python."""

Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), BeforeValidator(_parse_time)]
"""A time: "24h" in the profile, seconds in Python."""

Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, Field(min_length=1)]
Place = Annotated[str, Field(pattern=r"^[/~$]")]
"""A path on the site: absolute, or from ~ or a $VARIABLE, which the job's shell resolves."""

AcceleratorKey = Annotated[str, AfterValidator(_check_accelerator)]
LinkKey = Annotated[str, AfterValidator(_check_link)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(_Table):
    """One compute node, as a job that takes the whole of it sees it."""

    cores: Count | None = Field(None, description="cores that a job may use")
    memory: Bytes | None = Field(None, description="memory that a job may use")
    accelerator: AcceleratorKey | None = Field(
        None, description='key of the catalogue of accelerators, or "cpu" where a node has none'
    )
    accelerators_per_node: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None, description="accelerators of a node, as many as a process there can see"
    )
    link: LinkKey | None = Field(None, description="link between accelerators, where not the part's usual one")
    local_disk: Place | None = Field(None, description="folder on the node's own disk")

    @model_validator(mode="after")
    def _check_cpu_has_no_accelerators(self) -> Node:
        if self.accelerator == CPU and self.accelerators_per_node:
            raise ValueError(
                f'accelerator is "{CPU}" but accelerators_per_node is {self.accelerators_per_node}; '
                "allowed: 0 of them, or the key of an accelerator"
            )
        return self


class Network(_Table):
    """What joins the nodes."""

    link: LinkKey | None = Field(None, description="key of the catalogue of links: one adapter of a node")
    adapters_per_node: Count | None = Field(None, description="such adapters that a node has")


class Queue(_Table):
    """A PBS queue or a Slurm partition."""

    name: Text = Field(description="name that the scheduler knows")
    max_walltime: Seconds | None = Field(None, description="longest wall-time of a job")
    max_nodes: Count | None = Field(None, description="most nodes of a job")


Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Storage(_Table):
    """Folders on file systems that all nodes share."""

    home: Place | None = Field(None, description="small and backed up")
    project: Place | None = Field(None, description="kept as long as the project")
    scratch: Place | None = Field(None, description="large, fast, and purged")


class Source(_Table):
    """Where a fact comes from, and when it was read there."""

    source: Text = Field(description="document, command or person")
    date: datetime.date = Field(strict=True, description="day on which the source said so")


class SiteProfile(_Table):
    """What a site offers a job. Each key of `sources` is the key path of a fact here, or the start of one."""

    format: Annotated[int, Field(strict=True, ge=FORMAT, le=FORMAT)] = Field(description="1, the schema's version")
    name: Text = Field(description="short name of the site")
    title: Text = Field(description="name for people")
    scheduler: Scheduler = Field(description="who starts jobs")
    starter: Starter | None = Field(None, description="who starts the ranks of a job")
    container: Container | None = Field(None, description="container runtime of the nodes")
    node: Node = Field(Node(), description="one compute node")
    network: Network = Field(Network(), description="what joins the nodes")
    queues: tuple[Queue, ...] = Field((), description="queues or partitions; the first is the default")
    environment: Mapping[str, str] = Field({}, description="environment variables of every job")
    storage: Storage = Field(Storage(), description="shared file systems")
    measured: Mapping[str, Rate] = Field(
        {}, description="what benchmarks and finished runs reached here, by the names of the planner's ceilings"
    )
    sources: Mapping[str, Source] = Field({}, description="key path -> where the fact comes from")

    @model_validator(mode="after")
    def _check_queues_differ(self) -> SiteProfile:
        names = [queue.name for queue in self.queues]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"queues has {', '.join(twice)} more than once; allowed: each name once")
        return self
