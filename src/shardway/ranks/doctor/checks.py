"""Checks of a machine: GPUs, cores, memory and limits; network, file systems, versions, container, scheduler.

Invariants:
- GPUs: every verdict comes from what `look_around` gathered; no check asks a driver. ECC thresholds are those with
  which operators of large systems did not reject healthy nodes (aggregate errors alone are no defect).
- The node itself: checks read limits and sizes and use nothing up.
- Network: names are looked up, but no connection is made; that is `connectivity_check`.
- File systems: a folder is used only after a separate process has accessed it in time, since a hung mount blocks every
  process that touches it. A check writes only a file of a unique name, in the run's folder, and removes it.
- Versions and scheduler: no library is imported to read its version; only commands that read are given to a scheduler.

Sources: nvidia-smi(1); NVML API reference, "NvmlClocksEventReasons"; CUDA C++ Programming Guide, "CUDA Environment
Variables"; ROCm documentation, "GPU isolation techniques"; sched_setaffinity(2), getrlimit(2), tmpfs(5); srun(1) on
SRUN_CPUS_PER_TASK (since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK); NCCL's troubleshooting page on shared
memory, its environment variables (NCCL_SOCKET_IFNAME: prefixes, "=" exact, "^" not these); gloo in torch
(GLOO_SOCKET_IFNAME: exact names); RFC 1122 section 3.2.1.3 on 127/8; statvfs(3), fsync(2), rename(2); huggingface_hub
"Environment variables"; wandb "Environment variables" (WANDB_MODE); containers.conf(5) and OCI runtimes on the variable
`container`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardway.hardware.catalogue import load_links
from shardway.hardware.command import run_command, run_commands
from shardway.hardware.limits import read_cgroup_limits, read_task_limit
from shardway.hardware.mounts import IN_MEMORY, find_mount
from shardway.hardware.probe import list_interfaces
from shardway.places import expand_home
from shardway.ranks.doctor.surroundings import CheckResult, MachineView, bad, good, poor, unknown
from shardway.ranks.launcher import is_loopback
from shardway.ranks.network import choose_interface, list_others, look_up, select_interfaces
from shardway.refusals import ANOTHER_FOLDER
from shardway.sites.schema import CPU
from shardway.units import render_seconds

GIB = 2**30

# --- GPUs: driver, count, visibility, health

_ECC_WARN, _ECC_FAIL = 8, 64
_SW_THERMAL = 0x20
_THROTTLES = {
    0x8: "hardware slowdown",
    0x40: "too hot (hardware)",
    0x80: "power brake",
    _SW_THERMAL: "too hot (driver)",
}


def _other_node(around: MachineView) -> str:
    return f"leave this node out ({around.describe_remedy('leave_out')}) and tell the site's support"


def check_query(around: MachineView) -> CheckResult:
    """Whether nvidia-smi answers."""
    state = around.nvidia
    if state.answer == "hung":
        return bad(state.said, f"the driver of this node hangs: {_other_node(around)}")
    if state.answer == "failed":
        return bad(f"nvidia-smi: {state.said}", f"the driver does not work here: {_other_node(around)}")
    if state.answer == "absent" and around.device_files and around.in_job:
        remedy = "in a container: bring the driver's tools in (apptainer exec --nv, NVIDIA_DRIVER_CAPABILITIES=all)"
        return poor("this node has NVIDIA devices, but no nvidia-smi is to be found", remedy)
    if state.answer == "absent":
        return unknown("no nvidia-smi here")
    driver = next(iter(state.columns.get("driver", ())), "")
    return good(f"nvidia-smi answers, driver {driver or 'n/a'}", driver=driver)


def check_count(around: MachineView) -> CheckResult:
    """There should be as many GPUs as the profile states, the scheduler gave, and the ranks need."""
    found, state, node = around.devices, around.nvidia, around.site.node
    if state.answer in ("hung", "failed"):
        return unknown("the driver does not say")
    counts = (scheduler.count_accelerators(around.environ) for scheduler in around.schedulers)
    given = next((count for count in counts if count is not None), None)
    wanted, why = 0, ""
    if around.wanted.device != "cpu":
        if given is not None:
            wanted, why = given, "what the scheduler gave"
        elif node.accelerators_per_node and around.site.request.whole_nodes is not False:
            wanted, why = node.accelerators_per_node, f"in the profile of {around.site.name}"
        elif around.wanted.device == "cuda":
            wanted, why = around.local_world, "what the ranks of this node need"
    kinds = ", ".join(f"{state.names.count(name)} x {name}" for name in dict.fromkeys(state.names))
    said = kinds or (f"{around.amd} AMD devices" if around.amd else "no GPU")
    if state.slices:
        said = f"{state.slices} MIG slices of {len(state.names)} GPUs"
    if found < wanted:
        option = {
            "gres": f"--gres=gpu:{wanted}",
            "gpus-per-node": f"--gpus-per-node={wanted}",
            "ngpus": f"ngpus={wanted} in select",
            "none": "a whole node",
        }.get(around.site.request.accelerators or "", "all GPUs of the node")
        remedy = f"ask the scheduler for {option}; if the job did, {_other_node(around)}"
        return bad(f"{said}; {wanted} are {why}", remedy, gpus=found)
    if not wanted and not found:
        return good("none, and none is expected", gpus=0)
    return good(said + (f"; {wanted} are {why}" if wanted else ""), gpus=found)


def check_visible(around: MachineView) -> CheckResult:
    """The variables that hide GPUs must leave each rank of the node its own one."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    lists = {name: around.environ[name] for name in names if name in around.environ}
    known = around.site.node.accelerator not in (None, CPU)
    expected = around.wanted.device != "cpu" and (around.wanted.device == "cuda" or around.devices or known)
    if not lists:
        return good("no variable hides a GPU") if expected else unknown("no GPU is wanted or hidden")
    for name, text in lists.items():
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        if twice := sorted({entry for entry in entries if entries.count(entry) > 1}):
            remedy = f"name each device once: unset {name} in the job script"
            return bad(f"{name}={text} names {', '.join(twice)} twice, and what follows is ignored", remedy)
        # Devices from the first that does not exist on are ignored; "-1", "NoDevFiles" and "" hide all.
        usable = entries.index("-1") if "-1" in entries else 0 if "NoDevFiles" in entries else len(entries)
        if expected and usable < around.local_world:
            return bad(
                f"{name}={text} shows {usable} GPUs to each of the {around.local_world} ranks of this node",
                f"every rank must see all GPUs of its node: start without --gpus-per-task and --gpu-bind=single "
                f"(srun --gpu-bind=none), or unset {name}",
            )
    said = ", ".join(f"{name}={text}" for name, text in lists.items())
    if "HIP_VISIBLE_DEVICES" in lists and "ROCR_VISIBLE_DEVICES" in lists:
        return poor(f"{said}: the second counts within what the first leaves", "unset HIP_VISIBLE_DEVICES")
    return good(said)


