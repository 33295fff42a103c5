"""Writes a checkpoint: one file per rank, the table, the manifest, then the rename that makes it exist.

Invariants:
- torch plans which rank writes and reads what. No pickle is made or read.
- Checksums are of what was in memory, not of what a disk gave back. Every file is on the disk (fsync) when
  `write_tensors` returns.
- Before the rename there is no checkpoint of this step, after it there is a complete one. An existing one is never
  overwritten. A failed save raises on every rank and leaves earlier checkpoints as they were.
- The check before training raises one UserError that names all values that the writer would refuse.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.checkpoint import file_format
from shardway.checkpoint.file_format import (
    STEP,
    ChecksumWriter,
    Chunk,
    FileChecksum,
    Manifest,
    TensorRow,
    TensorTable,
    list_files,
    seal_file,
    shard_name,
    write_manifest,
)
from shardway.checkpoint.folders import CheckpointFolder, shared_place
from shardway.checkpoint.state import CheckpointState, Tensors, count_bytes, random_state
from shardway.checkpoint.tensor_subclasses import dtype_name, is_known, take_apart
from shardway.errors import Bug, Fenced, JobError, LostContact, Problem, ShardwayError, UserError, check_no_problems
from shardway.ranks.start import Ranks, is_lost_contact, is_out_of_memory
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import fsync_folder, is_there, remove_folder
from shardway.rundir.names import find_run_id
from shardway.watch.words import render_size

# --- plans with JSON for values that are not tensors


class SavePlanner(DefaultSavePlanner):
    """torch's planner, with JSON in place of pickles."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """A tensor as it is, anything else as JSON."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        if not survives_json(object):
            raise Bug(f"{write_item.index.fqn} of the state is a {type(object).__name__}, which JSON does not keep")
        return io.BytesIO(json.dumps(object).encode())


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, with JSON in place of pickles; always for nested states."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where it belongs in the state."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], json.loads(value.getvalue()))


def survives_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was; a tuple would be a list."""
    if isinstance(value, list):
        return all(map(survives_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(survives_json, value.values()))
    return type(value) in (type(None), bool, int, float, str)


# --- tensors: a file per rank, a table on rank 0


def write_tensors(folder: Path, ranks: Ranks, tensors: Tensors) -> dict[str, FileChecksum]:
    """Write a state on all ranks together; returns the checksums of the files that this rank wrote.

    Raises CheckpointException (a BaseException) on every rank if one fails.
    """
    writer = _ShardWriter(folder, ranks.rank)
    # A process without a group saves alone. The filter stays: restoring filters is only safe in a process with one
    # thread, and this may be another than that of training.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    dcp.save(
        tensors,
        storage_writer=writer,
        planner=SavePlanner(),
        process_group=ranks.group,
        no_dist=not ranks.grouped,
    )
    return writer.seals


@dataclass(frozen=True)
class _Value:
    """A value that is not a tensor, as JSON."""

    text: str


class _ShardWriter(StorageWriter):
    """torch.distributed.checkpoint's storage writer of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = shard_name(rank)
        self.seals: dict[str, FileChecksum] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan into its file."""
        values = [item for item in plan.items if item.tensor_data is None]
        boxes = [item for item in plan.items if item.tensor_data is not None]
        results = [WriteResult(item.index, 0, _Value(_text(planner.resolve_data(item)))) for item in values]
        if boxes:
            with open(self._folder / self._file, "xb", buffering=0) as file:
                stream = _Stream(file)
                results += [self._write_box(stream, item, planner) for item in boxes]
                os.fsync(file.fileno())
            self.seals[self._file] = stream.sealer.seal()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 alone: write the table."""
        written = [result for of_rank in results for result in of_rank]
        found = _make_table(metadata, written)
        self.seals[file_format.TABLE] = file_format.write_table(self._folder / file_format.TABLE, found)
        with open(self._folder / file_format.TABLE, "rb") as file:
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True: the folder is given."""
        return True

    def _write_box(self, stream: _Stream, item: WriteItem, planner: AnySavePlanner) -> WriteResult:
        tensor, at = cast(torch.Tensor, planner.resolve_data(item)), stream.written
        special, plain = take_apart(tensor.detach())
        for part in plain:
            stream.write(_bytes_of(part))
        box = item.tensor_data.chunk if item.tensor_data is not None else None
        offsets, sizes = (tuple(box.offsets), tuple(box.sizes)) if box is not None else ((), ())
        return WriteResult(item.index, stream.written - at, Chunk(self._file, at, offsets, sizes, special))


class _Stream:
    """A file that is written from first to last byte, and its checksums."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sealer = ChecksumWriter()
        self.written = 0

    def write(self, data: memoryview) -> None:
        """Write all of it, in steps that are hashed while they are in the cache. Raises OSError."""
        while len(data):
            count = self._file.write(data[:STEP])
            self.sealer.update(data[:count])
            data = data[count:]
            self.written += count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The numbers of a plain tensor in C order; its own memory if that is contiguous on the host."""
    flat = tensor.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _text(data: Any) -> str:
    return bytes(data.getbuffer()).decode()


def _make_table(metadata: Metadata, written: list[WriteResult]) -> TensorTable:
    chunks: dict[str, list[Chunk]] = {}
    values: dict[str, str] = {}
    for result in written:
        if isinstance(result.storage_data, _Value):
            values[result.index.fqn] = result.storage_data.text
        else:
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if name in chunks}
    rows = {
        name: TensorRow(dtype_name(entry.properties.dtype), tuple(entry.size), tuple(chunks[name]))
        for name, entry in tensors.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return TensorTable(rows, values)


# --- shards, manifest, rename

HEADROOM = 1.05
"""A checkpoint needs a little more than its tensors: metadata and file system blocks."""

FURTHER_FILES = 5
"""Files and folders of a checkpoint besides one shard per rank."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The result of a save: the checkpoint's name, size and manifest, and the files that this rank wrote."""

    name: str
    bytes: int
    manifest: Manifest
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint: this rank's tensors at `step`, the run's counters, and the bytes of all ranks.

    `write_files` writes files of another library into the given folder; it is called on all ranks together.
    """

    step: int
    numbers: Mapping[str, Any]
    tensors: Tensors
    bytes: int
    write_files: Callable[[Path], None]


@dataclass(frozen=True)
class SaveRequest:
    """A save: its step, its approximate size in bytes, and what writes its files into a folder.

    `write` is called on all ranks together, and returns the manifest and the files that this rank wrote.
    """

    step: int
    bytes: int
    write: Callable[[Path], tuple[Manifest, Sequence[str]]]


def save_checkpoint(
    directory: RunDir, ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]
) -> SavedCheckpoint | None:
    """Save in the run directory, on all ranks together; None if this step is saved already.

    Raises JobError on every rank alike.
    """
    return save_to(shared_place(directory, ranks), ranks, state, step, numbers)


def save_to(
    place: CheckpointFolder, ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]
) -> SavedCheckpoint | None:
    """As `save_checkpoint`, in any folder."""
    if is_saved(place, ranks, step):
        return None
    return write_checkpoint(place, ranks, collect_content(ranks, state, step, numbers))


def is_saved(place: CheckpointFolder, ranks: Ranks, step: int) -> bool:
    """Whether there is a checkpoint of this step; called on all ranks together.

    The rank that leads the folder looks for all: on a network file system ranks may see different things for a while.
    Raises JobError on every rank if the file system does not answer.
    """
    found = ranks.gather(ranks.together(lambda: is_there(place.path(step)) if place.leads else None))
    return all(each for each in found if each is not None)


def collect_content(ranks: Ranks, state: CheckpointState, step: int, numbers: Mapping[str, Any]) -> Content:
    """The current state, by reference, with this rank's random state; called on all ranks together."""
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
    """Check the room, write the files, and rename the folder; on all ranks together. Raises JobError on every rank
    alike."""
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
            raise  # more room would not help
        raise JobError(place.explain(error, work.step)) from error
    return SavedCheckpoint(final.name, manifest.total_bytes, manifest, tuple(own))


