"""Reads the newest checkpoint that is whole: every byte of it was compared with its manifest.

Invariant: either the whole state of one checkpoint is installed on every rank or nothing is, with an error that names
the files. It must not change anything on disk.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardway.checkpoint.manifest import Damaged, Manifest
from shardway.checkpoint.state import State, random_state, set_random_state
from shardway.checkpoint.verify import manifest_of_step, verify_checkpoint
from shardway.errors import JobError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class PassedOver:
    """A damaged checkpoint that is newer than the one that was loaded."""

    step: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """What was restored: the checkpoint's name, its counters, and whether the random state came with it.

    `passed_over`: newer ones that are damaged, the newest first.
    """

    name: str
    step: int
    world: int
    numbers: Mapping[str, Any]
    random_restored: bool
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True)
class _Whole:
    folder: Path
    manifest: Manifest
    passed_over: tuple[PassedOver, ...]


def peek_latest(directory: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint that has one, or None where there is no checkpoint.

    Cheap, so that a run that cannot go on is told before its model is built. Raises JobError where no manifest can be
    read, UserError for a newer format.
    """
    passed_over = []
    for step in reversed(directory.checkpoint_steps()):
        try:
            return manifest_of_step(directory, step)
        except Damaged as damage:
            passed_over.append(PassedOver(step, "; ".join(damage.reasons)))
    if passed_over:
        raise JobError(_nothing_whole(directory, passed_over))
    return None


def load_latest(directory: RunDir, ranks: Ranks, state: State) -> Loaded | None:
    """Restore the newest whole checkpoint on all ranks together; None where there is no checkpoint.

    Raises JobError where there are checkpoints and none is whole, or where it does not fit the state.
    """
    steps = ranks.gather(directory.checkpoint_steps() if ranks.is_first else [])[0]
    if not steps:
        return None
    whole = _find_whole(directory, ranks, steps)
    folder, manifest = whole.folder, whole.manifest
    same_world = manifest.world == ranks.world
    tensors = state.collect()
    if same_world:
        tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    ranks.together(lambda: _read(tensors, folder, ranks))
    ranks.together(lambda: state.read_files(folder, manifest.world))
    state.install(tensors)
    if same_world:
        set_random_state(tensors["random"][f"rank-{ranks.rank}"])
    return Loaded(folder.name, manifest.step, manifest.world, manifest.numbers, same_world, whole.passed_over)


def _find_whole(directory: RunDir, ranks: Ranks, steps: Sequence[int]) -> _Whole:
    """The newest of these checkpoints that is whole; each rank reads its share of every one that is looked at."""
    passed_over: list[PassedOver] = []
    for step in reversed(steps):
        shares = ranks.gather(ranks.together(partial(_damage_of_share, directory, step, ranks)))
        reasons = dict.fromkeys(reason for share in shares for reason in share)
        if not reasons:
            return _Whole(directory.checkpoint_path(step), manifest_of_step(directory, step), tuple(passed_over))
        passed_over.append(PassedOver(step, "; ".join(reasons)))
    raise JobError(_nothing_whole(directory, passed_over))


def _damage_of_share(directory: RunDir, step: int, ranks: Ranks) -> tuple[str, ...]:
    try:
        verify_checkpoint(directory, step, ranks.rank, ranks.world)
    except Damaged as damage:
        return damage.reasons
    return ()


def _nothing_whole(directory: RunDir, damaged: Sequence[PassedOver]) -> str:
    told = "\n".join(f"  {directory.checkpoint_path(each.step).name}: {each.reason}" for each in damaged)
    return (
        f"no checkpoint in {directory.checkpoints} is whole:\n{told}\n"
        "  None was loaded, and nothing was changed. To do: restore the files, or start over with --fresh, which sets "
        "the run directory aside."
    )


def _read(tensors: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    try:
        with warnings.catch_warnings():
            # That a process without a group loads alone is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            reader = dcp.FileSystemReader(folder)
            saved = sorted(reader.read_metadata().state_dict_metadata)
            _check_nothing_is_lost(tensors, saved)
            _leave_out_unsaved_state(tensors, saved)
            dcp.load(tensors, storage_reader=reader, no_dist=not ranks.grouped)
    except CheckpointException as error:
        raise JobError(_misfit(folder, next(iter(error.failures.values()))[0])) from None
    except (RuntimeError, KeyError, ValueError) as error:
        raise JobError(_misfit(folder, error)) from error


def _leave_out_unsaved_state(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Ask for no optimizer state of a parameter that has none among the sorted names `saved`.

    A parameter that no batch had used by then had none; the template made it up.
    """
    states = tensors.get("optimizer", {}).get("state", {})
    for name in list(states):
        if not _saved_state(name, saved):
            del states[name]


def _check_nothing_is_lost(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Raise ValueError where the optimizer of today keeps less of a parameter than the sorted names `saved` hold."""
    if "optimizer" not in tensors:
        return
    for name in tensors["model"]:
        if lost := _saved_state(name, saved) - set(tensors["optimizer"]["state"].get(name, ())):
            raise ValueError(f"it has {', '.join(sorted(lost))} of {name}, which this optimizer does not keep.")


def _saved_state(name: str, saved: Sequence[str]) -> set[str]:
    """What the sorted names `saved` hold of a parameter besides its values, such as "exp_avg"."""
    prefix = f"optimizer.state.{name}."
    of_it = saved[bisect_left(saved, prefix) : bisect_left(saved, f"{prefix}\U0010ffff")]
    return {each.removeprefix(prefix).partition(".")[0] for each in of_it}


def _misfit(folder: Path, error: BaseException) -> str:
    return (
        f"the checkpoint {folder} is whole but does not fit this model or optimizer: {error}\n"
        "  To do: use the run file that it was saved with, or start over with --fresh."
    )
