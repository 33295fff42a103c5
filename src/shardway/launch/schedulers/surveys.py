"""What the commands of Slurm and PBS print about nodes, queues and accounts, as facts of a site profile.

Invariant: a queue is in the profile only if this user (of PBS: every user) can send jobs to it, and of Slurm only if it
has the nodes that the profile describes; any other is a note. A routing queue of PBS is in it without the limits of its
destinations.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardway.errors import list_some
from shardway.launch.schedulers.base import Ask
from shardway.launch.site_survey import ProbedFacts, collect, parse_time
from shardway.sites.schema import CPU

PARTITIONS = ("scontrol", "show", "partition")
QUEUES = ("qstat", "-Qf", "-F", "json")
NODES = ("pbsnodes", "-a", "-F", "json")

Fact = tuple[tuple[str, ...], object, str]
"""A key, its value (None: unknown), and the command that printed it, as `collect` takes them."""


def survey_slurm(ask: Ask, sinfo: Sequence[str]) -> ProbedFacts:
    """`sinfo` is the command whose lines `parse_sinfo` reads."""
    kinds = parse_sinfo(ask(sinfo))
    if not kinds:
        return ProbedFacts((), ("sinfo names no nodes: nothing is known of nodes and partitions.",))
    user = ask(("id", "-un")).strip()
    accounts = parse_accounts(ask(accounts_command(user), quiet=True))
    partitions = parse_partitions(ask(PARTITIONS))
    found = describe_nodes(kinds) + describe_partitions(partitions, kinds, accounts) + describe_accounts(accounts, user)
    words = ("scontrol", "show", "node", parse_first_node(_choose_kind(kinds).nodes))
    architecture = parse_architecture(ask(words, quiet=True)) if words[-1] else None
    return found + collect([(("node", "architecture"), architecture, " ".join(words))])


def survey_pbs(ask: Ask, server: Sequence[str]) -> ProbedFacts:
    """`server` is the command whose answer names the default queue."""
    nodes = describe_hosts(ask(NODES))
    default = parse_default_queue(ask(server))
    return nodes + describe_queues(ask(QUEUES), default)


# --- of both


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one partition that are alike. `cores` are cores, not hardware threads, where sinfo says how many there
    are, and `threads` what Slurm counts as CPUs in each; `memory` is in bytes; `nodes` is the list of their names, as
    sinfo shortens it."""

    partition: str
    count: int
    cores: int | None
    memory: int | None
    gpus: int
    gpu_type: str
    nodes: str
    threads: int = 1

    @property
    def shape(self) -> tuple[int, str, int | None]:
        """What makes two of these the same kind of node."""
        return self.gpus, self.gpu_type, self.cores


def _choose_kind(kinds: Sequence[NodeKind]) -> NodeKind:
    """The kind of node that the profile describes: with accelerators before those without, then the most frequent."""
    counts = Counter[tuple[tuple[int, str, int | None], str]]()
    for kind in kinds:
        counts[kind.shape, kind.partition] += kind.count
    most: dict[tuple[int, str, int | None], int] = {}  # of each shape, in the partition that has most of them
    for (shape, _), count in counts.items():
        most[shape] = max(most.get(shape, 0), count)
    return max(kinds, key=lambda kind: (kind.gpus > 0, most[kind.shape]))


def _list_node_facts(kinds: Sequence[NodeKind], command: str, request: str) -> Iterator[Fact]:
    """What a profile says of the chosen kind; `request` is how a job asks for its accelerators."""
    chosen = _choose_kind(kinds)
    memories = [kind.memory for kind in kinds if kind.shape == chosen.shape and kind.memory]
    yield ("node", "cores"), chosen.cores, command
    yield ("node", "threads_per_core"), chosen.threads if chosen.threads > 1 else None, command
    yield ("node", "memory"), min(memories, default=None), command
    yield ("node", "accelerator"), None if chosen.gpus else CPU, command
    yield ("node", "accelerators_per_node"), chosen.gpus, command
    yield ("request", "accelerators"), request if chosen.gpus else None, command


def _note_others(words: Sequence[str]) -> list[str]:
    return [f"Other kinds of nodes, which are not described here: {list_some(words, 6)}."] if words else []


def _list_queue_facts(name: str, command: str, walltimes: tuple[Any, Any], nodes: tuple[Any, Any]) -> Iterator[Fact]:
    """The longest and the usual wall-time of a queue, and its most and fewest nodes."""
    longest, usual = map(parse_time, walltimes)
    most, fewest = map(_whole, nodes)
    yield ("queues", name, "name"), name, command
    yield ("queues", name, "max_walltime"), longest, command
    fits = usual and (longest is None or usual <= longest)
    yield ("queues", name, "default_walltime"), usual if fits else None, command
    yield ("queues", name, "max_nodes"), most or None, command
    yield ("queues", name, "min_nodes"), fewest if fewest > 1 else None, command


