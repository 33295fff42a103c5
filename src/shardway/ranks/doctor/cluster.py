"""Checks of what nodes share: network, file systems, versions, container, scheduler.

Invariants:
- Network: names are looked up, but no connection is made; that is `connectivity_check`. Verdicts are functions of what
  was read.
- File systems: a folder is used only after a separate process has accessed it in time, since a hung mount blocks every
  process that touches it. A check writes only a file of a unique name, in the run's folder, and removes it.
- Versions and scheduler: no library is imported to read its version; only commands that read are given to a scheduler.

Sources: NCCL environment variables (NCCL_SOCKET_IFNAME: prefixes, "=" exact, "^" not these); gloo in torch
(GLOO_SOCKET_IFNAME: exact names); RFC 1122 section 3.2.1.3 on 127/8; statvfs(3), fsync(2), rename(2); huggingface_hub
"Environment variables"; wandb "Environment variables" (WANDB_MODE); containers.conf(5) and OCI runtimes on the variable
`container`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardway.hardware.catalogue import load_links
from shardway.hardware.command import CommandResult, run_command, run_commands
from shardway.hardware.mounts import find_mount
from shardway.hardware.probe import Interface, Port, list_interfaces
from shardway.places import expand_home
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView
from shardway.ranks.launcher import is_loopback
from shardway.ranks.network import choose_interface, list_others, look_up, select_interfaces
from shardway.refusals import ANOTHER_FOLDER
from shardway.units import render_seconds

# --- network: interfaces, master address, InfiniBand


def check_interfaces(around: MachineView) -> CheckResult:
    """Whether the interfaces that NCCL and gloo are set to use exist and are up."""
    return judge_interfaces(around, list_interfaces())


def judge_interfaces(around: MachineView, found: tuple[Interface, ...]) -> CheckResult:
    """The first variable that leaves no usable interface decides."""
    said = []
    for name, exact in (("NCCL_SOCKET_IFNAME", False), ("GLOO_SOCKET_IFNAME", True)):
        text = around.environ.get(name, "")
        if not text:
            continue
        chosen = select_interfaces(text, found, exact=exact)
        up = [each for each in chosen if each.up]
        usable = ", ".join(each.name for each in found if each.up and each.leaves_machine) or "none"
        remedy = f"unset {name}, or name one that is up here: {usable}"
        if not chosen:
            return bad(f"{name}={text}: {around.host} has no such interface", remedy)
        if not up:
            return bad(f"{name}={text}: {', '.join(each.name for each in chosen)} is down", remedy)
        names = ", ".join(each.name for each in up)
        if around.several_nodes and not any(each.leaves_machine for each in up):
            return bad(f"{name}={text}: {names} leads to no other node", remedy)
        said.append(f"{name}={text}: {names}")
    if said:
        return good("; ".join(said))
    usable = ", ".join(each.name for each in found if each.up and each.leaves_machine)
    if not usable:
        return good("only the loopback is up") if not around.several_nodes else _alone(around)
    return good(f"no variable chooses; up: {usable}")


def _alone(around: MachineView) -> CheckResult:
    remedy = (
        "in a container: start it with the host's network (podman run --network=host); else tell the site's support"
    )
    return bad(f"{around.host} has no interface that is up, and ranks are on several nodes", remedy)


def check_master(around: MachineView) -> CheckResult:
    """Whether the address at which ranks meet resolves here, and other nodes can use it."""
    if around.placement is None:
        return unknown("this rank does not know its place")
    if around.placement.world == 1:
        return good("one rank alone, so there is no meeting point")
    return judge_master(around, look_up(around.placement.master_addr))


def check_hostname(around: MachineView) -> CheckResult:
    """Whether this node's own name resolves to an address that others can use: gloo passes that on."""
    if not around.several_nodes:
        return unknown("all ranks are on one node")
    addresses = look_up(around.host)
    others = list_others(around.placement, around.environ) if around.placement else ()
    return judge_hostname(around, addresses, choose_interface(addresses, others))


