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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from shardway.errors import render_reason
from shardway.hardware.catalogue import find_accelerator
from shardway.hardware.probe import Device, LocalMachine
from shardway.launch.hosts.base import Host
from shardway.plugins import make_installed, make_own, make_plugin
from shardway.runfile.load import render_value
from shardway.sites.schema import CPU, FORMAT, SiteProfile
from shardway.units import render_bytes, render_seconds

# --- The findings of a probe, each with the command that printed it; and the time formats of schedulers

KeyPath = tuple[str, ...]
"""("queues", "gpu", "max_walltime")"""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_PLACES = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}
_PLACES_AFTER_DAYS = {1: (3600,), 2: (3600, 60), 3: (3600, 60, 1)}
_DAY_S = 86400.0


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
    places = (_PLACES_AFTER_DAYS if match["days"] else _PLACES)[len(numbers)]
    seconds = sum(number * place for number, place in zip(numbers, places, strict=True))
    return seconds + _DAY_S * int(match["days"] or 0) or None


# --- Surveys a machine and writes the answers as a site profile

# --- containers, modules, folders, network, GPUs

_RUNTIMES = {"enroot": "enroot", "apptainer": "apptainer", "singularity": "apptainer"}
_RUNTIMES |= {"podman": "podman", "ch-run": "charliecloud"}
"""Program -> its container runtime; the first one found counts."""

_FOLDERS = {"home": ("HOME",), "project": ("PROJECT", "WORK", "CFS"), "scratch": ("SCRATCH", "PSCRATCH")}
_DISKS = ("/raid", "/local", "/localscratch", "/local_scratch", "/scratch/local", "/nvme", "/mnt/nvme", "/lscratch")
_DISK_SYSTEMS = {"ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs"}
_UNREACHABLE = {"5", "6", "7", "28", "56"}
"""curl's exit codes for a host or proxy that is not found, refuses, or does not answer (curl(1), EXIT CODES)."""

_PROXY = re.compile(r"https?://[^\s/@:]+:\d{1,5}/?")

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


def parse_programs(text: str) -> frozenset[str]:
    """Names of the installed programs, from `PROGRAMS`."""
    return frozenset(PurePosixPath(line.strip()).name for line in text.splitlines() if line.strip())


def describe_containers(programs: frozenset[str], part: tuple[str, str]) -> ProbedFacts:
    """The container runtime: the one that is a part of the scheduler, with the command that shows it, else the first
    that is found."""
    if part[0]:
        return collect([(("container",), *part)])
    found = [program for program in _RUNTIMES if program in programs]
    if not found:
        return ProbedFacts()
    command = f"command -v {found[0]}"
    alias = found[0] if found[0] == "singularity" else None
    facts = ((("container",), _RUNTIMES[found[0]], command), (("containers", "command"), alias, command))
    rest = sorted({_RUNTIMES[program] for program in found} - {_RUNTIMES[found[0]]})
    return collect(facts, [f"There are other container runtimes too: {', '.join(rest)}."] if rest else [])


def describe_modules(text: str) -> ProbedFacts:
    """A note if environment modules exist: no command lists the ones that a run needs."""
    note = "Environment modules are there (`module avail`): name those of every job in [modules] load = [...]."
    return ProbedFacts((), (note,)) if text.strip() == "yes" else ProbedFacts()


def parse_folders(text: str) -> ProbedFacts:
    """Shared folders from `FOLDERS`, by the variables that the site sets for them."""
    names = text.split()
    facts = []
    for key, variables in _FOLDERS.items():
        found = next((variable for variable in variables if variable in names), None)
        facts.append((("storage", key), f"${found}" if found else None, f"echo ${found}"))
    return collect(facts)


def parse_disks(text: str) -> tuple[str, ...]:
    """Folders on a local disk of the machine, from `df -P -T`: no network file systems, and not /."""
    rows = [line.split() for line in text.splitlines()[1:]]
    mounts = (row[6] for row in rows if len(row) >= 7 and row[1] in _DISK_SYSTEMS and row[6] != "/")
    return tuple(dict.fromkeys(mounts))


def describe_disks(text: str, is_node: bool) -> ProbedFacts:
    """A local disk: a fact if jobs run on this machine, else a note on where to look."""
    disks = parse_disks(text)
    if not disks:
        return ProbedFacts()
    if is_node:
        return collect([(("node", "local_disk"), disks[0], "df -T")])
    note = f"This machine has disks of its own at {', '.join(disks)}; compute nodes may have the same (local_disk)."
    return ProbedFacts((), (note,))


