"""Rows of named columns in groups: what Parquet's row groups and Arrow's record batches have in common.

Invariants:
- Rows are numbered over the files in their order, and in a file over its groups.
- All files have the same fields; the index is made only once that is checked.
- A group is decoded, or mapped, as a whole; some are kept. Only the columns that are asked for are decoded.
"""

from __future__ import annotations

import itertools
import os
import random
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardway.data.content import DataPath
from shardway.data.formats.arrow_values import Take, WrongValue, make_take, name_type
from shardway.data.formats.base import (
    RECORDS_AT_ONCE,
    DamagedData,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    check_ids,
)
from shardway.data.formats.indexes import IndexArrays
from shardway.errors import list_some

GROUP_BYTES = 2**26
"""Decoded groups are kept up to so many bytes, and two of them always. When there are more, one at random goes: batches
in a random order touch most groups again and again, and would find none of them if the oldest went."""

_MAPPED_GROUPS = 2048
"""So many groups that lie in mapped files are kept: they take no memory but what describes them."""


@dataclass(frozen=True)
class RowGroups:
    """The groups of rows (Parquet's row groups, Arrow's record batches) of one file."""

    rows: list[int]
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class _LoadedGroup:
    takes: dict[str, Take]
    size: int


class ColumnRecords(Records):
    """Rows in groups that are decoded, or mapped, as a whole; some are kept."""

    open_files: ClassVar[int]
    """The most files that are kept open."""

    def __init__(self, parts: FileParts, index: IndexArrays, schema: Any) -> None:
        self.parts, self.schema = parts, schema
        self._names = frozenset(schema.names)
        self._files: list[int] = index["files"].tolist()
        self._offsets: list[int] = index["offsets"].tolist()
        self._sizes: list[int] = index["sizes"].tolist()
        self._ends: Offsets = np.cumsum(index["rows"], dtype=np.int64)
        self._starts: list[int] = [0, *self._ends.tolist()]
        self._first_groups = np.searchsorted(index["files"], np.arange(len(parts.files))).tolist()
        self._loaded: OrderedDict[tuple[int, tuple[str, ...]], _LoadedGroup] = OrderedDict()
        self._loaded_bytes = 0
        self._drawn = random.Random(0)
        self._opened: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": OrderedDict(), "_loaded_bytes": 0, "_opened": OrderedDict()}

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def fields(self) -> dict[str, str]:
        return {field.name: name_type(field.type) for field in self.schema}

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        check_ids(ids, len(self))
        return self._read_rows(np.asarray(ids, np.int64), fields)

    def extent(self, number: int) -> Extent:
        """The group of rows that a record is in."""
        check_ids([number], len(self))
        return self._extent_of_row(number)

    def find_damage(self) -> Iterator[str]:
        """Everything that is found wrong when all is read: a group that cannot be decoded is one sentence."""
        yield from self.parts.find_damage()
        names = tuple(self.schema.names)
        for group in range(len(self._offsets)):
            try:
                self._load(group, names)
            except DamagedData as error:
                yield str(error).splitlines()[0]
                continue
            end = self._starts[group + 1]
            for first in range(self._starts[group], end, RECORDS_AT_ONCE):
                numbers = range(first, min(first + RECORDS_AT_ONCE, end))
                try:
                    self._read_rows(np.array(numbers), names)
                except DamagedData:
                    yield from self._find_damaged_rows(numbers)

    @abstractmethod
    def _decode(self, number: int, group: int, names: Sequence[str]) -> tuple[dict[str, Take], int]:
        """Columns of a group (numbered in its file), and the bytes of memory that they take. Raises what pyarrow
        raises."""

    @abstractmethod
    def _open_file(self, number: int) -> Any:
        """What reads a file. Raises what pyarrow raises."""

    def _file(self, number: int) -> Any:
        if self._process != os.getpid():
            self._opened, self._process = OrderedDict(), os.getpid()
        key = number, self.parts.version(number)
        if key not in self._opened:
            size = self.parts.path(number).stat().st_size
            if size != self.parts.files[number].size:
                what = f"the file has {size} bytes, and {self.parts.files[number].size} were expected"
                raise self.parts.damaged(number, min(size, self.parts.files[number].size), what)
            if len(self._opened) >= self.open_files:
                self._opened.popitem(last=False)
            self._opened[key] = self._open_file(number)
        self._opened.move_to_end(key)
        return self._opened[key]

    def _read_rows(self, numbers: Offsets, fields: Sequence[str]) -> list[Record]:
        names = tuple(name for name in (fields or self.schema.names) if name in self._names)
        order = np.argsort(numbers, kind="stable")
        wanted, places = numbers[order], order.tolist()
        groups = np.searchsorted(self._ends, wanted, side="right")
        cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(wanted)]
        found: list[Record] = [{} for _ in places]
        rows = wanted.tolist()
        for first, end in itertools.pairwise(cuts):
            if first == end:
                break
            group = int(groups[first])
            start, loaded = self._starts[group], self._load(group, names)
            inner = [row - start for row in rows[first:end]]
            records = [found[place] for place in places[first:end]]
            for name in names:
                try:
                    values = loaded.takes[name](inner)
                except WrongValue as error:
                    raise self._damaged(group, f'field "{name}": {error}') from error
                for record, value in zip(records, values, strict=True):
                    record[name] = value
        return found

    def _load(self, group: int, names: tuple[str, ...]) -> _LoadedGroup:
        loaded = self._loaded.get((group, names))
        if loaded is not None:
            self._loaded.move_to_end((group, names))
            return loaded
        import pyarrow as pa

        number = self._files[group]
        try:
            takes, size = self._decode(number, group - self._first_groups[number], names)
        except (pa.ArrowException, OSError, ValueError, EOFError, KeyError) as error:
            raise self._damaged(group, str(error).splitlines()[0] if str(error) else repr(error)) from error
        loaded = self._loaded[group, names] = _LoadedGroup(takes, size)
        self._loaded_bytes += size
        while (self._loaded_bytes > GROUP_BYTES and len(self._loaded) > 2) or len(self._loaded) > _MAPPED_GROUPS:
            others = list(self._loaded)[:-2]
            self._loaded_bytes -= self._loaded.pop(others[self._drawn.randrange(len(others))]).size
        return loaded

    def _damaged(self, group: int, what: str) -> DamagedData:
        number = self._files[group]
        inner, rows = group - self._first_groups[number], self._starts[group + 1] - self._starts[group]
        return self.parts.damaged(number, self._offsets[group], f"group {inner} ({rows} rows): {what}")

    def _find_damaged_rows(self, numbers: Sequence[int]) -> Iterator[str]:
        for number in numbers:
            try:
                self._read_rows(np.array([number]), self.schema.names)
            except DamagedData as error:
                yield f"row {number}: {str(error).splitlines()[0]}"

    def _extent_of_row(self, row: int) -> Extent:
        group = int(np.searchsorted(self._ends, row, side="right"))
        return Extent(self.parts.path(self._files[group]), self._offsets[group], self._sizes[group])


