"""Checks of a node: GPUs and their driver, cores, threads, shared memory, limits, TMPDIR.

Invariants:
- GPUs: every verdict comes from what `look_around` gathered; no check asks a driver. ECC thresholds are those with
  which operators of large systems did not reject healthy nodes (aggregate errors alone are no defect).
- The node itself: checks read limits and sizes and use nothing up. Verdicts are functions of numbers (`judge_*`).

Sources: nvidia-smi(1); NVML API reference, "NvmlClocksEventReasons"; CUDA C++ Programming Guide, "CUDA Environment
Variables"; ROCm documentation, "GPU isolation techniques"; sched_setaffinity(2), getrlimit(2), tmpfs(5); srun(1) on
SRUN_CPUS_PER_TASK (since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK); NCCL's troubleshooting page on shared
memory.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from shardway.hardware.limits import TaskLimit, read_cgroup_limits, read_task_limit
from shardway.hardware.mounts import IN_MEMORY, find_mount
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView
from shardway.sites.schema import CPU

# --- GPUs: driver, count, visibility, health

_ECC_WARN, _ECC_FAIL = 8, 64
_BUSY_MIB = 1024
_HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
_REASONS = {
    _HW_SLOWDOWN: "hardware slowdown",
    _HW_THERMAL: "too hot (hardware)",
    _POWER_BRAKE: "power brake",
    _SW_THERMAL: "too hot (driver)",
}
_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _other_node(around: MachineView) -> str:
    return f"leave this node out ({around.describe_remedy('leave_out')}) and tell the site's support"


def check_query(around: MachineView) -> CheckResult:
    """Whether nvidia-smi answers."""
    state = around.nvidia
    if state.answer == "hung":
        return bad(state.said, f"the driver of this node hangs: {_other_node(around)}")
    if state.answer == "failed":
        remedy = f"the driver does not work here: {_other_node(around)}"
        return bad(f"nvidia-smi: {state.said}", remedy)
    if state.answer == "absent":
        if around.device_files and around.in_job:
            return poor(
                "this node has NVIDIA devices, but no nvidia-smi is to be found",
                "in a container: bring the driver's tools in (apptainer exec --nv, NVIDIA_DRIVER_CAPABILITIES=all)",
            )
        return unknown("no nvidia-smi here")
    return good(f"nvidia-smi answers, driver {_driver(around) or 'n/a'}", driver=_driver(around))


def _driver(around: MachineView) -> str:
    return next(iter(around.nvidia.columns.get("driver", ())), "")


def check_count(around: MachineView) -> CheckResult:
    """Whether there are as many GPUs as the profile states, the scheduler gave, and the ranks need."""
    found, said = around.devices, _describe(around)
    if around.nvidia.answer in ("hung", "failed"):
        return unknown("the driver does not say")
    wanted, why = _expect(around)
    if found < wanted:
        return bad(f"{said}; {wanted} are {why}", _ask_for(around, wanted), gpus=found)
    if not wanted and not found:
        return good("none, and none is expected", gpus=0)
    return good(said + (f"; {wanted} are {why}" if wanted else ""), gpus=found)


def _expect(around: MachineView) -> tuple[int, str]:
    """How many GPUs this node must have at least, and the source of that number."""
    if around.wanted.device == "cpu":
        return 0, ""
    node = around.site.node
    if around.gpus_given is not None:
        return around.gpus_given, "what the scheduler gave"
    if node.accelerators_per_node and around.site.request.whole_nodes is not False:
        return node.accelerators_per_node, f"in the profile of {around.site.name}"
    if around.wanted.device == "cuda":
        return around.local_world, "what the ranks of this node need"
    return 0, ""


def _describe(around: MachineView) -> str:
    names = around.nvidia.names
    if around.nvidia.slices:
        return f"{around.nvidia.slices} MIG slices of {len(names)} GPUs"
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(kinds) or (f"{around.amd} AMD devices" if around.amd else "no GPU")


def _ask_for(around: MachineView, wanted: int) -> str:
    option = {
        "gres": f"--gres=gpu:{wanted}",
        "gpus-per-node": f"--gpus-per-node={wanted}",
        "ngpus": f"ngpus={wanted} in select",
        "none": "a whole node",
    }.get(around.site.request.accelerators or "", "all GPUs of the node")
    return f"ask the scheduler for {option}; if the job did, {_other_node(around)}"


def check_visible(around: MachineView) -> CheckResult:
    """Whether the variables that hide GPUs leave each rank of the node its own one."""
    lists = {name: around.environ[name] for name in _LISTS if name in around.environ}
    if not lists:
        return good("no variable hides a GPU") if _expects_gpus(around) else unknown("no GPU is wanted or hidden")
    for name, text in lists.items():
        trouble = _judge_list(around, name, text)
        if trouble is not None:
            return trouble
    if "HIP_VISIBLE_DEVICES" in lists and "ROCR_VISIBLE_DEVICES" in lists:
        said = ", ".join(f"{name}={text}" for name, text in lists.items())
        return poor(f"{said}: the second counts within what the first leaves", "unset HIP_VISIBLE_DEVICES")
    return good(", ".join(f"{name}={text}" for name, text in lists.items()))


def _judge_list(around: MachineView, name: str, text: str) -> CheckResult | None:
    """What is wrong with one variable; None for nothing."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    twice = sorted({entry for entry in entries if entries.count(entry) > 1})
    if twice:
        remedy = f"name each device once: unset {name} in the job script"
        return bad(f"{name}={text} names {', '.join(twice)} twice, and what follows is ignored", remedy)
    if not _expects_gpus(around):
        return None
    # Devices from the first that does not exist on are ignored; "-1", "NoDevFiles" and "" hide all.
    usable = entries.index("-1") if "-1" in entries else 0 if "NoDevFiles" in entries else len(entries)
    if usable < around.local_world:
        return bad(
            f"{name}={text} shows {usable} GPUs to each of the {around.local_world} ranks of this node",
            f"every rank must see all GPUs of its node: start without --gpus-per-task and --gpu-bind=single "
            f"(srun --gpu-bind=none), or unset {name}",
        )
    return None


