"""The file format of a checkpoint: block checksums, the manifest, the table of tensors, and reads that verify.

Invariants:
- Checksums: the checksum of a file is the same whether it is computed from memory while the file is written or from the
  file later. A difference of one bit is found.
- Manifest: a folder without one is no checkpoint, and a file that differs from it is damaged. The manifest has a
  checksum of its own.
- Table: values that are not tensors are stored in it as JSON. Nothing is a pickle.
- Reads: each block is read and hashed once, before any of its bytes is handed out, however small the pieces asked for.
  At most `HELD` blocks are in memory.

torch's own formats load a flipped bit or a zeroed page without an error, so each block carries an XXH3-128 checksum
(https://xxhash.com), which costs far less than reading the block. Checksums are per block, so a partial read verifies
only the blocks it touches.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardway.errors import JobError, UserError
from shardway.rundir.file_io import check_answers, render_json, write_json

# --- checksums: the size of a file and its blocks

BLOCK = 2**24
"""Bytes of a file that share a checksum."""

STEP = 2**20
"""Bytes that are read or written at once: small enough to stay in a core's cache until they are hashed."""


@dataclass(frozen=True)
class FileChecksum:
    """Size of one file, and the checksum of each block (`BLOCK` bytes; the last may be shorter) in hexadecimal."""

    bytes: int
    blocks: tuple[str, ...]


class ChecksumWriter:
    """Computes the checksums of bytes that come one after another."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self._bytes = 0

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes."""
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK - self._bytes % BLOCK]
            self._digest.update(part)
            self._bytes += len(part)
            view = view[len(part) :]
            if self._bytes % BLOCK == 0:
                self._blocks.append(self._digest.hexdigest())
                self._digest.reset()

    def result(self) -> FileChecksum:
        """The checksums of all bytes so far."""
        rest = [self._digest.hexdigest()] if self._bytes % BLOCK else []
        return FileChecksum(self._bytes, (*self._blocks, *rest))


def checksum_bytes(data: bytes) -> FileChecksum:
    """The checksums of a file with this content."""
    writer = ChecksumWriter()
    writer.update(data)
    return writer.result()


def checksum_file(path: Path) -> FileChecksum:
    """Read a whole file and compute its checksums."""
    writer, step = ChecksumWriter(), memoryview(bytearray(STEP))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(step):
            writer.update(step[:count])
    return writer.result()


def find_damage(folder: Path, name: str, checksum: FileChecksum) -> str | None:
    """What is wrong with one file of a checkpoint, or None."""
    if short := find_short(folder, name, checksum):
        return short
    try:
        found = checksum_file(folder / name)
    except OSError as error:
        return describe_unreadable(folder, name, error)
    if found.bytes != checksum.bytes:
        return _format_size(name, found.bytes, checksum)
    changed = (i for i, pair in enumerate(zip(found.blocks, checksum.blocks, strict=False)) if pair[0] != pair[1])
    return None if found == checksum else describe_changed(name, checksum, next(changed, 0))


def find_short(folder: Path, name: str, checksum: FileChecksum) -> str | None:
    """What is wrong with the size of one file of a checkpoint, or None; its content is not read."""
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return describe_unreadable(folder, name, error)
    return None if size == checksum.bytes else _format_size(name, size, checksum)


def describe_unreadable(folder: Path, name: str, error: OSError) -> str:
    """Describe a file that cannot be opened or read. Raises JobError if its file system is away: that is no damage."""
    check_answers(folder / name, error)
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error.strerror})"


def describe_changed(name: str, checksum: FileChecksum, block: int) -> str:
    """Describe a block that is not what was saved."""
    first, end = block * BLOCK, min((block + 1) * BLOCK, checksum.bytes)
    which = "its checksum" if len(checksum.blocks) == 1 else f"the checksum of its bytes {first} to {end}"
    return f"the content of {name} has changed ({which} is another)"


def _format_size(name: str, size: int, checksum: FileChecksum) -> str:
    return f"{name} has {size} bytes, the manifest says {checksum.bytes}"


# --- the manifest

FORMAT = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """`numbers` are the run's counters at `step`; `world` is how many ranks wrote the files.

    `epoch` is that of the writer's lease; 0 if it had none. `run` is the id of the run; empty in older manifests.
    """

    step: int
    world: int
    numbers: Mapping[str, Any]
    files: Mapping[str, FileChecksum]
    epoch: int = 0
    run: str = ""

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(checksum.bytes for checksum in self.files.values())


