"""Lines of JSON: one object a line, in plain files or in ones that gzip or zstd has compressed.

Invariants:
- Record i is the i-th line that is not blank, over the files in order of their names. A line ends at a newline or at
  the end of its file.
- The index holds the start of each line (8 bytes a line). It is made by one walk over the bytes, in a thread for each
  file, and kept; no line is parsed for it.
- A line is parsed when it is read. One that is no JSON object or no UTF-8 is an error with file, line and byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.content import DataPath
from shardway.data.formats.base import (
    DamagedData,
    DataFile,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    check_ids,
    find_shard,
    need_library,
)
from shardway.data.formats.compressed import SUFFIXES, CompressedFile, Expander
from shardway.data.formats.indexes import IndexArrays, read_sums, use_index
from shardway.data.formats.splits import has_file, list_whole

INDEX = "lines"
"""The name of the index."""

_LINES, _PERHAPS_LINES = ("jsonl", "ndjson"), "json"
_BLOCK_BYTES = 2**23
_RUN_BYTES = 2**22
"""Neighbouring records are read at once up to so many bytes."""

_STREAMS = 16
"""So many compressed files are kept where the last read ended."""

_FIELDS_OF = 16
"""Types of fields are those of so many first records."""

_BOM = b"\xef\xbb\xbf"
_NEWLINE, _SPACE = 10, 32


def is_lines(name: str) -> bool:
    """Whether a file has lines of JSON by its name."""
    return _stem(name).rpartition(".")[2] in _LINES


def is_perhaps_lines(name: str) -> bool:
    """Whether a file has lines of JSON by its name, `.json` included."""
    return is_lines(name) or _stem(name).rpartition(".")[2] == _PERHAPS_LINES


class JsonlRecords(Records):
    """Lines of JSON. Plain files are read at random at no cost but the read itself.

    Compressed files are best read in order, which expands them as it goes. At random, a file of many members or frames
    (bgzip, zstd's seekable format) costs about a quarter of a MiB of expansion a record; a file of one member is
    expanded once into the user's cache folder (`compressed`). In a folder, `.json` files count only where there are no
    others.
    """

    format = "jsonl"

    def __init__(self, parts: FileParts, index: IndexArrays) -> None:
        self.parts = parts
        self._starts: Offsets = index["starts"]
        self._sizes: list[int] = index["sizes"].tolist()
        self._ends: Offsets = np.cumsum(index["lines"], dtype=np.int64)
        self._compressed: dict[int, CompressedFile] = {}
        entries = np.split(index["entries"], np.cumsum(index["entry_counts"])[:-1])
        for number, file in enumerate(parts.files):
            if file.name.endswith(SUFFIXES):
                self._compressed[number] = CompressedFile(parts, number, entries[number], self._sizes[number])
        parts.unpacked_bytes = sum(file.size for file in self._compressed.values() if not file.has_entries)
        self._in_use: list[int] = []
        self._fields: dict[str, str] | None = None

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return has_file(path, is_perhaps_lines)

    @classmethod
    def open(cls, place: DataPath) -> JsonlRecords:
        path = place.path
        matches = is_lines if path.is_dir() and has_file(path, is_lines) else is_perhaps_lines
        root, files = list_whole(place, matches, "lines of JSON")
        if any(file.name.endswith(".zst") for file in files):
            need_library("zstandard", place, "zstd")
        parts = FileParts(root, files, read_sums(root, files))
        try:
            index = use_index(root, INDEX, files, lambda: _make_index(parts, place))
        except DamagedData as error:
            raise place.error(
                f"cannot be indexed: {str(error).splitlines()[0]}", remedy="copy the file again"
            ) from error
        if not len(index["starts"]):
            raise place.error("holds no records: " + ("it has" if len(files) == 1 else "its files have") + " no lines")
        return cls(parts, index)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def fields(self) -> dict[str, str]:
        if self._fields is None:
            found: dict[str, str] = {}
            for record in self.read(range(min(_FIELDS_OF, len(self)))):
                for name, value in record.items():
                    if found.get(name, "null") == "null":
                        found[name] = _name_type(value)
            self._fields = found
        return dict(self._fields)

    def file_ends(self) -> Offsets | None:
        return None if self._compressed else self._ends

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        check_ids(ids, len(self))
        numbers = np.asarray(ids, np.int64)
        order = np.argsort(numbers, kind="stable")
        wanted, places = numbers[order].tolist(), order.tolist()
        found: list[Record] = [{}] * len(wanted)
        at = 0
        while at < len(wanted):
            at = self._read_run(wanted, places, at, found)
        if fields:
            found = [{name: record[name] for name in fields if name in record} for record in found]
        return found

    def own_checks(self) -> str:
        if len(self._compressed) < len(self.parts.files):
            return ""
        is_gzip = all(file.name.endswith(".gz") for file in self.parts.files)
        return "of each gzip member" if is_gzip else "of zstd frames, where their writer made some"

    def extent(self, number: int) -> Extent:
        """Where the line lies; of a compressed file, the member or frame in which it begins or that is before it."""
        check_ids([number], len(self))
        shard, _ = find_shard(self._ends, number)
        start = int(self._starts[number])
        if shard in self._compressed:
            return Extent(self.parts.path(shard), self._compressed[shard].find_entry(start)[0])
        return Extent(self.parts.path(shard), start, self._end(shard, number) - start)

    def _read_run(self, wanted: list[int], places: list[int], at: int, found: list[Record]) -> int:
        """Read `wanted[at]` and those that follow it without a gap; returns the place after them."""
        shard, _ = find_shard(self._ends, wanted[at])
        last_of_file = int(self._ends[shard]) - 1
        first = last = wanted[at]
        start = int(self._starts[first])
        behind = at + 1
        while behind < len(wanted) and wanted[behind] <= min(last + 1, last_of_file):
            if self._end(shard, wanted[behind]) - start > _RUN_BYTES:
                break
            last, behind = wanted[behind], behind + 1
        content = self._read_bytes(shard, start, self._end(shard, last) - start)
        if first == last:
            found[places[at]] = self._parse(shard, first, content)
        else:
            cuts = (self._starts[first : last + 1] - start).tolist()
            cuts.append(len(content))
            for place in range(at, behind):
                number = wanted[place] - first
                found[places[place]] = self._parse(shard, wanted[place], content[cuts[number] : cuts[number + 1]])
            return behind
        for place in range(at + 1, behind):  # the same number again: an object of its own
            found[places[place]] = self._parse(shard, first, content)
        return behind

    def _read_bytes(self, shard: int, start: int, size: int) -> bytes:
        compressed = self._compressed.get(shard)
        if compressed is None:
            return self.parts.read(shard, start, size)
        if shard not in self._in_use:
            self._in_use.append(shard)
            if len(self._in_use) > _STREAMS:
                self._compressed[self._in_use.pop(0)].rest()
        return compressed.read(start, size)

    def _end(self, shard: int, number: int) -> int:
        """The byte after a line and the blank lines behind it."""
        return self._sizes[shard] if number + 1 == self._ends[shard] else int(self._starts[number + 1])

    def _parse(self, shard: int, number: int, content: bytes) -> Record:
        try:
            record = json.loads(content.decode())
        except UnicodeDecodeError as error:
            start = int(self._starts[number])
            what = f"it is not UTF-8 (byte {content[error.start]:#04x}: {error.reason})"
            raise self._damaged(shard, start, start + error.start, what) from error
        except (ValueError, RecursionError) as error:
            start, inner = int(self._starts[number]), 0
            if isinstance(error, json.JSONDecodeError):
                inner = len(content.decode()[: error.pos].encode())
            what = f"it is not JSON ({str(error).partition(': line ')[0]})"
            if start + len(content) >= self._sizes[shard] and not content.endswith(b"\n"):
                what += "; it is the last line and has no newline, so it may be cut off"
            raise self._damaged(shard, start, start + inner, what) from error
        if type(record) is not dict:
            start = int(self._starts[number])
            what = f"it is {_NAMES.get(type(record), 'null')}, and a record is an object"
            raise self._damaged(shard, start, start, what)
        return record

    def _damaged(self, shard: int, start: int, at: int, what: str) -> DamagedData:
        expanded = " (bytes are those of the expanded file)" if shard in self._compressed else ""
        line = self._count_lines(shard, start) + 1
        return self.parts.damaged(shard, at, f"line {line}{expanded}: {what}", f"correct line {line}, or remove it")

    def _count_lines(self, shard: int, end: int) -> int:
        """How many newlines are before a byte."""
        starts = range(0, end, _BLOCK_BYTES)
        return sum(self._read_bytes(shard, at, min(_BLOCK_BYTES, end - at)).count(b"\n") for at in starts)


_NAMES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_TYPES = {str: "text", int: "int", float: "float", bool: "bool", list: "list", dict: "object"}


def _name_type(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _stem(name: str) -> str:
    """A name without the end of a compressed file."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


# --- the index


def _make_index(parts: FileParts, place: DataPath) -> IndexArrays:
    """Arrays: `starts` of all lines, `lines` and `sizes` (expanded) of each file, and `entries` of compressed ones."""
    with ThreadPoolExecutor(min(len(parts.files), len(os.sched_getaffinity(0)))) as threads:
        found = list(threads.map(lambda number: _index_file(parts, number, place), range(len(parts.files))))
    starts, sizes, entries = zip(*found, strict=True)
    return {
        "starts": np.concatenate(starts),
        "lines": np.array([len(each) for each in starts], np.int64),
        "sizes": np.array(sizes, np.int64),
        "entries": np.concatenate([np.array(each, np.int64).reshape(-1, 2) for each in entries]),
        "entry_counts": np.array([len(each) for each in entries], np.int64),
    }


def _index_file(parts: FileParts, number: int, place: DataPath) -> tuple[Offsets, int, list[tuple[int, int]]]:
    file = parts.files[number]
    if not file.name.endswith(SUFFIXES):
        return find_lines(_refuse_other(_blocks(parts.path(number), file), place, file)), file.size, []
    expander = Expander(parts, number)
    starts = find_lines(_refuse_other(expander, place, file))
    return starts, expander.expanded, expander.entries


def _blocks(path: Path, file: DataFile) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        yield from iter(lambda: stream.read(_BLOCK_BYTES), b"")


def _refuse_other(blocks: Iterable[bytes], place: DataPath, file: DataFile) -> Iterator[bytes]:
    """The blocks of a file. Raises UserError if the first of them shows that the file has no lines of JSON."""
    first = True
    for block in blocks:
        if first:
            _check_begin(block.removeprefix(_BOM).lstrip(), place, file)
            first = False
        yield block


def _check_begin(begin: bytes, place: DataPath, file: DataFile) -> None:
    name, lines = file.name, f"{_stem(file.name).rpartition('.')[0]}.{_LINES[1]}"
    if begin.startswith(b"["):
        raise place.error(
            f"has a file that is one list and not one object a line: {name}",
            allowed='lines such as {"text": "..."}',
            remedy=f"jq -c '.[]' {name} > {lines}",
        )
    if begin.startswith(b"{") and begin.partition(b"\n")[0].strip() == b"{":
        raise place.error(
            f"has a file whose first object goes over several lines: {name}",
            allowed='lines such as {"text": "..."}',
            remedy=f"jq -c . {name} > {lines}",
        )
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise place.error(f"has a file that is UTF-16: {name}", remedy=f"iconv -f UTF-16 -t UTF-8 {name} > {lines}")


def find_lines(blocks: Iterable[bytes]) -> Offsets:
    """The first byte of each line that is not blank, of text that comes in blocks; a byte order mark is skipped."""
    found: list[Offsets] = []
    at, start, has_text = 0, 0, False
    for block in blocks:
        if not at and block.startswith(_BOM):
            start, block, at = len(_BOM), block[len(_BOM) :], len(_BOM)
        values = np.frombuffer(block, np.uint8)
        newlines = np.flatnonzero(values == _NEWLINE)
        if not len(newlines):
            has_text = has_text or not _is_blank(block)
            at += len(block)
            continue
        if has_text or not _is_blank(block[: newlines[0]]):
            found.append(np.array([start], np.int64))
        begins = newlines[:-1] + 1
        keep = values[begins] > _SPACE
        for line in np.flatnonzero(~keep & (values[begins] != _NEWLINE)).tolist():
            keep[line] = not _is_blank(block[begins[line] : newlines[line + 1]])
        found.append(begins[keep] + at)
        rest = int(newlines[-1]) + 1
        start, has_text = at + rest, not _is_blank(block[rest:])
        at += len(block)
    if has_text:
        found.append(np.array([start], np.int64))
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def _is_blank(text: bytes) -> bool:
    return not text or text.isspace()
