"""What a machine has besides its scheduler: container runtimes, modules, folders, a way out, GPUs.

Invariant: what is found on the machine that is asked (mostly a login node) is stated of compute nodes only where it is
the same machine; else it is a note. This module must not run commands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from shardway.hardware.catalogue import find_accelerator
from shardway.hardware.probe import Device, LocalMachine
from shardway.launch.probe.findings import ProbedFacts, collect
from shardway.sites.schema import CPU

_RUNTIMES = {"enroot": "enroot", "apptainer": "apptainer", "singularity": "apptainer"}
_RUNTIMES |= {"podman": "podman", "ch-run": "charliecloud"}
"""Program -> the container runtime that it is, the first found counts."""

_FOLDERS = {"home": ("HOME",), "project": ("PROJECT", "WORK", "CFS"), "scratch": ("SCRATCH", "PSCRATCH")}
_DISKS = ("/raid", "/local", "/localscratch", "/local_scratch", "/scratch/local", "/nvme", "/mnt/nvme", "/lscratch")
_DISK_SYSTEMS = {"ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs"}
_UNREACHABLE = {"5", "6", "7", "28", "56"}
"""curl's exit codes for a host or proxy that is not found, refuses, or does not answer (curl(1), EXIT CODES)."""

_PROXY = re.compile(r"https?://[^\s/@:]+:\d{1,5}/?")

PROGRAMS = ("sh", "-c", 'for c; do command -v "$c"; done; true', "sh", "sinfo", "qstat", *_RUNTIMES)
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
    """Names of the programs that are there, from `PROGRAMS`."""
    return frozenset(PurePosixPath(line.strip()).name for line in text.splitlines() if line.strip())


def describe_containers(programs: frozenset[str], srun_help: str) -> ProbedFacts:
    """The container runtime: Pyxis where srun knows its options, else the first that is found."""
    if "--container-image" in srun_help:
        return collect([(("container",), "pyxis", "srun --help")])
    found = [program for program in _RUNTIMES if program in programs]
    if not found:
        return ProbedFacts()
    command = f"command -v {found[0]}"
    alias = found[0] if found[0] == "singularity" else None
    facts = ((("container",), _RUNTIMES[found[0]], command), (("containers", "command"), alias, command))
    rest = sorted({_RUNTIMES[program] for program in found} - {_RUNTIMES[found[0]]})
    return collect(facts, [f"There are other container runtimes too: {', '.join(rest)}."] if rest else [])


def describe_modules(text: str) -> ProbedFacts:
    """A note where environment modules are there: which ones a run needs, no command says."""
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
    """Folders on a disk of the machine's own, from `df -P -T`: those that are no network file system and not /."""
    rows = [line.split() for line in text.splitlines()[1:]]
    mounts = (row[6] for row in rows if len(row) >= 7 and row[1] in _DISK_SYSTEMS and row[6] != "/")
    return tuple(dict.fromkeys(mounts))


def describe_disks(text: str, is_node: bool) -> ProbedFacts:
    """A disk of the machine's own: a fact where jobs run on this machine, else a note on where to look."""
    disks = parse_disks(text)
    if not disks:
        return ProbedFacts()
    if is_node:
        return collect([(("node", "local_disk"), disks[0], "df -T")])
    note = f"This machine has disks of its own at {', '.join(disks)}; compute nodes may have the same (local_disk)."
    return ProbedFacts((), (note,))


def parse_internet(text: str, is_node: bool) -> ProbedFacts:
    """What can be reached from here, from `INTERNET`. A proxy's address with a password in it is not repeated."""
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
    """Which accelerators the nodes have, from those of this machine: a fact where it has as many as a node (it is one,
    as far as one can tell), else a note."""
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