def _agree_on_manifest(
    place: CheckpointFolder, ranks: Ranks, content: Content, seals: Mapping[str, FileChecksum]
) -> Manifest:
    """The manifest, the same on every rank, also if several write it: rank 0 gives what does not follow from the
    files."""
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
    """Write this rank's share; returns the checksums of its tensor files, computed from memory."""
    with ranks.contact("during a save"), with_file_errors(ranks.rank):
        seals = write_tensors(folder, ranks, content.tensors)
        content.write_files(folder)
        return seals


@contextlib.contextmanager
def with_file_errors(rank: int = 0) -> Iterator[None]:
    """Turns errors of a file system, or of torch's writer for it, into a JobError.

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
    """The checksums of another library's files: every rank reads its share of them."""

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


# --- whether a checkpoint can hold a state

_ALLOWED = "tensors; numbers, strings, None, and lists and dicts of them"


def check_savable(tensors: Mapping[str, Any], what: str) -> None:
    """Raise UserError if a checkpoint cannot hold some value of a nested dict, such as a model's `state_dict`."""
    flat, _ = flatten_state_dict(dict(tensors))
    problems = [Problem(name, why, allowed=_ALLOWED) for name, value in flat.items() if (why := _find_hindrance(value))]
    check_no_problems(f"{what}, which a checkpoint has to hold", problems)


def check_collects(collect: Callable[[], Tensors]) -> None:
    """The same for the whole state of a run that `collect` gives. Raises UserError also if `collect` fails."""
    try:
        tensors = collect()
    except ShardwayError:
        raise
    except Exception as error:
        if is_lost_contact(error):
            raise
        raise UserError(
            f"the state of this run cannot be collected for a checkpoint: {type(error).__name__}: {error}\n"
            "  So the run ends now, before there is work that could not be saved. To do: look for what model and "
            "optimizer have in common: every parameter of the optimizer has to be one of the model's."
        ) from error
    check_savable(tensors, "the state of this run")


def _find_hindrance(value: Any) -> str:
    """Why a checkpoint cannot hold a value; "" if it can."""
    if not isinstance(value, torch.Tensor):
        return "" if survives_json(value) else f"a {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    if value.is_quantized:
        return "a quantized tensor"
    held = value.to_local() if isinstance(value, DTensor) else value
    if held.is_meta:
        return "a tensor on the meta device, which has no values"
    return "" if is_known(held) or not is_traceable_wrapper_subclass(held) else f"a {type(held).__name__}"
