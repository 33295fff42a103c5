"""Reads a checkpoint, after every byte of it was compared with its manifest.

Invariant: either the whole state is installed on every rank or none of it, with an error that names the file. It
must not change anything on disk.
"""

from __future__ import annotations

import contextlib
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardway.checkpoint.manifest import Manifest, find_damage, read_manifest
from shardway.checkpoint.state import State, random_state, set_random_state
from shardway.errors import JobError
from shardway.ranks.start import Ranks
from shardway.rundir.directory import RunDir


@dataclass(frozen=True)
class Loaded:
    """What was restored: the checkpoint's name, its counters, and whether the random state came with it."""

    name: str
    step: int
    world: int
    numbers: Mapping[str, Any]
    random_restored: bool


def peek_latest(directory: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint, or None. Raises JobError where it is damaged."""
    steps = directory.checkpoint_steps()
    if not steps:
        return None
    folder = directory.checkpoint_path(steps[-1])
    with _saying_how_to_go_on(folder, steps):
        return read_manifest(folder)


def load_latest(directory: RunDir, ranks: Ranks, state: State) -> Loaded | None:
    """Restore the newest checkpoint on all ranks together; None where there is none."""
    steps = ranks.gather(directory.checkpoint_steps() if ranks.is_first else [])[0]
    if not steps:
        return None
    folder = directory.checkpoint_path(steps[-1])
    manifest = ranks.together(lambda: _verified(folder, ranks, steps))
    same_world = manifest.world == ranks.world
    tensors = state.collect()
    if same_world:
        tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    ranks.together(lambda: _read(tensors, folder, ranks))
    ranks.together(lambda: state.read_files(folder, manifest.world))
    state.install(tensors)
    if same_world:
        set_random_state(tensors["random"][f"rank-{ranks.rank}"])
    return Loaded(folder.name, manifest.step, manifest.world, manifest.numbers, same_world)


def verify_checkpoint(folder: Path, rank: int = 0, world: int = 1) -> Manifest:
    """Compare this rank's share of the files with the manifest. Raises JobError that names what differs."""
    manifest = read_manifest(folder)
    shares = list(manifest.files.items())[rank::world]
    damages = [damage for name, seal in shares if (damage := find_damage(folder, name, seal))]
    if damages:
        raise JobError(f"the checkpoint {folder} is damaged: {'; '.join(damages)}.")
    return manifest


def _verified(folder: Path, ranks: Ranks, steps: list[int]) -> Manifest:
    with _saying_how_to_go_on(folder, steps):
        return verify_checkpoint(folder, ranks.rank, ranks.world)


@contextlib.contextmanager
def _saying_how_to_go_on(folder: Path, steps: list[int]) -> Iterator[None]:
    try:
        yield
    except JobError as error:
        older = f"step {steps[-2]}" if len(steps) > 1 else "the start of the run"
        raise JobError(
            f"{error}\n  It was not loaded, and nothing was changed. To do: restore the file, or move {folder} out of "
            f"the way and run the same command again: it then goes on from {older}."
        ) from None


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
