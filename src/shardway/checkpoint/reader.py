"""Reads tensors and whole states from a checkpoint, every byte compared with its checksum; compares two checkpoints.

Invariants:
- Each block is read and compared once, and goes directly into a tensor whose memory layout allows it. No number of a
  damaged block is copied on from a buffer. After damage, the tensors that were read into are a mixture.
- Plain tensors: beside what the caller keeps, one tensor and a few blocks are in memory. In the order of `place`, each
  block is read once, however small the tensors are.
- `load_latest` returns a state that was installed on every rank and of which every byte was compared. An error names
  the files. Nothing on disk is changed.
- Two checkpoints are equal only if every bit of every tensor is equal. What a difference means is not decided here.
"""

from __future__ import annotations

import contextlib
import io
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    part_of,
)
from shardway.checkpoint.file_format import (
    TABLE,
    BlockReader,
    Chunk,
    Damaged,
    FileChecksum,
    Manifest,
    Shape,
    Special,
    TensorTable,
    find_damage,
    is_shard,
    read_manifest,
    read_table,
)
from shardway.checkpoint.state import (
    CheckpointState,
    Tensors,
    find_dtype,
    is_model,
    is_optimizer,
    list_parameters,
    memory_of,
    put_together,
    random_state,
    set_random_state,
)
from shardway.checkpoint.writer import LoadPlanner
from shardway.errors import JobError, UserError, list_some
from shardway.ranks.start import Ranks
from shardway.rundir.directory import START_OVER, RunDir
from shardway.rundir.names import SHARED, step_name

# --- chunks of tensors


def _read_plain(blocks: BlockReader, file: str, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(tuple(shape), dtype=dtype)
    blocks.read(file, at, memory_of(tensor))
    return tensor


def _read_special(blocks: BlockReader, chunk: Chunk, special: Special) -> torch.Tensor:
    """A tensor of a special class, put together from its parts, which lie one after the other."""
    parts, at = [], chunk.at
    for part in special.parts:
        parts.append(_read_plain(blocks, chunk.file, at, part.shape, find_dtype(part.dtype)))
        at += parts[-1].nbytes
    return put_together(special, parts)


# --- a state, each rank for itself


def read_tensors(
    folder: Path,
    checksums: Mapping[str, FileChecksum],
    table: TensorTable,
    tensors: Tensors,
    whole: Collection[str] = (),
) -> list[str]:
    """Read a nested state from files of a checkpoint; returns what is damaged (empty: it was read). `whole`: files that
    are verified from first to last byte, whatever is wanted of them. Raises what torch raises if the state does not fit
    (RuntimeError, KeyError, ValueError)."""
    planner, chunks = _plan(table, tensors), _chunks(table)
    wanted: dict[tuple[str, Shape], list[tuple[ReadItem, torch.Tensor]]] = {}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(table.values[item.storage_index.fqn].encode()))
        else:
            wanted.setdefault(_place(item), []).append((item, planner.resolve_tensor(item).detach()))
    files: dict[str, list[tuple[str, Shape]]] = {name: [] for name in whole}
    for place in sorted(wanted, key=lambda place: chunks[place].at):
        files.setdefault(chunks[place].file, []).append(place)
    blocks = BlockReader(folder, checksums, held=1)
    damages: list[str] = []
    for name, places in sorted(files.items()):
        try:
            for place in places:
                _read_chunk(blocks, chunks[place], find_dtype(table.tensors[place[0]].dtype), wanted[place])
            if name in whole:
                blocks.verify_rest(name)
        except Damaged as damage:
            damages += damage.reasons
    return damages


def _plan(table: TensorTable, tensors: Tensors) -> LoadPlanner:
    """torch's plan of a load, from the table as its Metadata."""
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in table.values}
    for name, row in table.tensors.items():
        boxes = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in row.chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(find_dtype(row.dtype)), torch.Size(row.shape), boxes)
    planner = LoadPlanner()
    planner.set_up_planner(tensors, Metadata(entries))
    return planner


def _chunks(table: TensorTable) -> dict[tuple[str, Shape], Chunk]:
    return {(name, chunk.offsets): chunk for name, row in table.tensors.items() for chunk in row.chunks}


def _place(item: ReadItem) -> tuple[str, Shape]:
    """The tensor that an item reads from, and the offset of the chunk in it."""
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _is_plain(target: torch.Tensor) -> bool:
    """Whether the memory of a target has its values in their order, so that they can be read into it as they lie."""
    in_order = type(target) is torch.Tensor and target.is_cpu and target.is_contiguous()
    return in_order and not target.is_conj() and not target.is_neg()


