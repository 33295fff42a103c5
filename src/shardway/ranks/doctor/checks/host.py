"""Checks of a node itself: cores of a rank, threads, shared memory, limits of shell and container, TMPDIR.

Invariant: what is read is a limit or a size; nothing is used up. Verdicts are functions of numbers (`judge_*`).

Sources: sched_setaffinity(2), getrlimit(2), tmpfs(5); srun(1) on SRUN_CPUS_PER_TASK (since Slurm 22.05 srun does not
read SLURM_CPUS_PER_TASK); NCCL's troubleshooting page on shared memory.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from shardway.hardware.cgroup import read_cgroup_limits
from shardway.hardware.limits import TaskLimit, read_task_limit
from shardway.hardware.mounts import IN_MEMORY, find_mount
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView

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
    """One core of many is what srun gives a task that asks for nothing; fewer than were asked for is a binding."""
    said = f"{usable:g} of {around.machine_cores} hardware threads"
    given = around.cores_given
    loose = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the job script, or srun --cpu-bind=none"
    if usable < 2 and around.machine_cores > 2:
        return bad(f"{said}: data loading and the optimizer share one", f"{loose}; with mpirun: --bind-to none")
    if given and usable < given:
        return poor(f"{said}, where the scheduler gave {given}", loose)
    return good(said)


def check_threads(around: MachineView) -> CheckResult:
    """Whether OMP_NUM_THREADS fits the cores of a rank."""
    return judge_threads(around, around.environ.get("OMP_NUM_THREADS", ""))


def judge_threads(around: MachineView, text: str) -> CheckResult:
    """Unset is the number of all cores in every rank of a node; Shardway's own runs set their threads themselves."""
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
    """How much shared memory is free: loaders' workers and NCCL pass data through it."""
    try:
        facts = os.statvfs(around.root / "dev/shm")
    except OSError as error:
        remedy = "mount /dev/shm into the container (apptainer does; podman --shm-size)"
        return bad(f"/dev/shm: {error.strerror}", remedy)
    return judge_shm(around, facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize)


def judge_shm(around: MachineView, size: int, free: int) -> CheckResult:
    """64 MiB is what container runtimes give by default, and NCCL alone needs more."""
    said = f"/dev/shm has {free / GIB:.1f} of {size / GIB:.1f} GiB free"
    if free <= _SHM_FAIL:
        if size > _SHM_FAIL:
            return bad(said, "remove what an earlier job left there: ls -l /dev/shm")
        return bad(said, "start the container with more: --shm-size=16g, or mount the node's own: -v /dev/shm:/dev/shm")
    if free < (_SHM_WARN_ALONE if around.site.scheduler == "local" else _SHM_WARN):
        return poor(said, "use fewer loader workers, or start the container with --shm-size=16g")
    return good(said)


def check_memlock(around: MachineView) -> CheckResult:
    """Whether memory may be locked: InfiniBand registers what it sends."""
    return judge_memlock(around, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def judge_memlock(around: MachineView, limit: int) -> CheckResult:
    """Matters where there is InfiniBand."""
    if limit == resource.RLIM_INFINITY:
        return good("unlimited")
    said = f"ulimit -l is {limit // 1024} KiB"
    if not around.fast_ports:
        return good(f"{said}, and there is no InfiniBand")
    remedy = (
        "Slurm: start from a shell with `ulimit -l unlimited`, or srun --propagate=NONE; podman: --ulimit memlock=-1; "
        "else ask the site"
    )
    return bad(f"{said}, and InfiniBand needs it unlimited", remedy)


def check_files(around: MachineView) -> CheckResult:
    """How many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_files(soft, hard)


def judge_files(soft: int, hard: int) -> CheckResult:
    """Workers of a loader pass tensors as open files."""
    said = "unlimited" if soft == resource.RLIM_INFINITY else f"ulimit -n is {soft}"
    if soft == resource.RLIM_INFINITY or soft >= _FILES_WARN:
        return good(said)
    allowed = hard == resource.RLIM_INFINITY or hard >= _FILES_WARN
    return poor(said, f"ulimit -n {'65536' if hard < 0 else hard}" if allowed else f"ask the site for more than {hard}")


def check_tasks(around: MachineView) -> CheckResult:
    """How many processes and threads may still be started here."""
    return judge_tasks(around, read_task_limit(around.root))


def judge_tasks(around: MachineView, limit: TaskLimit | None) -> CheckResult:
    """A rank has a few dozen threads with its loader processes and those of CUDA."""
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
    """Whether the folder for temporary files is there, can be written and has space."""
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
    if mount is not None and mount.kind in IN_MEMORY and around.site.scheduler != "local":
        return good(f"{said}: it counts as memory of the job")
    return good(said)


def check_memory(around: MachineView) -> CheckResult:
    """Whether the job has the memory of a whole node, where it has the whole node."""
    limit, expected = read_cgroup_limits(around.root).memory_bytes, around.site.node.memory
    if limit is None or limit > 2**60:
        return unknown("no limit on the memory of this job")
    if expected and around.site.request.whole_nodes and limit < 0.9 * expected:
        said = f"{limit / GIB:.0f} GiB, where a node has {expected / GIB:.0f} GiB"
        return poor(said, "ask for all memory of the node (Slurm: --mem=0; PBS: mem= in select)")
    return good(f"{limit / GIB:.0f} GiB")
