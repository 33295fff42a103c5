"""Writes records as files of formats that other programs read: text and tables, MDS and LMDB, arrays.

Invariant: a value that a format cannot hold is refused with its field and record, never changed silently. What is held
in another type is said with each writer. Names that begin with "__" are no fields (keys of a source).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardway.data.content import DataPath
from shardway.data.formats.arrays import IDX_IMAGES, IDX_LABELS, TRAIN
from shardway.data.formats.base import Record, need_library
from shardway.data.formats.lmdb_records import MOST_FIELDS
from shardway.data.formats.mds_columns import DTYPES
from shardway.errors import UserError

SHARD_BYTES = 2**27
"""A shard is closed once it holds so much."""

ROOM_BYTES = 2**20
"""A disk with less room than this is full."""


def _file_in(out: Path, *suffixes: str) -> Path:
    """The path itself if its name says that it is a file of the format, else a file in a folder of that name."""
    if out.suffix in suffixes:
        return out
    out.mkdir()
    return out / f"data{suffixes[0]}"


def fields_of(record: Record) -> dict[str, Any]:
    """The fields of a record that are written."""
    return {name: value for name, value in record.items() if not name.startswith("__")}


def refuse_value(number: int, name: str, value: Any, kind: str, remedy: str = "") -> UserError:
    """The error for a value that a format (`kind`) cannot hold."""
    shape = f" of {value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    return UserError(
        f'record {number}: the field "{name}" holds {type(value).__name__}{shape}, which {kind} cannot hold as it is'
        + f"\n  to do: {remedy or OTHERWISE}"
    )


OTHERWISE = "leave the field out (--field names those that stay), or choose another format"
"""What to do about a value that a format cannot hold."""


def _check_same_fields(fields: Record, names: Sequence[str], number: int, kind: str) -> None:
    """Raise UserError for a record with other fields than the first."""
    if fields.keys() != set(names):
        raise UserError(
            f"record {number} has the fields {', '.join(fields) or '(none)'}\n"
            f"  allowed: {', '.join(names)}, as the first record, since {kind} needs the same in each\n"
            "  to do: name those that every record has with --field, or choose another format"
        )


# --- text and tables


def _plain(value: Any, number: int, name: str) -> Any:
    """A value as JSON has it: bytes that are UTF-8 as text, arrays as lists."""
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise refuse_value(number, name, value, "jsonl") from None
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), number, name)
    if isinstance(value, dict):
        return {str(key): _plain(each, number, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, number, name) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise refuse_value(number, name, value, "jsonl")


def write_jsonl(records: Iterator[Record], out: Path) -> None:
    """One JSON object a line, in name.jsonl or data.jsonl of a folder."""
    with _file_in(out, ".jsonl", ".ndjson").open("w", encoding="utf-8", newline="\n") as stream:
        for number, record in enumerate(records):
            plain = {name: _plain(value, number, name) for name, value in fields_of(record).items()}
            stream.write(_as_line(plain) + "\n")


def _as_line(plain: Any) -> str:
    """JSON in one line; text that is not UTF-8 as escapes."""
    line = json.dumps(plain, ensure_ascii=False)
    return line if line.isascii() or _is_utf8(line) else json.dumps(plain)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_ROWS = 1024


def _write_table(
    records: Iterator[Record], out: Path, make: Callable[[Any, Any, Path], Any], most_bytes: int = SHARD_BYTES // 2
) -> None:
    """Columns as the first rows have them; a field that a record lacks is null. Rows are written together up to about
    `most_bytes`."""
    arrow = need_library("pyarrow", DataPath("OUT", str(out)), "columnar")
    with contextlib.ExitStack() as stack:
        writer = schema = None
        rows: list[Record] = []
        done = held = 0

        def flush() -> None:
            nonlocal writer, schema, done, held
            names = list(dict.fromkeys(name for row in rows for name in row))
            if schema is not None and (new := [name for name in names if name not in schema.names]):
                at = done + next(at for at, row in enumerate(rows) if new[0] in row)
                _check_same_fields(rows[at - done], schema.names, at, "a table")
            columns = []
            for name in names if schema is None else schema.names:
                kind = None if schema is None else schema.field(name).type
                try:
                    column = arrow.array([row.get(name) for row in rows])
                    column = column if kind is None else column.cast(kind)  # which refuses what would lose something
                except (arrow.ArrowException, ValueError, TypeError, OverflowError) as error:
                    raise UserError(
                        f'the field "{name}" of the records {done} to {done + len(rows) - 1} does not fit one column'
                        f"{f' of {kind}' if kind is not None else ''}: {str(error).splitlines()[0]}\n"
                        f"  to do: {OTHERWISE}"
                    ) from error
                columns.append(column)
            batch = arrow.RecordBatch.from_arrays(
                columns, **({"names": names} if schema is None else {"schema": schema})
            )
            if writer is None:
                schema = batch.schema
                writer = stack.enter_context(make(arrow, schema, out))
            writer.write_batch(batch)
            done, held = done + len(rows), 0
            rows.clear()

        for number, record in enumerate(records):
            fields = fields_of(record)
            if not fields:
                refuse_empty(number, "a table")
            rows.append({name: _column_value(value, number, name) for name, value in fields.items()})
            held += count_bytes(fields)
            if len(rows) == _ROWS or held > most_bytes:
                flush()
        if rows or writer is None:
            flush()


def refuse_empty(number: int, kind: str) -> None:
    """Raise UserError for a record without fields."""
    raise UserError(f"record {number} has no fields, and {kind} cannot hold such a record")


def _column_value(value: Any, number: int, name: str) -> Any:
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise refuse_value(number, name, value, "a column", "choose hdf5, arrays, mds or shards")
    return value.item() if isinstance(value, np.generic) else value


def write_parquet(records: Iterator[Record], out: Path) -> None:
    """One Parquet file with zstd, checksums of pages, and row groups of about 1 MiB, of which one is decoded for a
    record in a random order: name.parquet, or data.parquet of a folder."""

    def make(arrow: Any, schema: Any, path: Path) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)

    _write_table(records, _file_in(out, ".parquet"), make, most_bytes=2**20)


def write_arrow(records: Iterator[Record], out: Path) -> None:
    """A folder with one Arrow stream, as `datasets` keeps it."""
    out.mkdir()
    with (out / "data-00000-of-00001.arrow").open("wb") as file:
        _write_table(records, out, lambda arrow, schema, path: arrow.ipc.new_stream(file, schema))


# --- shards of blobs


def as_bytes(value: Any, number: int, name: str) -> bytes:
    """Bytes as they are, text as UTF-8, a number as its digits, arrays as .npy, all else as JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise refuse_value(number, name, value, "a .npy file")
        stream = io.BytesIO()
        np.save(stream, value, allow_pickle=False)
        return stream.getvalue()
    if isinstance(value, bool | int | float | np.generic):
        return str(value.item() if isinstance(value, np.generic) else value).encode()
    return _as_line(_plain(value, number, name)).encode()


