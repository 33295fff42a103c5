"""Reads tensors and whole states from a checkpoint; every byte that is read is compared with its checksum.

Invariants:
- Shards: each byte is read once, directly into the tensor if its memory layout allows. No number of a damaged block is
  copied on from a buffer. After damage, the tensors that were read into are a mixture.
- Plain tensors: beside what the caller keeps, one tensor and a few blocks are in memory. In the order of `place`, each
  block is read once, however small the tensors are.
- `load_latest` returns a state that was installed on every rank and of which every byte was compared. An error names
  the files. Nothing on disk is changed.
"""

from __future__ import annotations

import contextlib
import io
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardway.checkpoint.catalog import (
    FoundCheckpoint,
    PassedOver,
    TensorEntry,
    find_in_run,
    make_entries,
    manifest_of,
    manifest_of_step,
)
from shardway.checkpoint.file_format import TABLE as TABLE
from shardway.checkpoint.file_format import (
    BlockReader,
    Chunk,
    Damaged,
    FileChecksum,
    Manifest,
    Range,
    Shape,
    Special,
    TensorRow,
    TensorTable,
    describe_unreadable,
    find_damage,
    read_manifest,
    read_ranges,
    read_table,
)
from shardway.checkpoint.local_tier import ShardStore
from shardway.checkpoint.state import (
    CheckpointState,
    Tensors,
    is_model,
    is_optimizer,
    list_parameters,
    random_state,
    set_random_state,
)
from shardway.checkpoint.structure import find_dtype, put_together
from shardway.checkpoint.writer import LoadPlanner
from shardway.errors import JobError, UserError, list_some
from shardway.ranks.start import Ranks
from shardway.rundir.directory import START_OVER, RunDir
from shardway.rundir.lineage import SHARED
from shardway.rundir.names import step_name

# --- tensors from shards, verified


@dataclass(frozen=True)
class ShardSource:
    """The files of a checkpoint: folder, checksums and table. `whole`: files that are read from first to last byte, so
    that they are verified whatever is wanted of them."""

    folder: Path
    checksums: Mapping[str, FileChecksum]
    table: TensorTable
    whole: Collection[str] = ()


def read_tensors(source: ShardSource, tensors: Tensors) -> list[str]:
    """Read a nested state, each rank for itself; returns what is damaged (empty: it was read).

    Raises what torch raises if the state does not fit (RuntimeError, KeyError, ValueError).
    """
    planner, boxes = _plan(source.table, tensors), dict[tuple[str, Shape], list[_Wish]]()
    chunks = _chunks(source.table)
    for item in planner.finish_plan(planner.create_local_plan()).items:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(source.table.values[item.storage_index.fqn].encode()))
            continue
        name = item.storage_index.fqn
        dtype = find_dtype(source.table.tensors[name].dtype)
        wish = _Wish(item, planner.resolve_tensor(item).detach(), dtype)
        boxes.setdefault((name, tuple(item.storage_index.offset or ())), []).append(wish)
    wanted: dict[str, list[Range]] = {name: [] for name in source.whole}
    for place, wishes in boxes.items():
        wanted.setdefault(chunks[place].file, []).extend(_ranges(chunks[place], wishes))
    return [damage for name in sorted(wanted) if (damage := _read_file(source, name, wanted[name]))]


def list_wanted(table: TensorTable, tensors: Tensors) -> set[str]:
    """The files that `read_tensors` would read for this state. Raises as it does."""
    items, chunks = _plan(table, tensors).create_local_plan().items, _chunks(table)
    places = ((item.storage_index.fqn, tuple(item.storage_index.offset or ())) for item in items)
    return {chunks[place].file for place in places if place in chunks}


def _plan(table: TensorTable, tensors: Tensors) -> LoadPlanner:
    planner = LoadPlanner()
    planner.set_up_planner(tensors, _describe(table))
    return planner


def _chunks(table: TensorTable) -> dict[tuple[str, Shape], Chunk]:
    """By tensor and offset in it."""
    return {(name, chunk.offsets): chunk for name, row in table.tensors.items() for chunk in row.chunks}


