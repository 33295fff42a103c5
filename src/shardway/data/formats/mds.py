"""Shards of MosaicML Streaming (MDS, version 2): a folder with index.json and the shards that it lists.

A shard is: the number n of its samples (uint32), n + 1 offsets from the start of the file (uint32), a JSON text, and
the samples. A sample is: a length (uint32) for each column without a fixed size, then the values of all columns.

Invariants:
- `open` reads index.json and the sizes of the shards; a shard is read when a record of it is asked for.
- Nothing in a file is executed: a pickled column is listed and never decoded.
- A compressed shard whose raw file is not there is decompressed once into the user's cache folder, written beside its
  final name, compared with its size and hash in index.json, and renamed.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import (
    DataFile,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    check_ids,
    describe_file,
    find_shard,
    need_library,
)
from shardway.data.formats.indexes import read_sums
from shardway.data.formats.mds_columns import (
    ENCODINGS,
    MdsColumn,
    MdsLayout,
    describe_type,
    find_decoder,
    find_size,
    make_layout,
)
from shardway.errors import JobError, UserError, list_some

INDEX = "index.json"
READ_GAP_BYTES = 4096
"""Two records are read at once if no more bytes lie between them."""
READ_RUN_BYTES = 2**17
"""Neighbours are read at once up to so many bytes, more than one record only."""
TABLE_BYTES = 2**28
"""The offsets of shards are kept up to so many bytes; those of further shards are read for each record."""
PIECE_BYTES = 2**20


class MdsRecords(Records):
    """The samples of an MDS folder, in the order of index.json. An image is given as its JPEG or PNG bytes."""

    format = "mds"

    def __init__(self, place: DataPath, folder: Path, shards: Sequence[_MdsShard], files: Sequence[DataFile]) -> None:
        self._place, self._shards = place, tuple(shards)
        self._layouts = [make_layout(shard.columns) for shard in shards]
        self._ends: Offsets = np.cumsum([shard.samples for shard in shards], dtype=np.int64)
        self.parts = FileParts(folder, files, read_sums(folder, files))
        self.parts.unpacked_bytes = sum(
            shard.raw.size for number, shard in enumerate(shards) if self._is_packed(number)
        )
        self._unpacked: FileParts | None = None
        self._tables: dict[int, npt.NDArray[np.uint32]] = {}

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a folder with an index.json that lists shards of this format, or that file."""
        try:
            with _find_index(path).open("rb") as stream:
                head = stream.read(2**16)
        except OSError:
            return False
        return b'"shards"' in head and b'"mds"' in head

    @classmethod
    def open(cls, place: DataPath) -> MdsRecords:
        """The records of a folder. Raises UserError for a damaged index, and shards that are missing or too short."""
        index = _find_index(place.path)
        shards = _read_shards(place, index)
        files = _find_files(place, index.parent, shards)
        if not sum(shard.samples for shard in shards):
            raise place.error(f"has no samples: {INDEX} lists {len(shards)} shards without any")
        _check_columns(place, shards)
        return cls(place, index.parent, shards, files)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}, "_unpacked": None, "_layouts": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layouts = [make_layout(shard.columns) for shard in self._shards]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fields(self) -> dict[str, str]:
        """The columns of the first shard; "pickle" or "unknown" for one that is never decoded."""
        return {column.name: describe_type(column.encoding) for column in self._shards[0].columns}

    @property
    def fingerprint(self) -> str:
        """xxh3-128 over the names, sizes, samples and hashes of the raw shards: the same whether compressed or not."""
        listed = (
            part for shard in self._shards for part in (shard.raw.name, shard.raw.size, shard.samples, shard.raw.hashes)
        )
        return fingerprint(self.format, *listed)

    def file_ends(self) -> Offsets | None:
        return None if any(map(self._is_packed, range(len(self._shards)))) else self._ends

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These samples. Columns that are pickled or of an unknown encoding are left out; raises UserError if one of
        them is among `fields`."""
        numbers = np.asarray(ids, np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= len(self)):
            check_ids(ids, len(self))
        found: list[Record] = [{} for _ in range(len(numbers))]
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        which = np.searchsorted(self._ends, ordered, side="right")
        cuts = np.flatnonzero(np.diff(which)) + 1
        for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ordered)], strict=True):
            if first < last:
                shard = int(which[first])
                start = int(self._ends[shard]) - self._shards[shard].samples
                self._read_shard(shard, ordered[first:last] - start, order[first:last].tolist(), fields, found)
        return found

    def extent(self, number: int) -> Extent:
        """Where a sample lies in its raw shard."""
        shard, row = find_shard(self._ends, number)
        begins, ends = self._find_rows(shard, np.array([row]))
        return Extent(self._parts_of(shard).path(shard), begins[0], ends[0] - begins[0])

    def index_files(self) -> list[str]:
        return [INDEX]

    def own_checks(self) -> str:
        return "of each shard" if all(shard.raw.hashes for shard in self._shards) else ""

    def find_damage(self) -> Iterator[str]:
        """Besides what is read (compressed shards are all decompressed to the cache for it): the hashes of index.json
        over each file; one that is not known here is named."""
        yield from super().find_damage()
        unknown: dict[str, int] = {}
        for number, shard in enumerate(self._shards):
            expected = shard.zip if shard.zip and self._is_packed(number) else shard.raw
            try:
                hashes = {algorithm: make for algorithm in expected.hashes if (make := _find_hash(algorithm))}
                found = _hash_file(self.parts.path(number), hashes)
            except OSError as error:
                yield f"{self.parts.path(number)}: {error.strerror}"
                continue
            for algorithm in expected.hashes.keys() - hashes.keys():
                unknown[algorithm] = unknown.get(algorithm, 0) + 1
            for algorithm, digest in found.items():
                if digest != expected.hashes[algorithm].lower():
                    yield (
                        f"{self.parts.path(number)} is damaged somewhere from byte 0 on: {INDEX} says {algorithm} "
                        f"{expected.hashes[algorithm]}, and that of the file is {digest}"
                    )
        for algorithm, shards in sorted(unknown.items()):
            yield f"{self.parts.root / INDEX}: {shards} shards have a hash {algorithm}, which is not known here"

    def _read_shard(
        self, shard: int, rows: Offsets, places: Sequence[int], fields: Sequence[str], found: list[Record]
    ) -> None:
        """Fill found[places] with rows (ascending) of a shard; neighbours are read at once."""
        parts, layout = self._parts_of(shard), self._layouts[shard]
        wanted = self._choose(layout, fields)
        begins, ends = self._find_rows(shard, rows)
        count, first = len(begins), 0
        while first < count:
            start, end, last = begins[first], ends[first], first + 1
            while last < count and begins[last] <= end + READ_GAP_BYTES and ends[last] - start <= READ_RUN_BYTES:
                end, last = ends[last], last + 1
            content = parts.read(shard, start, end - start)
            for at in range(first, last):
                try:
                    found[places[at]] = layout.decode(content, begins[at] - start, ends[at] - start, wanted)
                except (ValueError, KeyError, IndexError, TypeError, struct.error, RecursionError) as error:
                    raise parts.damaged(
                        shard, begins[at], f"sample {int(rows[at])} of the shard cannot be read: {error}"
                    ) from error
            first = last

    def _choose(self, layout: MdsLayout, fields: Sequence[str]) -> frozenset[str] | None:
        """The columns to decode; None: all that can be."""
        if not fields:
            return None
        for column in layout.columns:
            if column.name in fields and find_decoder(column.encoding) is None:
                raise UserError(_refuse_column(self._place, column))
        return frozenset(fields)

    def _find_rows(self, shard: int, rows: Offsets) -> tuple[list[int], list[int]]:
        """Where rows of a shard begin and end."""
        table = self._tables.get(shard)
        if table is None and sum(kept.nbytes for kept in self._tables.values()) < TABLE_BYTES:
            table = self._tables[shard] = self._read_table(shard)
        if table is not None:
            return table[rows].tolist(), table[rows + 1].tolist()
        parts, size = self._parts_of(shard), self._shards[shard].raw.size
        pairs = [struct.unpack("<2I", parts.read(shard, 4 + 4 * row, 8)) for row in rows.tolist()]
        for row, (begin, end) in zip(rows.tolist(), pairs, strict=True):
            if not begin <= end <= size:
                raise parts.damaged(shard, 4 + 4 * row, f"sample {row} goes from byte {begin} to {end} of {size}")
        return [begin for begin, _ in pairs], [end for _, end in pairs]

    def _read_table(self, shard: int) -> npt.NDArray[np.uint32]:
        """The n + 1 offsets of a shard, checked against index.json."""
        parts, samples, size = self._parts_of(shard), self._shards[shard].samples, self._shards[shard].raw.size
        head = np.frombuffer(parts.read(shard, 0, 4 * (samples + 2)), "<u4")
        count, table = int(head[0]), head[1:].astype(np.uint32)
        if count != samples:
            raise parts.damaged(shard, 0, f"it says that it has {count} samples, and {INDEX} says {samples}")
        falls = np.flatnonzero(table[1:] < table[:-1])
        if len(falls):
            row = int(falls[0])
            raise parts.damaged(
                shard, 8 + 4 * row, f"sample {row} ends at {table[row + 1]}, before it begins ({table[row]})"
            )
        if int(table[0]) < head.nbytes:
            raise parts.damaged(shard, 4, f"the first sample begins at {table[0]}, inside the list of offsets")
        if int(table[-1]) != size:
            raise parts.damaged(
                shard, 4 + 4 * samples, f"the last sample ends at {table[-1]}, and the file has {size} bytes"
            )
        return table

    # --- compressed shards

    def _is_packed(self, shard: int) -> bool:
        return self.parts.files[shard].name != self._shards[shard].raw.name

    def _parts_of(self, shard: int) -> FileParts:
        """What reads the raw bytes of a shard, by the same number."""
        if not self._is_packed(shard):
            return self.parts
        if self._unpacked is None:
            folder = self.parts.find_unpacked()
            if folder is None:
                raise JobError(self._refuse_cache("this account has no cache folder for it"))
            names = [_name_unpacked(self.parts.root, file) for file in self.parts.files]
            sizes = [shard.raw.size for shard in self._shards]
            files = [DataFile(name, size, 0) for name, size in zip(names, sizes, strict=True)]
            self._unpacked = FileParts(folder / "mds", files)
        path = self._unpacked.path(shard)
        if shard not in self._tables and not _has_size(path, self._shards[shard].raw.size):
            self._unpack(shard, path)
        return self._unpacked

    def _unpack(self, shard: int, path: Path) -> None:
        """Decompress a shard to a path. Raises DamagedData if it does not give what index.json promises."""
        raw, family = self._shards[shard].raw, self._shards[shard].compression.partition(":")[0]
        stream = self.parts.stream(shard)
        hashes = {algorithm: make() for algorithm in raw.hashes if (make := _find_hash(algorithm))}
        temporary, written = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp", 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                for piece in self._decompress(shard, family, stream):
                    written += len(piece)
                    if written > raw.size:
                        break
                    file.write(piece)
                    for digest in hashes.values():
                        digest.update(piece)
            if written != raw.size:
                more = "more" if written > raw.size else f"{written}"
                what = f"it decompresses to {more} bytes, and {INDEX} says {raw.size}"
                raise self.parts.damaged(shard, min(stream.tell(), self.parts.files[shard].size), what)
            for algorithm, digest in hashes.items():
                if digest.hexdigest() != raw.hashes[algorithm].lower():
                    raise self.parts.damaged(shard, 0, f"what it decompresses to has another {algorithm} than {INDEX}")
            os.replace(temporary, path)
        except OSError as error:
            raise JobError(self._refuse_cache(f"{path} cannot be written: {error.strerror}")) from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _decompress(self, shard: int, family: str, stream: io.RawIOBase) -> Iterator[bytes]:
        """The raw bytes in pieces. Raises DamagedData."""
        errors: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
        reader: Any
        if family == "zstd":
            zstandard = need_library("zstandard", self._place, "zstd-compressed MDS")
            reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
            errors = (*errors, zstandard.ZstdError)
        else:
            reader = gzip.GzipFile(fileobj=stream) if family == "gz" else bz2.BZ2File(stream)
        while True:
            try:
                piece = reader.read(PIECE_BYTES)
            except OSError as error:
                if error.errno is not None:
                    raise
                raise self._fail_unpack(shard, stream, error) from error
            except errors as error:
                raise self._fail_unpack(shard, stream, error) from error
            if not piece:
                return
            yield piece

    def _fail_unpack(self, shard: int, stream: io.RawIOBase, error: Exception) -> JobError:
        return self.parts.damaged(
            shard, stream.tell(), f"it cannot be decompressed, after the bytes before that: {error}"
        )

    def _refuse_cache(self, what: str) -> str:
        return (
            f"the compressed shards of {self.parts.root} cannot be decompressed: {what}\n"
            "  To do: decompress them beside themselves (zstd -d, gunzip -k); a raw shard is read where it lies."
        )


# --- index.json


@dataclass(frozen=True)
class _MdsFile:
    """A file that index.json lists, with its hashes in hex by algorithm."""

    name: str
    size: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class _MdsShard:
    """What index.json says of a shard; `compression` and `zip` are empty for one without."""

    samples: int
    columns: tuple[MdsColumn, ...]
    raw: _MdsFile
    compression: str
    zip: _MdsFile | None


_UNPACKED_BY_US = ("zstd", "gz", "bz2")


def _find_index(path: Path) -> Path:
    return path if path.name == INDEX else path / INDEX


def _read_shards(place: DataPath, index: Path) -> list[_MdsShard]:
    allowed = f"a folder with the {INDEX} that MDSWriter writes last, beside the shards"
    try:
        content = index.read_bytes()
    except OSError as error:
        splits = sorted(found.parent.name for found in place.path.glob(f"*/{INDEX}"))
        remedy = f"name one of its folders: {list_some(splits, 5)}" if splits else ""
        raise place.error(f"has no {INDEX} that can be read: {error.strerror}", allowed, remedy) from error
    try:
        listed = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise place.error(f"is damaged: {INDEX} is not UTF-8 at byte {error.start}", allowed) from error
    except ValueError as error:
        raise place.error(f"is damaged: {INDEX} is not JSON: {error}", allowed) from error
    except RecursionError as error:
        raise place.error(f"is damaged: {INDEX} is nested too deeply", allowed) from error
    facts = _Facts(place, INDEX, listed)
    if facts.get("version", int) != 2:
        raise place.error(f"is MDS of version {listed['version']}, as {INDEX} says", "version 2")
    shards = enumerate(facts.get("shards", list))
    return [_read_shard_facts(_Facts(place, f"shard {number} of {INDEX}", shard)) for number, shard in shards]


def _read_shard_facts(facts: _Facts) -> _MdsShard:
    form, version = facts.get("format", str), facts.get("version", int)
    if form != "mds" or version != 2:
        facts.refuse(f'is of format "{form}", version {version}', 'format "mds", version 2')
    names, encodings, sizes = (facts.get(f"column_{part}", list) for part in ("names", "encodings", "sizes"))
    if not len(names) == len(encodings) == len(sizes) or not all(isinstance(text, str) for text in names + encodings):
        facts.refuse("does not have a name, an encoding and a size for each column")
    if not all(size is None or (isinstance(size, int) and size >= 0) for size in sizes):
        facts.refuse(f"has sizes of columns {sizes}", "whole numbers or null")
    columns = tuple(
        MdsColumn(name, encoding, size or 0) for name, encoding, size in zip(names, encodings, sizes, strict=True)
    )
    packed = facts.value.get("zip_data")
    compression = facts.value.get("compression") or ""
    if packed is not None and not isinstance(compression, str):
        facts.refuse(f"has the compression {compression!r}")
    samples, raw = facts.get("samples", int), facts.get_file("raw_data")
    if samples and 4 * (samples + 2) > raw.size:
        facts.refuse(f"has {samples} samples in {raw.size} bytes, too few for their offsets")
    return _MdsShard(
        samples=samples,
        columns=columns,
        raw=raw,
        compression=compression if packed is not None else "",
        zip=facts.get_file("zip_data") if packed is not None else None,
    )


@dataclass(frozen=True)
class _Facts:
    """A mapping of index.json with checks; `where` names it in an error."""

    place: DataPath
    where: str
    value: Any

    def get(self, name: str, kind: type) -> Any:
        """The entry of a name. Raises UserError unless it is there and of that type, and not negative."""
        if not isinstance(self.value, dict):
            self.refuse("is not a mapping")
        if name not in self.value:
            self.refuse(f'lacks "{name}"')
        found = self.value[name]
        if not isinstance(found, kind) or isinstance(found, bool) or (isinstance(found, int) and found < 0):
            self.refuse(f'has {str(found)[:60]!r} as "{name}"')
        return found

    def get_file(self, name: str) -> _MdsFile:
        """A file that lies in the folder. Raises UserError for a path that leads out of it."""
        facts = _Facts(self.place, f"{name} of {self.where}", self.get(name, dict))
        basename, hashes = facts.get("basename", str), facts.value.get("hashes") or {}
        if not basename or os.path.isabs(basename) or ".." in Path(basename).parts:
            facts.refuse(f'names the file "{basename}", which is not in the folder')
        if not isinstance(hashes, dict) or not all(isinstance(digest, str) for digest in hashes.values()):
            facts.refuse("has hashes that are not text")
        return _MdsFile(basename, facts.get("bytes", int), hashes)

    def refuse(self, what: str, allowed: str = "what MDSWriter writes") -> NoReturn:
        """Raise UserError."""
        raise self.place.error(f"is damaged or not MDS: {self.where} {what}", allowed)


def _find_files(place: DataPath, folder: Path, shards: Sequence[_MdsShard]) -> list[DataFile]:
    """The file of each shard: its raw one, or the compressed one where that is missing or too short."""
    files, missing = [], []
    for shard in shards:
        raw = _describe(folder, shard.raw.name)
        packed = (
            _describe(folder, shard.zip.name) if shard.zip and (raw is None or raw.size != shard.raw.size) else None
        )
        file, expected = (packed, shard.zip) if packed and shard.zip else (raw, shard.raw)
        if file is None:
            missing.append(shard.raw.name if shard.zip is None else f"{shard.raw.name} or {shard.zip.name}")
        elif file.size != expected.size:
            raise place.error(
                f"has a damaged shard: {folder / file.name} has {file.size} bytes, and {INDEX} says {expected.size}",
                remedy="copy the shard again from where it came",
            )
        elif expected is shard.zip and shard.compression.partition(":")[0] not in _UNPACKED_BY_US:
            raise place.error(
                f'has shards compressed with "{shard.compression}", which Shardway does not decompress',
                allowed=", ".join(_UNPACKED_BY_US),
                remedy=f"decompress each beside itself, as {shard.raw.name}: a raw shard is read where it lies",
            )
        else:
            files.append(file)
    if any(file.name.endswith(".zstd") for file in files):
        need_library("zstandard", place, "zstd-compressed MDS")
    if missing:
        raise place.error(
            f"lacks {len(missing)} of the {len(shards)} shards that {INDEX} lists: {list_some(missing, 5)}",
            remedy="copy them from where the others came",
        )
    return files


def _check_columns(place: DataPath, shards: Sequence[_MdsShard]) -> None:
    """Raise UserError for a size that does not fit an encoding, and if nothing can be decoded."""
    for columns in dict.fromkeys(shard.columns for shard in shards):
        for column in columns:
            size = find_size(column.encoding)
            if size and column.size != size:
                raise place.error(
                    f'is damaged: {INDEX} says that column "{column.name}" ({column.encoding}) has {column.size} bytes',
                    allowed=f"{size} bytes",
                )
        if not any(find_decoder(column.encoding) for column in columns):
            raise (
                UserError(_refuse_column(place, columns[0])) if columns else place.error("has samples without columns")
            )


def _refuse_column(place: DataPath, column: MdsColumn) -> str:
    if column.encoding == "pkl":
        what = f'has a pickled column "{column.name}", and Shardway executes nothing that a file holds'
    else:
        what = f'has a column "{column.name}" of the unknown encoding "{column.encoding}"'
    remedy = "name other columns, or write it again as json, ndarray, str or bytes"
    return str(place.error(what, allowed=f"{', '.join(ENCODINGS)}", remedy=remedy))


def _describe(folder: Path, name: str) -> DataFile | None:
    try:
        return describe_file(folder, name)
    except OSError:
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _name_unpacked(root: Path, file: DataFile) -> str:
    return f"{fingerprint(root.resolve(), file.name, file.size, file.mtime_ns)}.mds"


def _find_hash(algorithm: str) -> Callable[[], Any] | None:
    if algorithm in xxhash.algorithms_available:
        return getattr(xxhash, algorithm, None)
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_"):
        return lambda: hashlib.new(algorithm, usedforsecurity=False)
    return None


def _hash_file(path: Path, hashes: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The digests of a file in hex, by algorithm."""
    digests = {algorithm: make() for algorithm, make in hashes.items()}
    if digests:
        with path.open("rb", buffering=0) as stream:
            for piece in iter(lambda: stream.read(PIECE_BYTES), b""):
                for digest in digests.values():
                    digest.update(piece)
    return {algorithm: str(digest.hexdigest()) for algorithm, digest in digests.items()}