_MDS_SCALARS = {bool: "int", int: "int", float: "float64"}


def _mds_encoding(value: Any) -> tuple[str, int | None]:
    """The encoding of a column by its first value, and its size in bytes (None: each says its own)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes | bytearray):
        return "bytes", None
    if isinstance(value, str):
        return "str", None
    if isinstance(value, np.ndarray):
        return "ndarray", None
    if type(value) in _MDS_SCALARS:
        return _MDS_SCALARS[type(value)], 8
    return "json", None


def _mds_bytes(value: Any, encoding: str, number: int, name: str) -> bytes:
    own = _mds_encoding(value)[0]
    is_exact = encoding == "float64" and own == "int" and float(value) == value
    if encoding not in (own, "json") and not is_exact:
        raise refuse_value(number, name, value, f"an mds column of {encoding} (as record 0 has it)")
    if encoding == "int":
        if not -(2**63) <= value < 2**63:
            raise refuse_value(number, name, value, "mds (8 bytes an integer)")
        return struct.pack("<q", int(value))
    if encoding == "float64":
        return struct.pack("<d", float(value))
    if encoding == "ndarray":
        array = np.asarray(value)
        codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
        if array.dtype not in codes or array.ndim > 63:
            raise refuse_value(number, name, value, "mds")
        wide = 0 if max(array.shape, default=0) < 2**8 else 1 if max(array.shape) < 2**16 else 2
        shape = np.array(array.shape, ("<u1", "<u2", "<u4")[wide])
        head = bytes([codes[array.dtype], array.ndim << 2 | wide])
        return head + shape.tobytes() + array.tobytes()
    return as_bytes(value, number, name) if encoding != "json" else _as_line(_plain(value, number, name)).encode()


def write_mds(records: Iterator[Record], out: Path) -> None:
    """Shards of MosaicML Streaming with an index.json that has a hash of each."""
    out.mkdir()
    shards: list[dict[str, Any]] = []
    columns: dict[str, tuple[str, int | None]] = {}
    samples: list[bytes] = []
    held = 0
    for number, record in enumerate(records):
        fields = fields_of(record)
        if not fields:
            refuse_empty(number, "mds")
        columns = columns or {name: _mds_encoding(value) for name, value in sorted(fields.items())}
        _check_same_fields(fields, list(columns), number, "mds")
        parts = [_mds_bytes(fields[name], encoding, number, name) for name, (encoding, _) in columns.items()]
        sizes = [len(part) for part, (_, fixed) in zip(parts, columns.values(), strict=True) if fixed is None]
        samples.append(np.array(sizes, "<u4").tobytes() + b"".join(parts))
        held += len(samples[-1])
        if held > SHARD_BYTES // 2:
            shards.append(_write_mds_shard(out, len(shards), columns, samples))
            samples, held = [], 0
    if samples or not shards:
        shards.append(_write_mds_shard(out, len(shards), columns, samples))
    (out / "index.json").write_text(json.dumps({"version": 2, "shards": shards}, sort_keys=True))


def _write_mds_shard(
    out: Path, number: int, columns: dict[str, tuple[str, int | None]], samples: list[bytes]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_names": list(columns),
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": ["xxh3_64"],
        "size_limit": SHARD_BYTES // 2,
        "version": 2,
    }
    config = json.dumps(described, sort_keys=True).encode()
    starts = 4 + 4 * (len(samples) + 1) + len(config) + np.cumsum([0, *map(len, samples)])
    content = b"".join((struct.pack("<I", len(samples)), starts.astype("<u4").tobytes(), config, *samples))
    name = f"shard.{number:05d}.mds"
    (out / name).write_bytes(content)
    raw = {"basename": name, "bytes": len(content), "hashes": {"xxh3_64": xxhash.xxh3_64_hexdigest(content)}}
    return {**described, "raw_data": raw, "samples": len(samples), "zip_data": None}


def write_lmdb(records: Iterator[Record], out: Path) -> None:
    """An LMDB environment: one key a record, or one for each field where there are several; values are bytes
    (`as_bytes`)."""
    library = need_library("lmdb", DataPath("OUT", str(out)), "lmdb")
    names: list[str] = []
    with library.open(str(out), map_size=2**40, subdir=True, lock=False) as environment:
        numbered = enumerate(records)
        upcoming = next(numbered, None)
        while upcoming is not None:
            held = 0
            with environment.begin(write=True) as transaction:
                while upcoming is not None and held < SHARD_BYTES:
                    number, fields = upcoming[0], fields_of(upcoming[1])
                    names = names or list(fields)
                    if not names:
                        refuse_empty(number, "lmdb")
                    _check_same_fields(fields, names, number, "lmdb")
                    _check_lmdb_names(names)
                    for name, value in fields.items():
                        key = f"{number:09d}" if names == ["value"] else f"{name}-{number:09d}"
                        content = as_bytes(value, number, name)
                        transaction.put(key.encode(), content)
                        held += len(content)
                    upcoming = next(numbered, None)
        environment.sync(True)


def _check_lmdb_names(names: Sequence[str]) -> None:
    wrong = next((name for name in names if not re.fullmatch(r"[A-Za-z]\w{0,99}", name, re.ASCII)), None)
    if wrong is not None or len(names) > MOST_FIELDS:
        raise UserError(
            (f'the field "{wrong}" cannot be part of a key of lmdb' if wrong else f"there are {len(names)} fields")
            + f"\n  allowed: up to {MOST_FIELDS} names of letters, digits and _\n  to do: {OTHERWISE}"
        )


# --- arrays


def write_hdf5(records: Iterator[Record], out: Path) -> None:
    """One HDF5 file, name.h5 or data.h5 of a folder: a data set for each field, grown as records come, with checksums;
    bytes and text by their own length."""
    library = need_library("h5py", DataPath("OUT", str(out)), "hdf5")
    with library.File(_file_in(out, ".h5", ".hdf5"), "w") as file:
        rows: dict[str, list[Any]] = {}
        kinds: dict[str, Any] = {}
        done = held = 0

        def flush() -> None:
            nonlocal done, held
            if shutil.disk_usage(out.parent).free < 2 * held + ROOM_BYTES:  # at which HDF5 1.14 ends the process
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            held = 0
            count = len(next(iter(rows.values()), []))
            for name, values in rows.items():
                data, kind = _hdf5_column(library, values, name, done, kinds.get(name))
                if name not in kinds:
                    shape = data.shape[1:]
                    row = max(1, int(np.prod(shape, dtype=np.int64)) * data.dtype.itemsize)
                    chunk = (max(1, min(_ROWS, 2**18 // row)), *shape)
                    file.create_dataset(
                        name, (0, *shape), kind, maxshape=(None, *shape), chunks=chunk, fletcher32=data.dtype != object
                    )
                    kinds[name] = kind
                if kind != kinds[name] or file[name].shape[1:] != data.shape[1:]:
                    raise UserError(
                        f'the field "{name}" of the records {done} to {done + count - 1} is of {kind} '
                        f"{list(data.shape[1:])}, and hdf5 has {kinds[name]} {list(file[name].shape[1:])} of those "
                        f"before\n  to do: {OTHERWISE}"
                    )
                file[name].resize(done + count, axis=0)
                if data.dtype == object and not isinstance(values[0], str):
                    for at, value in enumerate(data):  # at once, h5py would take rows of equal length for a table
                        file[name][done + at] = value
                else:
                    file[name][done:] = data
            done += count
            rows.clear()

        names: list[str] = []
        for number, record in enumerate(records):
            fields = fields_of(record)
            names = names or list(fields)
            if not names:
                refuse_empty(number, "hdf5")
            _check_same_fields(fields, names, number, "hdf5")
            for name, value in fields.items():
                rows.setdefault(name, []).append(value)
            held += count_bytes(fields)
            if len(next(iter(rows.values()), [])) == _ROWS or held > SHARD_BYTES // 2:
                flush()
        flush()


def _hdf5_column(library: Any, values: list[Any], name: str, first: int, before: Any) -> tuple[Any, Any]:
    """The rows of a field as an array and their HDF5 type; `before`: that of rows before these, if there are some."""
    if all(isinstance(value, str) for value in values):
        kind = library.string_dtype()
        if (wrong := next((at for at, value in enumerate(values) if "\0" in value), None)) is not None:
            raise refuse_value(first + wrong, name, values[wrong], "hdf5 (byte 0 ends a text there)")
        return np.array(values, dtype=object), kind
    if all(isinstance(value, bytes | bytearray) for value in values):
        return _as_objects([np.frombuffer(value, np.uint8) for value in values]), library.vlen_dtype(np.uint8)
    arrays = []
    for at, value in enumerate(values):
        try:
            array = np.asarray(value)
        except ValueError:  # lists of several lengths in a list
            array = np.asarray(None)
        if array.dtype == object or array.dtype.kind in "USMm":
            raise refuse_value(first + at, name, value, "hdf5")
        arrays.append(array)
    filled = [array.dtype for array in arrays if array.size] or [arrays[0].dtype]
    held = library.check_vlen_dtype(before) or before if before is not None else filled[0]
    if any(dtype != held for dtype in filled):
        at = next(at for at, array in enumerate(arrays) if array.size and array.dtype != held)
        raise refuse_value(first + at, name, arrays[at], f"an hdf5 data set of {held}")
    is_ragged = before is not None and library.check_vlen_dtype(before) is not None
    if is_ragged or len({array.shape for array in arrays}) > 1 or not all(arrays[0].shape):
        if any(array.ndim != 1 for array in arrays):
            raise UserError(
                f'the field "{name}" holds arrays of several shapes, which hdf5 cannot hold in one data set\n'
                f"  to do: {OTHERWISE}"
            )
        return _as_objects([array.astype(held) for array in arrays]), library.vlen_dtype(held)
    stacked = np.stack(arrays).astype(held, copy=False)
    return stacked, stacked.dtype


def _as_objects(values: Sequence[Any]) -> Any:
    data = np.empty(len(values), object)
    for at, value in enumerate(values):
        data[at] = value
    return data


def write_arrays(records: Iterator[Record], out: Path) -> None:
    """A folder with a .npy file for each field, of one shape and type."""
    out.mkdir()
    streams: dict[str, Any] = {}
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
    count = 0
    with contextlib.ExitStack() as stack:
        for number, record in enumerate(records):
            fields = fields_of(record)
            if not fields:
                refuse_empty(number, "arrays")
            if count:
                _check_same_fields(fields, list(shapes), number, "arrays")
            for name, value in fields.items():
                try:
                    array = np.ascontiguousarray(value)
                except ValueError:  # lists of several lengths in a list
                    raise refuse_value(number, name, value, "arrays") from None
                if array.dtype.kind not in "biufc":
                    raise refuse_value(number, name, value, "arrays")
                if name not in streams:
                    if "/" in name or "\0" in name or name.startswith("."):
                        raise UserError(f'the field "{name}" cannot be the name of a .npy file\n  to do: {OTHERWISE}')
                    shapes[name] = (array.dtype, np.shape(value))
                    stream = (out / f"{name}.npy").open("xb+")
                    streams[name] = stack.enter_context(stream)
                    _write_header(streams[name], shapes[name], 0)
                if (array.dtype, np.shape(value)) != shapes[name]:
                    shape = f"{shapes[name][0]} {list(shapes[name][1])}"
                    raise refuse_value(
                        number, name, array.reshape(np.shape(value)), f"arrays of {shape} (as record 0 has it)"
                    )
                streams[name].write(array.tobytes())
            count += 1
        for name, stream in streams.items():
            stream.seek(0)
            _write_header(stream, shapes[name], count)


def _write_header(stream: Any, shape: tuple[Any, tuple[int, ...]], count: int) -> None:
    """NumPy pads a header so that one with a longer length still fits."""
    header = {"descr": shape[0].str, "fortran_order": False, "shape": (count, *shape[1])}
    np.lib.format.write_array_header_1_0(stream, header)


def write_idx(records: Iterator[Record], out: Path) -> None:
    """MNIST's two files of the train part: the field "image" (bytes [H, W], of one shape), and "label" or "cls" from 0
    to 255; of other fields nothing is kept."""
    out.mkdir()
    shape: tuple[int, ...] = (0, 0)
    count = 0
    with (out / f"{TRAIN}-{IDX_IMAGES}").open("xb") as images, (out / f"{TRAIN}-{IDX_LABELS}").open("xb") as labels:
        images.write(bytes(16))
        labels.write(bytes(8))
        for number, record in enumerate(records):
            image, label = record.get("image"), record.get("label", record.get("cls"))
            shape = image.shape if isinstance(image, np.ndarray) and not count else shape
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape != shape or image.ndim != 2:
                raise refuse_value(number, "image", image, "idx (uint8 of one shape [H, W])", "choose another format")
            if isinstance(label, str | bytes) and label.isdigit():
                label = int(label)
            if not isinstance(label, int | np.integer) or not 0 <= label < 256:
                raise refuse_value(number, "label", label, "idx (a class from 0 to 255)", "choose another format")
            images.write(np.ascontiguousarray(image).tobytes())
            labels.write(bytes([label]))
            count += 1
        for stream, sizes in ((images, (count, *shape)), (labels, (count,))):
            stream.seek(0)
            stream.write(struct.pack(f">BBBB{len(sizes)}I", 0, 0, 8, len(sizes), *sizes))


# --- what values are


def count_bytes(record: Record) -> int:
    """The bytes of the values of a record that may be large."""
    blobs = (value for value in record.values() if isinstance(value, bytes | str | np.ndarray))
    return sum(value.nbytes if isinstance(value, np.ndarray) else len(value) for value in blobs)


IMAGE_MAGICS = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}
"""The first bytes of an image's format -> the suffix of its files."""


def find_image_suffix(value: Any) -> str:
    """The suffix of an image's format by its first bytes; "" for anything else."""
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes | bytearray):
        return ""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    if content[:2] == b"BM" and int.from_bytes(content[2:6], "little") == len(content):
        return "bmp"
    return next((suffix for magic, suffix in IMAGE_MAGICS.items() if content.startswith(magic)), "")