def _read_chunk(
    blocks: BlockReader, chunk: Chunk, dtype: torch.dtype, wanted: Sequence[tuple[ReadItem, torch.Tensor]]
) -> None:
    """Fill targets with their parts of a chunk. Its rows from the first wanted to the last are read once."""
    first = 0
    if chunk.special is not None:
        rows = _read_special(blocks, chunk, chunk.special)
    else:
        shape: Shape = ()
        if chunk.sizes:
            first = min(item.storage_offsets[0] for item, _ in wanted)
            end = max(item.storage_offsets[0] + item.lengths[0] for item, _ in wanted)
            shape = (end - first, *chunk.sizes[1:])
        at = chunk.at + first * math.prod(chunk.sizes[1:]) * dtype.itemsize
        item, target = wanted[0]
        is_alone = len(wanted) == 1 and target.dtype == dtype and tuple(item.lengths[1:]) == chunk.sizes[1:]
        if is_alone and _is_plain(target):
            blocks.read(chunk.file, at, memory_of(target))  # it lies in memory as it does in the file
            return
        rows = _read_plain(blocks, chunk.file, at, shape, dtype)
    for item, target in wanted:
        offsets = list(item.storage_offsets)
        if offsets:
            offsets[0] -= first
        target.copy_(narrow_tensor_by_index(rows, offsets, item.lengths))


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
        inside = all(
            len(chunk.sizes) == len(chunk.offsets) == len(row.shape)
            and all(
                0 <= at <= at + n <= size for at, n, size in zip(chunk.offsets, chunk.sizes, row.shape, strict=True)
            )
            for chunk in row.chunks
        )
        if not inside or sum(math.prod(chunk.sizes) for chunk in row.chunks) != math.prod(row.shape):
            raise Damaged(self._folder, [f"its parts of {name} are not the whole of it"])
        tensor = torch.empty(row.shape, dtype=find_dtype(row.dtype))
        for chunk in row.chunks:
            box = tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
            if chunk.special is not None:
                box.copy_(_read_special(self._blocks, chunk, chunk.special))
            elif box.is_contiguous():
                self._blocks.read(chunk.file, chunk.at, memory_of(box))
            else:
                box.copy_(_read_plain(self._blocks, chunk.file, chunk.at, chunk.sizes, tensor.dtype))
        return tensor