def _expects_gpus(around: MachineView) -> bool:
    if around.wanted.device == "cpu":
        return False
    known = around.site.node.accelerator not in (None, CPU)
    return bool(around.wanted.device == "cuda" or around.devices or known)


def check_ecc(around: MachineView) -> CheckResult:
    """Whether a GPU's memory has failed: errors since the driver was loaded, rows that could not be remapped."""
    state = around.nvidia
    volatile, aggregate = (max(state.numbers(name), default=None) for name in ("ecc_volatile", "ecc_aggregate"))
    waiting, failed = ("Yes" in state.columns.get(name, ()) for name in ("rows_pending", "rows_failed"))
    if volatile is None and aggregate is None:
        return unknown("no GPU here counts memory errors")
    said = f"uncorrected memory errors: {_or_na(volatile)} since start, {_or_na(aggregate)} in all"
    remedy = _other_node(around)
    if failed:
        return bad(f"{said}; rows of memory could not be replaced", remedy)
    if volatile or (aggregate or 0) >= _ECC_FAIL or waiting:
        return bad(said + ("; rows wait to be replaced at a reset" if waiting else ""), remedy)
    if (aggregate or 0) >= _ECC_WARN:
        return poor(said, "keep an eye on this node; tell the site's support if the number grows")
    return good(said)


def _or_na(number: float | None) -> str:
    return "n/a" if number is None else f"{number:g}"


def check_throttle(around: MachineView) -> CheckResult:
    """Whether a GPU is throttled by heat or by its power supply."""
    masks = around.nvidia.numbers("throttle_now") or around.nvidia.numbers("throttle")
    if not masks:
        return unknown("no GPU here says why it is slow")
    active = 0
    for mask in masks:
        active |= int(mask)
    reasons = [text for bit, text in _REASONS.items() if active & bit]
    slow = [str(index) for index, mask in enumerate(masks) if int(mask) & sum(_REASONS)]
    if not reasons:
        return good("no GPU is slowed down")
    said = f"GPU {', '.join(slow)}: {', '.join(reasons)}"
    remedy = f"one slow GPU slows all ranks: {_other_node(around)}"
    return bad(said, remedy) if active & ~_SW_THERMAL & sum(_REASONS) else poor(said, remedy)


def check_busy(around: MachineView) -> CheckResult:
    """Whether a foreign program is on a GPU, such as a leftover of an earlier job."""
    used = around.nvidia.numbers("memory_used_mib")
    if not used:
        return unknown("no GPU here reports its memory")
    busy = [f"GPU {index}: {mib / 1024:.1f} GiB" for index, mib in enumerate(used) if mib > _BUSY_MIB]
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

GIB = 2**30
_SHM_FAIL, _SHM_WARN, _SHM_WARN_ALONE = GIB // 8, 8 * GIB, GIB
_FILES_WARN = 4096
_TASKS_WARN = 128
_TMP_WARN = GIB


def check_affinity(around: MachineView) -> CheckResult:
    """How many cores this rank may run on."""
    quota = read_cgroup_limits(around.root).cores
    return judge_affinity(around, min(around.usable_cores, quota or around.usable_cores))