def judge_hostname(around: MachineView, addresses: tuple[str, ...], way: str = "") -> CheckResult:
    """gloo passes on the first address of the name, or the loopback if there is none: then the ranks of other nodes
    wait in vain. `way`: the interface that Shardway's ranks give it."""
    chosen = around.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        return good(f"gloo uses {chosen}, not the name of the host")
    if way:
        own = f"{around.host} is {addresses[0]}" if addresses else f"{around.host} does not know its own name"
        return good(f"{own}; ranks of Shardway talk by {way}, and others need GLOO_SOCKET_IFNAME={way}")
    remedy = "export GLOO_SOCKET_IFNAME with the interface that joins the nodes (ip -br addr), or mend /etc/hosts"
    if not addresses:
        return bad(f"{around.host} does not know its own name, by which gloo gives others its address", remedy)
    if is_loopback(addresses[0]):
        return bad(f"{around.host} takes its own name for {addresses[0]}, which gloo would give others", remedy)
    return good(f"{around.host} is {addresses[0]}")


def judge_master(around: MachineView, addresses: tuple[str, ...]) -> CheckResult:
    """A loopback address leads every node to itself; the profile may ask for a suffix."""
    name = around.placement.master_addr if around.placement else ""
    if not addresses:
        remedy = "export MASTER_ADDR with a name or an IPv4 address that every node knows (getent hosts NAME)"
        return bad(f"{around.host} does not know {name}", remedy)
    first = next((each for each in addresses if ":" not in each), addresses[0])
    if around.several_nodes and is_loopback(first):
        if around.has_first_rank and name.partition(".")[0] == around.host.partition(".")[0]:
            remedy = 'network.resolve = "ipv4" in the site\'s profile, or an /etc/hosts without this line'
            return poor(f"{name} is {first} on {around.host} itself", remedy, master_address=first)
        remedy = "export MASTER_ADDR with the address of rank 0's network interface; 127.x is each node's own"
        return bad(f"{name} is {first} on {around.host}: every node would meet itself", remedy, master_address=first)
    suffix = around.site.network.host_suffix
    named = not name.replace(".", "").isdigit() and ":" not in name
    if around.several_nodes and suffix and named and not name.partition(".")[0].endswith(suffix):
        remedy = f"export MASTER_ADDR={name.partition('.')[0]}{suffix}"
        said = f"{name} is {first}: on {around.site.name} the fast network's name ends in {suffix}"
        return poor(said, remedy, master_address=first)
    if ":" in first:
        remedy = "export MASTER_ADDR with an IPv4 address; many libraries meet by IPv4 alone"
        return poor(f"{name} has no IPv4 address, only {first}", remedy, master_address=first)
    return good(name if name == first else f"{name} is {first}", master_address=first)


def check_infiniband(around: MachineView) -> CheckResult:
    """Whether InfiniBand ports are active, as many and as fast as the profile states."""
    return judge_infiniband(around, around.fast_ports)


def judge_infiniband(around: MachineView, ports: tuple[Port, ...]) -> CheckResult:
    """A node may have ports without a cable; ports are missing only if the profile states how many are used."""
    network, active = around.site.network, [port for port in ports if port.active]
    wanted = network.adapters_per_node or 0
    down = ", ".join(f"{port.device}/{port.port} {port.state or 'unknown'}" for port in ports if not port.active)
    remedy = f"leave this node out ({around.describe_remedy('leave_out')}) and tell the site's support"
    if not ports:
        return _judge_no_ports(around)
    if not active:
        return bad(f"no InfiniBand port is active: {down}", remedy)
    rates = sorted((port.rate_gbit_s for port in active), reverse=True)
    said = f"{len(active)} of {len(ports)} ports active, {' '.join(f'{rate:g}' for rate in rates)} Gbit/s"
    if len(active) < wanted:
        return bad(f"{said}; the profile has {wanted}: {down or 'the others are not there'}", remedy)
    expected = _expected_gbit_s(around)
    if expected and rates[max(wanted, 1) - 1] < 0.9 * expected:
        return poor(f"{said}, where the profile has {expected:g}", remedy)
    return good(said)


