"""What a job's control group leaves to this process of a Linux machine: cores, memory, processes; how often memory ran
out.

Invariant: a limit is the tightest one on the way from the process's group to the root, in version 1 and in
version 2 of the interface (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); an
absent or unreadable file is no limit. This module must not raise, nor read anything but files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CgroupLimits:
    """What a control group allows; None is no limit. Version 1 writes a huge number for "no memory limit"."""

    cores: float | None
    memory_bytes: int | None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits of this process; `root` stands for "/", so that a test can lay out its own files."""
    folders = list(_group_folders(root))
    cores = [limit for folder in folders if (limit := _cores(folder)) is not None]
    memory = [limit for folder in folders if (limit := _memory_bytes(folder)) is not None]
    return CgroupLimits(min(cores, default=None), min(memory, default=None))


def read_cgroup_memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process's groups still leave, cached files that may be dropped among them; None: no limit.

    The usage of a group is memory.current (version 1: memory.usage_in_bytes), and inactive_file of its memory.stat is
    what the kernel drops first (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    folders = [(folder, limit) for folder in _group_folders(root) if (limit := _memory_bytes(folder)) is not None]
    return min((max(0, limit - _memory_held_bytes(folder)) for folder, limit in folders), default=None)


def read_cgroup_tasks(root: Path = Path("/")) -> tuple[int, int] | None:
    """How many processes and threads the tightest of this process's groups allows, and has; None: no limit.

    pids.max and pids.current are the same in both versions; the limit leaves the difference.
    """
    pairs = [(_read(folder / "pids.max"), _read(folder / "pids.current")) for folder in _group_folders(root)]
    found = [(int(limit), int(taken)) for limit, taken in pairs if limit.isdecimal() and taken.isdecimal()]
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this process's own group the kernel has ended since memory ran out; None: nobody says.

    The line oom_kill of memory.events.local (older kernels of version 2: memory.events; version 1: memory.oom_control),
    which counts the victims that were in the group (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    names = ("memory.events.local", "memory.events", "memory.oom_control")
    lines = (line for folder in _group_folders(root) for name in names for line in _read(folder / name).splitlines())
    counts = (words[1] for words in map(str.split, lines) if words[:1] == ["oom_kill"] and len(words) == 2)
    return next((int(count) for count in counts if count.isdecimal()), None)


def _group_folders(root: Path) -> Iterator[Path]:
    """Each folder that may hold a limit, from the process's own group up to the root of each hierarchy.

    /proc/self/cgroup has lines "0::/path" for version 2 and "4:memory:/path" for version 1. In a container
    the path may not exist below the mount, whose root is then the process's group.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = Path(path.strip().lstrip("/"))
        for controller in controllers.split(",") if controllers else ["", "unified"]:
            yield from (mount / controller / part for part in (group, *group.parents))


def _cores(folder: Path) -> float | None:
    """Cores from "cpu.max" (quota and period, or "max"), or from version 1's two files (-1 is no limit)."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    quota = quota or _read(folder / "cpu.cfs_quota_us")
    period = period or _read(folder / "cpu.cfs_period_us")
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _memory_bytes(folder: Path) -> int | None:
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return int(limit) if limit.isdecimal() else None


def _memory_held_bytes(folder: Path) -> int:
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    droppable = sum(int(words[1]) for words in lines if words[:1] == ["inactive_file"] and words[1:2])
    return max(0, int(used) - droppable) if used.isdecimal() else 0


def _read(path: Path) -> str:
    """The stripped text of a file, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a group name that is no file name
        return ""
