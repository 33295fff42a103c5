"""Parses what Slurm's own commands print about its nodes, partitions and accounts.

Invariant: a partition is a queue of the profile only if this user can send jobs to it and it has the nodes that the
profile describes; any other is a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardway.errors import list_some
from shardway.launch.schedulers.base import Ask
from shardway.launch.site_survey import ProbedFacts, collect, parse_time
from shardway.sites.schema import CPU

PARTITIONS = ("scontrol", "show", "partition")
CONFIG = ("scontrol", "show", "config")

_GPUS = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,()=]+))?:(?P<count>\d+)")
_ENTRY = re.compile(r"(\S+?)=(\S*)")
_NO_LIMIT = {"UNLIMITED", "INFINITE", "", "0"}
_MIB = 2**20


def survey(ask: Ask, sinfo: Sequence[str]) -> ProbedFacts:
    """What Slurm says of its nodes, partitions and accounts; `sinfo` is the command whose lines `parse_sinfo` reads."""
    kinds = parse_sinfo(ask(sinfo))
    if not kinds:
        return ProbedFacts((), ("sinfo names no nodes: nothing is known of nodes and partitions.",))
    user = ask(("id", "-un")).strip()
    accounts = parse_accounts(ask(accounts_command(user), quiet=True))
    partitions = parse_partitions(ask(PARTITIONS))
    found = describe_nodes(kinds) + describe_queues(partitions, kinds, accounts)
    found += describe_accounts(accounts, user)
    chosen = choose_kind(kinds)
    first = parse_first_node(chosen.nodes) if chosen else ""
    words = ("scontrol", "show", "node", first)
    architecture = parse_architecture(ask(words, quiet=True)) if first else None
    return found + collect([(("node", "architecture"), architecture, " ".join(words))])


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


@dataclass(frozen=True)
class Partition:
    """One partition. Times are in seconds; None is no limit, or none that is stated."""

    name: str
    is_default: bool
    state: str
    max_walltime: float | None
    default_walltime: float | None
    max_nodes: int | None
    min_nodes: int | None
    accounts: str
    submit_from: str
    root_only: bool
    whole_nodes: bool


@dataclass(frozen=True)
class SlurmAccount:
    """One account that a user may charge, with the qualities of service that come with it."""

    name: str
    qos: tuple[str, ...]


def parse_sinfo(text: str) -> list[NodeKind]:
    """Kinds of nodes from sinfo; a line of another form is left out. Slurm's MB are MiB (slurm.conf, RealMemory)."""
    kinds = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 10 or not fields[3].isdecimal():
            continue
        gpus, gpu_type = parse_gpus(fields[6])
        memory = _whole(fields[8])
        cores = _count_cores(fields[10]) if len(fields) > 10 else _whole(fields[7])
        kinds.append(
            NodeKind(
                partition=fields[0].removesuffix("*"),
                count=int(fields[3]),
                cores=cores or _whole(fields[7]),
                memory=memory * _MIB if memory else None,
                gpus=gpus,
                gpu_type=gpu_type,
                nodes=fields[5],
                threads=(_whole(fields[7]) or 0) // cores if cores else 1,
            )
        )
    return kinds


def parse_gpus(gres: str) -> tuple[int, str]:
    """GPUs of a node and their type, from a GRES such as "gpu:a100:4(S:0-1),nvme:1"; (0, "") for none."""
    found = [(match["type"] or "", int(match["count"])) for match in _GPUS.finditer(gres)]
    types = sorted({name for name, _ in found if name})
    return sum(count for _, count in found), types[0] if len(types) == 1 else ""


def parse_partitions(text: str) -> list[Partition]:
    """Partitions from `scontrol show partition`, which all versions from 22.05 on write as words KEY=VALUE."""
    tables = [dict(_ENTRY.findall(block)) for block in re.split(r"\n\s*\n", text)]
    return [_partition(table) for table in tables if table.get("PartitionName")]


def parse_config(text: str) -> dict[str, str]:
    """Settings from `scontrol show config`, whose lines are "Key = value"."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def parse_accounts(text: str) -> list[SlurmAccount]:
    """Accounts from `accounts_command`: cluster|account|user|qos|default qos."""
    rows = [line.split("|") for line in text.splitlines()]
    qos: dict[str, set[str]] = {}
    for row in rows:
        if len(row) >= 4 and row[1]:
            qos.setdefault(row[1], set()).update(filter(None, row[3].split(",")))
    return [SlurmAccount(name, tuple(sorted(names))) for name, names in qos.items()]


def parse_architecture(text: str) -> str | None:
    """The architecture in `scontrol show node NAME`; None for one that no profile knows."""
    found = dict(_ENTRY.findall(text)).get("Arch")
    return found if found in ("x86_64", "aarch64") else None


def parse_first_node(nodes: str) -> str:
    """The first name in a shortened list: "n[01-03,7],x1" -> "n01"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]


def accounts_command(user: str) -> tuple[str, ...]:
    """The command that lists what a user may charge."""
    return ("sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=cluster,account,user,qos,defaultqos")


def choose_kind(kinds: Sequence[NodeKind]) -> NodeKind | None:
    """The kind of node that the profile describes: with accelerators before those without, then the most frequent."""
    sizes: dict[tuple[int, str, int | None], int] = {}
    for kind in kinds:
        in_partition = sum(other.count for other in kinds if _alike(kind, other) and other.partition == kind.partition)
        sizes[kind.shape] = max(sizes.get(kind.shape, 0), in_partition)
    return max(kinds, key=lambda kind: (kind.gpus > 0, sizes[kind.shape]), default=None)


