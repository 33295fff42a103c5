"""Surveys a machine: findings with the command that printed each, written as a site profile.

Invariants:
- A finding's path is that of a key of a site profile, as a tuple, since a queue's name may contain a dot. No command is
  run here.
- A finding of the surveyed machine (mostly a login node) is stated of compute nodes only if it is one itself; else it
  is a note.
- A command that is missing, fails or does not answer in time loses only its own findings: a survey never raises for it,
  and notes it. Nothing on the machine is changed.
- The written profile loads to exactly the findings, each with its command and date as the source; notes are comments.
"""

from __future__ import annotations

import datetime
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from shardway.errors import render_reason
from shardway.hardware.catalogue import find_accelerator
from shardway.hardware.probe import LocalMachine
from shardway.launch.hosts.base import Host
from shardway.plugins import make_installed, make_own, make_plugin
from shardway.runfile.load import render_value
from shardway.sites.schema import CPU, FORMAT, SiteProfile
from shardway.units import render_bytes, render_seconds

# --- findings, each with the command that printed it; and the time formats of schedulers

KeyPath = tuple[str, ...]
"""("queues", "gpu", "max_walltime")"""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")


@dataclass(frozen=True)
class ProbedFact:
    """One fact of a profile, in bytes or seconds where it is a size or a time, and the command that said it."""

    path: KeyPath
    value: Any
    command: str


@dataclass(frozen=True)
class ProbedFacts:
    """What was found, and what a person should know besides: each note is a sentence or two."""

    facts: tuple[ProbedFact, ...] = ()
    notes: tuple[str, ...] = ()

    def get(self, *path: str) -> Any:
        """The value at a path; None where nothing was found."""
        return next((fact.value for fact in self.facts if fact.path == path), None)

    def __add__(self, other: ProbedFacts) -> ProbedFacts:
        return ProbedFacts(self.facts + other.facts, self.notes + other.notes)


def collect(facts: Iterable[tuple[KeyPath, Any, str]], notes: Iterable[str] = ()) -> ProbedFacts:
    """Findings of those facts whose value is known (not None)."""
    known = (ProbedFact(path, value, command) for path, value, command in facts if value is not None)
    return ProbedFacts(tuple(known), tuple(notes))


def parse_time(value: Any) -> float | None:
    """Seconds from a scheduler's time: "1-00:00:00", "120:00:00", "5:00" (minutes, seconds), "30" (minutes; sbatch,
    --time) or a number of seconds (PBS' JSON); None for "UNLIMITED", "NONE" and whatever else is no time."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if value > 0 else None
    match = _TIME.fullmatch(str(value).strip())
    if match is None:
        return None
    numbers = [int(part) for part in match["clock"].split(":")]
    places = (3600, 60, 1) if match["days"] or len(numbers) == 3 else (60, 1)  # "5" is 5 minutes, "1-5" ends in hours
    seconds = sum(number * place for number, place in zip(numbers, places, strict=False))
    return seconds + 86400.0 * int(match["days"] or 0) or None


# --- containers, modules, folders, network, GPUs

_RUNTIMES = {"enroot": "enroot", "apptainer": "apptainer", "singularity": "apptainer"}
_RUNTIMES |= {"podman": "podman", "ch-run": "charliecloud"}
"""Program -> its container runtime; the first one found counts."""

_FOLDERS = {"home": ("HOME",), "project": ("PROJECT", "WORK", "CFS"), "scratch": ("SCRATCH", "PSCRATCH")}
_DISKS = ("/raid", "/local", "/localscratch", "/local_scratch", "/scratch/local", "/nvme", "/mnt/nvme", "/lscratch")
_DISK_SYSTEMS = {"ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs"}
_UNREACHABLE = {"5", "6", "7", "28", "56"}
"""curl's exit codes for a host or proxy that is not found, refuses, or does not answer (curl(1), EXIT CODES)."""

PROGRAMS = ("sh", "-c", 'for c; do command -v "$c"; done; true', "sh")
"""What shows which of the programs that follow are installed."""

MODULES = ("bash", "-lc", "type module >/dev/null 2>&1 && echo yes; true")
FOLDERS = (
    *("bash", "-lc", 'for v; do [ -n "${!v-}" ] && echo "$v"; done; true', "bash"),
    *(name for names in _FOLDERS.values() for name in names),
)
DISKS = ("df", "-P", "-T", *_DISKS)
INTERNET = (
    *("bash", "-lc"),
    'printf "%s\\n" "${https_proxy:-${HTTPS_PROXY:-${http_proxy:-}}}" "${no_proxy:-${NO_PROXY:-}}"; '
    "curl --silent --head --output /dev/null --connect-timeout 3 --max-time 5 https://pypi.org/simple/; echo $?",
)


