"""Shardway's own format: a folder of shards (`shard_file`) and shards.json (`shard_manifest`); holds records of named
fields or documents of tokens. This module reads them.

Invariants:
- Opening reads the manifest and the sizes of the files; the index of a shard is read when the shard is touched first.
- A block of records is compared with its checksum when it is touched first, once in a process; of tokens see
  `TokenStore`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats import shard_file
from shardway.data.formats.base import (
    BLOCK_BYTES,
    OPEN_FILES,
    DamagedData,
    DataFile,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    Sums,
    check_ids,
    describe_file,
)
from shardway.data.formats.npy import parse_npy
from shardway.data.formats.shard_file import (
    DamagedShard,
    ShardFacts,
    ShardFooter,
    parse_footer,
    read_shard_sums,
)
from shardway.data.formats.shard_manifest import FORMAT, ShardManifest, find_folder, find_shard_kind, read_manifest
from shardway.data.formats.shard_repair import find_folder_damage
from shardway.data.formats.token_store import TokenFile, Tokens, TokenStore
from shardway.errors import JobError, list_some

COLUMN_BYTES = 256 * 2**20
"""A reader keeps columns of about so many bytes; those that were used least recently make room."""
MANY_RECORDS = 24
"""So many records of one shard are read as columns; fewer are read one by one, which costs less then (measured)."""
RUN_BYTES = 2**20
"""Neighbours of at most so many bytes are read at once."""


# --- reading shards


class ShardParts(FileParts):
    """The shards of a folder: the index and the checksums of each are read when it is touched first."""

    def __init__(self, root: Path, files: Sequence[DataFile], shards: Sequence[ShardFacts]) -> None:
        super().__init__(root, files)
        self.shards = tuple(shards)
        self.sums = _ShardSums(self)
        self._footers: dict[int, ShardFooter] = {}
        self._loaded: dict[int, Sums] = {}
        self._unchecked: dict[int, int] = {}
        """How many blocks of a shard were not compared with their checksums yet."""
        self._columns: OrderedDict[tuple[int, str], npt.NDArray[Any]] = OrderedDict()
        self._column_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_footers": {}, "_columns": OrderedDict(), "_column_bytes": 0, "_loaded": {}, "_unchecked": {}}
        return {**super().__getstate__(), **kept}

    def list_keys(self) -> list[str]:
        """What the manifest says of the content of each shard, so that none is read for it."""
        return [f"{shard.bytes}-{shard.xxh3}" for shard in self.shards]

    def check_copy(self, number: int, copied: Path, sums: Sequence[int]) -> None:
        name = self.path(number)
        try:
            file = DataFile(copied.name, self.files[number].size, 0)
            known = ShardParts(copied.parent, [file], [self.shards[number]]).load_sums(0)
        except DamagedData as error:
            raise DamagedData(str(error).replace(str(copied), str(name))) from error
        for block, (found, expected) in enumerate(zip(sums, known.tolist(), strict=True)):
            if found != expected:
                raise DamagedShard(name, block * BLOCK_BYTES, "checksum mismatch of the MiB from there on")

    def footer(self, number: int) -> ShardFooter:
        """Where everything lies in a shard. Raises DamagedData."""
        found = self._footers.get(number)
        if found is None:
            try:
                found = parse_footer(self.path(number), self.open(number))
            except OSError as error:
                raise JobError(f"{self.path(number)} cannot be read: {error.strerror}") from error
            if found.facts.xxh3 != self.shards[number].xxh3:
                offset = found.sums.offset + found.sums.size
                raise DamagedShard(self.path(number), offset, "this is another shard than the manifest names")
            self._footers[number] = found
        return found

    def load_sums(self, number: int) -> Sums:
        """The checksums of a shard's blocks: those that it holds, and from where checksums and footer lie those of
        what is there, since these vouch for each other. Raises DamagedData."""
        found = self._loaded.get(number)
        if found is None:
            footer, path, descriptor = self.footer(number), self.path(number), self._descriptor(number)
            kept = read_shard_sums(path, descriptor, footer)
            whole = footer.covered // BLOCK_BYTES
            start = whole * BLOCK_BYTES
            end = os.pread(descriptor, self.files[number].size - start, start)
            covered = end[: footer.covered - start]
            blocks = (end[at : at + BLOCK_BYTES] for at in range(0, len(end), BLOCK_BYTES))
            found = np.array([*kept[:whole].tolist(), *map(xxhash.xxh3_64_intdigest, blocks)], np.uint64)
            if covered and xxhash.xxh3_64_intdigest(covered) != int(kept[whole]):
                found[whole] ^= np.uint64(1)  # another than what is there: the block is damaged, and no other
            self._loaded[number] = found
        return found

    def read(self, number: int, offset: int, size: int) -> bytes:
        if self.has_unchecked(number):
            self.check(number, offset, size)
        try:
            found = os.pread(self._descriptor(number), size, offset)
        except OSError:
            found = b""
        # The other goes on after a short read, or says what is wrong.
        return found if len(found) == size else super().read(number, offset, size)

    def check(self, number: int, offset: int, size: int) -> None:
        sums = self.load_sums(number)
        checked = self._checked.setdefault(number, np.zeros(len(sums), np.bool_))
        for block in range(offset // BLOCK_BYTES, min(-(-(offset + size) // BLOCK_BYTES), len(sums))):
            if not checked[block]:
                self._check_block(number, block)
                checked[block] = True
                self._unchecked[number] = self._unchecked.get(number, len(sums)) - 1

    def open(self, number: int) -> int:
        """The descriptor of a shard; it stays open until OPEN_FILES others were."""
        try:
            return self._descriptor(number)
        except OSError as error:
            raise JobError(f"{self.path(number)} cannot be read: {error.strerror}") from error

    def has_unchecked(self, number: int) -> bool:
        """Whether a shard has blocks that were not compared with their checksums yet."""
        return self._unchecked.get(number) != 0

    def column(self, number: int, name: str) -> npt.NDArray[Any]:
        """An array of a shard, kept. Raises DamagedData."""
        key = number, name
        found = self._columns.get(key)
        if found is not None:
            self._columns.move_to_end(key)
            return found
        found = self.read_column(number, name)
        if name == "ends":  # with a zero in front, blob i is from ends[i] to ends[i + 1]
            found = np.concatenate([np.zeros(1, np.int64), found.astype(np.int64)])
        self._columns[key] = found
        self._column_bytes += found.nbytes
        while self._column_bytes > COLUMN_BYTES and len(self._columns) > 1:
            self._column_bytes -= self._columns.popitem(last=False)[1].nbytes
        return found

    def read_column(self, number: int, name: str) -> npt.NDArray[Any]:
        """An array of a shard as it is stored. Raises DamagedData."""
        where = self.footer(number).columns[name]
        return np.frombuffer(self.read(number, where.offset, where.size), where.dtype)

    def read_many(self, number: int, begins: Offsets, ends: Offsets) -> list[bytes]:
        """The bytes of parts of a shard, in this order, checked; neighbours are read at once."""
        found: list[bytes] = []
        starts, stops = begins.tolist(), ends.tolist()
        if len(starts) > 1 and not (begins[1:] == ends[:-1]).any():
            return [self.read(number, start, stop - start) for start, stop in zip(starts, stops, strict=True)]
        first = 0
        while first < len(starts):
            last, start = first + 1, starts[first]
            while last < len(starts) and starts[last] == stops[last - 1] and stops[last] - start <= RUN_BYTES:
                last += 1
            run = self.read(number, start, stops[last - 1] - start)
            found += [run[starts[part] - start : stops[part] - start] for part in range(first, last)]
            first = last
        return found

    def find_damage(self) -> Iterator[str]:
        """Every damaged part of the manifest and the shards, as a sentence."""
        yield from map(str, find_folder_damage(self.root))


class _ShardSums(list[Sums]):
    """The checksums of each shard, read when they are asked for."""

    def __init__(self, parts: ShardParts) -> None:
        super().__init__()
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts.shards)

    def __getitem__(self, number: Any) -> Any:
        return self._parts.load_sums(range(len(self))[number])

    def __iter__(self) -> Iterator[Sums]:
        return (self[number] for number in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _ShardSums, (self._parts,)


def open_shards(place: DataPath, kind: str) -> tuple[ShardManifest, ShardParts]:
    """The manifest and the files of a folder. Raises UserError for shards that are missing or have another size."""
    manifest = read_manifest(place)
    if manifest.kind != kind:
        remedy = f'set data.kind = "{"tokens" if manifest.kind == "tokens" else "shards"}"'
        raise place.error(f"holds {manifest.kind}", allowed=kind, remedy=remedy)
    root = find_folder(place.path)
    files, missing, remedy = [], [], "copy them again, or `shardway data repair` with a whole copy"
    for shard in manifest.shards:
        try:
            files.append(describe_file(root, shard.name))
        except FileNotFoundError:
            missing.append(shard.name)
    if missing:
        raise place.error(f"lacks {len(missing)} of its shards: {list_some(missing, 5)}", remedy=remedy)
    wrong = [
        f"{file.name} (has {file.size} bytes, should have {shard.bytes})"
        for file, shard in zip(files, manifest.shards, strict=True)
        if file.size != shard.bytes
    ]
    if wrong:
        raise place.error(f"has shards that were cut or changed: {list_some(wrong, 5)}", remedy=remedy)
    return manifest, ShardParts(root, files, manifest.shards)


# --- records


class ShardRecords(Records):
    """Records that Shardway has written."""

    format: ClassVar[str] = "shards"
    parts: ShardParts

    def __init__(self, manifest: ShardManifest, parts: ShardParts) -> None:
        self.manifest, self.parts = manifest, parts
        counts = np.array([shard.samples for shard in manifest.shards], np.int64)
        self._ends: Offsets = np.cumsum(counts)
        self._firsts: Offsets = self._ends - counts

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return find_shard_kind(path) == "records"

    @classmethod
    def open(cls, place: DataPath) -> ShardRecords:
        return cls(*open_shards(place, "records"))

    def __len__(self) -> int:
        return self.manifest.samples

    @property
    def fields(self) -> dict[str, str]:
        return dict(self.manifest.fields)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def more_facts(self) -> dict[str, Any]:
        return {"described": dict(self.manifest.described)}

    def file_ends(self) -> Offsets:
        return self._ends

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        numbers = np.asarray(ids, np.int64)
        if not len(numbers):
            return []
        if numbers.min() < 0 or numbers.max() >= len(self):
            check_ids(numbers.tolist(), len(self))
        which = np.searchsorted(self._ends, numbers, side="right")
        inner = numbers - self._firsts[which]
        if (which == which[0]).all():
            return self._read_shard(int(which[0]), inner, fields)
        found: list[Record] = [{}] * len(numbers)
        shards, counts = np.unique(which, return_counts=True)
        for shard in shards[counts >= MANY_RECORDS].tolist():
            here = np.flatnonzero(which == shard)
            for place, record in zip(here.tolist(), self._read_shard(shard, inner[here], fields), strict=True):
                found[place] = record
                which[place] = -1
        self._read_few(which.tolist(), inner.tolist(), fields, found)
        return found

    def extent(self, number: int) -> Extent:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        footer = self.parts.footer(shard)
        if "ends" not in footer.columns:
            return Extent(self.parts.path(shard), 0)
        ends, blobs = self.parts.column(shard, "ends"), footer.blobs
        first = (number - int(self._firsts[shard])) * blobs
        return Extent(self.parts.path(shard), int(ends[first]), int(ends[first + blobs] - ends[first]))

    def find_damage(self) -> Iterator[str]:
        """Every damaged part of the manifest and the shards; checksums cover all bytes, so no record is read."""
        return self.parts.find_damage()

    @classmethod
    def find_damage_unopened(cls, path: Path) -> Iterator[str]:
        """Every damaged part of the manifest and the shards of a folder."""
        folder = find_folder(path)
        return map(str, find_folder_damage(folder) if folder.is_dir() else ())

    def _read_few(self, which: list[int], inner: list[int], wanted: Sequence[str], found: list[Record]) -> None:
        """Records one by one into their places; not those whose shard is -1. As `_read_shard`, without the cost of
        arrays."""
        parts, opened, pread = self.parts, dict[int, _OpenShard](), os.pread
        for place, (number, record) in enumerate(zip(which, inner, strict=True)):
            if number < 0:
                continue
            shard = opened.get(number)
            if shard is None:
                if len(opened) >= OPEN_FILES // 2:  # those that were opened last stay open
                    opened.clear()
                shard = opened[number] = self._open_shard(number, wanted)
            bounds, first, begin, whole = shard.bounds, record * shard.blobs, 0, b""
            if shard.high:
                begin = bounds[first + shard.low]
                size = bounds[first + shard.high] - begin
                if shard.unchecked:
                    parts.check(number, begin, size)
                try:
                    whole = pread(shard.descriptor, size, begin)
                except OSError:
                    whole = b""
                if len(whole) != size:
                    whole = parts.read(number, begin, size)
            values: Record = {}
            for name, code, slot, entry in shard.entries:
                blob = whole
                if slot >= 0 and not shard.is_single:
                    blob = whole[bounds[first + slot] - begin : bounds[first + slot + 1] - begin]
                stored = parts.column(number, f"{name}/code").item(record) if code is None else code
                if stored == shard_file.BYTES:
                    values[name] = blob
                elif stored == shard_file.INT:
                    values[name] = parts.column(number, f"{name}/int").item(record)
                elif stored != shard_file.MISSING:
                    values[name] = self._decode_one(number, np.array([record]), name, entry, stored, [blob])[0]
            found[place] = values

    def _open_shard(self, shard: int, wanted: Sequence[str]) -> _OpenShard:
        footer, parts = self.parts.footer(shard), self.parts
        entries = []
        for name, entry in footer.fields.items():
            if not wanted or name in wanted:
                entries.append((name, entry["code"], -1 if entry["blob"] is None else entry["blob"], entry))
        slots = [slot for _, _, slot, _ in entries if slot >= 0]
        bounds = parts.column(shard, "ends").data if slots else memoryview(b"")
        low, high = (min(slots), max(slots) + 1) if slots else (0, 0)
        descriptor = parts.open(shard)
        return _OpenShard(
            bounds, descriptor, parts.has_unchecked(shard), footer.blobs, low, high, high - low == 1, entries
        )

    def _read_shard(self, shard: int, inner: Offsets, wanted: Sequence[str]) -> list[Record]:
        """Records of one shard."""
        footer = self.parts.footer(shard)
        names = [name for name in footer.fields if name in wanted] if wanted else list(footer.fields)
        slots = [footer.fields[name]["blob"] for name in names if footer.fields[name]["blob"] is not None]
        blobs = self._read_blobs(shard, inner, min(slots), max(slots) + 1, footer.blobs) if slots else {}
        columns = [self._decode(shard, inner, name, footer, blobs) for name in names]
        if len(columns) == 1 and not any(_ABSENT is value for value in columns[0]):
            name = names[0]
            return [{name: value} for value in columns[0]]
        rows = zip(*columns, strict=True) if columns else (() for _ in inner)
        records: list[Record] = [dict(zip(names, row, strict=True)) for row in rows]
        if any(_may_lack(footer.fields[name]) for name in names):
            records = [{name: value for name, value in row.items() if value is not _ABSENT} for row in records]
        return records

    def _read_blobs(self, shard: int, inner: Offsets, low: int, high: int, blobs: int) -> dict[int, list[bytes]]:
        """The blobs in slots low .. high of records: one part of the file for each record."""
        bounds = self.parts.column(shard, "ends")
        at = inner * blobs
        begins, ends = bounds[at + low], bounds[at + high]
        whole = self.parts.read_many(shard, begins, ends)
        if high - low == 1:
            return {low: whole}
        cuts = [(bounds[at + slot] - begins).tolist() for slot in range(low, high + 1)]
        return {
            low + number: [blob[first:last] for blob, first, last in zip(whole, firsts, lasts, strict=True)]
            for number, (firsts, lasts) in enumerate(itertools.pairwise(cuts))
        }

    def _decode(
        self, shard: int, inner: Offsets, name: str, footer: ShardFooter, blobs: Mapping[int, list[bytes]]
    ) -> list[Any]:
        """The values of a field; _ABSENT for a record that lacks it."""
        entry = footer.fields[name]
        if entry["code"] is not None:
            return self._decode_one(shard, inner, name, entry, entry["code"], blobs.get(entry["blob"], []))
        codes = self.parts.column(shard, f"{name}/code")[inner]
        values: list[Any] = [_ABSENT] * len(inner)
        for code in np.unique(codes).tolist():
            here = np.flatnonzero(codes == code)
            kept = blobs.get(entry["blob"], [])
            parts = [kept[place] for place in here.tolist()] if kept else []
            for place, value in zip(
                here.tolist(), self._decode_one(shard, inner[here], name, entry, code, parts), strict=True
            ):
                values[place] = value
        return values

    def _decode_one(
        self, shard: int, inner: Offsets, name: str, entry: Mapping[str, Any], code: int, blobs: list[bytes]
    ) -> list[Any]:
        """The values of a field for records that store it in one way."""
        if code == shard_file.BYTES:
            return blobs
        if code == shard_file.ARRAY:
            dtype, inner_shape = np.dtype(entry["dtype"]), tuple(entry["inner"])
            arrays = (np.frombuffer(blob, dtype).copy() for blob in blobs)
            return [array.reshape(-1, *inner_shape) for array in arrays] if inner_shape else list(arrays)
        if code in _DECODERS:
            return [_DECODERS[code](blob) for blob in blobs]
        if code in (shard_file.MISSING, shard_file.NULL):
            return [_ABSENT if code == shard_file.MISSING else None] * len(inner)
        values: list[Any] = self.parts.column(shard, f"{name}/{'float' if code == shard_file.FLOAT else 'int'}")[
            inner
        ].tolist()
        return list(map(bool, values)) if code == shard_file.BOOL else values


class _OpenShard(NamedTuple):
    """What reading single records of a shard needs: the bounds of its blobs, the blobs of a record that are wanted
    (`low` to `high`), and (name, code, blob or -1, entry) of each wanted field."""

    bounds: memoryview
    descriptor: int
    unchecked: bool
    blobs: int
    low: int
    high: int
    is_single: bool
    entries: list[tuple[str, int | None, int, Mapping[str, Any]]]


_ABSENT = object()
"""Stands for a field that a record lacks."""


def _decode_text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


_DECODERS: dict[int, Callable[[bytes], Any]] = {
    shard_file.TEXT: _decode_text,
    shard_file.JSON: lambda blob: json.loads(_decode_text(blob)),
    shard_file.NPY: parse_npy,
}


def _may_lack(entry: Mapping[str, Any]) -> bool:
    return entry["code"] is None or entry["code"] == shard_file.MISSING


# --- tokens


@dataclass(eq=False)
class ShardTokens(TokenStore):
    """The documents of token shards."""

    manifest: ShardManifest = field(kw_only=True)

    def read_ends(self) -> Offsets:
        starts = np.cumsum([0, *(file.tokens for file in self.files)])
        read = (_shards_of(self).read_column(number, "ends") for number in range(len(self.files)))
        ends = [inner + start for inner, start in zip(read, starts.tolist(), strict=False)]
        return np.concatenate([np.zeros(0, np.int64), *ends])

    def make_fingerprint(self, *parts: object) -> str:
        """That of the manifest, which is over all content, and of `parts`."""
        return fingerprint(FORMAT, self.manifest.fingerprint, *parts)


@dataclass(frozen=True)
class AllCounted(TokenFile):
    """The marks of a shard in which every token counts, among shards in which some do not."""

    def open(self) -> Tokens:
        return _make_ones(1 << max(0, self.tokens - 1).bit_length())[: self.tokens]

    def read(self, parts: FileParts, number: int, first: int, count: int) -> Tokens:
        return np.ones(count, np.uint8)


@functools.lru_cache(maxsize=1)
def _make_ones(count: int) -> Tokens:
    return np.ones(count, np.uint8)


def open_token_shards(place: DataPath) -> ShardTokens:
    """The documents of a folder of token shards. Raises UserError if it is not one, or files are missing or cut."""
    manifest, parts = open_shards(place, "tokens")
    root, dtype = parts.root, np.dtype(manifest.dtype or "uint8").newbyteorder("<").str
    files = tuple(TokenFile(root / shard.name, dtype, 0, shard.tokens) for shard in manifest.shards)
    counted = tuple(
        AllCounted(root / shard.name, "|u1", 0, shard.tokens)
        if shard.counted is None
        else TokenFile(root / shard.name, "|u1", shard.counted, shard.tokens)
        for shard in manifest.shards
    )
    if not files:
        raise place.error("holds no shards")
    some = any(shard.counted is not None for shard in manifest.shards)
    return ShardTokens(files, counted if some else (), parts, manifest=manifest)


def _shards_of(store: TokenStore) -> ShardParts:
    parts = store.parts
    if not isinstance(parts, ShardParts):
        raise TypeError("a store of shards has their parts")
    return parts