def check_ecc(around: MachineView) -> CheckResult:
    """Errors since the driver was loaded, and rows that could not be remapped, are defects."""
    state = around.nvidia
    volatile, aggregate = (max(state.numbers(name), default=None) for name in ("ecc_volatile", "ecc_aggregate"))
    waiting, failed = ("Yes" in state.columns.get(name, ()) for name in ("rows_pending", "rows_failed"))
    if volatile is None and aggregate is None:
        return unknown("no GPU here counts memory errors")
    since, total = ("n/a" if number is None else f"{number:g}" for number in (volatile, aggregate))
    said = f"uncorrected memory errors: {since} since start, {total} in all"
    if failed:
        return bad(f"{said}; rows of memory could not be replaced", _other_node(around))
    if volatile or (aggregate or 0) >= _ECC_FAIL or waiting:
        return bad(said + ("; rows wait to be replaced at a reset" if waiting else ""), _other_node(around))
    if (aggregate or 0) >= _ECC_WARN:
        return poor(said, "keep an eye on this node; tell the site's support if the number grows")
    return good(said)


def check_throttle(around: MachineView) -> CheckResult:
    """Whether a GPU is throttled by heat or by its power supply."""
    masks = [int(mask) for mask in around.nvidia.numbers("throttle_now") or around.nvidia.numbers("throttle")]
    if not masks:
        return unknown("no GPU here says why it is slow")
    active = [bit for bit in _THROTTLES if any(mask & bit for mask in masks)]
    if not active:
        return good("no GPU is slowed down")
    slow = [str(index) for index, mask in enumerate(masks) if mask & sum(_THROTTLES)]
    said = f"GPU {', '.join(slow)}: {', '.join(_THROTTLES[bit] for bit in active)}"
    remedy = f"one slow GPU slows all ranks: {_other_node(around)}"
    return poor(said, remedy) if active == [_SW_THERMAL] else bad(said, remedy)


