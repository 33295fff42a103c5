"""The folder of many runs that were submitted together, and its record.

    runs/my/sweep.json          what was asked for: the run file, the axes, the members with their values
    runs/my/000 001 ...         a run directory each
    runs/my/arrays/0001/        an array of jobs: its script, and what its tasks print before their jobs do

Invariants:
- `sweep.json` is written whole, and a member that is in it keeps its name and its values.
- The folder is no run directory: no verb takes it for one.
"""

from __future__ import annotations

from pathlib import Path

from shardway.rundir.file_io import PathBelow


class ArrayDir:
    """The folder of one array of jobs; `number` counts those of a sweep from 1."""

    def __init__(self, path: Path) -> None:
        self.path = path

    script = PathBelow("array.sh")
    log_folder = PathBelow("log")

    @property
    def number(self) -> int:
        return int(self.path.name)


class SweepDir:
    """The folder of a sweep; the object touches the disk only when a method is called."""

    def __init__(self, path: Path) -> None:
        self.path = path

    record_path = PathBelow("sweep.json")
    run_file = PathBelow("run.toml")  # the base of all members, as it was read
    arrays_folder = PathBelow("arrays")

    def array(self, number: int) -> ArrayDir:
        """The folder of one array."""
        return ArrayDir(self.arrays_folder / f"{number:04d}")

    def member(self, name: str) -> Path:
        """The run directory of a member."""
        return self.path / name