def judge_affinity(around: MachineView, usable: float) -> CheckResult:
    """One core of many is what srun gives a task by default; fewer than were requested means a binding."""
    said = f"{usable:g} of {around.machine_cores} hardware threads"
    given = around.cores_given
    loose = "; ".join(each.remedies["cores"] for each in around.schedulers if "cores" in each.remedies)
    if usable < 2 and around.machine_cores > 2:
        return bad(f"{said}: data loading and the optimizer share one", f"{loose}; with mpirun: --bind-to none")
    if given and usable < given:
        return poor(f"{said}, where the scheduler gave {given}", loose)
    return good(said)


def check_threads(around: MachineView) -> CheckResult:
    """Whether OMP_NUM_THREADS fits the cores of a rank."""
    return judge_threads(around, around.environ.get("OMP_NUM_THREADS", ""))


def judge_threads(around: MachineView, text: str) -> CheckResult:
    """If unset, every rank uses as many threads as the node has cores; Shardway's own runs set their threads."""
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


def check_shm(around: MachineView) -> CheckResult:
    """How much shared memory is free: data loader workers and NCCL pass data through it."""
    try:
        facts = os.statvfs(around.root / "dev/shm")
    except OSError as error:
        remedy = "mount /dev/shm into the container (apptainer does; podman --shm-size)"
        return bad(f"/dev/shm: {error.strerror}", remedy)
    return judge_shm(around, facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize)


def judge_shm(around: MachineView, size: int, free: int) -> CheckResult:
    """64 MiB is the default of container runtimes, and NCCL alone needs more."""
    said = f"/dev/shm has {free / GIB:.1f} of {size / GIB:.1f} GiB free"
    if free <= _SHM_FAIL:
        if size > _SHM_FAIL:
            return bad(said, "remove what an earlier job left there: ls -l /dev/shm")
        return bad(said, "start the container with more: --shm-size=16g, or mount the node's own: -v /dev/shm:/dev/shm")
    if free < (_SHM_WARN_ALONE if around.scheduler.this_machine else _SHM_WARN):
        return poor(said, "use fewer loader workers, or start the container with --shm-size=16g")
    return good(said)


def check_memlock(around: MachineView) -> CheckResult:
    """Whether memory may be locked, as InfiniBand does with its buffers."""
    return judge_memlock(around, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def judge_memlock(around: MachineView, limit: int) -> CheckResult:
    """Relevant only with InfiniBand."""
    if limit == resource.RLIM_INFINITY:
        return good("unlimited")
    said = f"ulimit -l is {limit // 1024} KiB"
    if not around.fast_ports:
        return good(f"{said}, and there is no InfiniBand")
    remedy = f"{around.describe_remedy('memlock')}; podman: --ulimit memlock=-1; else ask the site"
    return bad(f"{said}, and InfiniBand needs it unlimited", remedy)


def check_files(around: MachineView) -> CheckResult:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_files(soft, hard)


def judge_files(soft: int, hard: int) -> CheckResult:
    """Workers of a data loader pass tensors as open files."""
    said = "unlimited" if soft == resource.RLIM_INFINITY else f"ulimit -n is {soft}"
    if soft == resource.RLIM_INFINITY or soft >= _FILES_WARN:
        return good(said)
    allowed = hard == resource.RLIM_INFINITY or hard >= _FILES_WARN
    return poor(said, f"ulimit -n {'65536' if hard < 0 else hard}" if allowed else f"ask the site for more than {hard}")


def check_tasks(around: MachineView) -> CheckResult:
    """How many processes and threads may still be started here."""
    return judge_tasks(around, read_task_limit(around.root))


def judge_tasks(around: MachineView, limit: TaskLimit | None) -> CheckResult:
    """A rank has a few dozen threads, including those of its loader processes and of CUDA."""
    if limit is None:
        return good("no limit on processes and threads")
    if limit.left < _TASKS_WARN * around.local_world:
        return poor(str(limit), f"{limit.remedy}, or use fewer loader processes (data.workers)")
    return good(str(limit))


def check_core(around: MachineView) -> CheckResult:
    """Whether a crash writes core dumps to the shared file system."""
    folder = str(Path.cwd())
    mount = find_mount(folder, around.mounts)
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    if limit == 0:
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


def check_memory(around: MachineView) -> CheckResult:
    """Whether a job with a whole node has all of its memory."""
    limit, expected = read_cgroup_limits(around.root).memory_bytes, around.site.node.memory
    if limit is None or limit > 2**60:
        return unknown("no limit on the memory of this job")
    if expected and around.site.request.whole_nodes and limit < 0.9 * expected:
        said = f"{limit / GIB:.0f} GiB, where a node has {expected / GIB:.0f} GiB"
        return poor(said, f"ask for all memory of the node ({around.describe_remedy('all_memory')})")
    return good(f"{limit / GIB:.0f} GiB")
