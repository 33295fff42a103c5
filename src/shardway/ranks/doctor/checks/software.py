"""Checks of what a job finds around it: versions, the container, variables for nodes without internet, the scheduler.

Invariant: no library is imported to learn its version. Only commands that read are given to a scheduler.

Sources: huggingface_hub "Environment variables"; wandb "Environment variables" (WANDB_MODE); sacctmgr(1), squeue(1),
qstat(1B); containers.conf(5) and OCI runtimes on the variable `container`.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from shardway.hardware.command import CommandResult, run_command
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView

VERSIONS = ("python", "torch", "shardway", "driver", "machine")
"""Facts that must be equal on all nodes."""

_HUB = "HF_HUB_OFFLINE"  # read by the hub's own library, below transformers and datasets
_SCHEDULER_LIMIT_S = 8.0
_ASK = {"slurm": ("squeue", "--version"), "pbs": ("qstat", "--version")}
_ASK_SERVER = {"slurm": ("sinfo", "-h", "-o", "%R"), "pbs": ("qstat", "-Q")}


def check_versions(around: MachineView) -> CheckResult:
    """Versions that all nodes must share."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    found |= {name: text for name in ("shardway", "torch") if (text := _find_version(name))}
    said = ", ".join(f"{name} {text}" for name, text in found.items())
    if "torch" in found:
        return good(said, **found)
    if not around.in_job:
        return good(f"{said}; torch is not installed here", **found)
    remedy = "choose the environment with site.venv or the image with site.image, and load the site's modules"
    return bad(f"{said}; torch is not installed", remedy, **found)


def _find_version(package: str) -> str:
    """Of an installed package, from its metadata; "" for one that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_placement(around: MachineView) -> CheckResult:
    """Whether the launcher's variables say which rank this is."""
    if around.placement is None:
        lines = around.trouble.splitlines()
        remedy = around.trouble.partition("to do:")[2].strip() or "start the ranks from a fresh shell"
        return bad(lines[0] if lines else "no placement", remedy)
    p = around.placement
    if p.launcher == "none":
        return good("nothing started several ranks")
    return good(f"rank {p.rank} of {p.world} (local {p.local_rank} of {p.local_world}), started by {p.launcher}")


def check_container(around: MachineView) -> CheckResult:
    """Whether this runs in a container, where the run wants one."""
    inside = find_container(around)
    wanted = around.wanted.container
    if inside:
        return good(f"inside {inside}", container=inside)
    if wanted and around.launched:
        remedy = "start the ranks through the container runtime; look at the job script: shardway submit --dry-run"
        return bad(f"the run wants a container ({wanted}), and this is none", remedy, container="none")
    return good("no container", container="none")


_LOCK_OF_ENROOT = "/.lock"
"""A file of each container's root, which Enroot (and so Pyxis) mounts read only (its runtime.sh)."""


def find_container(around: MachineView) -> str:
    """The runtime whose container this is, "a container" for one that cannot be told, or ""."""
    environ, root = around.environ, around.root
    for name, sign in (("apptainer", "APPTAINER_CONTAINER"), ("singularity", "SINGULARITY_CONTAINER")):
        if environ.get(sign):
            return name
    if environ.get("container"):
        return environ["container"]
    if environ.get("CH_RUNNING"):
        return "charliecloud"
    if any(str(mount.place) == _LOCK_OF_ENROOT for mount in around.mounts):
        return "enroot"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    image = next((mount for mount in reversed(around.mounts) if str(mount.place) == "/"), None)
    return "a container" if image is not None and image.kind in ("overlay", "squashfs", "fuse.squashfuse") else ""


