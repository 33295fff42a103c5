"""Where a command of a person is rehearsed: in a copy of its folder, as in a job, so that its own outputs are let be.

Invariant: each run gets one copy, which its attempts share. This module must not write outside of the run directories.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardway.launch.snapshot.take import take_snapshot
from shardway.launch.snapshot.values import SnapshotPlan
from shardway.rundir.directory import RunDir


def work_in_copies(plan: SnapshotPlan) -> Callable[[Path], Path]:
    """For a run directory, the folder in which its attempts work: made of this snapshot the first time."""

    def place(path: Path) -> Path:
        run = RunDir(path)
        if not run.work.exists():
            taken = path.with_name(f"{path.name}-code") / "code"  # beside it: a snapshot's record is no part of a run
            take_snapshot(plan, taken)
            run.path.mkdir(parents=True, exist_ok=True)
            taken.rename(run.work)
        folder = plan.start_folder(run.work)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    return place
