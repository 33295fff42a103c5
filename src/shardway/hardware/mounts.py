"""On which file system a path lies, as the kernel lists its mounts.

Invariant: a path is found by its text, without touching the file system, so that a hung one cannot hold us. This
module must not raise.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SHARED = frozenset(
    ("lustre", "gpfs", "beegfs", "nfs", "nfs4", "ceph", "wekafs", "panfs", "pvfs2", "afs", "cifs", "fuse.glusterfs")
)
"""File systems that many machines share."""

IN_MEMORY = frozenset(("tmpfs", "ramfs"))


@dataclass(frozen=True)
class MountedFileSystem:
    """A mounted file system: where, of which kind, and its source ("/dev/sda1", "10.0.0.1@o2ib:/scratch")."""

    place: PurePosixPath
    kind: str
    source: str

    @property
    def shared(self) -> bool:
        return self.kind in SHARED


def read_mounts(root: Path = Path("/")) -> tuple[MountedFileSystem, ...]:
    """Everything that is mounted for this process; empty where the kernel does not say."""
    try:
        return parse_mounts((root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def parse_mounts(text: str) -> tuple[MountedFileSystem, ...]:
    """Mounts from mountinfo: "36 35 98:0 / /mnt rw master:1 - ext3 /dev/root rw"; other lines are passed over. Blanks
    are written as octal: "/a\\040b"."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if separator and len(fields) > 4 and len(kinds) > 1:
            place, source = (
                re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word) for word in (fields[4], kinds[1])
            )
            found.append(MountedFileSystem(PurePosixPath(place), kinds[0], source))
    return tuple(found)


def find_mount(path: str, mounts: tuple[MountedFileSystem, ...]) -> MountedFileSystem | None:
    """The mount that holds an absolute path: the deepest, and of several on one place the last."""
    sought = PurePosixPath(path)
    holding = [mount for mount in mounts if sought.is_relative_to(mount.place)]
    return max(reversed(holding), key=lambda mount: len(mount.place.parts), default=None)