def check_busy(around: MachineView) -> CheckResult:
    """Memory in use means a foreign program, such as a leftover of an earlier job."""
    used = around.nvidia.numbers("memory_used_mib")
    if not used:
        return unknown("no GPU here reports its memory")
    busy = [f"GPU {index}: {mib / 1024:.1f} GiB" for index, mib in enumerate(used) if mib > 1024]
    if not busy:
        return good("all GPUs are idle")
    remedy = "see who: nvidia-smi --query-compute-apps=pid,used_memory --format=csv; ask for whole nodes (--exclusive)"
    return poor("memory in use before the job starts: " + ", ".join(busy), remedy)


def check_mode(around: MachineView) -> CheckResult:
    """Whether a GPU refuses programs, or is split into slices."""
    modes, mig = (set(around.nvidia.columns.get(name, ())) for name in ("compute_mode", "mig"))
    if not modes:
        return unknown("no GPU here reports its mode")
    if "Prohibited" in modes:
        return bad("a GPU takes no programs (compute mode Prohibited)", _other_node(around))
    if "Enabled" in mig:
        remedy = "ask for GPUs that are not cut into slices: NCCL joins no two slices"
        return (poor if around.local_world < 2 else bad)("MIG is on: a process sees one slice", remedy)
    return good(f"compute mode {', '.join(sorted(modes))}")


# --- the node: cores, memory, limits, TMPDIR

_SHM_FAIL, _SHM_WARN, _SHM_WARN_ALONE = GIB // 8, 8 * GIB, GIB
_FILES_WARN = 4096
_TASKS_WARN = 128
_TMP_WARN = GIB


def check_affinity(around: MachineView) -> CheckResult:
    """One core of many is what srun gives a task by default; fewer than were requested means a binding."""
    usable = min(around.usable_cores, read_cgroup_limits(around.root).cores or around.usable_cores)
    said = f"{usable:g} of {around.machine_cores} hardware threads"
    counts = (scheduler.count_cores(around.environ, around.local_world) for scheduler in around.schedulers)
    given = next((count for count in counts if count is not None), None)
    loose = "; ".join(each.remedies["cores"] for each in around.schedulers if "cores" in each.remedies)
    if usable < 2 and around.machine_cores > 2:
        return bad(f"{said}: data loading and the optimizer share one", f"{loose}; with mpirun: --bind-to none")
    if given and usable < given:
        return poor(f"{said}, where the scheduler gave {given}", loose)
    return good(said)