# --- the newest complete checkpoint


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was restored: the checkpoint's name, its counters, and whether the random state came with it. `passed_over`:
    newer ones that are damaged, the newest first. `tier`: where it was (`rundir.names`)."""

    name: str
    step: int
    world: int
    numbers: Mapping[str, Any]
    random_restored: bool
    passed_over: tuple[PassedOver, ...] = ()
    tier: str = SHARED


def peek_latest(directory: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint that has one, or None if there is no checkpoint. It is cheap, so a run that
    cannot resume is refused before its model is built. Raises JobError if no manifest can be read, UserError for a
    newer format."""
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
    Raises JobError if there are checkpoints and none is complete, or if it does not fit the state."""
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


def nothing_whole(directory: RunDir, damaged: Sequence[PassedOver]) -> str:
    """The message if every checkpoint of a run is damaged."""
    lines = "\n".join(f"  {directory.checkpoint_path(each.step).name}: {each.reason}" for each in damaged)
    return (
        f"no checkpoint in {directory.checkpoints} is whole:\n{lines}\n"
        f"  None was loaded, and nothing was changed. To do: restore the files, or {START_OVER}."
    )


@dataclass(frozen=True)
class ShardStore:
    """The files of one checkpoint, which every rank sees; `found` is the checkpoint as this rank reads it. The methods
    are called on all ranks together."""

    found: FoundCheckpoint
    ranks: Ranks

    def bring(self, find: Callable[[], Collection[str]]) -> list[str]:
        """Make the files that `find` names readable for this rank; returns what of them is damaged."""
        return []

    def share(self, names: Sequence[str]) -> list[str]:
        """The files that this rank reads whole; each file is read whole by one rank."""
        return list(names[self.ranks.rank :: self.ranks.world])


def load_from(store: ShardStore, ranks: Ranks, state: CheckpointState) -> LoadedCheckpoint | PassedOver:
    """Restore one checkpoint, or return what of it is damaged; the same on every rank."""
    found, folder = store.found, store.found.folder
    step = found.step or 0
    if damaged := _agree(ranks, step, store.bring(lambda: [TABLE])):
        return damaged
    opened = ranks.together(lambda: _open(found))
    if damaged := _agree(ranks, step, opened.reasons if isinstance(opened, Damaged) else ()):
        return damaged
    if isinstance(opened, Damaged):  # which is agreed by now
        raise opened
    manifest, table = opened
    state.prepare(table)
    tensors = state.template(table)
    if manifest.world == ranks.world:
        tensors["random"] = {f"rank-{ranks.rank}": random_state()}
    _check_model_is_whole(ranks, folder, table, tensors)
    ranks.together(lambda: _leave_out_unsaved(folder, table, tensors))

    def list_files() -> set[str]:
        chunks = _chunks(table)
        with _misfits_explained(folder):
            places = map(_place, _plan(table, tensors).create_local_plan().items)
            return {chunks[place].file for place in places if place in chunks}

    def read() -> list[str]:
        """What this rank needs, and its share of the other files; returns what is damaged."""
        shards = {chunk.file for row in table.tensors.values() for chunk in row.chunks}
        with _misfits_explained(folder):
            damages = read_tensors(folder, manifest.files, table, tensors, shards.intersection(share))
        others = (find_damage(folder, name, manifest.files[name]) for name in share if name not in shards)
        return [*damages, *filter(None, others)]

    if damaged := _agree(ranks, step, store.bring(list_files)):
        return damaged
    share = store.share(sorted(manifest.files))
    if damaged := _agree(ranks, step, ranks.together(read)):
        return damaged
    ranks.together(lambda: state.read_files(folder, manifest.world))
    state.install(tensors)
    generators = tensors.get("random", {}).get(f"rank-{ranks.rank}")
    if generators:
        set_random_state(generators)
    return LoadedCheckpoint(step_name(manifest.step), manifest.step, manifest.world, manifest.numbers, bool(generators))


def _open(found: FoundCheckpoint) -> tuple[Manifest, TensorTable] | Damaged:
    try:
        manifest = manifest_of(found)
        return manifest, read_table(found.folder, manifest)
    except Damaged as damage:
        return damage


def _agree(ranks: Ranks, step: int, reasons: Sequence[str]) -> PassedOver | None:
    """What any rank found damaged, on every rank; None if no rank found anything."""
    found = dict.fromkeys(reason for share in ranks.gather(tuple(reasons)) for reason in share)
    return PassedOver(step, "; ".join(found)) if found else None


@contextlib.contextmanager
def _misfits_explained(folder: Path) -> Iterator[None]:
    """Turns what torch and this module raise for a state that does not fit into a JobError."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        raise JobError(
            f"the checkpoint {folder} does not fit this model or optimizer: {error}\n"
            "  To do: use the run file that it was saved with (in a script: its model and optimizer). `shardway "
            f"checkpoint export RUN FOLDER --own-names` takes its weights out. Or {START_OVER}."
        ) from error


def _check_model_is_whole(ranks: Ranks, folder: Path, table: TensorTable, tensors: Mapping[str, Any]) -> None:
    """Raise UserError on every rank if the checkpoint holds tensors of a model that no rank has today."""
    if not any(map(is_model, tensors)):
        return
    today = {f"{part}.{name}" for part in filter(is_model, tensors) for name in tensors[part]}
    saved = sorted(name for name in table.tensors if is_model(name.partition(".")[0]))
    known = ranks.sum(torch.tensor([name in today for name in saved], dtype=torch.int64, device=ranks.device))
    lost = [name for name, ranks_with_it in zip(saved, known.tolist(), strict=True) if not ranks_with_it]
    if lost:
        names = list_some([name.partition(".")[2] for name in lost], 6)
        parts = sorted({name.partition(".")[0] for name in lost})
        raise UserError(
            f"the checkpoint {folder} holds {names} of {list_some(parts, 6)}, which the script of today does "
            "not make: what a run adds to its models while it trains is not made again.\n"
            "  Nothing was changed. To do: make models as they were when it was saved, before run.steps."
        )