def _read_file(source: ShardSource, name: str, wanted: Sequence[Range]) -> str | None:
    checksum = source.checksums.get(name)
    if checksum is None:
        return f"{name} is not in the manifest"
    try:
        return read_ranges(source.folder, name, checksum, wanted, whole=name in source.whole)
    except OSError as error:
        return describe_unreadable(source.folder, name, error)


@dataclass(frozen=True)
class _Wish:
    """A part of a chunk, and the tensor that it goes into."""

    item: ReadItem
    target: torch.Tensor
    dtype: torch.dtype

    def takes_directly(self, chunk: Chunk) -> bool:
        """Whether the part lies in the target's memory as it does in the file."""
        plain = type(self.target) in (torch.Tensor, torch.nn.Parameter) and chunk.special is None
        here = plain and self.target.device.type == "cpu" and self.target.is_contiguous()
        return here and self.target.dtype == self.dtype and tuple(self.item.lengths[1:]) == chunk.sizes[1:]


def _ranges(chunk: Chunk, wishes: Sequence[_Wish]) -> Iterator[Range]:
    """The ranges of a chunk to read: rows from the first wanted to the last, once."""
    if chunk.special is not None:
        yield from _special_ranges(chunk, chunk.special, wishes)
        return
    dtype = wishes[0].dtype
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    first, end = _rows(wishes) if chunk.sizes else (0, 1)
    at, length = chunk.at + first * row_bytes, (end - first) * row_bytes
    if len(wishes) == 1 and wishes[0].takes_directly(chunk):
        memory = _memory(wishes[0].target)
        yield Range(at, length, lambda: memory)
        return
    buffer = _ReadBuffer(((end - first, *chunk.sizes[1:]) if chunk.sizes else (), dtype))

    def copy_on() -> None:
        rows = buffer.take()
        for wish in wishes:
            offsets = list(wish.item.storage_offsets)
            if offsets:
                offsets[0] -= first
            wish.target.copy_(narrow_tensor_by_index(rows, offsets, wish.item.lengths))

    yield Range(at, length, buffer.open, copy_on)


def _special_ranges(chunk: Chunk, special: Special, wishes: Sequence[_Wish]) -> Iterator[Range]:
    """The ranges of a tensor of a special class, which is put together after the last was read."""
    buffers = [_ReadBuffer((part.shape, find_dtype(part.dtype))) for part in special.parts]

    def copy_on() -> None:
        whole = put_together(special, [buffer.take() for buffer in buffers])
        for wish in wishes:
            wish.target.copy_(narrow_tensor_by_index(whole, wish.item.storage_offsets, wish.item.lengths))

    at = chunk.at
    for number, buffer in enumerate(buffers):
        last = number == len(buffers) - 1
        yield Range(at, buffer.bytes, buffer.open, copy_on if last else None)
        at += buffer.bytes


class _ReadBuffer:
    """Memory that is made when it is first needed, and freed when its tensor is taken."""

    def __init__(self, form: tuple[Sequence[int], torch.dtype]) -> None:
        self._shape, self._dtype = tuple(form[0]), form[1]
        self._tensor: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self._shape) * self._dtype.itemsize

    def open(self) -> memoryview:
        """The memory."""
        return _memory(self._made())

    def take(self) -> torch.Tensor:
        """What was read, once."""
        tensor, self._tensor = self._made(), None
        return tensor

    def _made(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=self._dtype)
        return self._tensor


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _rows(wishes: Sequence[_Wish]) -> tuple[int, int]:
    firsts = [wish.item.storage_offsets[0] for wish in wishes]
    return min(firsts), max(first + wish.item.lengths[0] for first, wish in zip(firsts, wishes, strict=True))


def _describe(found: TensorTable) -> Metadata:
    """The table as torch's Metadata."""
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in found.values}
    for name, row in found.tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in row.chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(find_dtype(row.dtype)), torch.Size(row.shape), boxes)
    return Metadata(entries)


