"""One shard of Shardway's own format: its layout, how it is written, and what is found wrong in it.

A shard is, in this order: the payload (blobs of records, or tokens); columns (arrays, each from a multiple of 64 bytes
on); the xxh3-64 of every BLOCK_BYTES of all that (u64); a footer of JSON that says where everything lies; and 32 bytes:
the size of the footer, its xxh3-64, and _MAGIC. All numbers are little-endian.

Invariants:
- Every byte of a shard is covered: blocks by their checksums, these by one in the footer, and that by the last bytes.
- A shard is written beside its final name, fsynced and renamed: a kill leaves no half shard.
- The same records or documents give the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.formats.base import BLOCK_BYTES, DamagedData, Extent, Record, Sums
from shardway.data.formats.token_store import Tokens
from shardway.errors import UserError
from shardway.rundir.file_io import fsync_folder

SHARD_SUFFIX = ".shard"
SHARD_VERSION = 1
SHARD_BYTES = 128 * 2**20
"""The size that a shard should have; one of 64 to 256 MiB is read well on any file system."""

TOKEN_DTYPES = ("uint8", "uint16", "uint32")

_MAGIC = b"shardway shard 1"
_TAIL = struct.Struct("<QQ16s")
_ALIGNMENT = 64
_FOOTER_BYTES = 2**16
"""The end of a shard that is read at once for its footer."""


@dataclass(frozen=True)
class ShardFacts:
    """What a manifest says of a shard. `xxh3` is the xxh3-128 of its footer and with it of all that the shard holds;
    `fields` are the names and types of the fields of its records, `dtype` is the type of its tokens, `counted` the byte
    from which on it says for each token whether it counts (None: all do)."""

    name: str
    bytes: int
    samples: int
    tokens: int
    xxh3: str
    kind: str
    dtype: str = ""
    counted: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardColumn:
    """An array of a shard: `count` of `dtype` from byte `offset` on."""

    dtype: str
    offset: int
    count: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ShardFooter:
    """Where everything lies in a shard. `fields`: how the records' fields are stored; `sums_xxh3`: of the checksums."""

    facts: ShardFacts
    columns: Mapping[str, ShardColumn]
    fields: Mapping[str, Mapping[str, Any]]
    sums: ShardColumn
    sums_xxh3: str

    blobs: int
    """The blobs of each record."""

    @property
    def covered(self) -> int:
        """The bytes that checksums of blocks cover, from the first on."""
        return self.sums.offset


@dataclass(frozen=True)
class FoundDamage:
    """A part of a file that is not what was written: `size` bytes from `offset` on; `what` says how that shows."""

    path: Path
    offset: int
    size: int
    what: str

    def __str__(self) -> str:
        return f"{self.path} is damaged at byte {self.offset}: {self.what}"


class DamagedShard(DamagedData):
    """The index of a shard is not what was written, from byte `offset` on."""

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {offset}: {what}\n"
            "  To do: `shardway data repair` with a whole copy of the data set, or copy the file again.",
            Extent(path, offset),
        )
        self.offset, self.what = offset, what

    def __reduce__(self) -> tuple[Any, ...]:
        return DamagedData, (str(self), self.place)


# --- reading the end of a shard


def read_shard_facts(path: Path) -> ShardFacts:
    """What a shard holds, from its verified footer. Raises DamagedData; OSError for a file that is not there."""
    with path.open("rb") as stream:
        return parse_footer(path, stream.fileno()).facts


