"""Parquet files, and Arrow files as Hugging Face `datasets` writes them, read with pyarrow alone.

Invariants:
- Files are in the order of their names, or in the order that a folder of `datasets` states.
- pyarrow works in the calling thread alone.
- A file that is cut off, or has bytes behind its end, is refused; a part of it is never taken for all of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.arrow_values import Take, make_take
from shardway.data.formats.base import (
    DataFile,
    Extent,
    FileParts,
    Offsets,
    Record,
    check_ids,
    describe_file,
    need_library,
)
from shardway.data.formats.columns import (
    GROUP_BYTES,
    ColumnRecords,
    RowGroups,
    check_not_empty,
    describe_groups,
    make_groups_index,
    take_chunks,
)
from shardway.data.formats.indexes import IndexArrays, read_sums, use_index
from shardway.data.formats.parquet_footer import TAIL_BYTES, parse_groups, parse_tail
from shardway.data.formats.splits import has_file, list_whole
from shardway.data.kinds import ArrowKind
from shardway.errors import list_some

_QUICK_BYTES = 2**16
"""A row group of fewer bytes is decoded about as fast as any record is read."""


class ParquetRecords(ColumnRecords):
    """Rows of Parquet files.

    A row group is decoded as a whole, so that reading in order costs little and reading at random costs a row group for
    each record unless it is kept. For training at random, write small row groups (1 MiB) or convert.
    """

    format = "parquet"
    open_files = 16

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return has_file(path, _is_parquet)

    @classmethod
    def open(cls, place: DataPath) -> ParquetRecords:
        need_library("pyarrow.parquet", place, "Parquet")
        root, files = list_whole(place, _is_parquet, "Parquet files")
        parts = FileParts(root, files, read_sums(root, files))
        index = use_index(root, "row-groups", files, lambda: make_groups_index(parts, place, _read_footer, "Parquet"))
        check_not_empty(index, place)
        return cls(parts, index, describe_groups(parts, 0, place, _read_footer, "Parquet")[0])

    def slow_in_random_order(self) -> str:
        mean = sum(self._sizes) // max(1, len(self._sizes))
        is_slow = sum(self._sizes) > GROUP_BYTES and mean >= _QUICK_BYTES
        return f"a row group of {mean / 2**20:.1f} MiB is decoded for a record" if is_slow else ""

    def own_checks(self) -> str:
        return "of pages, where their writer made some"

    def _open_file(self, number: int) -> Any:
        return _open_parquet(self.parts, number)

    def file_ends(self) -> Offsets:
        return np.array(self._starts, np.int64)[[*self._first_groups[1:], len(self._offsets)]]

    def _decode(self, number: int, group: int, names: Sequence[str]) -> tuple[dict[str, Take], int]:
        table = self._file(number).read_row_group(group, columns=list(names), use_threads=False)
        rows = self._starts[self._first_groups[number] + group + 1] - self._starts[self._first_groups[number] + group]
        if names and table.num_rows != rows:
            raise ValueError(f"it has {table.num_rows} rows, and {rows} when it was indexed")
        return {name: take_chunks(table.column(name).chunks) for name in names}, table.nbytes


class ArrowRecords(ColumnRecords):
    """Rows of Arrow files, in the stream or the file format: single ones, a folder that `datasets` has saved, or one of
    its cache.

    Files are mapped, so a row costs what it holds; a file that another process cuts off while it is mapped ends this
    one (SIGBUS). A selection or an order that `datasets` keeps as a file of indices is respected.
    """

    format = "arrow"
    open_files = 128

    def __init__(
        self, parts: FileParts, index: IndexArrays, schema: Any, indices: Offsets | None = None, content: str = ""
    ) -> None:
        """`indices`: the row of each record; None: all rows. `content`: what identifies the content besides names and
        sizes."""
        super().__init__(parts, index, schema)
        self._indices, self._content = indices, content

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return (path / _DICT).is_file() or has_file(path, _is_arrow)

    @classmethod
    def open(cls, place: DataPath) -> ArrowRecords:
        need_library("pyarrow.ipc", place, "Arrow")
        state = _read_state(place)
        if state is None:
            root, files = _list_arrow(place)
        else:
            root, files = place.path, _list_stated(place, state, "_data_files")
        index_files = _list_stated(place, state, "_indices_data_files") if state else []
        parts = FileParts(root, files, read_sums(root, files))
        index = use_index(root, "batches", files, lambda: make_groups_index(parts, place, _read_batches, "Arrow"))
        schema = _describe_arrow(parts, place)
        content = str(state.get("_fingerprint", "")) if state else ""
        if not index_files:
            check_not_empty(index, place)
            return cls(parts, index, schema, None, content)
        indices = _read_indices(FileParts(root, index_files), place)
        rows = int(index["rows"].sum())
        if len(indices) and not 0 <= indices.min() <= indices.max() < rows:
            raise place.error(f"selects row {indices.max()}, and its files have {rows} rows", remedy="save it again")
        if not len(indices):
            raise place.error("holds no records: it selects no row")
        return cls(parts, index, schema, indices, content)

    def __len__(self) -> int:
        return super().__len__() if self._indices is None else len(self._indices)

    @property
    def fingerprint(self) -> str:
        return fingerprint(super().fingerprint, self._content) if self._content else super().fingerprint

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        if self._indices is None:
            return super().read(ids, fields)
        check_ids(ids, len(self))
        return self._read_rows(self._indices[np.asarray(ids, np.int64)], fields)

    def extent(self, number: int) -> Extent:
        check_ids([number], len(self))
        return self._extent_of_row(number if self._indices is None else int(self._indices[number]))

    def _open_file(self, number: int) -> Any:
        import pyarrow as pa

        source = pa.memory_map(str(self.parts.path(number)))
        schema, _ = _read_schema(source)
        if not _has_dictionary(schema):
            return source, schema, None
        self.parts.check(number, 0, self.parts.files[number].size) if self.parts.sums else None
        return source, schema, _read_all(source)

    def _decode(self, number: int, group: int, names: Sequence[str]) -> tuple[dict[str, Take], int]:
        import pyarrow as pa

        at = self._first_groups[number] + group
        if self.parts.sums:
            self.parts.check(number, self._offsets[at], self._sizes[at])
        source, schema, batches = self._file(number)
        if batches is None:
            source.seek(self._offsets[at])
            before = pa.total_allocated_bytes()
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
            size = max(0, pa.total_allocated_bytes() - before)  # of compressed buffers; others stay in the file
        else:
            batch, size = batches[group], 0
        batch.validate()  # of lengths, without a look at values
        rows = self._starts[at + 1] - self._starts[at]
        if batch.num_rows != rows:
            raise ValueError(f"it has {batch.num_rows} rows, and {rows} when it was indexed")
        return {name: make_take(batch.column(name)) for name in names}, size


# --- Parquet


def _is_parquet(name: str) -> bool:
    return name.endswith((".parquet", ".pq"))


def _open_parquet(parts: FileParts, number: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = pa.PythonFile(parts.stream(number), mode="r") if parts.sums else str(parts.path(number))
    return pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)


def _read_footer(parts: FileParts, number: int) -> tuple[Any, RowGroups]:
    import pyarrow as pa

    size = parts.files[number].size
    if size < TAIL_BYTES:
        raise ValueError("it is too short")
    length = parse_tail(parts.read(number, size - TAIL_BYTES, TAIL_BYTES))
    if length + TAIL_BYTES > size:
        raise ValueError(f"its footer would have {length} bytes")
    start = size - TAIL_BYTES - length
    footer = parts.read(number, start, length)
    try:
        groups = RowGroups(*parse_groups(footer))
        with _open_parquet(parts, number) as opened:
            return opened.schema_arrow.remove_metadata(), groups
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"its footer, from byte {start} on: {reason}") from error


# --- Arrow

_MAGIC_BYTES = 8
"""The magic of the file format (`ArrowKind.magic`), padded."""

_END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""What ends a stream, today and before Arrow 0.15."""