# --- tensors without their run


class TensorReader:
    """Reads tensors of one checkpoint, whole, on the CPU. Raises Damaged if it is not what was saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = read_manifest(folder)
        self._blocks = BlockReader(folder, manifest.files)
        self._table = read_table(folder, manifest)
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in make_entries(self._table)}

    def place(self, name: str) -> tuple[str, int]:
        """Where a tensor begins: its first file and the byte in it; values that are not tensors, and missing names,
        sort first."""
        row = self._table.tensors.get(name)
        return min(((chunk.file, chunk.at) for chunk in row.chunks), default=("", 0)) if row is not None else ("", 0)

    def read(self, name: str) -> torch.Tensor:
        """A tensor with the values that were saved; for another value, the bytes of its JSON. Raises Damaged."""
        row = self._table.tensors.get(name)
        if row is None:
            return torch.frombuffer(bytearray(self._table.values[name].encode()), dtype=torch.uint8)
        if not _is_covered(row):
            raise Damaged(self._folder, [f"its parts of {name} are not the whole of it"])
        tensor = torch.empty(row.shape, dtype=find_dtype(row.dtype))
        for chunk in row.chunks:
            box = tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
            if chunk.special is not None:
                box.copy_(self._read_special(chunk, chunk.special))
            elif box.is_contiguous():
                self._fill(chunk.file, chunk.at, box)
            else:
                box.copy_(self._read_plain(chunk.file, chunk.at, chunk.sizes, tensor.dtype))
        return tensor

    def _read_special(self, chunk: Chunk, special: Special) -> torch.Tensor:
        parts, at = [], chunk.at
        for part in special.parts:
            parts.append(self._read_plain(chunk.file, at, part.shape, find_dtype(part.dtype)))
            at += parts[-1].nbytes
        return put_together(special, parts)

    def _read_plain(self, file: str, at: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self._fill(file, at, tensor)
        return tensor

    def _fill(self, file: str, at: int, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._blocks.read(file, at, tensor.view(-1).view(torch.uint8).numpy().data)


def _is_covered(row: TensorRow) -> bool:
    """Whether the boxes lie within the tensor and have as many elements."""
    inside = all(
        len(chunk.sizes) == len(chunk.offsets) == len(row.shape)
        and all(0 <= at <= at + n <= size for at, n, size in zip(chunk.offsets, chunk.sizes, row.shape, strict=True))
        for chunk in row.chunks
    )
    return inside and sum(math.prod(chunk.sizes) for chunk in row.chunks) == math.prod(row.shape)


# --- the newest complete checkpoint


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was restored: the checkpoint's name, its counters, and whether the random state came with it.

    `passed_over`: newer ones that are damaged, the newest first. `tier`: where it was (`rundir.lineage`).
    """

    name: str
    step: int
    world: int
    numbers: Mapping[str, Any]
    random_restored: bool
    passed_over: tuple[PassedOver, ...] = ()
    tier: str = SHARED


@dataclass(frozen=True)
class _Opened:
    """A checkpoint whose manifest and table were verified."""

    folder: Path
    manifest: Manifest
    table: TensorTable