def parse_footer(path: Path, descriptor: int) -> ShardFooter:
    """The footer of an open shard, verified. Raises DamagedData."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _FOOTER_BYTES)
    end = os.pread(descriptor, size - start, start)
    if len(end) < _TAIL.size:
        raise DamagedShard(path, 0, f"it has {size} bytes, too few for a shard")
    length, digest, magic = _TAIL.unpack(end[-_TAIL.size :])
    offset = size - _TAIL.size - length
    if magic != _MAGIC or offset < 0:
        raise DamagedShard(path, size - _TAIL.size, "it does not end as a shard does (cut short, or overwritten)")
    if offset < start:
        end = os.pread(descriptor, size - offset, offset)
    body = end[-_TAIL.size - length : -_TAIL.size]
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise DamagedShard(path, offset, "checksum mismatch of the footer that begins there")
    content = json.loads(body)
    if content["version"] > SHARD_VERSION:
        raise UserError(f"{path} is a shard of version {content['version']}\n  allowed: up to {SHARD_VERSION}")
    columns = {name: ShardColumn(**column) for name, column in content["columns"].items()}
    facts = _describe(path.name, size, body)
    blobs = sum(entry["blob"] is not None for entry in content["fields"].values())
    return ShardFooter(facts, columns, content["fields"], ShardColumn(**content["sums"]), content["sums_xxh3"], blobs)


def _describe(name: str, size: int, footer: bytes) -> ShardFacts:
    content = json.loads(footer)
    return ShardFacts(
        name,
        size,
        content["samples"],
        content["tokens"],
        xxhash.xxh3_128_hexdigest(footer),
        content["kind"],
        content["dtype"],
        content["columns"].get("counted", {}).get("offset"),
        {field: described["type"] for field, described in content["fields"].items()},
    )


def read_shard_sums(path: Path, descriptor: int, footer: ShardFooter) -> Sums:
    """The checksums of the blocks of a shard, verified. Raises DamagedData."""
    content = os.pread(descriptor, footer.sums.size, footer.sums.offset)
    if len(content) != footer.sums.size or xxhash.xxh3_128_hexdigest(content) != footer.sums_xxh3:
        raise DamagedShard(path, footer.sums.offset, "checksum mismatch of the checksums that begin there")
    return np.frombuffer(content, footer.sums.dtype)


def find_shard_damage(path: Path, expected: ShardFacts | None = None) -> Iterator[FoundDamage]:
    """Every damaged part of a shard, which is read whole; `expected`: what the manifest says of it."""
    try:
        stream = path.open("rb", buffering=0)
    except OSError as error:
        yield FoundDamage(path, 0, expected.bytes if expected else 0, str(error.strerror))
        return
    with stream:
        size = os.fstat(stream.fileno()).st_size
        if expected is not None and size != expected.bytes:
            first = min(size, expected.bytes)
            what = f"it has {size} bytes, and the manifest says {expected.bytes}"
            yield FoundDamage(path, first, max(size, expected.bytes) - first, what)
        try:
            footer = parse_footer(path, stream.fileno())
        except DamagedShard as error:
            yield FoundDamage(path, error.offset, size - error.offset, error.what)
            return
        end = footer.sums.offset + footer.sums.size
        if expected is not None and footer.facts.xxh3 != expected.xxh3:
            yield FoundDamage(path, end, size - end, "this is another shard than the one that the manifest names")
        kept = os.pread(stream.fileno(), footer.sums.size, footer.sums.offset)
        made = np.array([xxhash.xxh3_64_intdigest(block) for block in _read_blocks(stream, footer.covered)], np.uint64)
        if xxhash.xxh3_128_hexdigest(kept) != footer.sums_xxh3:
            yield FoundDamage(path, footer.sums.offset, footer.sums.size, "checksum mismatch of the checksums there")
        if xxhash.xxh3_128_hexdigest(made.astype("<u8").tobytes()) == footer.sums_xxh3:
            return  # all blocks are whole, whatever is true of the checksums that are kept
        sums = np.frombuffer(kept[: len(kept) // 8 * 8], np.uint64)
        for block in range(len(made)):
            if block >= len(sums) or made[block] != sums[block]:
                start = block * BLOCK_BYTES
                count = min(BLOCK_BYTES, footer.covered - start)
                yield FoundDamage(path, start, count, f"checksum mismatch of the {count} bytes from there on")


def _read_blocks(stream: IO[bytes] | io.FileIO, size: int) -> Iterator[bytes]:
    for start in range(0, size, BLOCK_BYTES):
        yield os.pread(stream.fileno(), min(BLOCK_BYTES, size - start), start)


# --- writing


class _ShardFile:
    """A shard while it is written: `write` the payload, `column` by column, then `finish`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        self._stream = self._temporary.open("xb", buffering=0)
        self._pending = bytearray()
        self._sums = array("Q")
        self._columns: dict[str, ShardColumn] = {}
        self.size = 0
        """Bytes that were given to `write`."""

    def __enter__(self) -> _ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def write(self, content: bytes | memoryview) -> None:
        """Write a part of what checksums cover."""
        self.size += len(content)
        self._pending += content
        whole = len(self._pending) // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            self._flush(whole)

    def column(self, name: str, values: npt.NDArray[Any]) -> None:
        """Write an array from the next multiple of 64 bytes on."""
        self._pad()
        flat = np.ascontiguousarray(values.reshape(-1))
        flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
        self._columns[name] = ShardColumn(flat.dtype.str, self.size, len(flat))
        self.write(flat.view(np.uint8).data)

    def finish(
        self, kind: str, samples: int, tokens: int = 0, dtype: str = "", fields: Mapping[str, Any] | None = None
    ) -> ShardFacts:
        """Write checksums and footer, and give the shard its name."""
        self._pad()
        self._flush(len(self._pending))
        sums = np.array(self._sums, "<u8").tobytes()
        content = {
            "version": SHARD_VERSION,
            "kind": kind,
            "samples": samples,
            "tokens": tokens,
            "dtype": dtype,
            "fields": fields or {},
            "columns": {name: asdict(column) for name, column in self._columns.items()},
            "sums": asdict(ShardColumn("<u8", self.size, len(self._sums))),
            "sums_xxh3": xxhash.xxh3_128_hexdigest(sums),
        }
        body = json.dumps(content, separators=(",", ":")).encode()
        tail = _TAIL.pack(len(body), xxhash.xxh3_64_intdigest(body), _MAGIC)
        _write_all(self._stream, sums + body + tail)
        os.fsync(self._stream.fileno())
        size = self._stream.tell()
        os.replace(self._temporary, self._path)
        fsync_folder(self._path.parent)
        return _describe(self._path.name, size, body)

    def _pad(self) -> None:
        self.write(bytes(-self.size % _ALIGNMENT))

    def _flush(self, count: int) -> None:
        with memoryview(self._pending) as pending:
            for start in range(0, count, BLOCK_BYTES):
                self._sums.append(xxhash.xxh3_64_intdigest(pending[start : min(start + BLOCK_BYTES, count)]))
            _write_all(self._stream, pending[:count])
        del self._pending[:count]