def check_threads(around: MachineView) -> CheckResult:
    """If unset, every rank uses as many threads as the node has cores; Shardway's own runs set their threads."""
    text = around.environ.get("OMP_NUM_THREADS", "")
    bound = around.usable_cores <= max(2, around.machine_cores // around.local_world)
    cores = around.usable_cores if bound else max(1, around.usable_cores // around.local_world)
    remedy = f"export OMP_NUM_THREADS={cores}"
    first = text.split(",")[0].strip()  # a list is for nested parallel regions
    if not first:
        if around.local_world == 1:
            return good("OMP_NUM_THREADS is not set: one rank may use all cores")
        return poor(f"OMP_NUM_THREADS is not set: each of {around.local_world} ranks starts a thread a core", remedy)
    if not first.isdecimal() or not int(first):
        return bad(f'OMP_NUM_THREADS="{text}" is no number', remedy)
    if int(first) > cores:
        return poor(f"OMP_NUM_THREADS={text}, and a rank here has {cores} cores", remedy)
    return good(f"OMP_NUM_THREADS={text}, {cores} cores a rank")


def check_memory(around: MachineView) -> CheckResult:
    """Whether a job with a whole node has all of its memory."""
    limit, expected = read_cgroup_limits(around.root).memory_bytes, around.site.node.memory
    if limit is None or limit > 2**60:
        return unknown("no limit on the memory of this job")
    if expected and around.site.request.whole_nodes and limit < 0.9 * expected:
        said = f"{limit / GIB:.0f} GiB, where a node has {expected / GIB:.0f} GiB"
        return poor(said, f"ask for all memory of the node ({around.describe_remedy('all_memory')})")
    return good(f"{limit / GIB:.0f} GiB")


def check_shm(around: MachineView) -> CheckResult:
    """Data loader workers and NCCL pass data through it; 64 MiB, the default of container runtimes, is too little."""
    try:
        facts = os.statvfs(around.root / "dev/shm")
    except OSError as error:
        remedy = "mount /dev/shm into the container (apptainer does; podman --shm-size)"
        return bad(f"/dev/shm: {error.strerror}", remedy)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    said = f"/dev/shm has {free / GIB:.1f} of {size / GIB:.1f} GiB free"
    if free <= _SHM_FAIL:
        if size > _SHM_FAIL:
            return bad(said, "remove what an earlier job left there: ls -l /dev/shm")
        return bad(said, "start the container with more: --shm-size=16g, or mount the node's own: -v /dev/shm:/dev/shm")
    if free < (_SHM_WARN_ALONE if around.scheduler.this_machine else _SHM_WARN):
        return poor(said, "use fewer loader workers, or start the container with --shm-size=16g")
    return good(said)


def check_memlock(around: MachineView) -> CheckResult:
    """InfiniBand locks the memory of its buffers."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return good("unlimited")
    said = f"ulimit -l is {limit // 1024} KiB"
    if not around.fast_ports:
        return good(f"{said}, and there is no InfiniBand")
    remedy = f"{around.describe_remedy('memlock')}; podman: --ulimit memlock=-1; else ask the site"
    return bad(f"{said}, and InfiniBand needs it unlimited", remedy)


def check_files(_: MachineView) -> CheckResult:
    """Workers of a data loader pass tensors as open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = "unlimited" if soft == resource.RLIM_INFINITY else f"ulimit -n is {soft}"
    if soft == resource.RLIM_INFINITY or soft >= _FILES_WARN:
        return good(said)
    allowed = hard == resource.RLIM_INFINITY or hard >= _FILES_WARN
    return poor(said, f"ulimit -n {'65536' if hard < 0 else hard}" if allowed else f"ask the site for more than {hard}")


def check_tasks(around: MachineView) -> CheckResult:
    """A rank has a few dozen threads, including those of its loader processes and of CUDA."""
    limit = read_task_limit(around.root)
    if limit is None:
        return good("no limit on processes and threads")
    if limit.left < _TASKS_WARN * around.local_world:
        return poor(str(limit), f"{limit.remedy}, or use fewer loader processes (data.workers)")
    return good(str(limit))


def check_core(around: MachineView) -> CheckResult:
    """Whether a crash writes core dumps to the shared file system."""
    folder = str(Path.cwd())
    mount = find_mount(folder, around.mounts)
    if resource.getrlimit(resource.RLIMIT_CORE)[0] == 0:
        return good("no core dumps")
    if mount is not None and mount.shared:
        remedy = "ulimit -c 0 in the job script: a dump is as large as the memory of a rank"
        return poor(f"crashed ranks leave core dumps in {folder}", remedy)
    return good("core dumps go to a disk of this node")


def check_tmp(around: MachineView) -> CheckResult:
    """Whether the folder for temporary files exists, is writable and has space."""
    folder = around.environ.get("TMPDIR") or "/tmp"
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return bad(f"TMPDIR={folder}: {error.strerror}", "export TMPDIR=/tmp, or make that folder in the job script")
    mount = find_mount(os.path.realpath(folder), around.mounts)
    free = facts.f_bavail * facts.f_frsize
    said = f"{folder} has {free / GIB:.1f} GiB free" + (f" on {mount.kind}" if mount else "")
    if not os.access(folder, os.W_OK | os.X_OK):
        return bad(f"{folder} cannot be written", "export TMPDIR with a folder of your own on this node's disk")
    if free < _TMP_WARN:
        return poor(said, "free some of it, or export TMPDIR with a folder on a larger disk of this node")
    if mount is not None and mount.kind in IN_MEMORY and not around.scheduler.this_machine:
        return good(f"{said}: it counts as memory of the job")
    return good(said)


# --- network: interfaces, master address, InfiniBand


def check_interfaces(around: MachineView) -> CheckResult:
    """The first variable that leaves no usable interface decides."""
    said, found = [], list_interfaces()
    usable = ", ".join(each.name for each in found if each.up and each.leaves_machine)
    for name, exact in (("NCCL_SOCKET_IFNAME", False), ("GLOO_SOCKET_IFNAME", True)):
        text = around.environ.get(name, "")
        if not text:
            continue
        chosen = select_interfaces(text, found, exact=exact)
        up = [each for each in chosen if each.up]
        remedy = f"unset {name}, or name one that is up here: {usable or 'none'}"
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
    if not usable and around.several_nodes:
        return bad(
            f"{around.host} has no interface that is up, and ranks are on several nodes",
            "in a container: start it with the host's network (podman run --network=host); else tell the site's "
            "support",
        )
    return good(f"no variable chooses; up: {usable}" if usable else "only the loopback is up")


def check_hostname(around: MachineView) -> CheckResult:
    """gloo passes on the first address of the node's own name, or the loopback if there is none: then ranks of other
    nodes wait in vain. Ranks of Shardway are given the interface of the way to them."""
    if not around.several_nodes or around.placement is None:
        return unknown("all ranks are on one node")
    addresses = look_up(around.host)
    way = choose_interface(addresses, list_others(around.placement, around.environ))
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


def check_master(around: MachineView) -> CheckResult:
    """A loopback address leads every node to itself; the profile may ask for a suffix."""
    if around.placement is None:
        return unknown("this rank does not know its place")
    if around.placement.world == 1:
        return good("one rank alone, so there is no meeting point")
    name = around.placement.master_addr
    addresses = look_up(name)
    if not addresses:
        remedy = "export MASTER_ADDR with a name or an IPv4 address that every node knows (getent hosts NAME)"
        return bad(f"{around.host} does not know {name}", remedy)
    first = next((each for each in addresses if ":" not in each), addresses[0])
    if around.several_nodes and is_loopback(first):
        with_first = around.placement.rank == around.placement.local_rank
        if with_first and name.partition(".")[0] == around.host.partition(".")[0]:
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
    """A node may have ports without a cable; ports are missing only if the profile states how many are used."""
    network, ports = around.site.network, around.fast_ports
    active = [port for port in ports if port.active]
    wanted = network.adapters_per_node or 0
    down = ", ".join(f"{port.device}/{port.port} {port.state or 'unknown'}" for port in ports if not port.active)
    remedy = f"leave this node out ({around.describe_remedy('leave_out')}) and tell the site's support"
    if not ports:
        if around.several_nodes and (network.link or "").startswith(("hdr", "ndr", "edr", "xdr")):
            remedy = "in a container: bind /dev/infiniband and /sys into it; otherwise leave this node out"
            return poor(f"no InfiniBand adapter is visible, and {around.site.name} has {network.link}", remedy)
        return unknown("no InfiniBand here")
    if not active:
        return bad(f"no InfiniBand port is active: {down}", remedy)
    rates = sorted((port.rate_gbit_s for port in active), reverse=True)
    said = f"{len(active)} of {len(ports)} ports active, {' '.join(f'{rate:g}' for rate in rates)} Gbit/s"
    if len(active) < wanted:
        return bad(f"{said}; the profile has {wanted}: {down or 'the others are not there'}", remedy)
    link = load_links().get(network.link or "")
    expected = (link.bandwidth_bytes_per_s or 0) * 8 / 1e9 if link else 0
    if expected and rates[max(wanted, 1) - 1] < 0.9 * expected:
        return poor(f"{said}, where the profile has {expected:g}", remedy)
    return good(said)


# --- file systems: answer, write, space

_ANSWERS_WITHIN_S = 8.0
_SLOW_WRITE_S = 1.0
_FEW_INODES = 10_000
_SPEED_BYTES, _SLOW_BYTES_PER_S = 256 * 2**20, 50e6
_NO_FOLDER = "no run file or --dir says where the run writes"
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
    for name in sorted(around.environ, key=len, reverse=True):
        value = around.environ[name]
        texts = [text.replace(f"${{{name}}}", value).replace(f"${name}", value) for text in texts]
    named = [str(expand_home(text)) for text in texts]
    if around.wanted.folder is not None:
        named.append(str(find_existing(around.wanted.folder)))
    return list(dict.fromkeys(place for place in named if place.startswith("/") and "$" not in place))


def check_write(around: MachineView) -> CheckResult:
    """Whether a file can be written, made durable, renamed and removed in the run's folder."""
    if around.wanted.folder is None:
        return unknown(_NO_FOLDER)
    folder = find_existing(around.wanted.folder)
    try:
        seconds = _write_and_remove(folder, b"shardway doctor\n")
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", "choose a folder that you may write to with --dir or run.root")
    if seconds > _SLOW_WRITE_S:
        return poor(
            f"{folder}: a small file took {seconds:.1f} s", "the file system is busy: save less often", write_s=seconds
        )
    return good(f"{folder}: written, made durable, renamed and removed in {1000 * seconds:.0f} ms", write_s=seconds)


def _write_and_remove(folder: Path, content: bytes) -> float:
    """How many seconds it took. Raises OSError."""
    start, path = time.monotonic(), folder / f".doctor-{uuid.uuid4().hex}"
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
    return time.monotonic() - start


def check_space(around: MachineView) -> CheckResult:
    """Whether the run's checkpoints fit: bytes and inodes. Quotas that statvfs does not show are not seen."""
    if around.wanted.folder is None:
        return unknown(_NO_FOLDER)
    folder = find_existing(around.wanted.folder)
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", ANOTHER_FOLDER)
    free, inodes = facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files else None
    said = f"{folder} has {free / GIB:.1f} GiB free"
    remedy = "move old runs elsewhere, choose another folder with --dir, or keep fewer checkpoints (checkpoint.keep)"
    if inodes is not None and inodes < _FEW_INODES:
        return bad(f"{said}, but only {inodes} more files may be made", remedy)
    size, keep = around.wanted.checkpoint_bytes, around.wanted.keep
    if not size:
        return poor(said, remedy) if free < GIB else good(said)
    shown = f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
    said += f"; a checkpoint is about {shown}, and {keep} are kept"
    if free < 2 * size:
        return bad(said, remedy)
    # One checkpoint more than are kept is on disk while it is written.
    return poor(said, remedy) if free < (keep + 1) * size else good(said)


def check_speed(around: MachineView) -> CheckResult:
    """How fast the run's folder takes 256 MiB."""
    if around.wanted.folder is None:
        return unknown(_NO_FOLDER)
    folder = find_existing(around.wanted.folder)
    content = os.urandom(2**20) * (_SPEED_BYTES // 2**20)
    try:
        rate = _SPEED_BYTES / max(_write_and_remove(folder, content), 1e-6)
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", ANOTHER_FOLDER)
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
    mount = find_mount(sys.prefix, around.mounts)
    if mount is not None and mount.shared:
        remedy = "use a container image (one file), or unpack the environment on each node's own disk ($TMPDIR)"
        return poor(f"{sys.prefix} is on {mount.kind}: imports take long, and longer on many nodes", remedy)
    return good(f"{sys.prefix}" + (f" on {mount.kind}" if mount else ""))


# --- versions, container, offline variables, scheduler

VERSIONS = ("python", "torch", "shardway", "driver", "machine")  # facts that must be equal on all nodes
_SCHEDULER_LIMIT_S = 8.0


def check_versions(around: MachineView) -> CheckResult:
    """Versions that all nodes must share."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("shardway", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    said = ", ".join(f"{name} {text}" for name, text in found.items())
    if "torch" in found:
        return good(said, **found)
    if not around.in_job:
        return good(f"{said}; torch is not installed here", **found)
    remedy = "choose the environment with site.venv or the image with site.image, and load the site's modules"
    return bad(f"{said}; torch is not installed", remedy, **found)


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
    environ, root, wanted = around.environ, around.root, around.wanted.container
    places = {str(mount.place): mount for mount in around.mounts}
    signs = (
        ("apptainer", environ.get("APPTAINER_CONTAINER")),
        ("singularity", environ.get("SINGULARITY_CONTAINER")),
        (environ.get("container"), environ.get("container")),
        ("charliecloud", environ.get("CH_RUNNING")),
        ("enroot", "/.lock" in places),  # of each container's root, which Enroot (and so Pyxis) mounts read only
        ("podman", (root / "run/.containerenv").exists()),
        ("docker", (root / ".dockerenv").exists()),
        ("a container", "/" in places and places["/"].kind in ("overlay", "squashfs", "fuse.squashfuse")),
    )
    inside = next((name for name, sign in signs if sign), None)
    if inside:
        return good(f"inside {inside}", container=inside)
    if wanted and around.launched:
        remedy = "start the ranks through the container runtime; look at the job script: shardway submit --dry-run"
        return bad(f"the run wants a container ({wanted}), and this is none", remedy, container="none")
    return good("no container", container="none")


def check_offline(around: MachineView) -> CheckResult:
    """Whether libraries are set to offline on a node without internet; otherwise they try for minutes."""
    reach = around.site.internet.nodes
    if reach is None:
        return unknown(f"the profile {around.site.name} does not say whether nodes have internet")
    if reach != "none":
        return good("nodes have internet" + (" through a proxy" if reach == "proxy" else ""))
    hub = "HF_HUB_OFFLINE"  # read by the hub's own library, on which transformers and datasets depend
    missing = [] if around.environ.get(hub, "").lower() in ("1", "true", "yes", "on") else [hub]
    if around.environ.get("WANDB_MODE", "") not in ("offline", "disabled"):
        missing.append("WANDB_MODE")
    if not missing:
        return good("no internet, and the offline variables are set")
    values = " ".join(f"{name}={'offline' if name == 'WANDB_MODE' else '1'}" for name in missing)
    said = f"nodes have no internet, and not set: {', '.join(missing)}"
    fatal = around.wanted.uses_hub and hub in missing
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
    answer = run_command(scheduler.server_command, _SCHEDULER_LIMIT_S)  # it may be empty: a controller without queues
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
            command = around.site.request.account_command
            how = f" (`{command}` lists yours)" if command else ""
            return poor("the site charges an account, and the run names none", f"set site.account{how}")
        return unknown("the run names no account")
    user = around.environ.get("USER") or around.environ.get("LOGNAME", "")
    words = around.scheduler.list_accounts(user)
    if not words:
        return unknown(f"{around.scheduler.title} does not tell whether {account} is yours")
    answer = run_command(words, _SCHEDULER_LIMIT_S)
    if not answer.ok:
        return unknown(f"{words[0]} does not tell: {answer.first_line or 'no answer'}")
    yours = list(dict.fromkeys(line.strip().lower() for line in answer.out.splitlines() if line.strip()))
    if not yours:
        return unknown(f"{around.scheduler.title} lists no accounts for this user")
    if account.lower() in yours:  # schedulers ignore case
        return good(f"{account} is one of yours")
    return bad(f'site.account = "{account}" is none of yours', f"set site.account to one of: {', '.join(yours)}")
