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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from shardway.checkpoint.checksum import FileChecksum, seal_file
from shardway.checkpoint.manifest import Manifest, list_files, write_manifest
from shardway.checkpoint.place import CheckpointFolder, shared_place
from shardway.checkpoint.shards.write import write_tensors
from shardway.checkpoint.state import CheckpointState, Tensors, count_bytes, random_state
from shardway.errors import Bug, Fenced, JobError, LostContact, ShardwayError
from shardway.ranks.start import Ranks, is_out_of_memory
from shardway.rundir.atomic import fsync_folder, remove_folder
from shardway.rundir.directory import RunDir
from shardway.rundir.look import is_there
from shardway.rundir.run_id import find_run_id
from shardway.watch.words import render_size

HEADROOM = 1.05
"""A checkpoint needs a little more than its tensors: metadata and file system blocks."""

FURTHER_FILES = 5
"""Files and folders of a checkpoint besides one shard a rank."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a save left: the checkpoint's name, size and manifest, and which of its files this rank wrote."""

    name: str
    bytes: int
    manifest: Manifest
    own: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class SaveRequest:
    """What makes a checkpoint: its step, about how many bytes it has, and what writes its files into a folder.

    `write` is called on all ranks together, and says what the manifest shall be and which files this rank wrote.
    """

    step: int
    bytes: int
    write: Callable[[Path], tuple[Manifest, Sequence[str]]]


def save_checkpoint(
    directory: RunDir, ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]
) -> SavedCheckpoint | None:
    """Save in the run directory, on all ranks together; None where this step is saved already.

    Raises JobError on every rank alike.
    """
    return save_to(shared_place(directory, ranks), ranks, state, step, numbers)


def save_to(
    place: CheckpointFolder, ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]
) -> SavedCheckpoint | None:
    """The same in any place."""
    if is_saved(place, ranks, step):
        return None
    return write_checkpoint(place, ranks, collect_content(ranks, state, step, numbers))


def is_saved(place: CheckpointFolder, ranks: Ranks, step: int) -> bool:
    """Whether there is a checkpoint of this step; asked on all ranks together.

    Who leads there looks for all: on a network file system ranks may see different things for a while. Raises JobError
    on every rank where it does not answer.
    """
    found = ranks.gather(ranks.together(lambda: is_there(place.path(step)) if place.leads else None))
    return all(each for each in found if each is not None)


def collect_content(ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]) -> Content:
    """The state as it is now, by reference, with this rank's random state; called on all ranks together."""
    tensors = state.collect()
    tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    random_elsewhere = (ranks.world - 1) * count_bytes(tensors["random"])
    whole = count_bytes(tensors) + random_elsewhere + state.count_file_bytes()
    return Content(step, numbers, tensors, whole, state.write_files)


def write_checkpoint(place: CheckpointFolder, ranks: Ranks, content: Content) -> SavedCheckpoint:
    """Write a checkpoint on all ranks together, in any thread of theirs. Raises JobError on every rank alike."""

    def write(folder: Path) -> tuple[Manifest, Sequence[str]]:
        own = ranks.together(lambda: _write_share(ranks, content, folder))
        seals = {name: seal for share in ranks.gather(own) for name, seal in share.items()}
        seals |= _seal_others(ranks, folder, seals)
        return _agree_on_manifest(place, ranks, content, seals), tuple(own)

    return make_checkpoint(place, ranks, SaveRequest(content.step, content.bytes, write))


def make_checkpoint(place: CheckpointFolder, ranks: Ranks, work: SaveRequest) -> SavedCheckpoint:
    """Make room, let the files be written, and make them a checkpoint; on all ranks together. Raises JobError on every
    rank alike."""
    partial, final = place.partial_path(work.step), place.path(work.step)
    try:
        _check_space(place, ranks, work.bytes)
        ranks.together(lambda: _clear_and_make(partial) if place.leads else None)
        manifest, own = work.write(partial)
        confirm = place.run.confirm_writer
        ranks.together(lambda: _commit(partial, final, manifest, confirm) if place.leads else None)
    except ShardwayError as error:
        if place.leads:
            remove_folder(partial)
        if isinstance(error, Bug | Fenced | LostContact):
            raise  # nothing that more room would mend
        raise JobError(place.explain(error, work.step)) from error
    return SavedCheckpoint(final.name, manifest.total_bytes, manifest, tuple(own))


def _agree_on_manifest(
    place: CheckpointFolder, ranks: Ranks, content: Content, seals: Mapping[str, FileChecksum]
) -> Manifest:
    """The same on every rank, also where several write it: rank 0 says what is not known from the files."""
    numbers, run = ranks.ask_first(lambda: (content.numbers, find_run_id(place.run.path)))
    return Manifest(content.step, ranks.world, numbers, seals, place.run.epoch, run)


def _check_space(place: CheckpointFolder, ranks: Ranks, whole_bytes: int) -> None:
    needed, files = int(whole_bytes * place.share * HEADROOM), int(ranks.world * place.share) + FURTHER_FILES

    def check() -> None:
        with with_file_errors():
            folder = place.make()
            free = shutil.disk_usage(folder).free
            system = os.statvfs(folder)
        if free < needed:
            raise JobError(f"it needs about {render_size(needed)} and {render_size(free)} are free")
        if system.f_files and system.f_favail < files:  # 0: such a file system has no limit
            raise JobError(f"it needs about {files} files and {system.f_favail} more may be made (inodes)")

    ranks.together(lambda: check() if place.leads else None)


def _clear_and_make(partial: Path) -> None:
    with with_file_errors():
        remove_folder(partial)
        partial.mkdir(exist_ok=True)


def _write_share(ranks: Ranks, content: Content, folder: Path) -> dict[str, FileChecksum]:
    """Write what this rank has to write; the seals of its files of tensors, made from what was in memory."""
    with ranks.contact("during a save"), with_file_errors(ranks.rank):
        seals = write_tensors(folder, ranks, content.tensors)
        content.write_files(folder)
        return seals


@contextlib.contextmanager
def with_file_errors(rank: int = 0) -> Iterator[None]:
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
        raise JobError(_describe(cause)) from (cause if own else None)
    except OSError as error:
        raise JobError(_describe(error)) from error


def _seal_others(ranks: Ranks, folder: Path, known: Mapping[str, FileChecksum]) -> dict[str, FileChecksum]:
    """The seals of what another library wrote: every rank reads its share of these files."""

    def seal_share() -> dict[str, FileChecksum]:
        with with_file_errors():
            names = [name for name in list_files(folder) if name not in known]
            return {name: seal_file(folder / name) for name in names[ranks.rank :: ranks.world]}

    shares = ranks.gather(ranks.together(seal_share))
    return {name: seal for share in shares for name, seal in share.items()}


def _commit(partial: Path, final: Path, manifest: Manifest, confirm: Callable[[], None]) -> None:
    with with_file_errors():
        write_manifest(partial, manifest)
        here = {(partial / name).parent for name in manifest.files} | {partial}
        for within in (folder for folder in here if folder.is_dir()):
            fsync_folder(within)
        confirm()  # a later holder has taken `partial` away: the rename fails, whatever comes between
        os.rename(partial, final)
        fsync_folder(final.parent)


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space is left on the device"
    if isinstance(error, OSError) and error.errno == errno.EDQUOT:
        return f"the quota of this user, group or project is used up ({error.strerror})"
    # torch's zip writer, which DeepSpeed's files go through, reports a full disk as an unexpected file position.
    if "unexpected pos" in str(error) or "file write failed" in str(error):
        return "the file system took only a part of what was written (no space, or a quota)"
    return f"{type(error).__name__}: {error}"