def _write_all(stream: io.FileIO, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[stream.write(left) :]


def write_token_shard(
    path: Path, documents: Iterable[tuple[Tokens, npt.NDArray[np.bool_] | None]], dtype: str
) -> ShardFacts:
    """Write documents of tokens as a shard: for each its tokens [n] and whether each counts as a target [n] (None: all
    do). `dtype` is one of TOKEN_DTYPES. Documents are written as they come.

    Raises UserError for a token that `dtype` does not hold; OSError if the shard cannot be written.
    """
    ends, marks, total, limit = array("q"), bytearray(), 0, np.iinfo(dtype).max
    with _ShardFile(path) as shard:
        for tokens, counted in documents:
            if tokens.size and (int(tokens.max()) > limit or int(tokens.min()) < 0):
                wrong = int(tokens.max()) if int(tokens.max()) > limit else int(tokens.min())
                raise UserError(f"document {len(ends)} of {path.name} holds the token {wrong}\n  allowed: 0 to {limit}")
            shard.write(np.ascontiguousarray(tokens, np.dtype(dtype).newbyteorder("<")).view(np.uint8).data)
            if counted is not None:
                if counted.shape != tokens.shape:
                    raise UserError(
                        f"document {len(ends)} of {path.name} has {tokens.size} tokens and {counted.size} marks"
                    )
                marks += b"\1" * (total - len(marks)) + np.ascontiguousarray(counted, np.uint8).tobytes()
            total += tokens.size
            ends.append(total)
        shard.column("ends", np.array(ends, "<i8"))
        if marks:
            marks += b"\1" * (total - len(marks))
            shard.column("counted", np.frombuffer(marks, np.uint8))
        return shard.finish("tokens", len(ends), total, dtype)


# How a value of a field is stored: the codes of a column "<field>/code", or one for all records of the shard.
MISSING, BYTES, TEXT, JSON, ARRAY, NPY, INT, FLOAT, BOOL, NULL = range(10)
IN_BLOB = frozenset({BYTES, TEXT, JSON, ARRAY, NPY})
_TYPE_NAMES = {BYTES: "bytes", TEXT: "text", JSON: "json", NPY: "array", INT: "int", FLOAT: "float", BOOL: "bool"}


class _FieldWriter:
    """What one field of all records of a shard needs besides its blobs."""

    def __init__(self, name: str, before: int) -> None:
        """`before`: how many records came before the first that has the field."""
        self.name = name
        self.codes = bytearray(before)
        self.sizes = array("Q", bytes(8 * before))
        self.numbers: dict[str, tuple[array[int], array[Any]]] = {
            "int": (array("q"), array("q")),
            "float": (array("q"), array("d")),
        }
        """Records that have a number, and these."""
        self.dtype = ""
        self.inner: tuple[int, ...] = ()
        self.lengths: set[int] = set()
        self.json_type = ""

    def encode(self, number: int, value: Any) -> bytes:
        """Take the value of record `number` up; returns its blob."""
        code, blob = self._encode(number, value)
        self.codes.append(code)
        self.sizes.append(len(blob))
        return blob

    def skip(self) -> None:
        """The record lacks the field."""
        self.codes.append(MISSING)
        self.sizes.append(0)

    def _encode(self, number: int, value: Any) -> tuple[int, bytes]:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bytes | bytearray | memoryview):
            return BYTES, bytes(value)
        if isinstance(value, str):
            return TEXT, value.encode("utf-8", "surrogatepass")
        if value is None:
            return NULL, b""
        if isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63):
            self._keep("int", number, int(value))
            return BOOL if isinstance(value, bool) else INT, b""
        if isinstance(value, float):
            self._keep("float", number, value)
            return FLOAT, b""
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        try:
            blob = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError) as error:
            raise UserError(f'field "{self.name}" of record {number} cannot be stored: {error}') from error
        self.json_type = self.json_type or (
            "list" if isinstance(value, list | tuple) else "mapping" if isinstance(value, dict) else "json"
        )
        return JSON, blob

    def _keep(self, column: str, number: int, value: float) -> None:
        at, values = self.numbers[column]
        at.append(number)
        values.append(value)

    def _encode_array(self, value: npt.NDArray[Any]) -> tuple[int, bytes]:
        """The bytes of an array, if the first axis alone sets it apart from the first array of the field; else a .npy
        file."""
        if value.dtype.hasobject:
            raise UserError(f'field "{self.name}" holds an array of Python objects\n  allowed: numbers, text, bytes')
        dtype, inner = value.dtype.str, value.shape[1:]
        if not self.dtype and value.ndim and value.dtype.names is None and 0 not in inner:
            self.dtype, self.inner = dtype, inner
        if value.ndim and (dtype, inner) == (self.dtype, self.inner) and value.dtype.names is None:
            self.lengths.add(len(value))
            return ARRAY, value.tobytes()
        stream = io.BytesIO()
        np.save(stream, value, allow_pickle=False)
        return NPY, stream.getvalue()

    def describe(self) -> dict[str, Any]:
        """The entry of the footer, for a reader; "code" is None where records differ."""
        present = set(self.codes)
        entry: dict[str, Any] = {"type": self._name_type(present), "code": None}
        if len(present) == 1:
            entry["code"] = present.pop()
        if self.dtype:
            entry |= {"dtype": self.dtype, "inner": list(self.inner)}
        return entry

    def _name_type(self, present: set[int]) -> str:
        codes = present - {MISSING, NULL}
        if codes == {ARRAY}:
            length = str(next(iter(self.lengths))) if len(self.lengths) == 1 else "?"
            return f"{np.dtype(self.dtype).name}[{', '.join([length, *map(str, self.inner)])}]"
        if codes <= {ARRAY, NPY} and codes:
            return "array"
        if codes == {JSON}:
            return self.json_type
        return _TYPE_NAMES[codes.pop()] if len(codes) == 1 else "any" if codes else "null"


