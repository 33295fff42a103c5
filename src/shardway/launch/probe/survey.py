"""Asks a machine what it is, and puts the answers together.

Invariant: a command that is missing, fails or does not answer in time costs what it would have said and nothing else: a
survey never raises for it, and says so in a note. Nothing on the machine is changed. This module must not read answers:
that is for the modules beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardway.errors import render_reason
from shardway.hardware.probe import LocalMachine
from shardway.launch.hosts.base import Host
from shardway.launch.probe import pbs, slurm, tools
from shardway.launch.probe.findings import ProbedFacts, collect

_PATIENCE_S = 15.0
"""Seconds for one command: a client of Slurm without a configuration tries for a minute."""


@dataclass
class _Asker:
    """Runs commands, and remembers which of them gave no answer."""

    host: Host
    silent: list[str] = field(default_factory=list)

    def ask(self, words: Sequence[str], *, quiet: bool = False) -> str:
        """What a command prints; empty where it fails, which is remembered unless `quiet`."""
        done = self.host.run(words, timeout_s=_PATIENCE_S)
        if done.ok:
            return done.out
        if not quiet:
            reason = "no answer in time" if done.timed_out else render_reason(done.err or done.out)
            self.silent.append(f"`{' '.join(words[:3])}` failed: {reason}.")
        return done.out if quiet else ""

    def answers(self, words: Sequence[str]) -> bool:
        """Whether a command has something to say."""
        done = self.host.run(words, timeout_s=_PATIENCE_S)
        return done.ok and bool(done.out.strip())

    def notes(self) -> ProbedFacts:
        """The commands that gave no answer."""
        return ProbedFacts((), tuple(self.silent))


def survey(host: Host, machine: LocalMachine | None = None) -> ProbedFacts:
    """Everything that a host says of its site; `machine` is its hardware where it is this machine.

    The first finding is always the scheduler. Raises HostUnreachable.
    """
    asker = _Asker(host)
    programs = tools.parse_programs(asker.ask(tools.PROGRAMS))
    found = _ask_scheduler(asker, programs)
    is_node = found.get("scheduler") == "local"
    if machine is not None and is_node:
        found += tools.describe_machine(machine)
    elif machine is not None and machine.accelerators:
        found += tools.describe_part(machine, found.get("node", "accelerators_per_node"))
    srun_help = asker.ask(slurm.SRUN_HELP, quiet=True) if found.get("scheduler") == "slurm" else ""
    found += tools.describe_containers(programs, srun_help)
    found += tools.describe_modules(asker.ask(tools.MODULES, quiet=True))
    found += tools.describe_disks(asker.ask(tools.DISKS, quiet=True), is_node)
    found += tools.parse_internet(asker.ask(tools.INTERNET, quiet=True), is_node)
    return found + tools.parse_folders(asker.ask(tools.FOLDERS, quiet=True)) + asker.notes()


def name_site(host: Host) -> str:
    """What the site calls itself: Slurm's cluster, else the host's own name; empty where neither is known."""
    cluster = slurm.parse_config(host.run(slurm.CONFIG, timeout_s=_PATIENCE_S).out).get("ClusterName", "")
    return cluster or host.run(("hostname", "-s"), timeout_s=_PATIENCE_S).out.strip()


def _ask_scheduler(asker: _Asker, programs: frozenset[str]) -> ProbedFacts:
    """Slurm where it is installed (it may bring a qstat of its own), else PBS, else none; of both, who answers."""
    both = {"sinfo", "qstat"} <= programs
    if both and not asker.answers(slurm.SINFO) and asker.answers(pbs.SERVER):
        note = "sinfo is installed here and does not answer; PBS does."
        return collect([(("scheduler",), "pbs", "qstat -Bf")]) + _ask_pbs(asker) + ProbedFacts((), (note,))
    if "sinfo" in programs:
        return collect([(("scheduler",), "slurm", "command -v sinfo")]) + _ask_slurm(asker)
    if "qstat" in programs:
        return collect([(("scheduler",), "pbs", "command -v qstat")]) + _ask_pbs(asker)
    return collect([(("scheduler",), "local", "command -v sinfo qstat")])


def _ask_slurm(asker: _Asker) -> ProbedFacts:
    kinds = slurm.parse_sinfo(asker.ask(slurm.SINFO))
    if not kinds:
        return ProbedFacts((), ("sinfo names no nodes: nothing is known of nodes and partitions.",))
    user = asker.ask(("id", "-un")).strip()
    accounts = slurm.parse_accounts(asker.ask(slurm.accounts_command(user), quiet=True))
    partitions = slurm.parse_partitions(asker.ask(slurm.PARTITIONS))
    found = slurm.describe_nodes(kinds) + slurm.describe_queues(partitions, kinds, accounts)
    found += slurm.describe_accounts(accounts, user)
    chosen = slurm.choose_kind(kinds)
    first = slurm.parse_first_node(chosen.nodes) if chosen else ""
    words = ("scontrol", "show", "node", first)
    architecture = slurm.parse_architecture(asker.ask(words, quiet=True)) if first else None
    return found + collect([(("node", "architecture"), architecture, " ".join(words))])


def _ask_pbs(asker: _Asker) -> ProbedFacts:
    nodes = pbs.describe_nodes(pbs.parse_nodes(asker.ask(pbs.NODES)))
    default = pbs.parse_default_queue(asker.ask(pbs.SERVER))
    return nodes + pbs.describe_queues(pbs.parse_queues(asker.ask(pbs.QUEUES)), default)
