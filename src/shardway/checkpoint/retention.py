"""Which checkpoints stay, and the removal of the others.

Invariant: an older checkpoint goes only once a newer one was read back and is what was in memory when it was saved; the
last that is whole never goes. Nothing is removed that Shardway did not make. This module must not write checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from shardway.checkpoint.manifest import Damaged
from shardway.checkpoint.verify import verify_checkpoint
from shardway.errors import JobError
from shardway.ranks.start import Ranks
from shardway.rundir.atomic import remove_folder
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the `newest` (at least 1), for ever those whose step is a multiple of `every`, and as
    many as `best` of those with the best validation."""

    newest: int
    every: int | None = None
    best: int = 0

    def find_best(self, steps: Sequence[int], ranking: Sequence[int]) -> list[int]:
        """Of some steps, those that are kept for their validation; `ranking` has all validated ones, the best first."""
        there = frozenset(steps)
        return [step for step in ranking if step in there][: self.best]

    def find_doomed(self, steps: Sequence[int], ranking: Sequence[int] = ()) -> list[int]:
        """Of the steps that are saved, oldest first, those that may go."""
        best = self.find_best(steps, ranking)
        return [s for s in steps[: -self.newest] if (self.every is None or s % self.every) and s not in best]


def retire(directory: RunDir, ranks: Ranks, keep: RetentionPolicy, newest: int, ranking: Sequence[int] = ()) -> None:
    """Remove what no rule keeps, after the checkpoint of step `newest` was read back; on all ranks together.

    Raises JobError on every rank where it is not what was saved, or another run has taken over: nothing goes then.
    """
    doomed = ranks.ask_first(lambda: keep.find_doomed(directory.checkpoint_steps(), ranking))
    if not doomed:
        return
    ranks.together(lambda: _read_back(directory, ranks, newest))
    ranks.together(lambda: _remove_all(directory, doomed) if ranks.is_first else None)


def remove_leftovers(directory: RunDir) -> None:
    """Remove what saves that were cut off have left; called on rank 0 while it holds the writer's lock."""
    for partial in directory.partial_checkpoints():
        remove_folder(partial)


def _read_back(directory: RunDir, ranks: Ranks, step: int) -> None:
    """Each rank reads files of the next node, where there is one: a node's own cache would show what it believes."""
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
    # Renamed first, so that one that is half deleted is never taken for a checkpoint.
    doomed = directory.partial_checkpoint_path(step)
    remove_folder(doomed)
    with contextlib.suppress(OSError):  # one that cannot be removed now is tried again after the next save
        directory.checkpoint_path(step).rename(doomed)
    remove_folder(doomed)
