"""Writes a checkpoint: one file per rank, the table, the manifest, then the rename that makes it exist.

Invariants:
- torch plans which rank writes and reads what. No pickle is made or read.
- Checksums are of what was in memory, not of what a disk gave back. Every file is on the disk (fsync) when
  `write_tensors` returns.
- Before the rename there is no checkpoint of this step, after it there is a complete one. An existing one is never
  overwritten. A failed save raises on every rank and leaves earlier checkpoints as they were.
- One rank leads each folder: it alone creates, renames and removes what is in it. The right to write is that of the run
  directory.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

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

from shardway.checkpoint.file_format import (
    STEP,
    TABLE,
    ChecksumWriter,
    Chunk,
    FileChecksum,
    Manifest,
    TensorRow,
    TensorTable,
    checksum_file,
    list_files,
    shard_name,
    write_manifest,
    write_table,
)
from shardway.checkpoint.state import (
    CheckpointState,
    Tensors,
    count_bytes,
    dtype_name,
    is_known,
    memory_of,
    random_state,
    take_apart,
)
from shardway.errors import Bug, Fenced, JobError, LostContact, Problem, ShardwayError, UserError, check_no_problems
from shardway.ranks.start import Ranks, is_lost_contact, is_out_of_memory
from shardway.refusals import find_remedy
from shardway.rundir.directory import RunDir
from shardway.rundir.file_io import fsync_folder, is_there, remove_folder
from shardway.rundir.names import LOCAL, SHARED, find_run_id, list_steps, partial_name, step_name
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
    """Write a state on all ranks together; returns the checksums of the files that this rank wrote. Raises
    CheckpointException (a BaseException) on every rank if one fails."""
    writer = _ShardWriter(folder, ranks.rank)
    # A process without a group saves alone. The filter stays: restoring filters is only safe in a process with one
    # thread, and this may be another than that of training.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    dcp.save(
        tensors, storage_writer=writer, planner=SavePlanner(), process_group=ranks.group, no_dist=not ranks.grouped
    )
    return writer.checksums


class _ShardWriter(StorageWriter):
    """torch.distributed.checkpoint's storage writer of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = shard_name(rank)
        self.checksums: dict[str, FileChecksum] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan into its file, in steps that are hashed while they are in the cache."""
        results, boxes = [], []
        for item in plan.items:
            if item.tensor_data is None:
                text = bytes(cast(io.BytesIO, planner.resolve_data(item)).getbuffer()).decode()
                results.append(WriteResult(item.index, 0, text))
            else:
                boxes.append((item, item.tensor_data.chunk))
        if boxes:
            checksum, written = ChecksumWriter(), 0
            with open(self._folder / self._file, "xb", buffering=0) as file:
                for item, box in boxes:
                    at = written
                    special, plain = take_apart(cast(torch.Tensor, planner.resolve_data(item)).detach())
                    for part in plain:
                        values = part.cpu().contiguous().resolve_conj().resolve_neg()
                        data = memory_of(values)  # its own memory if it is on the host so
                        while len(data):
                            count = file.write(data[:STEP])
                            checksum.update(data[:count])
                            data = data[count:]
                            written += count
                    chunk = Chunk(self._file, at, tuple(box.offsets), tuple(box.sizes), special)
                    results.append(WriteResult(item.index, written - at, chunk))
                os.fsync(file.fileno())
            self.checksums[self._file] = checksum.result()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 alone: write the table."""
        chunks: dict[str, list[Chunk]] = {}
        values: dict[str, str] = {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, str):  # the JSON of a value that is not a tensor
                values[result.index.fqn] = result.storage_data
            else:
                chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        rows = {
            name: TensorRow(dtype_name(entry.properties.dtype), tuple(entry.size), tuple(chunks[name]))
            for name, entry in metadata.state_dict_metadata.items()
            if name in chunks and isinstance(entry, TensorStorageMetadata)
        }
        path = self._folder / TABLE
        self.checksums[TABLE] = write_table(path, TensorTable(rows, values))
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


# --- folders of all ranks or of one node