def _leave_out_unsaved(folder: Path, table: TensorTable, tensors: dict[str, Any]) -> None:
    """Leave out of a template what was not saved. Raises JobError if today's optimizer keeps less than was saved. A
    parameter that no batch had used had no state; the template has made one. A checkpoint of weights alone has no
    optimizer, and one from a CPU no generator of a GPU."""
    saved = sorted({**table.tensors, **table.values})

    def has(prefix: str) -> bool:
        at = bisect_left(saved, prefix)
        return at < len(saved) and saved[at].startswith(prefix)

    def saved_state(part: str, name: str) -> set[str]:
        """What was saved of a parameter besides its values, such as "exp_avg"."""
        prefix = f"{part}.state.{name}."
        of_it = saved[bisect_left(saved, prefix) : bisect_left(saved, f"{prefix}\U0010ffff")]
        return {each.removeprefix(prefix).partition(".")[0] for each in of_it}

    optimizers = list(filter(is_optimizer, tensors))
    with _misfits_explained(folder):
        for part in optimizers:
            for name in list_parameters(tensors):
                if lost := saved_state(part, name) - set(tensors[part].get("state", {}).get(name, ())):
                    raise ValueError(f"it has {', '.join(sorted(lost))} of {name}, which this optimizer does not keep.")
    for part in optimizers:
        if not has(f"{part}."):
            del tensors[part]
            continue
        states = tensors[part].get("state", {})
        for name in list(states):
            if not saved_state(part, name):
                del states[name]
    for rank, generators in tensors.get("random", {}).items():
        if not has(f"random.{rank}."):
            generators.clear()
        if not has(f"random.{rank}.cuda"):
            generators.pop("cuda", None)


# --- two checkpoints compared

BLOCK = 2**20  # elements that are compared at a time: their fp64 copies take some tens of megabytes
INFINITE = float("inf")


@dataclass(frozen=True)
class Values:
    """How far two tensors of one shape and dtype are apart: their elements, those with equal bits, and of the others
    the largest |a - b| and the largest |a - b| / max(|a|, |b|). Infinite if one is not finite."""

    elements: int
    same_bits: int
    max_absolute: float
    max_relative: float


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs; a side is None if it has none of this name, `values` is set if values differ."""

    name: str
    first: TensorEntry | None
    second: TensorEntry | None
    values: Values | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FileDifference:
    """A file of another library that differs; its size in bytes, None if it is missing."""

    name: str
    first: int | None
    second: int | None


def find_differences(first: TensorReader, second: TensorReader, parts: Sequence[str]) -> list[TensorDifference]:
    """The tensors of these parts that differ, by name. They are read in the order of the first checkpoint's files, so
    each block of these is read once."""
    names, found = {name for name in {*first.entries, *second.entries} if part_of(name) in parts}, []
    for name in sorted(names, key=lambda name: (first.place(name), second.place(name), name)):
        one, other = first.entries.get(name), second.entries.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            found.append(TensorDifference(name, one, other))
            continue
        values = compare_values(first.read(name), second.read(name))
        if values.same_bits < values.elements:
            found.append(TensorDifference(name, one, other, values))
    return sorted(found, key=lambda each: each.name)


def find_other_files(first: Manifest, second: Manifest) -> list[FileDifference]:
    """Files of other libraries that differ, by their checksums; our own are compared by tensors."""
    found = []
    for name in sorted({*first.files, *second.files}):
        one, other = first.files.get(name), second.files.get(name)
        if name != TABLE and not is_shard(name) and one != other:
            found.append(FileDifference(name, one.bytes if one else None, other.bytes if other else None))
    return found


def compare_values(first: torch.Tensor, second: torch.Tensor) -> Values:
    """Compare two tensors of one dtype, a block at a time; byte strings may differ in length."""
    if first.numel() != second.numel():  # values that are no tensors
        return Values(max(first.numel(), second.numel()), 0, INFINITE, INFINITE)
    blocks = [_compare_block(*pair) for pair in zip(_blocks(first), _blocks(second), strict=True)]
    return Values(
        elements=first.numel(),
        same_bits=sum(block.same_bits for block in blocks),
        max_absolute=max((block.max_absolute for block in blocks), default=0.0),
        max_relative=max((block.max_relative for block in blocks), default=0.0),
    )


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.contiguous().view(-1).split(BLOCK) if tensor.numel() else ()


def _compare_block(first: torch.Tensor, second: torch.Tensor) -> Values:
    one, other = (tensor.view(torch.uint8).view(len(tensor), -1) for tensor in (first, second))  # elements, bytes
    same = (one == other).all(dim=1)
    if bool(same.all()):
        return Values(len(first), len(first), 0.0, 0.0)
    wide = torch.complex128 if first.is_complex() else torch.float64
    a, b = first[~same].to(wide), second[~same].to(wide)
    apart = (a - b).abs().nan_to_num(nan=INFINITE, posinf=INFINITE)
    size = torch.maximum(a.abs(), b.abs())
    relative = torch.where(apart > 0, apart / size, 0.0).nan_to_num(nan=INFINITE, posinf=INFINITE)
    return Values(len(first), int(same.sum()), float(apart.max()), float(relative.max()))