def check_offline(around: MachineView) -> CheckResult:
    """Whether libraries know that this node has no internet; otherwise they try for minutes."""
    reach = around.site.internet.nodes
    if reach is None:
        return unknown(f"the profile {around.site.name} does not say whether nodes have internet")
    if reach != "none":
        return good("nodes have internet" + (" through a proxy" if reach == "proxy" else ""))
    missing = [] if around.environ.get(_HUB, "").lower() in ("1", "true", "yes", "on") else [_HUB]
    if around.environ.get("WANDB_MODE", "") not in ("offline", "disabled"):
        missing.append("WANDB_MODE")
    if not missing:
        return good("no internet, and libraries are told")
    values = " ".join(f"{name}={'offline' if name == 'WANDB_MODE' else '1'}" for name in missing)
    said = f"nodes have no internet, and not set: {', '.join(missing)}"
    fatal = around.wanted.uses_hub and _HUB in missing
    return (bad if fatal else poor)(said, f"export {values}")


def check_proxy(around: MachineView) -> CheckResult:
    """Whether the proxy that leads outside is set."""
    found = {name: value for name, value in around.environ.items() if name.lower() in ("http_proxy", "https_proxy")}
    internet = around.site.internet
    if internet.nodes == "proxy" and not found:
        address = internet.proxy or "http://HOST:PORT"
        remedy = f"export http_proxy={address} https_proxy={address}"
        if internet.no_proxy:
            remedy += f" no_proxy={internet.no_proxy}"
        return poor("nodes reach the internet through a proxy, and none is set", remedy)
    if not found:
        return good("no proxy is set, and none is needed") if internet.nodes else unknown("no proxy is set")
    return good(", ".join(sorted(found)) + " set")  # not the values: they may hold a password


def check_scheduler(around: MachineView) -> CheckResult:
    """Whether the scheduler's commands are here, and its server answers."""
    kind = around.site.scheduler
    if kind == "local":
        return unknown("this machine has no scheduler")
    here = run_command(_ASK[kind], _SCHEDULER_LIMIT_S)
    if here.missing:
        return bad(f"{_ASK[kind][0]} is not to be found", "load the site's module for it, or use a login node (--on)")
    return judge_scheduler(kind, run_command(_ASK_SERVER[kind], _SCHEDULER_LIMIT_S))


def judge_scheduler(kind: str, answer: CommandResult) -> CheckResult:
    """An empty answer of sinfo is that of a controller without partitions, or none."""
    command = " ".join(_ASK_SERVER[kind])
    remedy = "wait, and look at the site's status page; Shardway tries again by itself where it can"
    if answer.hung:
        return bad(f"`{command}` did not answer within {_SCHEDULER_LIMIT_S:g} s", remedy)
    if not answer.ok:
        return bad(f"`{command}`: {answer.said or f'exit code {answer.code}'}", remedy)
    return good(f"{kind} answers")


def check_account(around: MachineView) -> CheckResult:
    """Whether the account that the run is charged to is one of the user's, where the scheduler tells."""
    account, rule = around.wanted.account, around.site.request.account
    if around.site.scheduler == "local":
        return unknown("this machine charges nobody")
    if not account:
        if rule == "required":
            how = (
                f" (`{around.site.request.account_command}` lists yours)" if around.site.request.account_command else ""
            )
            return poor("the site charges an account, and the run names none", f"set site.account{how}")
        return unknown("the run names no account")
    if around.site.scheduler == "pbs":
        return unknown(f"PBS does not tell whether {account} is yours")
    user = around.environ.get("USER") or around.environ.get("LOGNAME", "")
    words = ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
    return judge_account(account, run_command(words, _SCHEDULER_LIMIT_S))


def judge_account(account: str, answer: CommandResult) -> CheckResult:
    """Accounts are compared as Slurm does, without regard to case."""
    if not answer.ok:
        return unknown(f"sacctmgr does not tell: {answer.said or 'no answer'}")
    yours = parse_accounts(answer.out)
    if not yours:
        return unknown("Slurm lists no accounts for this user")
    if account.lower() in yours:
        return good(f"{account} is one of yours")
    return bad(f'site.account = "{account}" is none of yours', f"set site.account to one of: {', '.join(yours)}")


def parse_accounts(text: str) -> list[str]:
    """Accounts, one a line, from `sacctmgr -nP show assoc format=account`."""
    return list(dict.fromkeys(line.strip().lower() for line in text.splitlines() if line.strip()))