class Damaged(JobError):
    """A checkpoint is not what was saved; `reasons` lists the differences."""

    def __init__(self, folder: Path, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"the checkpoint {folder} is damaged: {'; '.join(reasons)}.")


def list_files(folder: Path) -> list[str]:
    """The files in a folder and its subfolders, as paths relative to it, in the same order on every rank."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder whose files are all there."""
    content = _content_of(manifest)
    write_json(folder / MANIFEST, {**content, "xxh3": _digest(content)})


def digest_manifest(manifest: Manifest) -> str:
    """A checksum of the content of a manifest, as its file states it."""
    return _digest(_content_of(manifest))


def _content_of(manifest: Manifest) -> dict[str, Any]:
    files = {
        name: {"bytes": checksum.bytes, "xxh3": checksum.blocks} for name, checksum in sorted(manifest.files.items())
    }
    head = {"format": FORMAT, "step": manifest.step, "world": manifest.world, "epoch": manifest.epoch}
    return {**head, "run": manifest.run, "numbers": dict(manifest.numbers), "block_bytes": BLOCK, "files": files}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Damaged if it cannot be read, UserError for another format."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(_other_format(folder, content["format"]))
        if content.pop("xxh3") != _digest(content):
            raise Damaged(folder, [f"its {MANIFEST} has changed (its checksum is another)"])
        files = {name: _read_checksum(name, checksum) for name, checksum in content["files"].items()}
        numbers, epoch = dict(content["numbers"]), int(content["epoch"])
        run = str(content.get("run", ""))
        return Manifest(int(content["step"]), int(content["world"]), numbers, files, epoch, run)
    except FileNotFoundError:
        raise Damaged(folder, [f"its {MANIFEST} is missing"]) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        check_answers(folder / MANIFEST, error)
        raise Damaged(folder, [f"its {MANIFEST} cannot be read ({error})"]) from None


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of a manifest's content, however it is written; numbers that are not finite become null."""
    return xxhash.xxh3_128_hexdigest(render_json(content, sort_keys=True).encode())