def _whole(value: Any) -> int:
    """A number, in JSON also one as a text; of sinfo with a + where nodes differ, whose fewest it is; 0 for none."""
    digits = str(value).strip().removesuffix("+")
    return int(digits) if digits.isdecimal() else 0


# --- Slurm

_GPUS = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,()=]+))?:(?P<count>\d+)")
_ENTRY = re.compile(r"(\S+?)=(\S*)")
_MIB = 2**20  # Slurm's MB are MiB (slurm.conf, RealMemory)


def parse_sinfo(text: str) -> list[NodeKind]:
    """Kinds of nodes from sinfo; a line of another form is left out."""
    kinds = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 10 or not fields[3].isdecimal():
            continue
        partition, _, _, count, _, nodes, gres, cpus, memory, _, *shape = fields
        # "%z": sockets, cores of each, threads of each
        numbers = [_whole(part) for part in shape[0].split(":")] if shape else []
        cores = numbers[0] * numbers[1] if len(numbers) == 3 else 0 if shape else _whole(cpus)
        threads = _whole(cpus) // cores if cores else 1
        size = _whole(memory) * _MIB or None
        name = partition.removesuffix("*")
        kinds.append(NodeKind(name, int(count), cores or _whole(cpus) or None, size, *parse_gpus(gres), nodes, threads))
    return kinds


def parse_gpus(gres: str) -> tuple[int, str]:
    """GPUs of a node and their type, from a GRES such as "gpu:a100:4(S:0-1),nvme:1"; (0, "") for none."""
    found = [(match["type"] or "", int(match["count"])) for match in _GPUS.finditer(gres)]
    types = sorted({name for name, _ in found if name})
    return sum(count for _, count in found), types[0] if len(types) == 1 else ""


def describe_nodes(kinds: Sequence[NodeKind]) -> ProbedFacts:
    """What sinfo says of the nodes that the profile describes, and how a job asks for their accelerators."""
    chosen = _choose_kind(kinds)
    others = sorted({kind.shape for kind in kinds} - {chosen.shape}, key=str)
    notes = [f"The accelerators are called {chosen.gpu_type} here (gres)."] if chosen.gpu_type else []
    words = [f"{cores} cores, {gpus} GPUs{f' ({name})' if name else ''}" for gpus, name, cores in others]
    return collect(_list_node_facts(kinds, "sinfo", "gres"), [*notes, *_note_others(words)])