def describe_nodes(kinds: Sequence[NodeKind]) -> ProbedFacts:
    """What sinfo says of the nodes that the profile describes, and how a job asks for their accelerators."""
    chosen, command = choose_kind(kinds), "sinfo"
    if chosen is None:
        return ProbedFacts()
    memories = [kind.memory for kind in kinds if _alike(kind, chosen) and kind.memory]
    facts = (
        (("node", "cores"), chosen.cores, command),
        (("node", "threads_per_core"), chosen.threads if chosen.threads > 1 else None, command),
        (("node", "memory"), min(memories, default=None), command),
        (("node", "accelerator"), None if chosen.gpus else CPU, command),
        (("node", "accelerators_per_node"), chosen.gpus, command),
        (("request", "accelerators"), "gres" if chosen.gpus else None, command),
    )
    others = sorted({kind.shape for kind in kinds if not _alike(kind, chosen)}, key=str)
    notes = [f"The accelerators are called {chosen.gpu_type} here (gres)."] if chosen.gpu_type else []
    words = [f"{cores} cores, {gpus} GPUs{f' ({name})' if name else ''}" for gpus, name, cores in others]
    notes += [f"Other kinds of nodes, which are not described here: {list_some(words, 6)}."] if words else []
    return collect(facts, notes)


def describe_queues(
    partitions: Sequence[Partition], kinds: Sequence[NodeKind], accounts: Sequence[SlurmAccount]
) -> ProbedFacts:
    """Partitions with the nodes that the profile describes, the default one first."""
    chosen, command = choose_kind(kinds), "scontrol show partition"
    having = {kind.partition for kind in kinds if chosen is None or _alike(kind, chosen)}
    reasons = {partition.name: _why_not(partition, having, accounts) for partition in partitions}
    usable = [partition for partition in partitions if not reasons[partition.name]]
    usable.sort(key=lambda partition: not partition.is_default)
    facts = [fact for partition in usable for fact in _queue_facts(partition, command)]
    if usable and all(partition.submit_from == "ALL" for partition in usable):
        facts.append((("request", "submit_from_nodes"), True, f"{command}: AllocNodes=ALL"))
    if usable and all(partition.whole_nodes for partition in usable):
        facts.append((("request", "whole_nodes"), True, command))
    return collect(facts, [f"Partition {name} is left out: {why}." for name, why in reasons.items() if why])


def describe_accounts(accounts: Sequence[SlurmAccount], user: str) -> ProbedFacts:
    """What this user may charge: the default of the runs where it is one, a note where there are several."""
    command = " ".join(accounts_command(user))
    qos = sorted({name for account in accounts for name in account.qos})
    notes = [f"Qualities of service that you may ask for: {', '.join(qos)}."] if len(qos) > 1 else []
    if len(accounts) == 1:
        return collect([(("defaults", "account"), accounts[0].name, command)], notes)
    if accounts:
        names = ", ".join(account.name for account in accounts)
        notes.append(f"Accounts that you may charge: {names}. Name one in the run file, or here under [defaults].")
    return ProbedFacts((), tuple(notes))


def _alike(one: NodeKind, other: NodeKind) -> bool:
    return one.shape == other.shape


def _why_not(partition: Partition, having: set[str], accounts: Sequence[SlurmAccount]) -> str:
    """Why a partition is no queue of the profile; empty where it is one."""
    if partition.state != "UP":
        return f"its state is {partition.state}"
    if partition.root_only:
        return "it is for administrators"
    if partition.name not in having:
        return "it has other nodes"
    allowed = partition.accounts.split(",")
    if accounts and partition.accounts not in ("ALL", "") and not {a.name for a in accounts} & set(allowed):
        return f"it is for other accounts ({list_some(allowed, 4)})"
    return ""


def _queue_facts(partition: Partition, command: str) -> Iterator[tuple[tuple[str, ...], object, str]]:
    for key in ("name", "max_walltime", "default_walltime", "max_nodes", "min_nodes"):
        yield ("queues", partition.name, key), getattr(partition, key), command


def _partition(table: Mapping[str, str]) -> Partition:
    longest, default = parse_time(table.get("MaxTime", "")), parse_time(table.get("DefaultTime", ""))
    fewest = _limit(table.get("MinNodes", ""))
    return Partition(
        name=table["PartitionName"],
        is_default=table.get("Default") == "YES",
        state=table.get("State", "UP"),
        max_walltime=longest,
        default_walltime=default if default and (longest is None or default <= longest) else None,
        max_nodes=_limit(table.get("MaxNodes", "")),
        min_nodes=fewest if fewest and fewest > 1 else None,
        accounts=table.get("AllowAccounts", "ALL"),
        submit_from=table.get("AllocNodes", ""),
        root_only=table.get("RootOnly") == "YES",
        whole_nodes=table.get("OverSubscribe") == "EXCLUSIVE" or table.get("Exclusive") == "NODE",
    )


def _limit(text: str) -> int | None:
    return None if text in _NO_LIMIT or not text.isdecimal() else int(text)


def _whole(text: str) -> int | None:
    """A number as sinfo writes it: with a + where nodes differ, whose fewest it is."""
    digits = text.strip().removesuffix("+")
    return int(digits) if digits.isdecimal() and int(digits) else None


def _count_cores(sockets_cores_threads: str) -> int | None:
    """Cores from sinfo's "%z": sockets, cores of each, threads of each."""
    numbers = [_whole(part) for part in sockets_cores_threads.split(":")]
    return numbers[0] * numbers[1] if len(numbers) == 3 and numbers[0] and numbers[1] else None
