"""The file format of a checkpoint: block checksums, the manifest, the table of tensors, and reads that verify.

Invariants:
- Checksums: the checksum of a file is the same whether it is computed from memory while the file is written or from the
  file later. A difference of one bit is found.
- Manifest: a folder without one is no checkpoint, and a file that differs from it is damaged. The manifest has a
  checksum of its own.
- Table: values that are not tensors are stored in it as JSON. Nothing is a pickle.
- Reads: each block is read and hashed once, however small the pieces asked for, and no number of a damaged one is
  handed out. At most `HELD` blocks are in memory.

torch's own formats load a flipped bit or a zeroed page without an error, so each block carries an XXH3-128 checksum
(https://xxhash.com), which costs far less than reading the block. Checksums are per block, so a partial read verifies
only the blocks it touches.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardway.errors import JobError, UserError
from shardway.rundir.file_io import check_answers, render_json, write_json

# --- checksums: the size of a file and its blocks

BLOCK = 2**24  # bytes of a file that share a checksum
STEP = 2**20  # bytes that are read or written at once: small enough to stay in a core's cache until they are hashed


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
    try:
        BlockReader(folder, {name: checksum}).verify_rest(name)
    except Damaged as damage:
        return damage.reasons[0]
    return None


def find_short(folder: Path, name: str, checksum: FileChecksum) -> str | None:
    """What is wrong with the size of one file of a checkpoint, or None; its content is not read."""
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return _describe_unreadable(folder, name, error)
    return None if size == checksum.bytes else f"{name} has {size} bytes, the manifest says {checksum.bytes}"


def _describe_unreadable(folder: Path, name: str, error: OSError) -> str:
    """Describe a file that cannot be opened or read. Raises JobError if its file system is away: that is no damage."""
    check_answers(folder / name, error)
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error.strerror})"


# --- the manifest

FORMAT = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """`numbers` are the run's counters at `step`; `world` is how many ranks wrote the files. `epoch` is that of the
    writer's lease; 0 if it had none. `run` is the id of the run; empty in older manifests."""

    step: int
    world: int
    numbers: Mapping[str, Any]
    files: Mapping[str, FileChecksum]
    epoch: int = 0
    run: str = ""

    @property
    def total_bytes(self) -> int:
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
    write_json(folder / MANIFEST, {**_content_of(manifest), "xxh3": digest_manifest(manifest)})


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
            newer = isinstance(content["format"], int) and content["format"] > FORMAT
            raise UserError(
                f"the checkpoint {folder} has format {content['format']}; this Shardway reads format {FORMAT}.\n"
                "  Nothing in it was changed. To do: "
                f"{'update Shardway' if newer else 'use the Shardway that saved it'}."
            )
        if content.pop("xxh3") != _digest(content):
            raise Damaged(folder, [f"its {MANIFEST} has changed (its checksum is another)"])
        files = {
            name: FileChecksum(int(entry["bytes"]), tuple(map(str, entry["xxh3"])))
            for name, entry in content["files"].items()
        }
        for name, checksum in files.items():
            if len(checksum.blocks) != -(-checksum.bytes // BLOCK):
                raise ValueError(f"{name} has {len(checksum.blocks)} checksums for {checksum.bytes} bytes")
        return Manifest(
            step=int(content["step"]),
            world=int(content["world"]),
            numbers=dict(content["numbers"]),
            files=files,
            epoch=int(content["epoch"]),
            run=str(content.get("run", "")),
        )
    except FileNotFoundError:
        raise Damaged(folder, [f"its {MANIFEST} is missing"]) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        check_answers(folder / MANIFEST, error)
        raise Damaged(folder, [f"its {MANIFEST} cannot be read ({error})"]) from None


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of a manifest's content, however it is written; numbers that are not finite become null."""
    return xxhash.xxh3_128_hexdigest(render_json(content, sort_keys=True).encode())


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
    """A plain tensor that a tensor of a special class is made of: the attribute, its dtype and shape."""

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
    """A box of a tensor: its offset and size in the tensor, and the file and byte where its numbers begin. The numbers
    are in C order, little endian."""

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
    data = render_json({"files": files, "tensors": rows, "values": dict(table.values)}).encode()
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
        rows = {
            name: TensorRow(
                str(row["dtype"]), tuple(row["shape"]), tuple(_unpack(chunk, files) for chunk in row["chunks"])
            )
            for name, row in content["tensors"].items()
        }
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


def _unpack(packed: list[Any], files: list[str]) -> Chunk:
    number, at, offsets, sizes, *rest = packed
    special = None
    if rest:
        parts = tuple(TensorPart(attribute, dtype, tuple(shape)) for attribute, dtype, shape in rest[0]["parts"])
        special = Special(rest[0]["kind"], rest[0]["context"], parts)
    return Chunk(files[number], int(at), tuple(offsets), tuple(sizes), special)


# --- reads that verify

HELD = 8  # blocks that stay in memory: one for each of a few files that are read side by side


class BlockReader:
    """Reads ranges of files of one checkpoint, in any order. Raises Damaged if they are not what was saved. A block of
    which all is wanted goes straight into its target. Of others, the last `held` stay in memory. If one that was
    dropped is needed again, only the wanted bytes are read: the block was verified before."""

    def __init__(self, folder: Path, checksums: Mapping[str, FileChecksum], held: int = HELD) -> None:
        self._folder, self._checksums, self._most_held = folder, checksums, held
        self._held: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._verified: set[tuple[str, int]] = set()

    def read(self, name: str, at: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file from `at` on; after damage its content is undefined."""
        if name not in self._checksums:
            raise Damaged(self._folder, [f"{name} is not in the manifest"])
        end, size = at + len(target), self._checksums[name].bytes
        if at < 0 or end > size:
            raise Damaged(self._folder, [f"{name} has {size} bytes, and more are said to be in it"])
        for number in range(at // BLOCK, -(-end // BLOCK) if end > at else 0):
            start, stop = number * BLOCK, min((number + 1) * BLOCK, size)
            first, last = max(at, start), min(end, stop)
            part, block = target[first - at : last - at], (name, number)
            if block not in self._held and block in self._verified:
                self._fill(name, first, part)
            elif block not in self._held and (first, last) == (start, stop):
                self._fill_verified(name, number, part)
            else:
                if block not in self._held:
                    is_full = len(self._held) == self._most_held
                    dropped = self._held.popitem(last=False)[1] if is_full else memoryview(b"")
                    # Memory that was touched before is filled faster.
                    memory = dropped if len(dropped) == stop - start else memoryview(bytearray(stop - start))
                    self._fill_verified(name, number, memory)
                    self._held[block] = memory
                self._held.move_to_end(block)
                part[:] = self._held[block][first - start : last - start]

    def verify_rest(self, name: str) -> None:
        """Read and compare the blocks of a file that nothing was read of."""
        if (checksum := self._checksums.get(name)) is None:
            raise Damaged(self._folder, [f"{name} is not in the manifest"])
        if short := find_short(self._folder, name, checksum):
            raise Damaged(self._folder, [short])
        memory = memoryview(bytearray(min(BLOCK, checksum.bytes)))
        for number in range(len(checksum.blocks)):
            if (name, number) not in self._verified:
                self._fill_verified(name, number, memory[: checksum.bytes - number * BLOCK])

    def _fill_verified(self, name: str, number: int, target: memoryview) -> None:
        checksum = self._checksums[name]
        if name not in self._open and (short := find_short(self._folder, name, checksum)):
            raise Damaged(self._folder, [short])
        if self._fill(name, number * BLOCK, target) != checksum.blocks[number]:
            first, end = number * BLOCK, min((number + 1) * BLOCK, checksum.bytes)
            one = len(checksum.blocks) == 1
            which = "its checksum" if one else f"the checksum of its bytes {first} to {end}"
            raise Damaged(self._folder, [f"the content of {name} has changed ({which} is another)"])
        self._verified.add((name, number))

    def _fill(self, name: str, at: int, target: memoryview) -> str:
        """Read from the file; returns the checksum of what was read, computed while it is in the core's cache."""
        digest = xxhash.xxh3_128()
        try:
            descriptor = self._find_descriptor(name)
            while len(target):
                count = os.preadv(descriptor, [target[:STEP]], at)
                if not count:
                    short = find_short(self._folder, name, self._checksums[name])
                    raise Damaged(self._folder, [short]) if short else OSError(5, "it ends too early")
                digest.update(target[:count])
                at, target = at + count, target[count:]
        except OSError as error:
            raise Damaged(self._folder, [_describe_unreadable(self._folder, name, error)]) from None
        return digest.hexdigest()

    def _find_descriptor(self, name: str) -> int:
        """The open file; a network file system is asked once a file, and reads ahead."""
        if name not in self._open:
            if len(self._open) == HELD:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._open[name], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._open.move_to_end(name)
        return self._open[name]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