def _judge_no_ports(around: MachineView) -> CheckResult:
    link = around.site.network.link or ""
    if around.several_nodes and link.startswith(("hdr", "ndr", "edr", "xdr")):
        remedy = "in a container: bind /dev/infiniband and /sys into it; otherwise leave this node out"
        return poor(f"no InfiniBand adapter is visible, and {around.site.name} has {link}", remedy)
    return unknown("no InfiniBand here")


def _expected_gbit_s(around: MachineView) -> float | None:
    link = load_links().get(around.site.network.link or "")
    rate = link.bandwidth_bytes_per_s if link else None
    return rate * 8 / 1e9 if rate else None


# --- file systems: answer, write, space

GIB = 2**30
_ANSWERS_WITHIN_S = 8.0
_SLOW_WRITE_S = 1.0
_FEW_INODES = 10_000
_SPEED_BYTES = 256 * 2**20
_SLOW_BYTES_PER_S = 50e6
CACHES = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MIOPEN_USER_DB_PATH", "XDG_CACHE_HOME")


def find_existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    path = expand_home(folder).absolute()
    return next((each for each in (path, *path.parents) if os.path.lexists(each)), Path("/"))


def check_mounts(around: MachineView) -> CheckResult:
    """Whether every file system of the profile and the run answers."""
    places = list_places(around)
    if not places:
        return unknown("neither the profile nor the run names a folder")
    answers = run_commands([("ls", "-d", place) for place in places], _ANSWERS_WITHIN_S)
    hung = [place for place, answer in zip(places, answers, strict=True) if answer.hung]
    gone = [place for place, answer in zip(places, answers, strict=True) if not answer.hung and not answer.ok]
    if hung:
        remedy = f"the file system hangs on this node: leave it out ({around.describe_remedy('leave_out')})"
        return bad(f"{', '.join(hung)} did not answer within {render_seconds(_ANSWERS_WITHIN_S)}", remedy)
    if gone:
        remedy = "in a container: mount them; otherwise correct [storage] of the profile, or ask the site"
        return poor(f"not there: {', '.join(gone)}", remedy)
    return good(", ".join(places))


def list_places(around: MachineView) -> list[str]:
    """Folders of the profile's storage whose variables are set, and the run's folder."""
    storage = around.site.storage
    texts = [text for text in (storage.home, storage.project, storage.scratch) if text]
    named = [str(expand_home(_expand(text, around))) for text in texts]
    if around.wanted.folder is not None:
        named.append(str(find_existing(around.wanted.folder)))
    return list(dict.fromkeys(place for place in named if place.startswith("/") and "$" not in place))


def _expand(text: str, around: MachineView) -> str:
    for name in sorted(around.environ, key=len, reverse=True):
        text = text.replace(f"${{{name}}}", around.environ[name]).replace(f"${name}", around.environ[name])
    return text


def check_write(around: MachineView) -> CheckResult:
    """Whether a file can be written, made durable, renamed and removed in the run's folder."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder = find_existing(around.wanted.folder)
    start = time.monotonic()
    try:
        _write_and_remove(folder, b"shardway doctor\n")
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", "choose a folder that you may write to with --dir or run.root")
    seconds = time.monotonic() - start
    if seconds > _SLOW_WRITE_S:
        return poor(
            f"{folder}: a small file took {seconds:.1f} s", "the file system is busy: save less often", write_s=seconds
        )
    return good(f"{folder}: written, made durable, renamed and removed in {1000 * seconds:.0f} ms", write_s=seconds)


def _write_and_remove(folder: Path, content: bytes) -> None:
    path = folder / f".doctor-{uuid.uuid4().hex}"
    renamed = path.with_suffix(".renamed")
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path, renamed)
    finally:
        for each in (path, renamed):
            with contextlib.suppress(OSError):
                each.unlink()


def check_space(around: MachineView) -> CheckResult:
    """Whether the run's checkpoints fit: bytes and inodes. Quotas that statvfs does not show are not seen."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder = find_existing(around.wanted.folder)
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", ANOTHER_FOLDER)
    inodes = facts.f_favail if facts.f_files else None
    return judge_space(around, str(folder), facts.f_bavail * facts.f_frsize, inodes)