def describe_disks(text: str, is_node: bool) -> ProbedFacts:
    """A local disk, from `df -P -T`: a fact if jobs run on this machine, else a note on where to look. Network file
    systems and / are none."""
    rows = [line.split() for line in text.splitlines()[1:]]
    disks = [row[6] for row in rows if len(row) >= 7 and row[1] in _DISK_SYSTEMS and row[6] != "/"]
    if not disks:
        return ProbedFacts()
    if is_node:
        return collect([(("node", "local_disk"), disks[0], "df -T")])
    listed = ", ".join(dict.fromkeys(disks))
    return ProbedFacts(
        (), (f"This machine has disks of its own at {listed}; compute nodes may have the same (local_disk).",)
    )


def parse_internet(text: str, is_node: bool) -> ProbedFacts:
    """What can be reached from here, from `INTERNET`. A proxy address with a password is not repeated."""
    lines = text.splitlines()
    if len(lines) < 3:
        return ProbedFacts()
    proxy, no_proxy, code = (line.strip() for line in (lines[0], lines[1], lines[-1]))
    command, path = "curl https://pypi.org", ("internet", "nodes" if is_node else "login")
    if code in _UNREACHABLE:
        return collect([(path, "none", command)])
    if code != "0":
        return ProbedFacts()
    if not proxy:
        return collect([(path, "direct", command)])
    if not re.fullmatch(r"https?://[^\s/@:]+:\d{1,5}/?", proxy):
        return ProbedFacts((), ("The way out is a proxy, whose address is not written down: it may hold a password.",))
    facts = ((path, "proxy", command), (("internet", "proxy"), proxy, "echo $https_proxy"))
    return collect([*facts, (("internet", "no_proxy"), no_proxy or None, "echo $no_proxy")])


def _describe_machine(machine: LocalMachine, is_node: bool, per_node: int | None) -> ProbedFacts:
    """A machine without a scheduler is its own compute node. On another one, its accelerators are those of the nodes if
    it has as many as a node (it is probably one), else they are a note."""
    count = len(machine.accelerators)
    parts = [find_accelerator(device.name) for device in machine.accelerators]
    keys = {part.key if part else None for part in parts}
    part = next(iter(keys)) if len(keys) == 1 else None
    if is_node:
        architecture = machine.os.split()[-1:]
        node = {
            "architecture": architecture[0] if architecture and architecture[0] in ("x86_64", "aarch64") else None,
            "cores": machine.usable_cores,
            "memory": machine.memory_bytes,
            "accelerator": part if machine.accelerators else CPU,
            "accelerators_per_node": count,
        }
        return collect(((("node", key), value, "shardway sites probe") for key, value in node.items()))
    if not machine.accelerators:
        return ProbedFacts()
    if part is None:
        names = ", ".join(sorted({device.name for device in machine.accelerators}))
        return ProbedFacts((), (f"GPUs of this machine, which the catalogue lacks: {names}.",))
    if per_node == count:
        return collect([(("node", "accelerator"), part, "the driver's list of GPUs")])
    return ProbedFacts((), (f"This machine has {count} x {part}; where the nodes have the same: accelerator.",))


# --- the survey

_PATIENCE_S = 15.0
"""Seconds for one command: a client without a configuration may try for a minute."""


def survey(host: Host, machine: LocalMachine | None = None) -> ProbedFacts:
    """All findings about a host's site; `machine` is its hardware if it is this machine.

    The first finding is always the scheduler. Raises HostUnreachable.
    """
    silent: list[str] = []
    ask = partial(_ask, host, silent)
    wanted = (*(scheduler.survey_command[0] for scheduler in _list_schedulers()), *_RUNTIMES)
    lines = ask((*PROGRAMS, *wanted)).splitlines()
    programs = frozenset(PurePosixPath(line.strip()).name for line in lines if line.strip())
    scheduler, command, notes = _find_scheduler(host, programs)
    found = collect([(("scheduler",), scheduler.name, command)]) + scheduler.survey(ask) + ProbedFacts((), notes)
    is_node = scheduler.this_machine
    if machine is not None:
        found += _describe_machine(machine, is_node, found.get("node", "accelerators_per_node"))
    part = scheduler.survey_container(ask)  # the runtime that is a part of the scheduler, and the command that shows it
    runtimes = [program for program in _RUNTIMES if program in programs]
    if part[0]:
        found += collect([(("container",), *part)])
    elif runtimes:
        first, shown = runtimes[0], f"command -v {runtimes[0]}"
        alias = first if first == "singularity" else None
        rest = sorted({_RUNTIMES[program] for program in runtimes} - {_RUNTIMES[first]})
        found += collect(
            [(("container",), _RUNTIMES[first], shown), (("containers", "command"), alias, shown)],
            [f"There are other container runtimes too: {', '.join(rest)}."] if rest else [],
        )
    if ask(MODULES, quiet=True).strip() == "yes":  # no command lists the ones that a run needs
        note = "Environment modules are there (`module avail`): name those of every job in [modules] load = [...]."
        found += ProbedFacts((), (note,))
    found += describe_disks(ask(DISKS, quiet=True), is_node)
    found += parse_internet(ask(INTERNET, quiet=True), is_node)
    names = ask(FOLDERS, quiet=True).split()
    for key, variables in _FOLDERS.items():  # shared folders, by the variables that the site sets for them
        if variable := next((variable for variable in variables if variable in names), None):
            found += collect([(("storage", key), f"${variable}", f"echo ${variable}")])
    return found + ProbedFacts((), tuple(silent))