_STATE, _DICT, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"
"""The files that `datasets` writes beside its data: of one split, of a folder of splits, of a cache."""

_RESULT = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
"""What `datasets` keeps of a `map` or `filter` beside the data."""


def _is_arrow(name: str) -> bool:
    return name.endswith((".arrow", ".feather")) and _RESULT.fullmatch(os.path.basename(name)) is None


def _read_state(place: DataPath) -> dict[str, Any] | None:
    """What a folder that `datasets` has saved states; None for any other path. Raises UserError for a folder of
    splits."""
    path = place.path
    if (path / _DICT).is_file():
        splits = _read_json(path / _DICT, place).get("splits", [])
        named = [split for split in splits if (path / str(split)).is_dir()]
        raise place.error(
            f"is a DatasetDict with the splits {list_some([str(split) for split in splits], 10)}",
            allowed="one split",
            remedy=f'name the folder of one, such as "{os.path.join(place.text, str(named[0]))}"' if named else "",
        )
    return _read_json(path / _STATE, place) if (path / _STATE).is_file() else None


def _read_json(path: Path, place: DataPath) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise place.error(f"has a damaged {path.name}: {error}", remedy="copy it again from where it came") from error
    if not isinstance(found, dict):
        raise place.error(f"has a {path.name} that is no JSON object", remedy="copy it again from where it came")
    return found