def parse_internet(text: str, is_node: bool) -> ProbedFacts:
    """What can be reached from here, from `INTERNET`. A proxy address with a password is not repeated."""
    lines = text.splitlines()
    if len(lines) < 3:
        return ProbedFacts()
    proxy, no_proxy, code = (line.strip() for line in (lines[0], lines[1], lines[-1]))
    command, key = "curl https://pypi.org", "nodes" if is_node else "login"
    if code in _UNREACHABLE:
        return collect([(("internet", key), "none", command)])
    if code != "0":
        return ProbedFacts()
    if not proxy:
        return collect([(("internet", key), "direct", command)])
    if not _PROXY.fullmatch(proxy):
        return ProbedFacts((), ("The way out is a proxy, whose address is not written down: it may hold a password.",))
    facts = ((("internet", key), "proxy", command), (("internet", "proxy"), proxy, "echo $https_proxy"))
    return collect([*facts, (("internet", "no_proxy"), no_proxy or None, "echo $no_proxy")])


def describe_machine(machine: LocalMachine) -> ProbedFacts:
    """A machine without a scheduler, as its own compute node."""
    command, words = "shardway sites probe", machine.os.split()
    keys = _accelerator_keys(machine)
    part = next(iter(keys)) if len(keys) == 1 else None
    architecture = words[-1] if words and words[-1] in ("x86_64", "aarch64") else None
    facts = (
        (("node", "architecture"), architecture, command),
        (("node", "cores"), machine.usable_cores, command),
        (("node", "memory"), machine.memory_bytes, command),
        (("node", "accelerator"), part if machine.accelerators else CPU, command),
        (("node", "accelerators_per_node"), len(machine.accelerators), command),
    )
    return collect(facts)


def describe_part(machine: LocalMachine, per_node: int | None) -> ProbedFacts:
    """The accelerators of the nodes, from this machine's: a fact if it has as many as a node (it is probably one), else
    a note."""
    keys = _accelerator_keys(machine)
    part = next(iter(keys), None) if len(keys) == 1 else None
    if part is None:
        found = _list_names(machine.accelerators)
        return ProbedFacts((), (f"GPUs of this machine, which the catalogue lacks: {found}.",) if found else ())
    if per_node == len(machine.accelerators):
        return collect([(("node", "accelerator"), part, "the driver's list of GPUs")])
    note = f"This machine has {len(machine.accelerators)} x {part}; where the nodes have the same: accelerator."
    return ProbedFacts((), (note,))


def _list_names(devices: Sequence[Device]) -> str:
    return ", ".join(sorted({device.name for device in devices}))


def _accelerator_keys(machine: LocalMachine) -> set[str | None]:
    parts = [find_accelerator(device.name) for device in machine.accelerators]
    return {part.key if part else None for part in parts}


# --- the survey

_PATIENCE_S = 15.0
"""Seconds for one command: a client without a configuration may try for a minute."""


@dataclass
class _Asker:
    """Runs commands, and collects those that gave no answer."""

    host: Host
    silent: list[str] = field(default_factory=list)

    def ask(self, words: Sequence[str], *, quiet: bool = False) -> str:
        """The output of a command; empty if it fails, which is noted unless `quiet`."""
        done = self.host.run(words, timeout_s=_PATIENCE_S)
        if done.ok:
            return done.out
        if not quiet:
            reason = "no answer in time" if done.timed_out else render_reason(done.err or done.out)
            self.silent.append(f"`{' '.join(words[:3])}` failed: {reason}.")
        return done.out if quiet else ""

    def answers(self, words: Sequence[str]) -> bool:
        """Whether a command prints anything."""
        done = self.host.run(words, timeout_s=_PATIENCE_S)
        return done.ok and bool(done.out.strip())

    def notes(self) -> ProbedFacts:
        """Notes on the commands that gave no answer."""
        return ProbedFacts((), tuple(self.silent))


def survey(host: Host, machine: LocalMachine | None = None) -> ProbedFacts:
    """All findings about a host's site; `machine` is its hardware if it is this machine.

    The first finding is always the scheduler. Raises HostUnreachable.
    """
    asker = _Asker(host)
    wanted = (*(scheduler.survey_command[0] for scheduler in _list_schedulers()), *_RUNTIMES)
    programs = parse_programs(asker.ask((*PROGRAMS, *wanted)))
    scheduler, found = _ask_scheduler(asker, programs)
    is_node = scheduler.this_machine
    if machine is not None and is_node:
        found += describe_machine(machine)
    elif machine is not None and machine.accelerators:
        found += describe_part(machine, found.get("node", "accelerators_per_node"))
    found += describe_containers(programs, scheduler.survey_container(asker.ask))
    found += describe_modules(asker.ask(MODULES, quiet=True))
    found += describe_disks(asker.ask(DISKS, quiet=True), is_node)
    found += parse_internet(asker.ask(INTERNET, quiet=True), is_node)
    return found + parse_folders(asker.ask(FOLDERS, quiet=True)) + asker.notes()