@dataclass(frozen=True)
class CheckpointFolder:
    """Where this rank writes checkpoints of a run: the folder that holds theirs. On the disk of a node (`tier`):
    `start` is the name of the start of the run that saves there, `share` the part of the bytes of all ranks that goes
    there, and `make` makes the folder (OSError, JobError)."""

    run: RunDir
    leads: bool
    folder: Path
    tier: str = SHARED
    start: str = ""
    share: float = 1.0
    make: Callable[[], object] = lambda: None

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def partial_path(self, step: int) -> Path:
        """The folder in which a checkpoint is written; each start of the run has its own on a local disk."""
        if self.tier == SHARED:
            return self.run.partial_checkpoint_path(step)
        return self.folder / partial_name(step, f"start-{self.start}")

    def explain(self, error: ShardwayError, step: int) -> str:
        """The message for a save that failed."""
        if self.tier == LOCAL:
            return (
                f"the checkpoint of step {step} could not be saved on the disk of a node ({self.folder}): {error}\n"
                f"  Nothing that was saved before has changed. To do: "
                f"{find_remedy(str(error), 'name another checkpoint.local_dir', 'make room there')}."
            )
        try:
            steps = list_steps(self.folder)
            last = f"step {steps[-1]} is the last complete checkpoint" if steps else "there is no earlier checkpoint"
        except JobError:
            last = "which checkpoint is the last cannot be seen now"
        room = "make room, lower checkpoint.keep"
        return (
            f"the checkpoint of step {step} could not be saved in {self.folder}: {error}\n"
            f"  Nothing that was saved before has changed; {last}.\n"
            f"  To do: {find_remedy(str(error), 'choose another disk with --dir', room)}; then run the same command "
            "again."
        )


def shared_place(run: RunDir, ranks: Ranks) -> CheckpointFolder:
    """The run directory, which rank 0 leads."""
    return CheckpointFolder(run, ranks.is_first, run.checkpoints)


# --- shards, manifest, rename

HEADROOM = 1.05  # a checkpoint needs a little more than its tensors: metadata and file system blocks
FURTHER_FILES = 5  # files and folders of a checkpoint besides one shard per rank


@dataclass(frozen=True)
class SavedCheckpoint:
    """The result of a save: the checkpoint's manifest, and the files that this rank wrote."""

    manifest: Manifest
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint: this rank's tensors at `step`, the run's counters, and the bytes of all ranks.
    `write_files` writes files of another library into the given folder; it is called on all ranks together."""

    step: int
    numbers: Mapping[str, Any]
    tensors: Tensors
    bytes: int
    write_files: Callable[[Path], None]


def is_saved(place: CheckpointFolder, ranks: Ranks, step: int) -> bool:
    """Whether there is a checkpoint of this step; called on all ranks together. The rank that leads the folder looks
    for all: on a network file system ranks may see different things for a while. Raises JobError on every rank if the
    file system does not answer."""
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
    with new_checkpoint(place, ranks, content.step, content.bytes) as folder:
        own = ranks.together(partial(_write_share, ranks, content, folder))
        checksums = {name: checksum for share in ranks.gather(own) for name, checksum in share.items()}
        others = ranks.gather(ranks.together(partial(_checksum_others, ranks, folder, checksums)))
        checksums |= {name: checksum for share in others for name, checksum in share.items()}
        # The same on every rank, also if several write it: rank 0 gives what does not follow from the files.
        numbers, run = ranks.ask_first(lambda: (content.numbers, find_run_id(place.run.path)))
        manifest = Manifest(content.step, ranks.world, numbers, checksums, place.run.epoch, run)
        return commit_checkpoint(place, ranks, manifest, own)


@contextlib.contextmanager
def new_checkpoint(place: CheckpointFolder, ranks: Ranks, step: int, whole_bytes: int) -> Iterator[Path]:
    """The folder that a checkpoint is written into, if it has room; on all ranks together. Raises JobError on every
    rank alike. What the body has not committed when it fails is removed."""
    unfinished = place.partial_path(step)
    try:
        ranks.together(lambda: _check_space(place, ranks, whole_bytes))
        ranks.together(lambda: _clear_and_make(unfinished) if place.leads else None)
        yield unfinished
    except ShardwayError as error:
        if place.leads:
            remove_folder(unfinished)
        if isinstance(error, Bug | Fenced | LostContact):
            raise  # more room would not help
        raise JobError(place.explain(error, step)) from error


def commit_checkpoint(place: CheckpointFolder, ranks: Ranks, manifest: Manifest, own: Iterable[str]) -> SavedCheckpoint:
    """Give an unfinished checkpoint its manifest and its name, on all ranks together; `own` are this rank's files."""
    unfinished, final, confirm = place.partial_path(manifest.step), place.path(manifest.step), place.run.confirm_writer
    ranks.together(lambda: _commit(unfinished, final, manifest, confirm) if place.leads else None)
    return SavedCheckpoint(manifest, tuple(own))


