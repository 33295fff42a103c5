"""The folder that is submitted, as the job will see it: a snapshot, the folder itself, or nothing of it.

Invariant: a path is called missing only where the job will not find it in the folder in which it runs. This module
must not ask the host.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from shardway.launch.snapshot import SnapshotPlan


@dataclass(frozen=True)
class Code:
    """`here`: the folder as it is now. `snapshot`: what is copied of it; None where the job runs in `here` itself, or,
    if not `is_there`, on a host that has nothing of it."""

    here: Path
    snapshot: SnapshotPlan | None = None
    is_there: bool = True

    def why_missing(self, path: str) -> str:
        """Why the job will not find a relative path in its folder; "" where it will, or nobody can know."""
        if not self.is_there:
            return ""
        if not (self.here / path).exists():
            return f"there is no file {path} in {self.here}"
        return self.why_lost(path)

    def why_lost(self, path: str) -> str:
        """Why a relative path does not lead in the job where it leads here; "" where it does, or nobody can know."""
        if not self.is_there or self.snapshot is None:
            return ""
        name = posixpath.normpath(posixpath.join(self.snapshot.below, path))
        if name == ".." or name.startswith("../"):
            return f"{path} leads out of {self.snapshot.root}, and the job runs in a copy of that folder"
        gone = next((e for e in self.snapshot.left_out if name == e.path or name.startswith(f"{e.path}/")), None)
        return f"{path} is not in the snapshot that the job runs in ({gone.reason})" if gone else ""

    def holds_module(self, name: str) -> bool:
        """Whether `import name` finds it in the folder itself."""
        return self.is_there and any((self.here / found).exists() for found in (name, f"{name}.py"))