def peek_latest(directory: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint that has one, or None if there is no checkpoint.

    It is cheap, so a run that cannot resume is refused before its model is built. Raises JobError if no manifest can be
    read, UserError for a newer format.
    """
    passed_over = []
    for step in reversed(directory.checkpoint_steps()):
        try:
            return manifest_of_step(directory, step)
        except Damaged as damage:
            passed_over.append(PassedOver(step, "; ".join(damage.reasons)))
    if passed_over:
        raise JobError(nothing_whole(directory, passed_over))
    return None


def load_latest(
    directory: RunDir, ranks: Ranks, state: CheckpointState, without: Sequence[int] = ()
) -> LoadedCheckpoint | None:
    """Restore the newest complete checkpoint on all ranks together; None if there is none besides the steps `without`.

    Raises JobError if there are checkpoints and none is complete, or if it does not fit the state.
    """
    steps = [step for step in ranks.ask_first(directory.checkpoint_steps) if step not in without]
    passed_over: list[PassedOver] = []
    for step in reversed(steps):
        loaded = load_from(ShardStore(find_in_run(directory, step), ranks), ranks, state)
        if isinstance(loaded, LoadedCheckpoint):
            return replace(loaded, passed_over=tuple(passed_over))
        passed_over.append(loaded)
    if passed_over:
        raise JobError(nothing_whole(directory, passed_over))
    return None


def load_from(store: ShardStore, ranks: Ranks, state: CheckpointState) -> LoadedCheckpoint | PassedOver:
    """Restore one checkpoint, or return what of it is damaged; the same on every rank."""
    step = store.found.step or 0
    if damaged := _agree(ranks, step, store.bring(lambda: [TABLE])):
        return damaged
    opened = ranks.together(lambda: _open(store.found))
    if damaged := _agree(ranks, step, opened.reasons if isinstance(opened, Damaged) else ()):
        return damaged
    if isinstance(opened, Damaged):  # which is agreed by now
        raise opened
    manifest = opened.manifest
    state.prepare(opened.table)
    tensors = state.template(opened.table)
    if manifest.world == ranks.world:
        tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    _check_model_is_whole(ranks, opened, tensors)
    ranks.together(lambda: _fit(opened, tensors))
    if damaged := _agree(ranks, step, store.bring(lambda: _want(opened, tensors))):
        return damaged
    share = store.share(sorted(manifest.files))
    if damaged := _agree(ranks, step, ranks.together(lambda: _read(opened, tensors, share))):
        return damaged
    ranks.together(lambda: state.read_files(opened.folder, manifest.world))
    state.install(tensors)
    generators = tensors.get("random", {}).get(f"rank-{ranks.rank}")
    if generators:
        set_random_state(generators)
    return LoadedCheckpoint(step_name(manifest.step), manifest.step, manifest.world, manifest.numbers, bool(generators))


def _open(found: FoundCheckpoint) -> _Opened | Damaged:
    try:
        manifest = manifest_of(found)
        return _Opened(found.folder, manifest, read_table(found.folder, manifest))
    except Damaged as damage:
        return damage


def _agree(ranks: Ranks, step: int, reasons: Sequence[str]) -> PassedOver | None:
    """What any rank found damaged, on every rank; None if no rank found anything."""
    found = dict.fromkeys(reason for share in ranks.gather(tuple(reasons)) for reason in share)
    return PassedOver(step, "; ".join(found)) if found else None


def nothing_whole(directory: RunDir, damaged: Sequence[PassedOver]) -> str:
    """The message if every checkpoint of a run is damaged."""
    lines = "\n".join(f"  {directory.checkpoint_path(each.step).name}: {each.reason}" for each in damaged)
    return (
        f"no checkpoint in {directory.checkpoints} is whole:\n{lines}\n"
        f"  None was loaded, and nothing was changed. To do: restore the files, or {START_OVER}."
    )


@contextlib.contextmanager
def _misfits_explained(folder: Path) -> Iterator[None]:
    """Turns what torch and this module raise for a state that does not fit into a JobError."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        raise JobError(_misfit(folder, error)) from error


def _fit(opened: _Opened, tensors: Tensors) -> None:
    """Leave out of a template what was not saved. Raises JobError if it does not fit."""
    saved = sorted({**opened.table.tensors, **opened.table.values})
    with _misfits_explained(opened.folder):
        _check_nothing_is_lost(tensors, saved)
        _leave_out_unsaved_state(tensors, saved)
        _leave_out_unsaved_generators(tensors, saved)


def _check_model_is_whole(ranks: Ranks, opened: _Opened, tensors: Mapping[str, Any]) -> None:
    """Raise UserError on every rank if the checkpoint holds tensors of a model that no rank has today."""
    if not any(map(is_model, tensors)):
        return
    today = {f"{part}.{name}" for part in filter(is_model, tensors) for name in tensors[part]}
    saved = sorted(name for name in opened.table.tensors if is_model(name.partition(".")[0]))
    known = ranks.sum(torch.tensor([name in today for name in saved], dtype=torch.int64, device=ranks.device))
    lost = [name for name, ranks_with_it in zip(saved, known.tolist(), strict=True) if not ranks_with_it]
    if lost:
        names = list_some([name.partition(".")[2] for name in lost], 6)
        parts = sorted({name.partition(".")[0] for name in lost})
        raise UserError(
            f"the checkpoint {opened.folder} holds {names} of {list_some(parts, 6)}, which the script of today does "
            "not make: what a run adds to its models while it trains is not made again.\n"
            "  Nothing was changed. To do: make models as they were when it was saved, before run.steps."
        )


def _want(opened: _Opened, tensors: Tensors) -> set[str]:
    """The files that a template is read from. Raises JobError if it does not fit."""
    with _misfits_explained(opened.folder):
        return list_wanted(opened.table, tensors)


def _read(opened: _Opened, tensors: Tensors, share: Sequence[str]) -> list[str]:
    """Read what this rank needs, and verify its share of the other files; returns what is damaged."""
    folder, checksums, table = opened.folder, opened.manifest.files, opened.table
    shards = {chunk.file for row in table.tensors.values() for chunk in row.chunks}
    with _misfits_explained(folder):
        damages = read_tensors(
            ShardSource(folder, checksums, table, [name for name in share if name in shards]), tensors
        )
    others = (find_damage(folder, name, checksums[name]) for name in share if name not in shards)
    return [*damages, *(damage for damage in others if damage)]


def _leave_out_unsaved_state(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Drop optimizer states of parameters that have none among the sorted names `saved`.

    A parameter that no batch had used had no state; the template has made one. A checkpoint of weights alone has no
    optimizer.
    """
    for part in [part for part in tensors if is_optimizer(part)]:
        if not _has(saved, f"{part}."):
            del tensors[part]
            continue
        states = tensors[part].get("state", {})
        for name in list(states):
            if not _saved_state(part, name, saved):
                del states[name]


def _leave_out_unsaved_generators(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Drop generators that have no state among the sorted names `saved`, such as that of a GPU if there was none."""
    for rank, generators in tensors.get("random", {}).items():
        if not _has(saved, f"random.{rank}."):
            generators.clear()
        if not _has(saved, f"random.{rank}.cuda"):
            generators.pop("cuda", None)


def _has(saved: Sequence[str], prefix: str) -> bool:
    """Whether one of sorted names begins with `prefix`."""
    at = bisect_left(saved, prefix)
    return at < len(saved) and saved[at].startswith(prefix)


def _check_nothing_is_lost(tensors: dict[str, Any], saved: Sequence[str]) -> None:
    """Raise ValueError if today's optimizer keeps less of a parameter than the sorted names `saved` hold."""
    for part in filter(is_optimizer, tensors):
        for name in list_parameters(tensors):
            if lost := _saved_state(part, name, saved) - set(tensors[part].get("state", {}).get(name, ())):
                raise ValueError(f"it has {', '.join(sorted(lost))} of {name}, which this optimizer does not keep.")


def _saved_state(part: str, name: str, saved: Sequence[str]) -> set[str]:
    """What the sorted names `saved` hold of a parameter besides its values, such as "exp_avg"."""
    prefix = f"{part}.state.{name}."
    of_it = saved[bisect_left(saved, prefix) : bisect_left(saved, f"{prefix}\U0010ffff")]
    return {each.removeprefix(prefix).partition(".")[0] for each in of_it}


def _misfit(folder: Path, error: BaseException) -> str:
    return (
        f"the checkpoint {folder} does not fit this model or optimizer: {error}\n"
        "  To do: use the run file that it was saved with (in a script: its model and optimizer). `shardway checkpoint "
        f"export RUN FOLDER --own-names` takes its weights out. Or {START_OVER}."
    )
