"""The folders that checkpoints are written to, and the retention policy that prunes them.

Invariants:
- One rank leads each folder: it alone creates, renames and removes what is in it. The right to write is that of the run
  directory.
- An older checkpoint is removed only after a newer one was read back and equals what was in memory when it was saved.
  The last complete checkpoint is never removed, nor is anything that Shardway did not make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardway.checkpoint.catalog import verify_checkpoint
from shardway.checkpoint.file_format import Damaged
from shardway.errors import JobError, ShardwayError
from shardway.ranks.start import Ranks
from shardway.refusals import find_remedy
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import remove_folder
from shardway.rundir.lineage import LOCAL, SHARED
from shardway.rundir.names import LocalRun, list_steps, partial_name, step_name

# --- folders of all ranks or of one node

_ROOM = "make room, lower checkpoint.keep"


@dataclass(frozen=True)
class Local:
    """This rank's node: its number, its share of all ranks, and the name of the start that saves there."""

    files: LocalRun
    node: int
    share: float
    start: str


@dataclass(frozen=True)
class CheckpointFolder:
    """Where this rank writes checkpoints of a run; `local` is set for the disk of its node."""

    run: RunDir
    leads: bool
    local: Local | None = None

    @property
    def tier(self) -> str:
        """The tier: shared or local."""
        return SHARED if self.local is None else LOCAL

    @property
    def share(self) -> float:
        """The part of the bytes of all ranks that goes into this folder."""
        return 1.0 if self.local is None else self.local.share

    @property
    def folder(self) -> Path:
        """The folder that holds the folders of checkpoints."""
        return self.run.checkpoints if self.local is None else self.local.files.node(self.local.node)

    def make(self) -> Path:
        """The folder; a local one is made if it is missing. Raises OSError, JobError."""
        return self.folder if self.local is None else self.local.files.make(self.local.node)

    def path(self, step: int) -> Path:
        """The folder of a complete checkpoint of a step."""
        return self.folder / step_name(step)

    def partial_path(self, step: int) -> Path:
        """The folder in which a checkpoint is written; each start of the run has its own on a local disk."""
        if self.local is None:
            return self.run.partial_checkpoint_path(step)
        return self.folder / partial_name(step, f"start-{self.local.start}")

    def explain(self, error: ShardwayError, step: int) -> str:
        """The message for a save that failed."""
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
    """The run directory, which rank 0 leads."""
    return CheckpointFolder(run, ranks.is_first)


# --- the retention policy


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the `newest` (at least 1), those whose step is a multiple of `every`, and the `best` ones
    by validation."""

    newest: int
    every: int | None = None
    best: int = 0

    def find_best(self, steps: Sequence[int], ranking: Sequence[int]) -> list[int]:
        """Of some steps, those kept for their validation; `ranking` has all validated ones, the best first."""
        there = frozenset(steps)
        return [step for step in ranking if step in there][: self.best]

    def find_doomed(self, steps: Sequence[int], ranking: Sequence[int] = ()) -> list[int]:
        """Of the saved steps, oldest first, those that may be removed."""
        best = self.find_best(steps, ranking)
        return [s for s in steps[: -self.newest] if (self.every is None or s % self.every) and s not in best]


def retire(directory: RunDir, ranks: Ranks, keep: RetentionPolicy, newest: int, ranking: Sequence[int] = ()) -> None:
    """Remove what no rule keeps, after the checkpoint of step `newest` was read back; on all ranks together.

    Raises JobError on every rank if it is not what was saved, or if another run has taken over; then nothing is
    removed.
    """
    doomed = ranks.ask_first(lambda: keep.find_doomed(directory.checkpoint_steps(), ranking))
    if not doomed:
        return
    ranks.together(lambda: _read_back(directory, ranks, newest))
    ranks.together(lambda: _remove_all(directory, doomed) if ranks.is_first else None)


def remove_leftovers(directory: RunDir) -> None:
    """Remove what interrupted saves have left; called on rank 0 while it holds the writer's lock."""
    for partial in directory.partial_checkpoints():
        remove_folder(partial)


def _read_back(directory: RunDir, ranks: Ranks, step: int) -> None:
    """Each rank reads files of the next node if there is one: the cache of its own node would hide errors of the
    disk."""
    share = (ranks.rank + ranks.placement.local_world) % ranks.world
    try:
        verify_checkpoint(directory, step, share, ranks.world)
    except Damaged as damage:
        raise JobError(f"{damage}\n  It was read back after it was saved. Older checkpoints were kept.") from None


def _remove_all(directory: RunDir, steps: Sequence[int]) -> None:
    directory.confirm_writer()
    for step in steps:
        _remove(directory, step)


def _remove(directory: RunDir, step: int) -> None:
    # Renamed first, so that a half-deleted folder is never taken for a checkpoint.
    doomed = directory.partial_checkpoint_path(step)
    remove_folder(doomed)
    with contextlib.suppress(OSError):  # tried again after the next save
        directory.checkpoint_path(step).rename(doomed)
    remove_folder(doomed)
