"""Limits of this process: control group, processes and threads, open files, memory, a folder for temporary files.

Invariants:
- A limit is the tightest one from the process's control group up to the root, in version 1 and version 2 of the
  interface (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
- A file that is absent or unreadable is no limit, and reading a limit uses nothing up.
- The memory left is the smaller of the machine's and the control groups'.

Sources: getrlimit(2), setrlimit(2) on RLIMIT_NPROC and RLIMIT_NOFILE; Linux, Documentation/admin-guide/cgroup-v2.rst
(pids.max, cpu.max); pthread_create(3); Python's manual, tempfile.gettempdir.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardway.errors import SiteError
from shardway.places import folder_is_gone

# --- control groups; `root` stands for "/", so that a test can lay out its own files


@dataclass(frozen=True)
class CgroupLimits:
    """What a control group allows; None is no limit. Version 1 writes a huge number for "no memory limit"."""

    cores: float | None
    memory_bytes: int | None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits of this process."""
    cores, memory = [], []
    for folder in _group_folders(root):
        # "cpu.max" holds quota and period, or "max"; version 1 has two files, in which -1 is no limit.
        quota, _, period = read_or_empty(folder / "cpu.max").partition(" ")
        quota = quota or read_or_empty(folder / "cpu.cfs_quota_us")
        period = period or read_or_empty(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores.append(int(quota) / int(period))
        memory += _memory_limits(folder)
    return CgroupLimits(min(cores, default=None), min(memory, default=None))


def _memory_limits(folder: Path) -> list[int]:
    limit = read_or_empty(folder / "memory.max") or read_or_empty(folder / "memory.limit_in_bytes")
    return [int(limit)] if limit.isdecimal() else []


def read_memory_left(root: Path = Path("/")) -> int:
    """Bytes that this host and this process's groups still leave, cached files that may be dropped among them.

    The usage of a group is memory.current (version 1: memory.usage_in_bytes), and inactive_file of its memory.stat is
    what the kernel drops first (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    import psutil  # imported here: few callers ask for memory

    left = [int(psutil.virtual_memory().available)]
    for folder in _group_folders(root):
        for limit in _memory_limits(folder):
            used = read_or_empty(folder / "memory.current") or read_or_empty(folder / "memory.usage_in_bytes")
            lines = (line.split() for line in read_or_empty(folder / "memory.stat").splitlines())
            droppable = sum(int(words[1]) for words in lines if words[:1] == ["inactive_file"] and words[1:2])
            left.append(max(0, limit - max(0, int(used) - droppable)) if used.isdecimal() else limit)
    return min(left)


def read_cgroup_tasks(root: Path = Path("/")) -> tuple[int, int] | None:
    """How many processes and threads the tightest of this process's groups allows, and has; None: no limit. pids.max
    and pids.current are the same in both versions; the limit leaves the difference."""
    names = ("pids.max", "pids.current")
    pairs = [[read_or_empty(folder / name) for name in names] for folder in _group_folders(root)]
    found = [(int(limit), int(taken)) for limit, taken in pairs if limit.isdecimal() and taken.isdecimal()]
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this process's own group the kernel has killed for lack of memory; None: not available.

    The line oom_kill of memory.events.local (older kernels of version 2: memory.events; version 1: memory.oom_control),
    which counts the victims that were in the group (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    for folder in _group_folders(root):
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            for words in map(str.split, read_or_empty(folder / name).splitlines()):
                if words[:1] == ["oom_kill"] and len(words) == 2 and words[1].isdecimal():
                    return int(words[1])
    return None


def _group_folders(root: Path) -> Iterator[Path]:
    """Each folder that may hold a limit, from the process's own group up to the root of each hierarchy.

    /proc/self/cgroup has lines "0::/path" for version 2 and "4:memory:/path" for version 1. In a container
    the path may not exist below the mount, whose root is then the process's group.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = Path(path.strip().lstrip("/"))
        for controller in controllers.split(",") if controllers else ["", "unified"]:
            yield from (mount / controller / part for part in (group, *group.parents))


def read_or_empty(path: Path) -> str:
    """The stripped text of a file of the kernel, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a group name that is no file name
        return ""


# --- processes, files, cores, temporary files

MOST_FILES = 65536
"""More open files than this are not asked for: some programs run through all numbers that a limit allows."""
NEAR = 8
"""With so few processes or threads left, a refusal that names no reason is taken for that of their limit."""
_LAST_RESORT = "/dev/shm"
_UNBOUND = (1 << 21) | (1 << 24)
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: the kernel does not apply RLIMIT_NPROC then."""


@dataclass(frozen=True)
class TaskLimit:
    """Processes and threads (Linux counts them as one) that a limit allows, and that there are; `source` is its
    name, `remedy` how to get more."""

    limit: int
    taken: int
    source: str
    remedy: str

    @property
    def left(self) -> int:
        """How many can still be started."""
        return max(0, self.limit - self.taken)

    def __str__(self) -> str:
        return f"{self.source} allows {self.limit} processes and threads, of which {self.taken} are there"


def read_task_limit(root: Path = Path("/")) -> TaskLimit | None:
    """The limit on processes and threads that leaves least; None: there is none. `root` stands for "/" in tests."""
    found = [limit for limit in (_read_user_limit(root), _read_group_limit(root)) if limit is not None]
    return min(found, key=lambda limit: limit.left, default=None)


def _read_user_limit(root: Path) -> TaskLimit | None:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    held = _find_words(read_or_empty(root / "proc/self/status"), "CapEff:")
    if limit == resource.RLIM_INFINITY or os.getuid() == 0 or int(held, 16) & _UNBOUND:
        return None
    taken = 0  # threads of all processes of this user that this process can see
    with contextlib.suppress(OSError), os.scandir(root / "proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    if entry.stat().st_uid == os.getuid():
                        taken += int(_find_words(read_or_empty(Path(entry.path) / "status"), "Threads:"))
    return TaskLimit(limit, taken, f"ulimit -u (of the user {os.getuid()})", "raise `ulimit -u`")


def _find_words(status: str, label: str) -> str:
    lines = (line.split() for line in status.splitlines() if line.startswith(label))
    return next((words[1] for words in lines), "0")


def _read_group_limit(root: Path) -> TaskLimit | None:
    found = read_cgroup_tasks(root)
    if found is None:
        return None
    remedy = "give the job or container more (pids.max; --pids-limit, TasksMax, podPidsLimit)"
    return TaskLimit(*found, "the control group (pids.max)", remedy)


def count_threads() -> int:
    """Threads of this process; 1 where the system does not say."""
    return _count_entries("/proc/self/task") or 1


def _count_entries(folder: str) -> int:
    """Entries of a folder of the kernel; 0 where it cannot be read."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def raise_file_limit() -> None:
    """Raise the limit of open files, for this process and its children, as far as no privilege is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_file_limit() -> int | None:
    """How many files this process may have open; None: any number."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def count_open_files() -> int:
    """Files that this process has open; 0 where the system does not say."""
    return _count_entries("/proc/self/fd")


def read_files_left(process: int) -> int:
    """How many more files another process of this user may open; any number where the system does not say."""
    try:
        soft = resource.prlimit(process, resource.RLIMIT_NOFILE)[0]
    except (OSError, AttributeError):  # only Linux gives it for another process
        return sys.maxsize
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(0, soft - _count_entries(f"/proc/{process}/fd"))


def describe_few_cores(workers: int, ranks: int, root: Path = Path("/")) -> str:
    """Why `ranks` on this node with so many loader processes each take turns on the cores; "" where they need not."""
    machine = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return judge_cores(workers, ranks, machine, mask, read_cgroup_limits(root).cores)


def count_own_cores(ranks: int, root: Path = Path("/")) -> int:
    """The cores that each of `ranks` on this node has for itself and its loader processes, at least 1."""
    machine = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota = read_cgroup_limits(root).cores
    return max(1, int(min(mask / _count_sharing(ranks, machine, mask), (quota or machine) / ranks)))


def _count_sharing(ranks: int, machine: int, mask: int) -> int:
    """How many ranks share an affinity mask."""
    return 1 if mask < machine and mask <= max(1, machine // ranks) else ranks


def judge_cores(workers: int, ranks: int, machine: int, mask: int, quota: float | None) -> str:
    """As `describe_few_cores`, for a `machine` of so many cores, an affinity `mask` and a `quota` of processor time.

    A mask of no more than a rank's share of the machine is taken for the rank's own, as srun gives it. Where nothing
    limits a machine, only loader processes count: it is known how small it is.
    """
    sharing = _count_sharing(ranks, machine, mask)
    # What there is, how many cores, how many ranks share them, and processes of each that keep a core busy.
    limits = [("all that this machine has", float(machine), ranks, workers)]
    if mask < machine:
        limits.append(("what the affinity mask (taskset, --cpus-per-task) leaves", float(mask), sharing, workers + 1))
    if quota is not None:
        limits.append(("what the control group (cpu.max, --cpus) leaves", quota, ranks, workers + 1))
    missing = [limit for limit in limits if limit[2] * limit[3] > limit[1]]
    if not missing:
        return ""
    source, cores, here, busy = min(missing, key=lambda limit: limit[1])
    best = int(cores // here) - (busy - workers)
    who = "1 rank" if here == 1 else f"{here} ranks"
    return (
        f"{here * (workers + 1)} processes ({who}, data.workers = {workers}) share {cores:g} "
        f"core{'' if cores == 1 else 's'}, {source}, so batches may come late. To do: ask for more cores, or set "
        f"data.workers = {max(0, best)}."
    )


# --- a folder for temporary files, and what to say of an error


def settle_temporary() -> str:
    """Find the folder for temporary files, in memory where none of the usual ones can be written; what is wrong with
    the one that the environment names, or ""."""
    named = next(((name, os.environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), None)
    found = find_temporary()
    if found is None and os.access(_LAST_RESORT, os.W_OK | os.X_OK):
        tempfile.tempdir = found = _LAST_RESORT
    where = f"so temporary files are in {found}" if found else "and there is no other folder for temporary files"
    remedy = "To do: export TMPDIR with a folder of your own on this node's disk."
    if named is None:
        usual = found is not None and found != _LAST_RESORT and (folder_is_gone() or found != os.getcwd())
        return "" if usual else f"/tmp and /var/tmp cannot be written, {where}. {remedy}"
    name, folder = named
    if found is not None and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
        return ""  # that one, or another that was chosen before
    if not os.path.exists(folder):
        why = "which does not exist"
    else:
        why = "where nothing can be written" if os.path.isdir(folder) else "which is no folder"
    return f"{name} is {folder} (environment), {why}, {where}. {remedy}"


def ensure_temporary() -> None:
    """Raise SiteError where there is no folder for temporary files; to be called before torch is imported, whose
    compiler looks for one then."""
    said = settle_temporary()
    if find_temporary() is None:
        raise SiteError(
            f"{said.partition(' To do:')[0]}\n"
            "  Allowed: $TMPDIR, /tmp, /var/tmp, /usr/tmp, /dev/shm or the current folder, where one can be written.\n"
            "  To do: export TMPDIR with such a folder, or mount one into the container (--tmpfs /tmp)."
        )


def find_temporary() -> str | None:
    """Python's folder for temporary files; None where nothing can be written in any that it knows."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return None


def explain_limit(error: BaseException, root: Path = Path("/")) -> str:
    """The limit that an error reports as reached, with a remedy; "" if the error is about no limit."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else 0
    if number == errno.EMFILE or (isinstance(error, RuntimeError) and text.startswith("Too many open files")):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"no more files can be opened: this process has {count_open_files() or soft} open, and ulimit -n allows "
            f"{soft}.\n"
            f"  Allowed: up to {'any number' if hard < 0 else hard} without asking the site (ulimit -Hn).\n"
            "  To do: raise `ulimit -n` in the shell or job script, or lower data.workers and data.prefetch."
        )
    if number == errno.ENFILE:
        return "no more files can be opened on this node: fs.file-max is reached.\n  To do: ask the site."
    threads = isinstance(error, RuntimeError) and "can't start new thread" in text
    unnamed = isinstance(error, RuntimeError) and text.endswith("Resource temporarily unavailable")
    if isinstance(error, OSError):  # with a file name: the file is locked
        unnamed = number == errno.EAGAIN and error.filename is None
    if not (threads or unnamed):
        return ""
    limit = read_task_limit(root)
    if not threads and (limit is None or limit.left >= NEAR):
        return ""
    known = f"{limit}" if limit is not None else "ulimit -u, pids.max of a control group or kernel.threads-max"
    remedy = limit.remedy if limit is not None else "look at these, and raise what is low"
    return (
        f"no more processes or threads can be started: {known}.\n"
        f"  To do: {remedy}, or need fewer: run.threads, data.workers, ranks on this node, other programs of yours."
    )