@contextlib.contextmanager
def with_file_errors(rank: int = 0) -> Iterator[None]:
    """Turns errors of a file system, or of torch's writer for it, into a JobError. torch's CheckpointException is a
    BaseException: it would escape `except Exception`. Every rank gets those of all."""
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


def _check_space(place: CheckpointFolder, ranks: Ranks, whole_bytes: int) -> None:
    if not place.leads:
        return
    needed, files = int(whole_bytes * place.share * HEADROOM), int(ranks.world * place.share) + FURTHER_FILES
    with with_file_errors():
        place.make()
        free = shutil.disk_usage(place.folder).free
        system = os.statvfs(place.folder)
    if free < needed:
        raise JobError(f"it needs about {render_size(needed)} and {render_size(free)} are free")
    if system.f_files and system.f_favail < files:  # 0: such a file system has no limit
        raise JobError(f"it needs about {files} files and {system.f_favail} more may be made (inodes)")


def _clear_and_make(folder: Path) -> None:
    with with_file_errors():
        remove_folder(folder)
        folder.mkdir(exist_ok=True)


def _write_share(ranks: Ranks, content: Content, folder: Path) -> dict[str, FileChecksum]:
    """Write this rank's share; returns the checksums of its tensor files, computed from memory."""
    with ranks.contact("during a save"), with_file_errors(ranks.rank):
        checksums = write_tensors(folder, ranks, content.tensors)
        content.write_files(folder)
        return checksums


def _checksum_others(ranks: Ranks, folder: Path, known: Mapping[str, FileChecksum]) -> dict[str, FileChecksum]:
    """The checksums of another library's files: every rank reads its share of them."""
    with with_file_errors():
        names = [name for name in list_files(folder) if name not in known]
        return {name: checksum_file(folder / name) for name in names[ranks.rank :: ranks.world]}


def _commit(unfinished: Path, final: Path, manifest: Manifest, confirm: Callable[[], None]) -> None:
    with with_file_errors():
        write_manifest(unfinished, manifest)
        here = {(unfinished / name).parent for name in manifest.files} | {unfinished}
        for within in (folder for folder in here if folder.is_dir()):
            fsync_folder(within)
        confirm()  # a later holder has taken it away: the rename fails, whatever comes between
        os.rename(unfinished, final)
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


def check_savable(tensors: Mapping[str, Any], what: str, *, in_place: bool = False) -> None:
    """Raise UserError if a checkpoint cannot hold some value of a nested dict, such as a model's `state_dict`; or,
    where it would be loaded `in_place`, if torch cannot write to that."""
    flat, _ = flatten_state_dict(dict(tensors))
    problems = [Problem(name, why, allowed=_ALLOWED) for name, value in flat.items() if (why := _find_hindrance(value))]
    held = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    repeated = [name for name, value in held.items() if in_place and repeated_dims(value)]
    expanded, remedy = "its elements share memory (`expand`), so nothing can be loaded into it", "clone() it first"
    problems += [Problem(name, expanded, remedy=remedy) for name in repeated]
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


def repeated_dims(tensor: torch.Tensor) -> list[int]:
    """The dims along which all elements lie at one place in memory, as `expand` makes them."""
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dim for dim, (size, stride) in sizes if size > 1 and stride == 0]


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
