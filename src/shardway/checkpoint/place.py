"""Where checkpoints are written: one folder of all ranks in the run directory, or a folder a node on its own disk.

Invariant: in each folder one rank leads, which makes, names and removes what stands there. Whoever writes, the right to
write is that of the run directory. This module must not write.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardway.errors import JobError, ShardwayError
from shardway.ranks.start import Ranks
from shardway.refusals import find_remedy
from shardway.rundir.directory import RunDir
from shardway.rundir.lineage import LOCAL, SHARED
from shardway.rundir.local import LocalRun
from shardway.rundir.steps import list_steps, partial_name, step_name

_ROOM = "make room, lower checkpoint.keep"


@dataclass(frozen=True)
class Local:
    """This rank's node: its number, which part of all ranks it has, and the name of the start that saves there."""

    files: LocalRun
    node: int
    share: float
    start: str


@dataclass(frozen=True)
class CheckpointFolder:
    """Where this rank writes checkpoints of a run; `local` where that is the disk of its node."""

    run: RunDir
    leads: bool
    local: Local | None = None

    @property
    def tier(self) -> str:
        """Which of the two it is."""
        return SHARED if self.local is None else LOCAL

    @property
    def share(self) -> float:
        """Which part of the bytes of all ranks comes into this folder."""
        return 1.0 if self.local is None else self.local.share

    @property
    def folder(self) -> Path:
        """The folder that the folders of checkpoints are in."""
        return self.run.checkpoints if self.local is None else self.local.files.node(self.local.node)

    def make(self) -> Path:
        """The folder; that on a disk is made where it is missing. Raises OSError, JobError."""
        return self.folder if self.local is None else self.local.files.make(self.local.node)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step stands once it is complete."""
        return self.folder / step_name(step)

    def partial_path(self, step: int) -> Path:
        """Where it is written before; each start of the run has a place of its own."""
        if self.local is None:
            return self.run.partial_checkpoint_path(step)
        return self.folder / partial_name(step, f"start-{self.local.start}")

    def explain(self, error: ShardwayError, step: int) -> str:
        """What somebody is told whose save has failed."""
        if self.local is not None:
            return (
                f"the checkpoint of step {step} could not be saved on the disk of a node ({self.folder}): {error}\n"
                f"  Nothing that was saved before has changed. To do: "
                f"{find_remedy(str(error), 'name another checkpoint.local_dir', 'make room there')}."
            )
        return (
            f"the checkpoint of step {step} could not be saved in {self.folder}: {error}\n"
            f"  Nothing that was saved before has changed; {self._name_last()}.\n"
            f"  To do: {find_remedy(str(error), 'choose another disk with --dir', _ROOM)}; then run the same command "
            "again."
        )

    def _name_last(self) -> str:
        try:
            steps = list_steps(self.folder)
        except JobError:
            return "which checkpoint is the last cannot be seen now"
        return f"step {steps[-1]} is the last complete checkpoint" if steps else "there is no earlier checkpoint"


def shared_place(run: RunDir, ranks: Ranks) -> CheckpointFolder:
    """The run directory, in which rank 0 leads."""
    return CheckpointFolder(run, ranks.is_first)