def _ask(host: Host, silent: list[str], words: Sequence[str], *, quiet: bool = False) -> str:
    """The output of a command; empty if it fails, which is noted in `silent` unless `quiet`."""
    done = host.run(words, timeout_s=_PATIENCE_S)
    if done.ok or quiet:
        return done.out
    reason = "no answer in time" if done.timed_out else render_reason(done.err or done.out)
    silent.append(f"`{' '.join(words[:3])}` failed: {reason}.")
    return ""


def name_site(host: Host) -> str:
    """The site's own name: the one that a scheduler has for it, else the host's; empty if neither is known."""
    names = (scheduler.read_site_name(partial(_ask, host, [])) for scheduler in _list_schedulers())
    return next(filter(None, names), "") or host.run(("hostname", "-s"), timeout_s=_PATIENCE_S).out.strip()


def _list_schedulers() -> list[Any]:
    known = (*make_own("schedulers"), *make_installed("schedulers"))
    return [scheduler for scheduler in known if scheduler.survey_command]


def _find_scheduler(host: Host, programs: frozenset[str]) -> tuple[Any, str, tuple[str, ...]]:
    """The first scheduler that is installed (it may bring the commands of others), else this machine; of several, the
    first one that answers. With the command that shows it, and notes."""
    commands = {scheduler: scheduler.survey_command for scheduler in _list_schedulers()}
    there = [scheduler for scheduler, words in commands.items() if words[0] in programs]
    if not there:
        machine = next(scheduler for scheduler in make_own("schedulers") if scheduler.this_machine)
        return machine, f"command -v {' '.join(words[0] for words in commands.values())}", ()
    first, program = there[0], commands[there[0]][0]
    for other in there if len(there) > 1 else ():
        done = host.run(commands[other], timeout_s=_PATIENCE_S)
        if done.ok and done.out.strip():
            if other is first:
                break
            note = f"{program} is installed here and does not answer; {other.title} does."
            return other, " ".join(commands[other][:2]), (note,)
    return first, f"command -v {program}", ()


# --- findings as a site profile

_WIDTH = 118


def render_profile(name: str, title: str, found: ProbedFacts, where: str, day: datetime.date) -> str:
    """The text of a profile called `name`; `where` is the surveyed machine."""
    parent = make_plugin("schedulers", str(found.get("scheduler"))).generic_site
    lines = [
        *_comment(
            f"Written by `shardway sites probe` on {where}, {day.isoformat()}. What no command says is left out: add "
            "what you know, each fact with its source. `shardway sites show` prints facts with their sources.",
            "# ",
        ),
        *(line for note in found.notes for line in _comment(note, "# - ")),
        "",
        f"format = {FORMAT}",
        f"name = {render_value(name)}",
        f"title = {render_value(title)}",
        *([f"extends = {render_value(parent)}"] if parent else []),
        "",
    ]
    tables: dict[str, list[ProbedFact]] = {}
    for fact in found.facts:
        tables.setdefault(fact.path[0], []).append(fact)
    lines += [_line(fact) for fact in found.facts if len(fact.path) == 1]
    for key in SiteProfile.model_fields:  # in the order of the schema
        facts = [fact for fact in tables.get(key, ()) if len(fact.path) > 1]
        queues = dict.fromkeys(fact.path[1] for fact in facts) if key == "queues" else {}
        for queue in queues:
            lines += ["", "[[queues]]", *(_line(fact) for fact in facts if fact.path[1] == queue)]
        if facts and not queues:
            lines += ["", f"[{key}]", *map(_line, facts)]
    lines += ["", "[sources]"]
    for key, facts in tables.items():  # one source per table if one command gave all of it, else one per fact
        alike = len({fact.command for fact in facts}) == 1
        for path, fact in {key if alike else ".".join(fact.path): fact for fact in facts}.items():
            source = render_value(f"`{fact.command}` on {where}")
            lines.append(f"{render_value(path)} = {{ source = {source}, date = {day.isoformat()} }}")
    return "\n".join(lines) + "\n"


def _line(fact: ProbedFact) -> str:
    value, key = fact.value, fact.path[-1]
    if fact.path == ("node", "memory"):
        value = render_bytes(value)
    elif key.endswith("_walltime"):
        value = render_seconds(value)
    return f"{key} = {render_value(value)}"


def _comment(text: str, indent: str) -> list[str]:
    """A text as comment lines, without control characters, which would end the comment."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    rest = f"#{' ' * (len(indent) - 1)}"
    return textwrap.wrap(clean, _WIDTH, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False)
