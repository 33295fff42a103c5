"""HDF5: the datasets of a file that have one row for each record; files with equal datasets follow each other.

A field is a dataset, by its path ("group/images"), whose first axis has the common length: the one that most datasets
have; of two, that of the dataset with most elements. Others are no fields. Numbers and arrays are given as they are,
strings as text, opaque values as bytes, a compound value as a mapping, a value of variable length as an array.

Rows of a dataset without filters are read with pread(2) from where the library says that they lie; so are values of
variable length, by references of which some are kept. Of a compressed one whole chunks are decoded and some are kept,
since the library would decode a chunk again for each row.

What is not detected: a byte that changes in a dataset without fletcher32 or compression, unless the file has checksums
of `shardway data`. Damage to the tables of a file is what the library makes of it: an error, wrong values, or in rare
cases a call that does not return. Checksums are compared before it.

Invariants:
- A file is opened without locks, for reading, by each process for itself: a handle is never used across a fork.
- A dataset that takes values from other files (virtual or external) is refused: the library fills what is missing.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath
from shardway.data.formats.base import (
    OPEN_FILES,
    DamagedData,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    check_ids,
    find_shard,
    list_files,
    need_library,
)
from shardway.data.formats.hdf5_heap import REFERENCE, BadHeap, GlobalHeap
from shardway.data.formats.indexes import read_sums, use_index
from shardway.data.kinds import Hdf5Kind
from shardway.errors import JobError, UserError, list_some

Rows = npt.NDArray[Any]

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
CHUNK_CACHE_BYTES = 2**26
"""Decoded chunks are kept up to so many bytes."""
MOST_CHUNKS = 2**25
"""Where chunks lie is kept for up to so many of a dataset; one with more is read by the library."""
READ_RUN_BYTES = 2**17
"""Neighbouring rows are read at once up to so many bytes."""
_QUICK_BYTES = 2**16
"""A chunk of fewer bytes is decoded about as fast as any record is read."""
_FARTHEST = 2**62
"""A greater offset, which damage can make, is past the end of each file too, and no 64-bit sum with it overflows."""
_REFERENCES = 2**12
"""References to values of variable length are read and kept by so many."""

_LIBRARY_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError)
"""What h5py raises for a file that is not what it should be."""


@dataclass(frozen=True)
class H5Column:
    """A dataset as a field: its path in the file; how a row is given ("number", "array", "text", "bytes", "mapping" or
    "ragged"); the shape of a row; and the name of the dtype of an element, of a ragged row too."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> str:
        """The type of the field."""
        if self.kind == "number":
            return self.dtype.rstrip("0123456789").removeprefix("u")
        if self.kind == "ragged":
            return f"{self.dtype}[...]"
        if self.kind == "array":
            return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return "list" if self.shape else self.kind