def _list_stated(place: DataPath, state: dict[str, Any], key: str) -> list[DataFile]:
    """The files that a state lists, in its order."""
    try:
        names = [str(file["filename"]) for file in state.get(key) or []]
    except (TypeError, KeyError) as error:
        raise place.error(f'has a {_STATE} whose "{key}" is no list of files', remedy="save it again") from error
    if not names and key == "_data_files":
        raise place.error(f'has a {_STATE} that lists no files in "{key}"', remedy="save it again")
    missing = [name for name in names if not (place.path / name).is_file()]
    if missing:
        what = f"lacks {len(missing)} of {len(names)} files that its {_STATE} lists: {list_some(missing, 3)}"
        raise place.error(what, remedy="copy them from where the folder came")
    return [describe_file(place.path, name) for name in names]


def _list_arrow(place: DataPath) -> tuple[Path, list[DataFile]]:
    """Arrow files that no state lists. Raises UserError for a cache that holds several sets of them."""
    root, files = list_whole(place, _is_arrow, "Arrow files")
    sets = {re.sub(r"(-\d{5}-of-\d{5})?\.arrow$", "", file.name): file.name for file in files}
    if place.path.is_dir() and (place.path / _INFO).is_file() and len(sets) > 1:
        names = sorted(sets)
        raise place.error(
            f"holds {len(names)} sets of files: {list_some(names, 10)}",
            allowed="one of them",
            remedy=f'name its files with a pattern, such as "{os.path.join(place.text, names[0])}*.arrow"',
        )
    return root, files


def _describe_arrow(parts: FileParts, place: DataPath) -> Any:
    import pyarrow as pa

    def describe(parts: FileParts, number: int) -> tuple[Any, RowGroups]:
        with pa.memory_map(str(parts.path(number))) as source:
            return _read_schema(source)[0].remove_metadata(), RowGroups([], [], [])

    return describe_groups(parts, 0, place, describe, "Arrow")[0]


def _read_schema(source: Any) -> tuple[Any, bool]:
    """The schema at the beginning of a mapped file, which is then at the first batch; whether it is the file format."""
    import pyarrow as pa

    is_file = source.read(len(ArrowKind.magic)) == ArrowKind.magic
    source.seek(_MAGIC_BYTES if is_file else 0)
    return pa.ipc.read_schema(pa.ipc.read_message(source)), is_file


def _has_dictionary(schema: Any) -> bool:
    return "dictionary<" in str(schema.types)


def _read_all(source: Any) -> list[Any]:
    """The batches of a mapped file, without a copy of what they hold; needed where batches refer to dictionaries."""
    import pyarrow as pa

    source.seek(0)
    if source.read(len(ArrowKind.magic)) == ArrowKind.magic:
        opened = pa.ipc.open_file(source)
        return [opened.get_batch(number) for number in range(opened.num_record_batches)]
    source.seek(0)
    return list(pa.ipc.open_stream(source))


def _read_batches(parts: FileParts, number: int) -> tuple[Any, RowGroups]:
    """The record batches of a file, by going from message to message. Raises DamagedData if it is cut off."""
    import pyarrow as pa

    size, groups = parts.files[number].size, RowGroups([], [], [])
    with pa.memory_map(str(parts.path(number))) as source:
        schema, is_file = _read_schema(source)
        batches = [batch.num_rows for batch in _read_all(source)] if _has_dictionary(schema) else None
        source.seek(0)
        _read_schema(source)
        while True:
            at = source.tell()
            mark = source.read(8)
            if end := next((end for end in _END_MARKS if mark.startswith(end)), b""):
                break
            source.seek(at)
            if at >= size:
                raise parts.damaged(number, size, "the stream has no end mark there, so it may be cut off")
            try:
                message = pa.ipc.read_message(source)
                if message.type != "record batch":
                    continue
                rows = pa.ipc.read_record_batch(message, schema).num_rows if batches is None else batches.pop(0)
            except (pa.ArrowException, OSError, EOFError, IndexError) as error:
                raise parts.damaged(number, at, f"the message there cannot be read: {error}") from error
            groups.rows.append(rows)
            groups.offsets.append(at)
            groups.sizes.append(source.tell() - at)
        behind = size - at - len(end)
        if is_file:
            source.seek(0)
            listed = pa.ipc.open_file(source).num_record_batches
            if listed != len(groups.rows):
                raise parts.damaged(number, at, f"the footer lists {listed} batches, and {len(groups.rows)} are there")
        elif behind:
            raise parts.damaged(number, at, f"the stream ends there, and {behind} bytes follow")
    return schema.remove_metadata(), groups


def _read_indices(parts: FileParts, place: DataPath) -> Offsets:
    """The numbers in the files of a selection: one column named "indices"."""
    import pyarrow as pa

    found = []
    for number in range(len(parts.files)):
        describe_groups(parts, number, place, _read_batches, "Arrow")
        with pa.memory_map(str(parts.path(number))) as source:
            for batch in _read_all(source):
                if "indices" not in batch.schema.names:
                    raise place.error(f'has a selection without the column "indices": {parts.files[number].name}')
                found.append(batch.column("indices").to_numpy(zero_copy_only=False).astype(np.int64))
    return np.concatenate(found) if found else np.zeros(0, np.int64)