def parse_first_node(nodes: str) -> str:
    """The first name in a shortened list: "n[01-03,7],x1" -> "n01"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]


def parse_architecture(text: str) -> str | None:
    """The architecture in `scontrol show node NAME`; None for one that no profile knows."""
    found = dict(_ENTRY.findall(text)).get("Arch")
    return found if found in ("x86_64", "aarch64") else None


def parse_partitions(text: str) -> list[dict[str, str]]:
    """Partitions from `scontrol show partition`, which all versions from 22.05 on write as words KEY=VALUE."""
    tables: list[dict[str, str]] = [dict(_ENTRY.findall(block)) for block in re.split(r"\n\s*\n", text)]
    return [table for table in tables if table.get("PartitionName")]


def describe_partitions(
    partitions: Sequence[Mapping[str, str]], kinds: Sequence[NodeKind], accounts: Iterable[str]
) -> ProbedFacts:
    """Partitions with the nodes that the profile describes, the default one first."""
    chosen = _choose_kind(kinds).shape
    having = {kind.partition for kind in kinds if kind.shape == chosen}
    mine, command = set(accounts), "scontrol show partition"
    usable, facts, notes = [], list[Fact](), []
    for words in partitions:
        name, state, allowed = words["PartitionName"], words.get("State", "UP"), words.get("AllowAccounts", "ALL")
        if state != "UP":
            why = f"its state is {state}"
        elif words.get("RootOnly") == "YES":
            why = "it is for administrators"
        elif name not in having:
            why = "it has other nodes"
        elif mine and allowed not in ("ALL", "") and mine.isdisjoint(allowed.split(",")):
            why = f"it is for other accounts ({list_some(allowed.split(','), 4)})"
        else:
            usable.append(words)
            continue
        notes.append(f"Partition {name} is left out: {why}.")
    for words in sorted(usable, key=lambda words: words.get("Default") != "YES"):
        times = (words.get("MaxTime", ""), words.get("DefaultTime", ""))
        nodes = (words.get("MaxNodes", ""), words.get("MinNodes", ""))
        facts += _list_queue_facts(words["PartitionName"], command, times, nodes)
    if usable and all(words.get("AllocNodes") == "ALL" for words in usable):
        facts.append((("request", "submit_from_nodes"), True, f"{command}: AllocNodes=ALL"))
    if usable and all(
        words.get("OverSubscribe") == "EXCLUSIVE" or words.get("Exclusive") == "NODE" for words in usable
    ):
        facts.append((("request", "whole_nodes"), True, command))
    return collect(facts, notes)


def accounts_command(user: str) -> tuple[str, ...]:
    """The command that lists what a user may charge."""
    return ("sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=cluster,account,user,qos,defaultqos")


def parse_accounts(text: str) -> dict[str, set[str]]:
    """Account -> the qualities of service that come with it, from `accounts_command`."""
    accounts: dict[str, set[str]] = {}
    for row in (line.split("|") for line in text.splitlines()):
        if len(row) >= 4 and row[1]:
            accounts.setdefault(row[1], set()).update(filter(None, row[3].split(",")))
    return accounts


def describe_accounts(accounts: Mapping[str, set[str]], user: str) -> ProbedFacts:
    """What this user may charge: the default of the runs where it is one, a note where there are several."""
    qos = sorted(set().union(*accounts.values()))
    notes = [f"Qualities of service that you may ask for: {', '.join(qos)}."] if len(qos) > 1 else []
    if len(accounts) > 1:
        names = ", ".join(accounts)
        notes.append(f"Accounts that you may charge: {names}. Name one in the run file, or here under [defaults].")
    account = next(iter(accounts)) if len(accounts) == 1 else None
    return collect([(("defaults", "account"), account, " ".join(accounts_command(user)))], notes)


# --- PBS

_SIZE = re.compile(r"([0-9]+)(?:([kmgtp])?b)?")


def describe_hosts(text: str) -> ProbedFacts:
    """The most frequent kind of node in `pbsnodes -a -F json`, with accelerators before those without."""
    hosts: dict[str, list[Mapping[str, Any]]] = {}  # a host may consist of several vnodes
    for name, table in _read_tables(text, "nodes"):
        resources = table.get("resources_available")
        if isinstance(resources, Mapping):
            hosts.setdefault(str(resources.get("host", name)), []).append(resources)
    if not hosts:
        return ProbedFacts()
    kinds = []
    for host, vnodes in hosts.items():
        gpus, cores = (sum(_whole(vnode.get(key)) for vnode in vnodes) for key in ("ngpus", "ncpus"))
        memory = sum(parse_size(vnode.get("mem", "")) or 0 for vnode in vnodes)
        kinds.append(NodeKind("", 1, cores or None, memory or None, gpus, "", host))
    chosen, command = _choose_kind(kinds).shape, "pbsnodes -a"
    alike = [vnode for kind in kinds if kind.shape == chosen for vnode in hosts[kind.nodes]]
    makes_containers = any("container_engine" in vnode for vnode in alike) or None
    others = sorted({(kind.gpus, kind.cores or 0) for kind in kinds if kind.shape != chosen})
    facts = [*_list_node_facts(kinds, command, "ngpus"), (("containers", "by_scheduler"), makes_containers, command)]
    return collect(facts, _note_others([f"{cores} cores, {gpus} GPUs" for gpus, cores in others]))


def parse_default_queue(text: str) -> str:
    """The queue of jobs that name none, from `qstat -Bf -F json`."""
    return next((str(table.get("default_queue", "")) for _, table in _read_tables(text, "Server")), "")


def describe_queues(text: str, default: str) -> ProbedFacts:
    """Queues of `qstat -Qf -F json` that jobs can be sent to, the default one first."""
    queues = _read_tables(text, "Queue")
    facts: list[Fact] = []
    for name, table in sorted(queues, key=lambda queue: queue[0] != default):
        most, least, usual = (_table(table, f"resources_{word}") for word in ("max", "min", "default"))
        if not _why_closed(table):
            times = (most.get("walltime", ""), usual.get("walltime", ""))
            facts += _list_queue_facts(name, "qstat -Qf", times, (most.get("nodect"), least.get("nodect")))
    closed = ((name, _why_closed(table)) for name, table in queues)
    return collect(facts, [f"Queue {name} is left out: {why}." for name, why in closed if why])


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


def parse_size(value: Any) -> int | None:
    """Bytes from a size of PBS, such as "24684084kb"; None for what is none. Its units are powers of 1024 (PBS
    Professional Reference Guide, formats: size)."""
    match = _SIZE.fullmatch(str(value).strip().lower())
    return int(match[1]) * 1024 ** " kmgtp".index(match[2] or " ") if match else None


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key)
    return found if isinstance(found, Mapping) else {}


def _read_tables(text: str, key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The named tables below a key of a JSON text; none where it is no such text."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        tables = _table(document, key) if isinstance(document, Mapping) else {}
        return [(name, table) for name, table in tables.items() if isinstance(table, Mapping)]
    return []
