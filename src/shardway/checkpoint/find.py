"""Which checkpoints a person means: those of a run, or one by its own folder, wherever that was copied to.

Invariant: a folder is taken for a checkpoint by its name or by its manifest, never by guessing. This module must not
import torch nor judge what is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardway.checkpoint.manifest import NAME
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.rundir.run_id import find_run_id
from shardway.rundir.steps import step_of_checkpoint


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's folder and the step that its name says; None where somebody gave it another name.

    `run`: the id of the run in whose directory it was found; empty where that has none, or it was named by itself.
    """

    folder: Path
    step: int | None
    run: str = ""


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that is newer than the one that was loaded, and why it was not."""

    step: int
    reason: str


def find_checkpoints(path: Path) -> list[FoundCheckpoint]:
    """All checkpoints of a run directory, the newest first, or the one whose folder this is. Raises UserError where
    there is none."""
    run = RunDir(path)
    found = [find_in_run(run, step) for step in reversed(run.checkpoint_steps())]
    step = step_of_checkpoint(path)
    if not found and path.is_dir() and (step is not None or (path / NAME).exists()):
        found = [FoundCheckpoint(path, step)]
    if not found:
        raise UserError(
            f"{path} holds no checkpoint.\n  To do: name a run directory that has one (`shardway status` lists runs "
            "and their steps), or the folder of a checkpoint."
        )
    return found


def find_in_run(run: RunDir, step: int) -> FoundCheckpoint:
    """The checkpoint of a step where it stands in a run directory, whether it is there or not."""
    return FoundCheckpoint(run.checkpoint_path(step), step, find_run_id(run.path))


def find_checkpoint(path: Path, step: int | None = None) -> FoundCheckpoint:
    """The checkpoint of a step, or the newest where `step` is None. Raises UserError where there is none."""
    found = find_checkpoints(path)
    chosen = next((each for each in found if step is None or each.step == step), None)
    if chosen is None:
        steps = ", ".join(str(each.step) for each in reversed(found) if each.step is not None)
        raise UserError(f"{path} holds no checkpoint of step {step}.\n      allowed: {steps or 'no --step here'}")
    return chosen