def write_record_shard(path: Path, records: Iterable[Record]) -> ShardFacts:
    """Write records as a shard: bytes, text, numbers, None, lists and mappings (as JSON does, so that a tuple becomes a
    list), arrays. A record may lack fields that others have. Blobs are written as they come, numbers at the end.

    Raises UserError for a value that cannot be stored; OSError if the shard cannot be written.
    """
    fields: dict[str, _FieldWriter] = {}
    count = 0
    with _ShardFile(path) as shard:
        for record in records:
            for name in record:
                if name not in fields:
                    fields[name] = _FieldWriter(name, count)
            for name, writer in fields.items():
                if name in record:
                    if blob := writer.encode(count, record[name]):
                        shard.write(blob)
                else:
                    writer.skip()
            count += 1
        stored = {name: writer for name, writer in fields.items() if IN_BLOB & set(writer.codes)}
        if stored:
            sizes = np.stack([np.array(writer.sizes, np.uint64) for writer in stored.values()], axis=1)
            shard.column("ends", np.cumsum(sizes.reshape(-1), dtype=np.uint64))
        described = {}
        for name, writer in fields.items():
            described[name] = {**writer.describe(), "blob": list(stored).index(name) if name in stored else None}
            if described[name]["code"] is None:
                shard.column(f"{name}/code", np.frombuffer(writer.codes, np.uint8))
            for suffix, (at, values) in writer.numbers.items():
                if at:
                    column = np.zeros(count, values.typecode)
                    column[np.array(at)] = values
                    shard.column(f"{name}/{suffix}", column)
        return shard.finish("records", count, fields=described)
