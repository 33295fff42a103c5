"""How much may still be written into a folder: bytes and files of its file system, and the quotas of the user there.

Invariants:
- Nothing is written, and the folder need not exist: its next parent that does is looked at.
- A quota that no command here reports is unknown, never unlimited: `Room.quotas` is then empty, and callers say so.

Sources: statvfs(3); quota(1) of quota-tools 4 (-w one line a file system, -p grace times as numbers); lfs-quota(1)
(-q without the heading).
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.hardware.command import run_commands
from shardway.hardware.mounts import MountedFileSystem, find_mount, read_mounts
from shardway.units import format_bytes

_LIMIT_S = 5.0
"""How long commands that report quotas may take in all: a server may be away."""

FILES_OF_A_FILE = 2
"""Inodes of a file in the cache: its blob, and the link in the snapshot."""


@dataclass(frozen=True)
class QuotaLimit:
    """A quota as a command reported it; None is no limit. `subject`: "user" or "group"."""

    subject: str
    command: str
    used_bytes: int
    limit_bytes: int | None
    used_files: int
    limit_files: int | None

    def __str__(self) -> str:
        size = format_bytes(self.limit_bytes) if self.limit_bytes else "no limit"
        files = f"{self.limit_files:,}" if self.limit_files else "no limit"
        used = f"{render_amount(self.used_bytes)} of {size}, {self.used_files:,} files of {files}"
        return f"quota of the {self.subject} (`{self.command}`): {used}"

    @property
    def free_bytes(self) -> int | None:
        return None if not self.limit_bytes else max(0, self.limit_bytes - self.used_bytes)

    @property
    def free_files(self) -> int | None:
        return None if not self.limit_files else max(0, self.limit_files - self.used_files)


@dataclass(frozen=True)
class Room:
    """What is free where a folder is, or will be. `free_files` None: the file system has no fixed number of inodes."""

    folder: Path
    kind: str
    free_bytes: int
    free_files: int | None
    quotas: tuple[QuotaLimit, ...] = ()

    def list_lacks(self, need_bytes: int, need_files: int) -> list[str]:
        """Sentences about each limit that so many bytes and inodes exceed."""
        limits: list[tuple[str, int | None, int | None]] = [("the file system", self.free_bytes, self.free_files)]
        limits += [(f"the quota of the {each.subject}", each.free_bytes, each.free_files) for each in self.quotas]
        found = []
        for name, size, files in limits:
            if size is not None and size < need_bytes:
                needed = render_amount(need_bytes)
                found.append(f"{name} at {self.folder} has {render_amount(size)} left, and {needed} are needed")
            if files is not None and files < need_files:
                found.append(f"{name} at {self.folder} takes {files:,} more files, and {need_files:,} are needed")
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "folder": str(self.folder),
            "file_system": self.kind,
            "free_bytes": self.free_bytes,
            "free_files": self.free_files,
            "quotas": [vars(each) for each in self.quotas],
        }


def find_room(folder: Path) -> Room:
    """What is free for a folder. Raises OSError where its file system cannot be looked at."""
    there = next(each for each in (folder, *folder.parents) if os.path.isdir(each))
    facts = os.statvfs(there)
    mount = find_mount(os.path.realpath(there), read_mounts())
    return Room(
        folder=folder,
        kind=mount.kind if mount else "unknown",
        free_bytes=facts.f_bavail * facts.f_frsize,
        free_files=facts.f_favail if facts.f_files else None,
        quotas=tuple(_ask_quotas(there, mount)),
    )


def _ask_quotas(folder: Path, mount: MountedFileSystem | None) -> Iterator[QuotaLimit]:
    if mount is None or mount.kind in ("tmpfs", "ramfs", "overlay"):
        return
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    asked: dict[str, tuple[str, ...]]
    if mount.kind == "lustre":
        asked = {
            "user": ("lfs", "quota", "-q", "-u", user, str(folder)),
            "group": ("lfs", "quota", "-q", "-g", str(folder.stat().st_gid), str(folder)),
        }
    else:
        asked = {"user": ("quota", "-w", "-p", "-u"), "group": ("quota", "-w", "-p", "-g")}
    for (subject, words), answer in zip(asked.items(), run_commands(list(asked.values()), _LIMIT_S), strict=True):
        # quota(1) ends with 1 where a limit is exceeded, and prints it all the same
        if not answer.hung and not answer.missing:
            names = {mount.source, str(mount.place)} if words[0] == "quota" else None
            yield from parse_quotas(answer.out, subject, " ".join(words[:2]) if words[0] == "lfs" else "quota", names)


def parse_quotas(text: str, subject: str, command: str, names: set[str] | None = None) -> list[QuotaLimit]:
    """Limits in the output of `quota -w -p` or `lfs quota -q`: a file system, then kB used, soft, hard and grace, then
    files used, soft, hard and grace. `names`: only of these file systems. The hard limit counts, or else the soft one;
    rows without any limit, and lines of another form, are passed over."""
    found, words = [], list[str]()
    for line in text.splitlines():
        words += line.split()  # lfs puts a long name on a line of its own
        if len(words) == 1 and words[0].startswith("/"):
            continue
        row, words = words, []
        if len(row) < 9:
            continue
        name, numbers = row[0], [word.strip("*[]") for word in row[1:9]]
        amounts = [int(word) if word.isdecimal() else None for word in numbers]
        used, soft, hard, _, files, soft_files, hard_files, _ = amounts
        if used is None or files is None or (names is not None and name not in names):
            continue
        size, most = hard or soft or 0, hard_files or soft_files or None
        if size or most:
            found.append(QuotaLimit(subject, command, used * 1024, size * 1024 or None, files, most))
    return found


def render_amount(count: int) -> str:
    """Bytes for people, with three figures: 1500000 -> "1.43MiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count}B"