def _read_checksum(name: str, checksum: Mapping[str, Any]) -> FileChecksum:
    found = FileChecksum(int(checksum["bytes"]), tuple(map(str, checksum["xxh3"])))
    if len(found.blocks) != -(-found.bytes // BLOCK):
        raise ValueError(f"{name} has {len(found.blocks)} checksums for {found.bytes} bytes")
    return found


def _other_format(folder: Path, found: Any) -> str:
    remedy = "update Shardway" if isinstance(found, int) and found > FORMAT else "use the Shardway that saved it"
    return (
        f"the checkpoint {folder} has format {found}; this Shardway reads format {FORMAT}.\n"
        f"  Nothing in it was changed. To do: {remedy}."
    )


# --- the table of tensors

TABLE = "tensors.json"

Shape = tuple[int, ...]


def shard_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.bin"


def is_shard(name: str) -> bool:
    """Whether a file of a checkpoint is a rank's shard."""
    return re.fullmatch(r"rank-\d{5,}\.bin", name) is not None


@dataclass(frozen=True)
class TensorPart:
    """A plain tensor that a tensor of a special class is made of: the attribute, its format and shape."""

    attribute: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Special:
    """A tensor of a special class: the class, what it needs besides its parts (JSON), and the parts in order."""

    kind: str
    context: Any
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its offset and size in the tensor, and the file and byte where its numbers begin.

    The numbers are in C order, little endian.
    """

    file: str
    at: int
    offsets: Shape
    sizes: Shape
    special: Special | None = None


@dataclass(frozen=True)
class TensorRow:
    """One tensor, whole."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class TensorTable:
    """By name: tensors, and other values, each as a JSON string of its own (so values that are not finite survive)."""

    tensors: Mapping[str, TensorRow]
    values: Mapping[str, str]


def write_table(path: Path, table: TensorTable) -> FileChecksum:
    """Write a table; returns the checksums of its file. The caller makes it durable."""
    files = sorted({chunk.file for row in table.tensors.values() for chunk in row.chunks})
    numbers = {name: number for number, name in enumerate(files)}
    rows = {
        name: {"dtype": row.dtype, "shape": row.shape, "chunks": [_pack(chunk, numbers) for chunk in row.chunks]}
        for name, row in sorted(table.tensors.items())
    }
    text = render_json({"files": files, "tensors": rows, "values": dict(table.values)})
    data = text.encode()
    path.write_bytes(data)
    return checksum_bytes(data)


def read_table(folder: Path, manifest: Manifest) -> TensorTable:
    """The table of a checkpoint, compared with its checksums. Raises Damaged."""
    checksum = manifest.files.get(TABLE)
    if checksum is None:
        raise Damaged(folder, [f"its manifest knows no {TABLE}"])
    if damage := find_damage(folder, TABLE, checksum):
        raise Damaged(folder, [damage])
    try:
        content = json.loads((folder / TABLE).read_bytes())
        files = content["files"]
        rows = {name: _read_row(row, files) for name, row in content["tensors"].items()}
        return TensorTable(rows, {name: str(value) for name, value in content["values"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LookupError) as error:
        check_answers(folder / TABLE, error)
        raise Damaged(folder, [f"{TABLE} cannot be read ({error})"]) from None


def _pack(chunk: Chunk, numbers: Mapping[str, int]) -> list[Any]:
    """A chunk as a short list: large models have millions of chunks."""
    packed: list[Any] = [numbers[chunk.file], chunk.at, chunk.offsets, chunk.sizes]
    if (special := chunk.special) is not None:
        parts = [[part.attribute, part.dtype, part.shape] for part in special.parts]
        packed.append({"kind": special.kind, "context": special.context, "parts": parts})
    return packed


def _read_row(row: Mapping[str, Any], files: list[str]) -> TensorRow:
    chunks = tuple(_unpack(chunk, files) for chunk in row["chunks"])
    return TensorRow(str(row["dtype"]), tuple(row["shape"]), chunks)


def _unpack(packed: list[Any], files: list[str]) -> Chunk:
    number, at, offsets, sizes, *rest = packed
    special = None
    if rest:
        parts = tuple(TensorPart(attribute, dtype, tuple(shape)) for attribute, dtype, shape in rest[0]["parts"])
        special = Special(rest[0]["kind"], rest[0]["context"], parts)
    return Chunk(files[number], int(at), tuple(offsets), tuple(sizes), special)


# --- small reads in any order, verified

HELD = 8
"""Blocks that stay in memory: one for each of a few files that are read side by side."""


class BlockReader:
    """Reads ranges of files of one checkpoint.

    If a dropped block is needed again, only the wanted bytes are read: the block was verified before.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, FileChecksum]) -> None:
        self._folder = folder
        self._checksums = checksums
        self._held: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._whole: set[tuple[str, int]] = set()

    def read(self, name: str, at: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file from `at` on. Raises Damaged if they are not what was saved."""
        checksum = self._checksums.get(name)
        if checksum is None:
            raise Damaged(self._folder, [f"{name} is not in the manifest"])
        end = at + len(target)
        if at < 0 or end > checksum.bytes:
            raise Damaged(self._folder, [f"{name} has {checksum.bytes} bytes, and more are said to be in it"])
        for number in range(at // BLOCK, -(-end // BLOCK)):
            first, last = max(at, number * BLOCK), min(end, (number + 1) * BLOCK)
            self._take(name, number, first - number * BLOCK, target[first - at : last - at])

    def _take(self, name: str, number: int, start: int, target: memoryview) -> None:
        key = (name, number)
        if key not in self._held and key in self._whole:
            self._fill(name, number * BLOCK + start, target)
            return
        if key not in self._held:
            self._held[key] = self._load(name, number)
            self._whole.add(key)
            if len(self._held) > HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        target[:] = self._held[key][start : start + len(target)]

    def _load(self, name: str, number: int) -> memoryview:
        checksum = self._checksums[name]
        if short := find_short(self._folder, name, checksum):
            raise Damaged(self._folder, [short])
        block = memoryview(bytearray(min(BLOCK, checksum.bytes - number * BLOCK)))
        self._fill(name, number * BLOCK, block)
        if xxhash.xxh3_128_hexdigest(block) != checksum.blocks[number]:
            raise Damaged(self._folder, [describe_changed(name, checksum, number)])
        return block

    def _fill(self, name: str, at: int, target: memoryview) -> None:
        """Read from the file without a check."""
        try:
            with open(self._folder / name, "rb", buffering=0) as file:
                file.seek(at)
                left = target
                while len(left):
                    count = file.readinto(left)
                    if not count:
                        raise OSError(5, "it ends too early")
                    left = left[count:]
        except OSError as error:
            raise Damaged(self._folder, [describe_unreadable(self._folder, name, error)]) from None


# --- ranges of a file into memory, verified

MOST_PIECES = 512
"""Buffers of one read; systems allow 1024 (IOV_MAX)."""


@dataclass(frozen=True)
class Range:
    """Bytes of a file: offset, length, a function that gives the target memory when it is needed, and one that is
    called when they are there."""

    at: int
    length: int
    open: Callable[[], memoryview]
    done: Callable[[], None] | None = None

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.at + self.length


def read_ranges(folder: Path, name: str, checksum: FileChecksum, ranges: Sequence[Range], *, whole: bool) -> str | None:
    """Read ranges that do not overlap; returns what is damaged, or None. `whole`: also verify blocks that no range
    touches. Raises OSError."""
    if short := find_short(folder, name, checksum):
        return short
    if any(each.end > checksum.bytes for each in ranges):
        return f"{name} has {checksum.bytes} bytes, and more are said to be in it"
    pending = _Pending(ranges)
    with open(folder / name, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for number, wanted in enumerate(checksum.blocks):
            first, end = number * BLOCK, min((number + 1) * BLOCK, checksum.bytes)
            if (whole or pending.touches(first, end)) and _read_block(file.fileno(), first, end, pending) != wanted:
                return describe_changed(name, checksum, number)
            pending.finish(end)
    return None


class _Pending:
    """The ranges that are not read yet, in the order of the file."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._left = sorted(ranges, key=lambda each: (each.at, each.end))
        self._next = 0

    def touches(self, first: int, end: int) -> bool:
        """Whether a range has bytes there; ranges that end before are done."""
        return self._next < len(self._left) and self._left[self._next].at < end

    def pieces(self, first: int, end: int, nowhere: memoryview) -> Iterator[memoryview]:
        """The memory for the bytes from `first` to `end`, in order. Bytes outside all ranges go to parts of `nowhere`,
        each its own, since all are hashed after all were read."""
        at, number = first, self._next
        while at < end:
            while number < len(self._left) and self._left[number].end <= at:
                number += 1
            found = self._left[number] if number < len(self._left) else None
            if found is None or found.at >= end:
                yield nowhere[at - first : end - first]
                return
            if found.at > at:
                yield nowhere[at - first : found.at - first]
                at = found.at
            stop = min(end, found.end)
            yield found.open()[at - found.at : stop - found.at]
            at = stop

    def finish(self, end: int) -> None:
        """All bytes before `end` are there and verified."""
        while self._next < len(self._left) and self._left[self._next].end <= end:
            if (done := self._left[self._next].done) is not None:
                done()
            self._next += 1


def _read_block(descriptor: int, first: int, end: int, pending: _Pending) -> str:
    """Read one block into its targets; returns its checksum."""
    digest, nowhere = xxhash.xxh3_128(), memoryview(bytearray(STEP))
    for at in range(first, end, STEP):
        stop = min(at + STEP, end)
        position, batch = at, []
        for piece in pending.pieces(at, stop, nowhere):
            batch.append(piece)
            if len(batch) == MOST_PIECES:
                position = _read_pieces(descriptor, batch, position, digest)
                batch = []
        _read_pieces(descriptor, batch, position, digest)
    return digest.hexdigest()


def _read_pieces(descriptor: int, pieces: list[memoryview], at: int, digest: xxhash.xxh3_128) -> int:
    """Fill all pieces from the file, one after the other, and hash them; returns the offset after the last."""
    left = [piece for piece in pieces if len(piece)]
    for piece in _filled(descriptor, left, at):
        digest.update(piece)
    return at + sum(map(len, left))


def _filled(descriptor: int, pieces: list[memoryview], at: int) -> list[memoryview]:
    left = list(pieces)
    while left:
        count = os.preadv(descriptor, left, at)
        if count == 0:
            raise OSError(5, "it ends too early")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:
            left[0] = left[0][count:]
    return pieces
