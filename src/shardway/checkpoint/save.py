"""Writes a checkpoint: shards, then the manifest, then the rename that makes it exist.

Invariant: until the rename there is no checkpoint of this step, after it there is a whole one; an existing one is
never overwritten. A failed save raises on every rank and leaves what was saved before as it was. This module must not
remove older checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from shardway.checkpoint.manifest import Manifest, list_files, write_manifest
from shardway.checkpoint.seal import Seal, seal_file
from shardway.checkpoint.shards.write import write_tensors
from shardway.checkpoint.state import State, Tensors, count_bytes, random_state
from shardway.errors import Bug, Fenced, JobError, LostContact, ShardwayError
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.rundir.atomic import fsync_folder
from shardway.rundir.directory import RunDir
from shardway.rundir.run_id import find_run_id
from shardway.watch.words import render_size

HEADROOM = 1.05
"""A checkpoint needs a little more than its tensors: metadata and file system blocks."""

FURTHER_FILES = 5
"""Files and folders of a checkpoint besides one shard a rank."""


@dataclass(frozen=True)
class Saved:
    """What a save left: the checkpoint's name and its size."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Content:
    """What becomes a checkpoint: this rank's tensors at `step`, the run's counters, and the bytes of all ranks.

    `write_files` writes what is no tensor into the folder that it is given; it is called on all ranks together.
    """

    step: int
    numbers: Mapping[str, Any]
    tensors: Tensors
    bytes: int
    write_files: Callable[[Path], None]


def save_checkpoint(
    directory: RunDir, ranks: Ranks, state: State, step: int, numbers: Mapping[str, Any]
) -> Saved | None:
    """Save on all ranks together; None where this step is saved already. Raises JobError on every rank alike."""
    if is_saved(directory, ranks, step):
        return None
    return write_checkpoint(directory, ranks, collect_content(ranks, state, step, numbers))


def is_saved(directory: RunDir, ranks: Ranks, step: int) -> bool:
    """Whether there is a checkpoint of this step; asked on all ranks together.

    Rank 0 looks for all: on a network file system ranks may see different things for a while.
    """
    return ranks.gather(ranks.is_first and directory.checkpoint_path(step).exists())[0]


def collect_content(ranks: Ranks, state: State, step: int, numbers: Mapping[str, Any]) -> Content:
    """The state as it is now, by reference, with this rank's random state; called on all ranks together."""
    tensors = state.collect()
    tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    random_elsewhere = (ranks.world - 1) * count_bytes(tensors["random"])
    whole = count_bytes(tensors) + random_elsewhere + state.count_file_bytes()
    return Content(step, numbers, tensors, whole, state.write_files)


def write_checkpoint(directory: RunDir, ranks: Ranks, content: Content) -> Saved:
    """Write a checkpoint on all ranks together, in any thread of theirs. Raises JobError on every rank alike."""
    step = content.step
    partial, final = directory.partial_checkpoint_path(step), directory.checkpoint_path(step)
    try:
        _check_space(directory, ranks, content.bytes)
        ranks.together(lambda: _clear_and_make(partial) if ranks.is_first else None)
        shares = ranks.gather(ranks.together(lambda: _write_share(ranks, content, partial)))
        seals = {name: seal for share in shares for name, seal in share.items()}
        seals |= _seal_others(ranks, partial, seals)
        manifest = Manifest(step, ranks.world, content.numbers, seals, directory.epoch)
        ranks.together(lambda: _commit(directory, manifest) if ranks.is_first else None)
    except ShardwayError as error:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Bug | Fenced | LostContact):
            raise  # nothing that more room would mend
        raise _explain(error, directory, step) from error
    return Saved(final.name, manifest.total_bytes)


def _check_space(directory: RunDir, ranks: Ranks, whole_bytes: int) -> None:
    needed = int(whole_bytes * HEADROOM)

    def check() -> None:
        with _told():
            free = shutil.disk_usage(directory.checkpoints).free
            system = os.statvfs(directory.checkpoints)
        if free < needed:
            raise JobError(f"it needs about {render_size(needed)} and {render_size(free)} are free")
        if system.f_files and system.f_favail < ranks.world + FURTHER_FILES:  # 0: such a file system has no limit
            raise JobError(
                f"it needs about {ranks.world + FURTHER_FILES} files and {system.f_favail} more may be made (inodes)"
            )

    ranks.together(lambda: check() if ranks.is_first else None)


def _clear_and_make(partial: Path) -> None:
    with _told():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)


def _write_share(ranks: Ranks, content: Content, folder: Path) -> dict[str, Seal]:
    """Write what this rank has to write; the seals of its files of tensors, made from what was in memory."""
    with ranks.contact("during a save"), _told(ranks.rank):
        seals = write_tensors(folder, ranks, content.tensors)
        content.write_files(folder)
        return seals


@contextlib.contextmanager
def _told(rank: int = 0) -> Iterator[None]:
    """What a file system refuses, or torch's writer for it, as a JobError.

    torch's CheckpointException is a BaseException: it would escape `except Exception`. Every rank gets those of all.
    """
    try:
        yield
    except CheckpointException as error:
        own = error.failures.get(rank)
        cause = (own or next(iter(error.failures.values())))[0]
        if own is None and is_out_of_memory(cause):
            raise LostContact("another rank ran out of memory during a save") from None
        raise JobError(_say(cause)) from (cause if own else None)
    except OSError as error:
        raise JobError(_say(error)) from error


def _seal_others(ranks: Ranks, folder: Path, known: Mapping[str, Seal]) -> dict[str, Seal]:
    """The seals of what another library wrote: every rank reads its share of these files."""

    def seal_share() -> dict[str, Seal]:
        with _told():
            names = [name for name in list_files(folder) if name not in known]
            return {name: seal_file(folder / name) for name in names[ranks.rank :: ranks.world]}

    shares = ranks.gather(ranks.together(seal_share))
    return {name: seal for share in shares for name, seal in share.items()}


def _commit(directory: RunDir, manifest: Manifest) -> None:
    partial, final = directory.partial_checkpoint_path(manifest.step), directory.checkpoint_path(manifest.step)
    with _told():
        write_manifest(partial, replace(manifest, run=find_run_id(directory.path)))
        for within in {(partial / name).parent for name in manifest.files} | {partial}:
            fsync_folder(within)
        directory.confirm_writer()  # a later holder has taken `partial` away: the rename fails, whatever comes between
        os.rename(partial, final)
        fsync_folder(final.parent)


def _say(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space is left on the device"
    if isinstance(error, OSError) and error.errno == errno.EDQUOT:
        return "the quota of this user, group or project is used up"
    # torch's zip writer, which DeepSpeed's files go through, reports a full disk as an unexpected file position.
    if "unexpected pos" in str(error) or "file write failed" in str(error):
        return "the file system took only a part of what was written (no space, or a quota)"
    return f"{type(error).__name__}: {error}"


def _explain(error: ShardwayError, directory: RunDir, step: int) -> JobError:
    steps = directory.checkpoint_steps()
    last = f"step {steps[-1]} is the last complete checkpoint" if steps else "there is no earlier checkpoint"
    return JobError(
        f"the checkpoint of step {step} could not be saved in {directory.checkpoints}: {error}\n"
        f"  Nothing that was saved before has changed; {last}.\n"
        "  To do: make room (or lower checkpoint.keep, or choose another disk with --dir), then run the same command "
        "again."
    )