def take_chunks(chunks: Sequence[Any]) -> Take:
    """Rows of a column that is in pieces, as one of over 2 GiB is."""
    takes = [make_take(chunk) for chunk in chunks]
    if len(takes) == 1:
        return takes[0]
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)]).tolist()

    def take(rows: Sequence[int]) -> list[Any]:
        which = (np.searchsorted(starts, rows, side="right") - 1).tolist()
        return [takes[piece]([row - starts[piece]])[0] for piece, row in zip(which, rows, strict=True)]

    return take


# --- the index

Describe = Callable[[FileParts, int], tuple[Any, RowGroups]]
"""The schema and the groups of a file. Raises what pyarrow raises, or DamagedData."""


def make_groups_index(parts: FileParts, place: DataPath, describe: Describe, kind: str) -> IndexArrays:
    """Arrays with one value for each group of rows: `files`, `rows`, `offsets` and `sizes` in bytes."""
    numbers = range(len(parts.files))
    with ThreadPoolExecutor(min(len(numbers), 4 * len(os.sched_getaffinity(0)))) as threads:
        found = list(threads.map(lambda number: describe_groups(parts, number, place, describe, kind), numbers))
    for number, (schema, _) in enumerate(found):
        _check_same_fields(parts, number, found[0][0], schema, place)
    groups = [each for _, each in found]
    return {
        "files": np.repeat(np.arange(len(groups)), [len(each.rows) for each in groups]),
        "rows": np.array([row for each in groups for row in each.rows], np.int64),
        "offsets": np.array([offset for each in groups for offset in each.offsets], np.int64),
        "sizes": np.array([size for each in groups for size in each.sizes], np.int64),
    }


def describe_groups(
    parts: FileParts, number: int, place: DataPath, describe: Describe, kind: str
) -> tuple[Any, RowGroups]:
    """The schema and the groups of a file. Raises UserError for one that is empty, cut off or of another format."""
    import pyarrow as pa

    name, size, again = parts.files[number].name, parts.files[number].size, "copy the file again from where it came"
    if not size:
        raise place.error(f"has an empty file: {name} has 0 bytes", allowed=f"{kind} files", remedy=again)
    try:
        schema, groups = describe(parts, number)
        _decode_names(schema)
        return schema, groups
    except DamagedData as error:
        raise place.error(f"has a damaged file: {str(error).splitlines()[0]}", remedy=again) from error
    except (pa.ArrowException, OSError, ValueError, EOFError, IndexError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise place.error(
            f"has a file that is no {kind} file, or not all of one: {name} ({size} bytes): {reason}", remedy=again
        ) from error


def _decode_names(fields: Any) -> None:
    """Raise UnicodeDecodeError for a name in a schema, or a struct in it, that is no text."""
    for field in fields:
        str(field.name)
        if field.type.num_fields and hasattr(field.type, "field"):
            _decode_names(field.type.field(place) for place in range(field.type.num_fields))


def _check_same_fields(parts: FileParts, number: int, first: Any, other: Any, place: DataPath) -> None:
    """Raise UserError if a file has other fields than the first one. A field with no value at all has any type."""
    import pyarrow as pa

    a, b = parts.files[0].name, parts.files[number].name
    if len(set(other.names)) < len(other.names):
        raise place.error(f"has a file with two fields of one name: {b} has {list_some(other.names, 10)}")
    for here, there, has, lacks in ((a, b, first, other), (b, a, other, first)):
        only = [name for name in has.names if name not in lacks.names]
        if only:
            what = f'{here} has "{only[0]}", and {there} has not'
            raise place.error(f"has files with other fields: {what}", remedy=_ONE_SCHEMA)
    for name in first.names:
        types = [schema.field(name).type for schema in (first, other)]
        if types[0] != types[1] and not any(pa.types.is_null(kind) for kind in types):
            what = f'"{name}" is {types[0]} in {a} and {types[1]} in {b}'
            raise place.error(f"has files with other fields: {what}", remedy=_ONE_SCHEMA)


_ONE_SCHEMA = "name the files of one kind with a pattern, or write them again with one schema"


def check_not_empty(index: IndexArrays, place: DataPath) -> None:
    """Raise UserError if no file has a row."""
    if not index["rows"].sum():
        raise place.error("holds no records: its files have 0 rows")