def judge_space(around: MachineView, folder: str, free: int, inodes: int | None) -> CheckResult:
    """One checkpoint more than are kept is on disk while it is written."""
    said = f"{folder} has {free / GIB:.1f} GiB free"
    remedy = "move old runs elsewhere, choose another folder with --dir, or keep fewer checkpoints (checkpoint.keep)"
    if inodes is not None and inodes < _FEW_INODES:
        return bad(f"{said}, but only {inodes} more files may be made", remedy)
    size, keep = around.wanted.checkpoint_bytes, around.wanted.keep
    if not size:
        return poor(said, remedy) if free < GIB else good(said)
    said += f"; a checkpoint is about {_format_size(size)}, and {keep} are kept"
    if free < 2 * size:
        return bad(said, remedy)
    return poor(said, remedy) if free < (keep + 1) * size else good(said)


def _format_size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def check_speed(around: MachineView) -> CheckResult:
    """How fast the run's folder takes 256 MiB."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder = find_existing(around.wanted.folder)
    start = time.monotonic()
    try:
        _write_and_remove(folder, os.urandom(2**20) * (_SPEED_BYTES // 2**20))
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", ANOTHER_FOLDER)
    rate = _SPEED_BYTES / max(time.monotonic() - start, 1e-6)
    said = f"{folder} took {_SPEED_BYTES // 2**20} MiB at {rate / 1e6:.0f} MB/s"
    if rate < _SLOW_BYTES_PER_S:
        return poor(said, "write to the site's scratch file system (--dir), and save less often", write_rate=rate)
    return good(said, write_rate=rate)


def check_caches(around: MachineView) -> CheckResult:
    """Whether caches of libraries are in a small home folder."""
    home, storage = around.environ.get("HOME", ""), around.site.storage
    if around.scheduler.this_machine or not home or not (storage.project or storage.scratch):
        return unknown("nothing says that the home folder is small")
    places = {name: around.environ.get(name, "") for name in CACHES}
    default = places["XDG_CACHE_HOME"] or f"{home}/.cache"
    places["HF_HOME"] = places["HF_HOME"] or f"{default}/huggingface"
    inside = [name for name, place in places.items() if place and Path(place).is_relative_to(home)]
    roomy = storage.scratch or storage.project
    if inside:
        remedy = f"export HF_HOME={roomy}/huggingface XDG_CACHE_HOME={roomy}/.cache, and the like for the others"
        return poor(f"below the home folder {home}: {', '.join(inside)}", remedy)
    return good("no cache below the home folder")


def check_python(around: MachineView) -> CheckResult:
    """Whether Python's thousands of small files are on a parallel file system."""
    import sys

    mount = find_mount(sys.prefix, around.mounts)
    if mount is not None and mount.shared:
        remedy = "use a container image (one file), or unpack the environment on each node's own disk ($TMPDIR)"
        return poor(f"{sys.prefix} is on {mount.kind}: imports take long, and longer on many nodes", remedy)
    return good(f"{sys.prefix}" + (f" on {mount.kind}" if mount else ""))


# --- versions, container, offline variables, scheduler

VERSIONS = ("python", "torch", "shardway", "driver", "machine")
"""Facts that must be equal on all nodes."""