def name_site(host: Host) -> str:
    """The site's own name: the one that a scheduler has for it, else the host's; empty if neither is known."""
    names = (scheduler.read_site_name(_Asker(host).ask) for scheduler in _list_schedulers())
    return next(filter(None, names), "") or host.run(("hostname", "-s"), timeout_s=_PATIENCE_S).out.strip()


def _list_schedulers() -> list[Any]:
    """The schedulers that can be found by a command."""
    known = (*make_own("schedulers"), *make_installed("schedulers"))
    return [scheduler for scheduler in known if scheduler.survey_command]


def _ask_scheduler(asker: _Asker, programs: frozenset[str]) -> tuple[Any, ProbedFacts]:
    """The first scheduler that is installed (it may bring the commands of others), else this machine; of several, the
    first one that answers."""
    commands = {scheduler: scheduler.survey_command for scheduler in _list_schedulers()}
    there = [scheduler for scheduler, words in commands.items() if words[0] in programs]
    if not there:
        machine = next(scheduler for scheduler in make_own("schedulers") if scheduler.this_machine)
        looked = f"command -v {' '.join(words[0] for words in commands.values())}"
        return machine, collect([(("scheduler",), machine.name, looked)])
    chosen, notes = there[0], ProbedFacts()
    how = f"command -v {commands[chosen][0]}"
    if len(there) > 1 and not asker.answers(commands[chosen]):
        answering = next((other for other in there[1:] if asker.answers(commands[other])), None)
        if answering is not None:
            note = f"{commands[chosen][0]} is installed here and does not answer; {answering.title} does."
            chosen, notes, how = answering, ProbedFacts((), (note,)), " ".join(commands[answering][:2])
    return chosen, collect([(("scheduler",), chosen.name, how)]) + chosen.survey(asker.ask) + notes


# --- findings as a site profile

_WIDTH = 118


def render_profile(name: str, title: str, found: ProbedFacts, where: str, day: datetime.date) -> str:
    """The text of a profile called `name`; `where` is the surveyed machine."""
    parent = make_plugin("schedulers", str(found.get("scheduler"))).generic_site
    head = [
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
    ]
    plain = [fact for fact in found.facts if len(fact.path) == 1]
    lines = [*head, "", *(_line(fact) for fact in plain)]
    for table in _tables(found):
        lines += _queues(found) if table == "queues" else _table(table, found)
    return "\n".join([*lines, "", "[sources]", *_sources(found, where, day)]) + "\n"


def _tables(found: ProbedFacts) -> list[str]:
    """The non-empty tables, in the order of the schema."""
    used = {fact.path[0] for fact in found.facts if len(fact.path) > 1}
    return [key for key in SiteProfile.model_fields if key in used]


def _table(name: str, found: ProbedFacts) -> list[str]:
    return ["", f"[{name}]", *(_line(fact) for fact in found.facts if fact.path[0] == name)]


def _queues(found: ProbedFacts) -> list[str]:
    lines = []
    for facts in _by_queue(found).values():
        lines += ["", "[[queues]]", *(_line(fact) for fact in facts)]
    return lines


def _by_queue(found: ProbedFacts) -> Mapping[str, list[ProbedFact]]:
    queues: dict[str, list[ProbedFact]] = {}
    for fact in found.facts:
        if fact.path[0] == "queues":
            queues.setdefault(fact.path[1], []).append(fact)
    return queues


def _line(fact: ProbedFact) -> str:
    return f"{fact.path[-1]} = {render_value(_with_unit(fact.path, fact.value))}"


def _with_unit(path: Sequence[str], value: Any) -> Any:
    if tuple(path) == ("node", "memory"):
        return render_bytes(value)
    return render_seconds(value) if path[-1].endswith("_walltime") else value


def _sources(found: ProbedFacts, where: str, day: datetime.date) -> Iterator[str]:
    """One source per table if one command gave all of it, else one per fact."""
    groups: dict[str, list[ProbedFact]] = {}
    for fact in found.facts:
        groups.setdefault(fact.path[0], []).append(fact)
    for key, facts in groups.items():
        commands = {fact.command for fact in facts}
        entries = {key: facts[0]} if len(commands) == 1 else {".".join(fact.path): fact for fact in facts}
        for path, fact in entries.items():
            source = render_value(f"`{fact.command}` on {where}")
            yield f"{render_value(path)} = {{ source = {source}, date = {day.isoformat()} }}"


def _comment(text: str, indent: str) -> list[str]:
    """A text as comment lines, without control characters, which would end the comment."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    rest = f"#{' ' * (len(indent) - 1)}"
    return textwrap.wrap(clean, _WIDTH, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False)
