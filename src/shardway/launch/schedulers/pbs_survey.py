"""Parses what PBS Pro's own commands print about its nodes and queues.

Invariant: a queue is in the profile only if every user can send jobs to it; any other is a note. A routing queue is in
it without the limits of its destinations.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.errors import list_some
from shardway.launch.schedulers.base import Ask
from shardway.launch.site_survey import ProbedFacts, collect, parse_time
from shardway.sites.schema import CPU
from shardway.units import parse_bytes

QUEUES = ("qstat", "-Qf", "-F", "json")
NODES = ("pbsnodes", "-a", "-F", "json")

_UNITS = {"b": "B", "kb": "KiB", "mb": "MiB", "gb": "GiB", "tb": "TiB", "pb": "PiB"}
"""PBS' units are powers of 1024 (PBS Professional Reference Guide, formats: size)."""


def survey(ask: Ask, server: Sequence[str]) -> ProbedFacts:
    """What PBS says of its nodes and queues; `server` is the command whose answer names the default queue."""
    nodes = describe_nodes(parse_nodes(ask(NODES)))
    default = parse_default_queue(ask(server))
    return nodes + describe_queues(parse_queues(ask(QUEUES)), default)


@dataclass(frozen=True)
class PbsNode:
    """One host, the sum of its vnodes. `memory` is in bytes."""

    name: str
    cores: int
    gpus: int
    memory: int | None
    makes_containers: bool

    @property
    def shape(self) -> tuple[int, int]:
        """What makes two hosts the same kind of node."""
        return self.gpus, self.cores


@dataclass(frozen=True)
class PbsQueue:
    """One queue. `closed` says why a job cannot be sent there; empty where it can."""

    name: str
    closed: str
    max_walltime: float | None
    default_walltime: float | None
    max_nodes: int | None
    min_nodes: int | None


def parse_queues(text: str) -> list[PbsQueue]:
    """Queues from `qstat -Qf -F json`; empty where that is no JSON."""
    return [_queue(name, table) for name, table in _tables(_parse_json(text), "Queue")]


def parse_default_queue(text: str) -> str:
    """The queue of jobs that name none, from `qstat -Bf -F json`."""
    servers = [table for _, table in _tables(_parse_json(text), "Server")]
    return str(servers[0].get("default_queue", "")) if servers else ""


def parse_nodes(text: str) -> list[PbsNode]:
    """Hosts from `pbsnodes -a -F json`; a host may consist of several vnodes."""
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for name, table in _tables(_parse_json(text), "nodes"):
        resources = table.get("resources_available")
        if isinstance(resources, Mapping):
            hosts.setdefault(str(resources.get("host", name)), []).append(resources)
    return [_node(host, vnodes) for host, vnodes in hosts.items()]


def parse_size(value: Any) -> int | None:
    """Bytes from a size of PBS, such as "24684084kb"; None for what is none."""
    text = str(value).strip().lower()
    digits = text.rstrip("bkmgtpw")
    unit = text[len(digits) :] or "b"
    with contextlib.suppress(ValueError):
        return parse_bytes(f"{digits}{_UNITS[unit]}") if unit in _UNITS else None
    return None


def describe_nodes(nodes: Sequence[PbsNode]) -> ProbedFacts:
    """The most frequent kind of node, with accelerators before those without."""
    if not nodes:
        return ProbedFacts()
    shapes = [node.shape for node in nodes]
    gpus, cores = max(shapes, key=lambda shape: (shape[0] > 0, shapes.count(shape)))
    alike = [node for node in nodes if node.shape == (gpus, cores)]
    command = "pbsnodes -a"
    facts = (
        (("node", "cores"), cores or None, command),
        (("node", "memory"), min((node.memory for node in alike if node.memory), default=None), command),
        (("node", "accelerator"), None if gpus else CPU, command),
        (("node", "accelerators_per_node"), gpus, command),
        (("request", "accelerators"), "ngpus" if gpus else None, command),
        (("containers", "by_scheduler"), True if any(node.makes_containers for node in alike) else None, command),
    )
    others = [f"{c} cores, {g} GPUs" for g, c in sorted(set(shapes) - {(gpus, cores)})]
    return collect(
        facts, [f"Other kinds of nodes, which are not described here: {list_some(others, 6)}."] if others else []
    )


def describe_queues(queues: Sequence[PbsQueue], default: str) -> ProbedFacts:
    """Queues that jobs can be sent to, the default one first."""
    usable = sorted((queue for queue in queues if not queue.closed), key=lambda queue: queue.name != default)
    facts = [fact for queue in usable for fact in _queue_facts(queue)]
    return collect(facts, [f"Queue {queue.name} is left out: {queue.closed}." for queue in queues if queue.closed])


def _queue_facts(queue: PbsQueue) -> Iterator[tuple[tuple[str, ...], object, str]]:
    for key in ("name", "max_walltime", "default_walltime", "max_nodes", "min_nodes"):
        yield ("queues", queue.name, key), getattr(queue, key), "qstat -Qf"


def _queue(name: str, table: Mapping[str, Any]) -> PbsQueue:
    most, least, usual = (_table(table, f"resources_{word}") for word in ("max", "min", "default"))
    longest, default = parse_time(most.get("walltime", "")), parse_time(usual.get("walltime", ""))
    fewest = _count(least.get("nodect"))
    return PbsQueue(
        name=name,
        closed=_why_closed(table),
        max_walltime=longest,
        default_walltime=default if default and (longest is None or default <= longest) else None,
        max_nodes=_count(most.get("nodect")) or None,
        min_nodes=fewest if fewest > 1 else None,
    )


def _why_closed(table: Mapping[str, Any]) -> str:
    if str(table.get("enabled")) != "True":
        return "it takes no jobs (enabled)"
    if str(table.get("started")) != "True":
        return "it starts no jobs (started)"
    if str(table.get("from_route_only")) == "True":
        return "jobs come there from other queues only"
    for who in ("user", "group"):
        if str(table.get(f"acl_{who}_enable")) == "True":
            return f"it is for some {who}s only: {table.get(f'acl_{who}s', '')}"
    return ""


def _node(host: str, vnodes: Sequence[Mapping[str, Any]]) -> PbsNode:
    memories = [size for size in (parse_size(vnode.get("mem", "")) for vnode in vnodes) if size]
    return PbsNode(
        name=host,
        cores=sum(_count(vnode.get("ncpus")) for vnode in vnodes),
        gpus=sum(_count(vnode.get("ngpus")) for vnode in vnodes),
        memory=sum(memories) or None,
        makes_containers=any("container_engine" in vnode for vnode in vnodes),
    )


def _count(value: Any) -> int:
    """A whole number; PBS' JSON has them as numbers or as texts."""
    return int(value) if str(value).isdecimal() else 0


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key)
    return found if isinstance(found, Mapping) else {}


def _tables(document: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, table) for name, table in _table(document, key).items() if isinstance(table, Mapping)]


def _parse_json(text: str) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        if isinstance(document, Mapping):
            return document
    return {}