_HUB = "HF_HUB_OFFLINE"  # read by the hub's own library, on which transformers and datasets depend
_SCHEDULER_LIMIT_S = 8.0


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
    """The version of an installed package, from its metadata; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_placement(around: MachineView) -> CheckResult:
    """Whether the launcher's variables give this process a rank."""
    if around.placement is None:
        lines = around.trouble.splitlines()
        remedy = around.trouble.partition("to do:")[2].strip() or "start the ranks from a fresh shell"
        return bad(lines[0] if lines else "no placement", remedy)
    p = around.placement
    if p.launcher == "none":
        return good("nothing started several ranks")
    return good(f"rank {p.rank} of {p.world} (local {p.local_rank} of {p.local_world}), started by {p.launcher}")


def check_container(around: MachineView) -> CheckResult:
    """Whether this runs in a container, if the run wants one."""
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
    """The runtime of the container this runs in, "a container" for an unknown one, or ""."""
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
    """Whether libraries are set to offline on a node without internet; otherwise they try for minutes."""
    reach = around.site.internet.nodes
    if reach is None:
        return unknown(f"the profile {around.site.name} does not say whether nodes have internet")
    if reach != "none":
        return good("nodes have internet" + (" through a proxy" if reach == "proxy" else ""))
    missing = [] if around.environ.get(_HUB, "").lower() in ("1", "true", "yes", "on") else [_HUB]
    if around.environ.get("WANDB_MODE", "") not in ("offline", "disabled"):
        missing.append("WANDB_MODE")
    if not missing:
        return good("no internet, and the offline variables are set")
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
    scheduler = around.scheduler
    if scheduler.this_machine:
        return unknown("this machine has no scheduler")
    if not scheduler.client_command:
        return unknown(f"no command is known that {scheduler.title} answers")
    here = run_command(scheduler.client_command, _SCHEDULER_LIMIT_S)
    if here.missing:
        said = f"{scheduler.client_command[0]} is not to be found"
        return bad(said, "load the site's module for it, or use a login node (--on)")
    return judge_scheduler(scheduler, run_command(scheduler.server_command, _SCHEDULER_LIMIT_S))


def judge_scheduler(scheduler: Any, answer: CommandResult) -> CheckResult:
    """An empty answer comes from a controller without queues, or from none."""
    command = " ".join(scheduler.server_command)
    remedy = "wait, and look at the site's status page; Shardway tries again by itself where it can"
    if answer.hung:
        return bad(f"`{command}` did not answer within {_SCHEDULER_LIMIT_S:g} s", remedy)
    if not answer.ok:
        return bad(f"`{command}`: {answer.first_line or f'exit code {answer.code}'}", remedy)
    return good(f"{scheduler.name} answers")


def check_account(around: MachineView) -> CheckResult:
    """Whether the account charged for the run is one of the user's, if the scheduler lists them."""
    account, rule = around.wanted.account, around.site.request.account
    if around.scheduler.this_machine:
        return unknown("this machine charges no account")
    if not account:
        if rule == "required":
            how = (
                f" (`{around.site.request.account_command}` lists yours)" if around.site.request.account_command else ""
            )
            return poor("the site charges an account, and the run names none", f"set site.account{how}")
        return unknown("the run names no account")
    user = around.environ.get("USER") or around.environ.get("LOGNAME", "")
    words = around.scheduler.list_accounts(user)
    if not words:
        return unknown(f"{around.scheduler.title} does not tell whether {account} is yours")
    return judge_account(account, around.scheduler, run_command(words, _SCHEDULER_LIMIT_S))


def judge_account(account: str, scheduler: Any, answer: CommandResult) -> CheckResult:
    """Accounts are compared as schedulers do, ignoring case."""
    if not answer.ok:
        return unknown(f"{scheduler.list_accounts('')[0]} does not tell: {answer.first_line or 'no answer'}")
    yours = parse_accounts(answer.out)
    if not yours:
        return unknown(f"{scheduler.title} lists no accounts for this user")
    if account.lower() in yours:
        return good(f"{account} is one of yours")
    return bad(f'site.account = "{account}" is none of yours', f"set site.account to one of: {', '.join(yours)}")


def parse_accounts(text: str) -> list[str]:
    """Accounts, one a line."""
    return list(dict.fromkeys(line.strip().lower() for line in text.splitlines() if line.strip()))