class Hdf5Records(Records):
    """The rows of the datasets of HDF5 files."""

    format = "hdf5"

    def __init__(self, place: DataPath, parts: FileParts, columns: Sequence[H5Column], rows: Sequence[int]) -> None:
        """`rows`: those of each file."""
        self.parts, self._place = parts, place
        self._columns = {column.name: column for column in columns}
        self._ends: Offsets = np.cumsum(rows, dtype=np.int64)
        self._handles: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._datasets: dict[tuple[int, int, str], _Dataset] = {}
        self._chunks = _ChunkCache()
        self._heaps: dict[int, GlobalHeap] = {}

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a file with the signature or a suffix of HDF5, a folder with such a file, or such a pattern."""
        if path.is_dir():
            with suppress(OSError):
                return any(_is_named(found.name) for found in path.iterdir())
        return _is_named(path.name) or _has_signature(path)

    @classmethod
    def open(cls, place: DataPath) -> Hdf5Records:
        """The records of files. Raises UserError for a file that is not HDF5 or truncated, files with other datasets
        than the first, a filter that is not installed, and no rows."""
        h5py = need_library("h5py", place, "HDF5")
        root, files = list_files(place, _is_named, "HDF5 files")
        parts = FileParts(root, files, read_sums(root, files))
        with _opened(h5py, place, parts, 0) as file:
            found = _list_datasets(h5py, file)
            columns, rows = _choose_columns(place, found)
            for column in columns:
                _check_dataset(h5py, place, file[column.name])
        lengths = [rows]
        if len(files) > 1:
            made = use_index(root, "hdf5", files, lambda: {"rows": _count_rows(h5py, place, parts, columns)})
            lengths = made["rows"].tolist()
        if not sum(lengths):
            raise place.error("has no rows: " + _list_shapes(found))
        return cls(place, parts, columns, lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": OrderedDict(), "_datasets": {}, "_chunks": _ChunkCache(), "_heaps": {}}

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fields(self) -> dict[str, str]:
        """The datasets with one row for each record."""
        return {name: column.type for name, column in self._columns.items()}

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These rows. Raises DamagedData for a chunk that its filter refuses, naming file, dataset and rows."""
        numbers = np.asarray(ids, np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= len(self)):
            check_ids(ids, len(self))
        found: list[Record] = [{} for _ in range(len(numbers))]
        names = [name for name in self._columns if not fields or name in fields]
        unique, places = np.unique(numbers, return_inverse=True)
        which = np.searchsorted(self._ends, unique, side="right")
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            rows = unique[here] - (int(self._ends[number - 1]) if number else 0)
            wanted = np.flatnonzero((places >= here[0]) & (places <= here[-1]))
            picks = list(zip(wanted.tolist(), (places[wanted] - here[0]).tolist(), strict=True))
            for name in names:
                self._fill(number, self._columns[name], rows, picks, found)
        return found

    def slow_in_random_order(self) -> str:
        datasets = [self._use(0, name) for name in self._columns]
        decoded = [(each.block_rows * each.size, len(self) * each.size) for each in datasets if each.block_rows > 1]
        largest = max((chunk for chunk, _ in decoded), default=0)
        is_slow = sum(every for _, every in decoded) > CHUNK_CACHE_BYTES and largest >= _QUICK_BYTES
        return f"a chunk of {largest / 2**20:.1f} MiB is decoded for a record" if is_slow else ""

    def own_checks(self) -> str:
        datasets = [self._use(0, name).handle for name in self._columns]
        summed = all(each.fletcher32 and not each.dtype.hasobject for each in datasets)
        return "of each chunk (fletcher32)" if summed else ""

    def extent(self, number: int) -> Extent:
        """Where the row of the first field lies; of a compressed one, its chunk."""
        shard, row = find_shard(self._ends, number)
        dataset = self._use(shard, next(iter(self._columns)))
        if dataset.row_bytes:
            starts = dataset.find_rows(np.array([row]))
            if starts[0] >= 0:
                return Extent(self.parts.path(shard), int(starts[0]), dataset.row_bytes)
        return Extent(self.parts.path(shard), *dataset.find_chunk(row))

    def _fill(
        self, number: int, column: H5Column, rows: Offsets, picks: Sequence[tuple[int, int]], found: list[Record]
    ) -> None:
        """Set a field of found[place] to rows[row], for each (place, row) of `picks`; `rows` rise."""
        dataset = self._use(number, column.name)
        values = self._read_rows(number, dataset, rows)
        give = _GIVE[column.kind]
        if column.kind == "ragged" and dataset.element is not None and len(picks) == len(rows):
            give = _GIVE["number"]  # each is a copy already
        if column.kind == "number":
            values = np.asarray(values).tolist()
        for place, row in picks:
            try:
                found[place][column.name] = give(values[row])
            except UnicodeDecodeError as error:
                what = f'dataset "{column.name}", row {int(rows[row])}, is not UTF-8 text: {error.reason}'
                raise self.parts.damaged(number, dataset.find_chunk(int(rows[row]))[0], what) from error

    def _read_rows(self, number: int, dataset: _Dataset, rows: Offsets) -> Rows | list[Any]:
        """Rows of a dataset of a file, rising."""
        if dataset.element is not None:
            return self._read_values(number, dataset, rows)
        if dataset.row_bytes:
            starts = dataset.find_rows(rows)
            if (starts >= 0).all():
                return self._read_parts(number, dataset, starts)
        try:
            if dataset.block_rows > 1:
                return self._read_blocks(number, dataset, rows)
            return dataset.read_points(rows) if dataset.points else self._read_runs(dataset, rows)
        except JobError:
            raise
        except _LIBRARY_ERRORS as error:
            if len(rows) > 1 and not dataset.block_rows > 1:
                return [self._read_rows(number, dataset, rows[at : at + 1])[0] for at in range(len(rows))]
            raise self._describe(number, dataset, int(rows[0]), int(rows[-1]), error) from error

    def _read_parts(self, number: int, dataset: _Dataset, starts: Offsets) -> Rows:
        """Rows that lie uncompressed in the file; neighbours are read at once."""
        size = dataset.row_bytes
        most = max(1, READ_RUN_BYTES // size)
        cuts = [0, *(np.flatnonzero(np.diff(starts) != size) + 1).tolist(), len(starts)]
        found, offsets = [], starts.tolist()
        for first, last in pairwise(cuts):
            for at in range(first, last, most):
                found.append(self.parts.read(number, offsets[at], size * (min(at + most, last) - at)))
        content = found[0] if len(found) == 1 else b"".join(found)
        rows = np.frombuffer(content, dataset.dtype).reshape(len(starts), *dataset.row_shape)
        return _make_native(rows)

    def _read_values(self, number: int, dataset: _Dataset, rows: Offsets) -> list[Any]:
        """Values of variable length: bytes of a text, arrays of others."""
        if number not in self._heaps:
            if len(self._heaps) >= OPEN_FILES:
                self._heaps.clear()
            self._heaps[number] = GlobalHeap(self.parts, number)
        heap, element = self._heaps[number], dataset.element
        width = 1 if element is None else element.itemsize
        native = None if element is None else element.newbyteorder("=")
        missing = set(rows[dataset.find_rows(rows) < 0].tolist()) if dataset.fill else ()
        found: list[Any] = []
        for row, (length, address, index) in zip(
            rows.tolist(), self._read_references(number, dataset, rows), strict=True
        ):
            try:
                value = dataset.fill if row in missing else heap.read(address, index, length * width)
            except BadHeap as error:
                raise self.parts.damaged(
                    number, error.offset, f'dataset "{dataset.name}", row {row}: {error}'
                ) from error
            found.append(
                bytes(value).split(b"\0", 1)[0] if dataset.is_text else np.array(np.frombuffer(value, element), native)
            )
        return found

    def _read_references(self, number: int, dataset: _Dataset, rows: Offsets) -> list[Any]:
        """The references of rows, which rise."""
        found: list[Any] = []
        height = dataset.height
        firsts = rows - rows % height % _REFERENCES
        cuts = [0, *(np.flatnonzero(np.diff(firsts)) + 1).tolist(), len(rows)]
        for begin, end in pairwise(cuts):
            if begin == end:
                break
            first = int(firsts[begin])
            key = (number, dataset.name, first)
            block = self._chunks.get(key)
            if block is None:
                count = min(_REFERENCES, height - first % height, dataset.rows - first)
                start = int(dataset.find_rows(np.array([first]))[0])
                content = bytes(count * REFERENCE.itemsize)  # of rows that were never written
                if start >= 0:
                    content = self.parts.read(number, start, len(content))
                block = np.frombuffer(content, REFERENCE)
                self._chunks.put(key, block)
            found += block[rows[begin:end] - first].tolist()
        return found

    def _read_blocks(self, number: int, dataset: _Dataset, rows: Offsets) -> list[Any]:
        """Rows out of whole chunks."""
        found: list[Any] = []
        blocks = rows // dataset.block_rows
        for block in np.unique(blocks).tolist():
            start = block * dataset.block_rows
            key = (number, dataset.name, block)
            decoded = self._chunks.get(key)
            if decoded is None:
                stop = min(start + dataset.block_rows, dataset.rows)
                try:
                    decoded = _make_native(dataset.handle[start:stop])
                except JobError:
                    raise
                except _LIBRARY_ERRORS as error:
                    raise self._describe(number, dataset, start, stop - 1, error) from error
                self._chunks.put(key, decoded)
            found.extend(decoded[rows[blocks == block] - start])
        return found

    def _read_runs(self, dataset: _Dataset, rows: Offsets) -> Rows:
        """Rows by slices of neighbours."""
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        found = [dataset.handle[int(run[0]) : int(run[-1]) + 1] for run in np.split(rows, cuts) if len(run)]
        return _make_native(np.concatenate(found))

    def _describe(self, number: int, dataset: _Dataset, first: int, last: int, error: Exception) -> DamagedData:
        rows = f"row {first}" if first == last else f"rows {first} to {last}"
        what = f'dataset "{dataset.name}", {rows}, cannot be read: {error}'
        return self.parts.damaged(number, dataset.find_chunk(first)[0], what)

    def _use(self, number: int, name: str) -> _Dataset:
        """A dataset of a file, opened by this process."""
        key = (os.getpid(), number)
        if key not in self._handles:
            self._open_file(key)
        self._handles.move_to_end(key)
        if (*key, name) not in self._datasets:
            try:
                handle = self._handles[key][name]
                self._datasets[(*key, name)] = _Dataset(self._h5py, name, handle, self._handles[key].userblock_size)
            except JobError:
                raise
            except _LIBRARY_ERRORS as error:
                raise self.parts.damaged(number, 0, f'dataset "{name}" cannot be opened: {error}') from error
            dataset, rows = self._datasets[(*key, name)], int(np.diff(self._ends, prepend=0)[number])
            if dataset.rows != rows:
                del self._datasets[(*key, name)]
                what = f'dataset "{name}" has {dataset.rows} rows, and had {rows} when the data were opened'
                raise self.parts.damaged(number, 0, what)
        return self._datasets[(*key, name)]

    def _open_file(self, key: tuple[int, int]) -> None:
        own = [known for known in self._handles if known[0] == key[0]]
        if len(own) >= OPEN_FILES:
            for known in [known for known in self._datasets if known[:2] == own[0]]:
                del self._datasets[known]
            self._handles.pop(own[0]).close()
        try:
            self._handles[key] = _open_library_file(self._h5py, self.parts, key[1])
        except JobError:
            raise
        except _LIBRARY_ERRORS as error:
            raise self.parts.damaged(key[1], 0, f"HDF5 cannot open it: {error}") from error

    @property
    def _h5py(self) -> Any:
        return need_library("h5py", self._place, "HDF5")


class _Dataset:
    """A dataset of an open file and the way its rows are read."""

    def __init__(self, h5py: Any, name: str, handle: Any, userblock: int) -> None:
        self.name, self.handle, self._h5py = name, handle, h5py
        self.rows: int = handle.shape[0]
        base, inner = handle.dtype.subdtype or (handle.dtype, ())
        self.dtype: np.dtype[Any] = base
        self.row_shape = (*handle.shape[1:], *inner)
        size = self.size = base.itemsize * prod(self.row_shape)
        chunks = handle.chunks
        self.height: int = chunks[0] if chunks else self.rows
        """Rows of a chunk; all if there are none."""
        stored = handle.id.get_type()
        filters = handle.id.get_create_plist().get_nfilters()
        plain = not handle.dtype.hasobject and not filters and not userblock and size > 0
        plain = plain and stored.equal(h5py.h5t.py_create(handle.dtype))
        self.element: np.dtype[Any] | None = None
        """The elements of values of variable length that are read from the heap; of a text, bytes."""
        self.is_text = False
        if handle.dtype.hasobject and handle.ndim == 1 and not filters and not userblock:
            self.element, self.is_text = _find_element(h5py, handle, stored)
        self.fill = b""
        """The text in rows of chunks that were never written."""
        if self.element is not None:
            plain, size = True, REFERENCE.itemsize
            self.fill = bytes(handle.fillvalue) if self.is_text and handle.fillvalue else b""
        self.row_bytes = 0
        """Bytes of a row that lies in the file as it is in memory (of a reference to it, if it has an `element`); 0:
        the library reads it."""
        self._start = -1
        self._chunk_starts: Offsets | None = None
        if chunks is None and handle.id.get_space_status() == h5py.h5d.SPACE_STATUS_ALLOCATED:
            start = handle.id.get_offset()
            self._start = -1 if start is None else min(int(start), _FARTHEST)
            self.row_bytes = size if plain and self._start >= 0 else 0
        elif plain and chunks and chunks[1:] == handle.shape[1:] and self.rows // chunks[0] < MOST_CHUNKS:
            self.row_bytes = size
            self._chunk_starts = np.full(-(-self.rows // chunks[0]), -2, np.int64)
        if not self.row_bytes:
            self.element = None
        whole = chunks[0] if chunks and not handle.dtype.hasobject else 1
        self.block_rows = whole if whole * size <= CHUNK_CACHE_BYTES // 2 else 1
        """Rows of a chunk that is decoded and kept; 1: rows are read one by one."""
        self.points = handle.dtype.hasobject and handle.ndim == 1

    def find_rows(self, rows: Offsets) -> Offsets:
        """The byte where each row begins; -1 for a row of a chunk that was never written."""
        if self._chunk_starts is None:
            return self._start + rows * self.row_bytes
        height = self.height
        chunks = rows // height
        for chunk in np.unique(chunks[self._chunk_starts[chunks] == -2]).tolist():
            self._chunk_starts[chunk] = self._ask_chunk(chunk * height)[0]
        starts = self._chunk_starts[chunks]
        return np.where(starts < 0, -1, starts + rows % height * self.row_bytes)

    def find_chunk(self, row: int) -> tuple[int, int]:
        """(offset, size) of the chunk of a row; (0, 0) if it is not known."""
        if self.handle.chunks is None:
            return max(0, self._start), 0
        offset, size = self._ask_chunk(row)
        return max(0, offset), size

    def read_points(self, rows: Offsets) -> Rows:
        """Values of variable length, at once."""
        found = np.empty(len(rows), self.handle.dtype)
        space = self.handle.id.get_space()
        space.select_elements(rows.astype(np.uint64).reshape(-1, 1))
        memory = self._h5py.h5s.create_simple((len(rows),))
        self.handle.id.read(memory, space, found, self._h5py.h5t.py_create(self.handle.dtype))
        return found

    def _ask_chunk(self, row: int) -> tuple[int, int]:
        try:
            info = self.handle.id.get_chunk_info_by_coord((row, *(0 for _ in self.handle.shape[1:])))
        except _LIBRARY_ERRORS:
            return -1, 0
        return (-1, 0) if info.byte_offset is None else (min(int(info.byte_offset), _FARTHEST), int(info.size))


def _find_element(h5py: Any, handle: Any, stored: Any) -> tuple[np.dtype[Any] | None, bool]:
    """The dtype of the elements of values of variable length that lie in the heap as they are in memory, and whether it
    is text; None for others."""
    settings = h5py.h5i.get_file_id(handle.id).get_create_plist()
    if settings.get_sizes() != (8, 8):
        return None, False
    if h5py.check_string_dtype(handle.dtype) is not None:
        return np.dtype(np.uint8), True
    base = np.dtype(h5py.check_vlen_dtype(handle.dtype) or object)
    usable = base.kind in "biufc" and stored.get_super().equal(h5py.h5t.py_create(base))
    return (base if usable else None), False


class _ChunkCache:
    """Decoded chunks and references, those used last, up to CHUNK_CACHE_BYTES."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, str, int], Rows] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[int, str, int]) -> Rows | None:
        """A chunk, if it is kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: tuple[int, str, int], rows: Rows) -> None:
        """Keep a chunk; forget those not used for longest."""
        self._kept[key] = rows
        self._bytes += rows.nbytes
        while self._bytes > CHUNK_CACHE_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def _make_native(rows: Rows) -> Rows:
    """The same numbers in the byte order of this machine."""
    if rows.dtype.isnative or rows.dtype.names:
        return rows
    return rows.astype(rows.dtype.newbyteorder("="))


def _give_text(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return [_give_text(part) for part in row]
    return bytes(row).decode() if isinstance(row, bytes) else str(row)


def _give_bytes(row: Any) -> Any:
    return [_give_bytes(part) for part in row] if isinstance(row, np.ndarray) else bytes(row)


def _give_mapping(row: Any) -> Any:
    if isinstance(row, np.ndarray) and row.ndim:
        return [_give_mapping(part) for part in row]
    parts = {name: row[name] for name in row.dtype.names}
    return {
        name: _give_mapping(part) if part.dtype.names else _give_text(part) if part.dtype.kind == "S" else part.tolist()
        for name, part in ((name, np.asarray(part)[()]) for name, part in parts.items())
    }


_GIVE: dict[str, Callable[[Any], Any]] = {
    "number": lambda row: row,
    "array": lambda row: row.copy(),
    "ragged": lambda row: _make_native(np.array(row)),
    "text": _give_text,
    "bytes": _give_bytes,
    "mapping": _give_mapping,
}


# --- files


def _is_named(name: str) -> bool:
    return name.endswith(SUFFIXES)


def _has_signature(path: Path) -> bool:
    """Whether the signature lies at byte 0, or after a user block of 512, 1024 or 2048 bytes."""
    magic = Hdf5Kind.magic
    try:
        with path.open("rb") as stream:
            head = stream.read(2048 + len(magic))
    except OSError:
        return False
    return any(head.startswith(magic, at) for at in (0, 512, 1024, 2048))


def _open_library_file(h5py: Any, parts: FileParts, number: int) -> Any:
    """A file for reading, without locks; each block that the library reads is compared with its checksum, if it has."""
    if not parts.sums:
        try:
            return h5py.File(parts.path(number), "r", locking=False)
        except OSError as error:
            if "locking" not in str(error):
                raise  # else this process has it open with locks, and HDF5 refuses to open it otherwise
    return h5py.File(parts.stream(number), "r")


@contextmanager
def _opened(h5py: Any, place: DataPath, parts: FileParts, number: int) -> Iterator[Any]:
    """A file while it is looked at. Raises UserError for anything that the library says about it."""
    path = parts.path(number)
    if not parts.files[number].size:
        raise place.error(f"has an empty file: {path} has 0 bytes", "HDF5 files")
    try:
        with _open_library_file(h5py, parts, number) as file:
            yield file
    except UserError:
        raise
    except DamagedData as error:
        raise place.error(str(error).splitlines()[0], remedy="copy the file again from where it came") from error
    except _LIBRARY_ERRORS as error:
        if "truncated" in str(error):
            what = f"has a truncated file, or one that is still written: {path}: {error}"
        elif "signature not found" in str(error):
            what = f"has a file that is not HDF5, or whose first bytes are damaged: {path}"
        else:
            what = f"has a file that HDF5 cannot read: {path}: {error}"
        raise place.error(what, "HDF5 files", "copy the file again from where it came") from error


def _list_datasets(h5py: Any, file: Any) -> list[Any]:
    """The datasets of a file, by path; links to other files are not followed."""
    found: list[Any] = []

    def visit(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.append((item.name.lstrip("/"), item, _describe_dataset(h5py, item)))

    file.visititems(visit)
    return sorted(found, key=lambda entry: str(entry[0]))


def _describe_dataset(h5py: Any, dataset: Any) -> H5Column | None:
    """The field that a dataset can be; None for one without rows or with values that are not read."""
    if not dataset.shape:
        return None
    name, (base, inner) = dataset.name.lstrip("/"), dataset.dtype.subdtype or (dataset.dtype, ())
    shape = (*dataset.shape[1:], *inner)
    ragged = h5py.check_vlen_dtype(base)
    if h5py.check_string_dtype(base) is not None:
        return H5Column(name, "text", shape, "text")
    if ragged is not None:
        usable = not shape and np.dtype(ragged).kind in "biufc"
        return H5Column(name, "ragged", shape, np.dtype(ragged).name) if usable else None
    if base.names is not None:
        return None if base.hasobject else H5Column(name, "mapping", shape, str(base))
    if base.kind == "V":
        return H5Column(name, "bytes", shape, "bytes")
    if base.kind not in "biufc":
        return None
    return H5Column(name, "array" if shape else "number", shape, base.name)


def _choose_columns(place: DataPath, found: Sequence[Any]) -> tuple[list[H5Column], int]:
    """The datasets whose first axis has the common length, and that length."""
    fitting = [(dataset, column) for _, dataset, column in found if column is not None]
    filled = [(dataset, column) for dataset, column in fitting if dataset.shape[0]] or fitting
    if not filled:
        raise place.error("has no dataset with rows that can be read: " + _list_shapes(found))
    counts = Counter(dataset.shape[0] for dataset, _ in filled)
    most = max(counts.values())
    _, rows = max((dataset.size, dataset.shape[0]) for dataset, _ in filled if counts[dataset.shape[0]] == most)
    return [column for dataset, column in filled if dataset.shape[0] == rows], rows


def _list_shapes(found: Sequence[Any]) -> str:
    shapes = [f'"{name}" {dataset.dtype} {list(dataset.shape or ())}' for name, dataset, _ in found]
    return f"it holds {list_some(shapes, 8)}" if shapes else "it holds no datasets"


def _check_dataset(h5py: Any, place: DataPath, dataset: Any) -> None:
    """Raise UserError for a dataset whose values lie in other files, for a filter that is not installed, and for values
    of variable length in the other byte order that are not read from the heap: h5py 3.16 does not swap their bytes."""
    if dataset.is_virtual or dataset.external:
        raise place.error(
            f'has a dataset "{dataset.name}" with values in other files',
            remedy="name those files, or write the dataset into one file (h5repack)",
        )
    settings = dataset.id.get_create_plist()
    for number in range(settings.get_nfilters()):
        code, _, _, name = settings.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            with suppress(ImportError):
                importlib.import_module("hdf5plugin")
        if not h5py.h5z.filter_avail(code):
            raise place.error(
                f'has a dataset "{dataset.name}" compressed with filter {code} ({name.decode(errors="replace")}), which'
                " is not installed",
                remedy="pip install hdf5plugin, or write it again with gzip (h5repack -f GZIP=4)",
            )
    ragged = h5py.check_vlen_dtype(dataset.dtype)
    is_swapped = isinstance(ragged, np.dtype) and not ragged.isnative and dataset.shape[0] > 0
    if is_swapped and _Dataset(h5py, dataset.name, dataset, dataset.file.userblock_size).element is None:
        raise place.error(
            f'has a dataset "{dataset.name}" of variable length in the other byte order ({ragged.str}), which h5py'
            " reads wrong where there is a filter or a user block",
            remedy="write it again without them, or in the byte order of this machine",
        )


def _count_rows(h5py: Any, place: DataPath, parts: FileParts, columns: Sequence[H5Column]) -> Offsets:
    """The rows of each file. Raises UserError for one whose datasets are not those of the first."""
    counts = []
    for number in range(len(parts.files)):
        with _opened(h5py, place, parts, number) as file:
            rows = set()
            for column in columns:
                dataset = file.get(column.name)
                is_equal = isinstance(dataset, h5py.Dataset) and _describe_dataset(h5py, dataset) == column
                if not is_equal:
                    other = f"{dataset.dtype} {list(dataset.shape)}" if isinstance(dataset, h5py.Dataset) else "missing"
                    raise place.error(
                        f'has files with unequal datasets: "{column.name}" of {parts.path(number)} is {other}',
                        f"{column.type} in each row, as in {parts.path(0)}",
                        "name files that were written alike",
                    )
                _check_dataset(h5py, place, dataset)
                rows.add(dataset.shape[0])
        if len(rows) > 1:
            raise place.error(
                f"has a file whose datasets have unequal lengths, {sorted(rows)}: {parts.path(number)}",
                remedy="write it again, or leave it out",
            )
        counts.append(rows.pop())
    return np.array(counts, np.int64)
