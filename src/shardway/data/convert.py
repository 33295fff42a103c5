"""Writes records in another format: every record with its fields, in the same order.

Invariants:
- What is written has its final name only when it is whole; a kill leaves a folder whose name begins with a dot.
- A value that a format cannot hold as it is, is refused with its field and record, never changed silently. Names that
  begin with "__" are no fields (keys of a source).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardway.data.content import DataPath
from shardway.data.formats.base import RECORDS_AT_ONCE, Record, Records, need_library
from shardway.data.formats.shard_file import ShardFacts
from shardway.errors import JobError, UserError

SHARD_BYTES = 2**27
"""Tar and MDS files are closed once they hold so much."""

Writer = Callable[[Iterator[Record], Path], None]


def convert_records(
    records: Records, out: Path, to: str, fields: Sequence[str], advance: Callable[[int, int], object]
) -> dict[str, int]:
    """Write all records at a path in the format `to`; returns samples, bytes and files.

    `fields`: these alone, or all. `advance` is called with records done and their number. Raises UserError if the path
    is taken, the format cannot be written, or it cannot hold a value.
    """
    writer = WRITERS.get(to)
    if writer is None:
        raise UserError(f'--to: "{to}" cannot be written\n  allowed: {", ".join(sorted((*WRITERS, "squashfs")))}')
    missing = [name for name in fields if name not in records.fields]
    if missing:
        raise UserError(f'there is no field "{missing[0]}"\n  allowed: {", ".join(records.fields)}')
    temporary = _begin(out)
    try:
        writer(_walk(records, fields, advance), temporary)
        os.replace(temporary, out)
    except BaseException:
        _remove(temporary)
        raise
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out]
    return {"samples": len(records), "bytes": sum(path.stat().st_size for path in files), "files": len(files)}


def pack_squashfs(source: Path, out: Path) -> dict[str, int]:
    """Pack a folder, with all small files in it, into one file system image that a container mounts.

    By `mksquashfs` of squashfs-tools with zstd. Raises UserError if the source is no folder or the path is taken,
    JobError if the tool is missing or fails.
    """
    if not source.is_dir():
        raise UserError(f"{source} is no folder, and squashfs packs folders")
    tool = shutil.which("mksquashfs")
    if tool is None:
        raise JobError("mksquashfs is not there\n  To do: install squashfs-tools, or ask the support of your centre.")
    temporary = _begin(out)
    try:
        command = [tool, str(source), str(temporary), "-comp", "zstd", "-no-progress", "-quiet", "-no-xattrs"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            said = (ran.stderr or ran.stdout).strip().splitlines()
            raise JobError(
                f"mksquashfs failed with exit code {ran.returncode}: {said[-1] if said else 'no reason given'}"
            )
        os.replace(temporary, out)
    except BaseException:
        _remove(temporary)
        raise
    samples = sum(len(names) for _, _, names in os.walk(source))
    return {"samples": samples, "bytes": out.stat().st_size, "files": 1}


def _begin(out: Path) -> Path:
    if out.exists():
        raise UserError(f"{out} is there already\n  to do: name another path, or move it away")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.stem}.writing{out.suffix}"
    _remove(temporary)
    return temporary


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _walk(records: Records, fields: Sequence[str], advance: Callable[[int, int], object]) -> Iterator[Record]:
    for first in range(0, len(records), RECORDS_AT_ONCE):
        numbers = range(first, min(first + RECORDS_AT_ONCE, len(records)))
        yield from records.read(numbers, fields)
        advance(numbers.stop, len(records))


def _file_in(out: Path, *suffixes: str) -> Path:
    """The path itself if its name says that it is a file of the format, else a file in a folder of that name."""
    if out.suffix in suffixes:
        return out
    out.mkdir()
    return out / f"data{suffixes[0]}"


def _fields_of(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith("__")}


def _refuse(number: int, name: str, value: Any, kind: str, remedy: str = "") -> UserError:
    shape = f" of shape {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    return UserError(
        f'record {number}: the field "{name}" holds {type(value).__name__}{shape}, which {kind} cannot hold as it is'
        + (f"\n  to do: {remedy}" if remedy else "")
    )


# --- text and tables


def _plain(value: Any, number: int, name: str) -> Any:
    """A value as JSON has it: bytes that are UTF-8 as text, arrays as lists."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _refuse(number, name, value, "jsonl", "leave it out with --field, or choose another format") from None
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(each, number, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, number, name) for each in value]
    return value


def write_jsonl(records: Iterator[Record], out: Path) -> None:
    """One JSON object a line, in name.jsonl or data.jsonl of a folder."""
    with _file_in(out, ".jsonl", ".ndjson").open("w", encoding="utf-8", newline="\n") as stream:
        for number, record in enumerate(records):
            plain = {name: _plain(value, number, name) for name, value in _fields_of(record).items()}
            stream.write(json.dumps(plain, ensure_ascii=False) + "\n")


_ROWS = 1024


def _write_table(records: Iterator[Record], out: Path, make: Callable[[Any, Any, Path], Any]) -> None:
    arrow = need_library("pyarrow", DataPath("OUT", str(out)), "columnar")
    writer = schema = None
    rows: list[dict[str, Any]] = []

    def flush() -> None:
        nonlocal writer, schema
        try:
            batch = arrow.RecordBatch.from_pylist(rows, schema=schema)
        except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
            raise UserError(f"records do not fit one table: {error}") from error
        if writer is None:
            schema = batch.schema
            writer = make(arrow, schema, out)
        writer.write_batch(batch)
        rows.clear()

    for number, record in enumerate(records):
        rows.append({name: _column_value(value, number, name) for name, value in _fields_of(record).items()})
        if len(rows) == _ROWS:
            flush()
    if rows or writer is None:
        flush()
    if writer is not None:
        writer.close()


def _column_value(value: Any, number: int, name: str) -> Any:
    if isinstance(value, np.ndarray) and value.ndim > 1:
        raise _refuse(number, name, value, "a column", "choose hdf5, arrays, mds or shards")
    return value.item() if isinstance(value, np.generic) else value


def write_parquet(records: Iterator[Record], out: Path) -> None:
    """One Parquet file with zstd, checksums of pages, and small row groups: name.parquet, or data.parquet of a
    folder."""

    def make(arrow: Any, schema: Any, path: Path) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)

    _write_table(records, _file_in(out, ".parquet"), make)


def write_arrow(records: Iterator[Record], out: Path) -> None:
    """A folder with one Arrow stream, as `datasets` keeps it."""
    out.mkdir()
    _write_table(
        records, out / "data-00000-of-00001.arrow", lambda arrow, schema, path: arrow.ipc.new_stream(path, schema)
    )


# --- shards of blobs


def _as_bytes(value: Any, number: int, name: str) -> bytes:
    """Bytes as they are, text as UTF-8, a number as its digits, arrays as .npy, all else as JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        stream = io.BytesIO()
        np.save(stream, value, allow_pickle=False)
        return stream.getvalue()
    if isinstance(value, bool | int | float | np.generic):
        return str(value.item() if isinstance(value, np.generic) else value).encode()
    return json.dumps(_plain(value, number, name)).encode()


def _suffix(name: str, value: Any) -> str:
    """The field as the suffix of a member, by which readers of WebDataset know what it is: that of an image's format,
    "cls" for a label, with ".npy" for an array and ".json" for a table."""
    if image := _image_suffix(value):
        return image
    if name == "label" and isinstance(value, int | np.integer):
        return "cls"
    if isinstance(value, np.ndarray) and not name.endswith("npy"):
        return f"{name}.npy"
    return f"{name}.json" if isinstance(value, dict | list) and not name.endswith("json") else name


def write_webdataset(records: Iterator[Record], out: Path) -> None:
    """Tar shards 000000.tar, 000001.tar ...: a member for each field."""
    out.mkdir()
    numbered, count = enumerate(records), 0
    upcoming = next(numbered, None)
    while upcoming is not None or not count:
        with tarfile.open(out / f"{count:06d}.tar", "w", format=tarfile.GNU_FORMAT) as shard:
            while upcoming is not None and shard.offset < SHARD_BYTES:
                _add_members(shard, *upcoming)
                upcoming = next(numbered, None)
        count += 1


def _add_members(shard: tarfile.TarFile, number: int, record: Record) -> None:
    key = str(record.get("__key__", ""))
    if not key or "." in key.rpartition("/")[2]:
        key = f"{number:09d}"
    for name, value in _fields_of(record).items():
        content = _as_bytes(value["bytes"] if _image_suffix(value) and isinstance(value, dict) else value, number, name)
        member = tarfile.TarInfo(f"{key}.{_suffix(name, value)}")
        member.size, member.mode = len(content), 0o644
        shard.addfile(member, io.BytesIO(content))


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
    if encoding == "int":
        return struct.pack("<q", int(value))
    if encoding == "float64":
        return struct.pack("<d", float(value))
    if encoding == "ndarray":
        array = np.ascontiguousarray(value)
        kinds = (
            "uint8",
            "int8",
            "uint16",
            "int16",
            "uint32",
            "int32",
            "uint64",
            "int64",
            "float16",
            "float32",
            "float64",
        )
        if array.dtype.name not in kinds or array.ndim > 255:
            raise _refuse(number, name, value, "mds")
        dims = np.array(array.shape, np.int64).astype("<u4")
        wide = 0 if not array.ndim or max(array.shape) < 2**8 else 1 if max(array.shape) < 2**16 else 2
        shape = dims.astype(("<u1", "<u2", "<u4")[wide])
        head = bytes([kinds.index(array.dtype.name), wide << 6 | array.ndim])
        return head + shape.tobytes() + array.tobytes()
    return _as_bytes(value, number, name) if encoding != "json" else json.dumps(_plain(value, number, name)).encode()


def write_mds(records: Iterator[Record], out: Path) -> None:
    """Shards of MosaicML Streaming with an index.json that has a hash of each."""
    out.mkdir()
    shards: list[dict[str, Any]] = []
    columns: dict[str, tuple[str, int | None]] = {}
    samples: list[bytes] = []
    held = 0
    for number, record in enumerate(records):
        fields = _fields_of(record)
        columns = columns or {name: _mds_encoding(value) for name, value in sorted(fields.items())}
        if fields.keys() != columns.keys():
            raise UserError(
                f"record {number} has the fields {', '.join(fields)}\n"
                f"  allowed: {', '.join(columns)}, since mds needs the same in each record"
            )
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
    """An LMDB environment: one key a record, or one for each field where there are several."""
    library = need_library("lmdb", DataPath("OUT", str(out)), "lmdb")
    environment = library.open(str(out), map_size=2**40, subdir=True, lock=False)
    transaction, held = environment.begin(write=True), 0
    for number, record in enumerate(records):
        fields = _fields_of(record)
        for name, value in fields.items():
            key = f"{number:09d}" if len(fields) == 1 else f"{name}-{number:09d}"
            content = _as_bytes(value, number, name)
            transaction.put(key.encode(), content)
            held += len(content)
        if held > SHARD_BYTES:
            transaction.commit()
            transaction, held = environment.begin(write=True), 0
    transaction.commit()
    environment.sync(True)
    environment.close()


# --- arrays


def write_hdf5(records: Iterator[Record], out: Path) -> None:
    """One HDF5 file, name.h5 or data.h5 of a folder: a data set for each field, grown as records come, with checksums;
    bytes and text by their own length."""
    library = need_library("h5py", DataPath("OUT", str(out)), "hdf5")
    with library.File(_file_in(out, ".h5", ".hdf5"), "w") as file:
        rows: dict[str, list[Any]] = {}
        done = 0

        def flush() -> None:
            nonlocal done
            count = len(next(iter(rows.values()), []))
            for name, values in rows.items():
                if len(values) != count:
                    raise UserError(f'the field "{name}" is not in every record, which hdf5 needs')
                data, kind = _hdf5_column(library, values, name, done)
                if name not in file:
                    shape = data.shape[1:]
                    row = max(1, int(np.prod(shape, dtype=np.int64)) * data.dtype.itemsize)
                    chunk = (max(1, min(_ROWS, 2**18 // row)), *shape)
                    file.create_dataset(
                        name, (0, *shape), kind, maxshape=(None, *shape), chunks=chunk, fletcher32=data.dtype != object
                    )
                if file[name].shape[1:] != data.shape[1:]:
                    raise UserError(f'the field "{name}" has the shapes {file[name].shape[1:]} and {data.shape[1:]}')
                file[name].resize(done + count, axis=0)
                if data.dtype == object and not isinstance(values[0], str):
                    for at, value in enumerate(data):  # at once, h5py would take rows of equal length for a table
                        file[name][done + at] = value
                else:
                    file[name][done:] = data
            done += count
            rows.clear()

        for record in records:
            for name, value in _fields_of(record).items():
                rows.setdefault(name, []).append(value)
            if len(next(iter(rows.values()), [])) == _ROWS:
                flush()
        flush()


def _hdf5_column(library: Any, values: list[Any], name: str, first: int) -> tuple[Any, Any]:
    if all(isinstance(value, str) for value in values):
        kind = library.string_dtype()
        return np.array(values, dtype=object), kind
    if all(isinstance(value, bytes | bytearray) for value in values):
        data = np.empty(len(values), object)
        for at, value in enumerate(values):
            data[at] = np.frombuffer(value, np.uint8)
        return data, library.vlen_dtype(np.uint8)
    arrays = [np.asarray(value) for value in values]
    wrong = next((at for at, array in enumerate(arrays) if array.dtype == object or array.dtype.kind in "US"), None)
    if wrong is not None:
        raise _refuse(first + wrong, name, values[wrong], "hdf5")
    if len({array.shape for array in arrays}) > 1:
        if any(array.ndim != 1 for array in arrays):
            raise UserError(
                f'the field "{name}" holds arrays of several shapes, which hdf5 cannot hold in one data set'
            )
        data = np.empty(len(values), object)
        for at, array in enumerate(arrays):
            data[at] = array
        return data, library.vlen_dtype(arrays[0].dtype)
    stacked = np.stack(arrays)
    return stacked, stacked.dtype


def write_arrays(records: Iterator[Record], out: Path) -> None:
    """A folder with a .npy file for each field, of one shape and type."""
    out.mkdir()
    streams: dict[str, Any] = {}
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
    count = 0
    for number, record in enumerate(records):
        for name, value in _fields_of(record).items():
            array = np.ascontiguousarray(value)
            if array.dtype.kind not in "biufc" or (count and name not in shapes):
                raise _refuse(number, name, value, "arrays", "leave it out with --field, or choose another format")
            if name not in streams:
                shapes[name] = (array.dtype, np.shape(value))
                streams[name] = (out / f"{name.replace('/', '.')}.npy").open("w+b")
                _write_header(streams[name], shapes[name], 0)
            if (array.dtype, np.shape(value)) != shapes[name]:
                raise _refuse(number, name, value, f"arrays of {shapes[name][0]} {list(shapes[name][1])}")
            streams[name].write(array.tobytes())
        count += 1
    for name, stream in streams.items():
        stream.seek(0)
        _write_header(stream, shapes[name], count)
        stream.close()


def _write_header(stream: Any, shape: tuple[Any, tuple[int, ...]], count: int) -> None:
    """NumPy pads a header so that one with a longer length still fits."""
    header = {"descr": shape[0].str, "fortran_order": False, "shape": (count, *shape[1])}
    np.lib.format.write_array_header_1_0(stream, header)


# --- tokens, images, texts


def _tokens_of(record: Record, number: int) -> Any:
    for name in ("tokens", "input_ids"):
        value = record.get(name)
        if isinstance(value, np.ndarray | list):
            return np.asarray(value)
    raise UserError(
        f"record {number} has no field of tokens (tokens or input_ids), but {', '.join(record)}\n"
        "  to do: make tokens of texts: `shardway data prepare SOURCE OUT --tokenizer T`"
    )


def write_megatron(records: Iterator[Record], out: Path) -> None:
    """A folder with data.bin and data.idx, as Megatron-LM's indexed data set has them (version 1)."""
    from shardway.data.formats.megatron import write_megatron_files

    out.mkdir()
    write_megatron_files(out / "data", (_tokens_of(record, number) for number, record in enumerate(records)))


def write_tokens(records: Iterator[Record], out: Path) -> None:
    """A folder of token shards with checksums."""
    from shardway.data.formats.shards import write_manifest, write_token_shard

    out.mkdir()
    vocab = 0

    def documents() -> Iterator[tuple[Any, Any]]:
        nonlocal vocab
        for number, record in enumerate(records):
            tokens = _tokens_of(record, number)
            vocab = max(vocab, int(tokens.max(initial=-1)) + 1)
            yield tokens, record.get("counted")

    facts = [write_token_shard(out / "00000.shard", documents(), "uint32")]
    write_manifest(out, "tokens", facts, {"vocab": vocab})


def write_shards(records: Iterator[Record], out: Path) -> None:
    """A folder of shards with checksums."""
    from shardway.data.formats.shards import write_manifest, write_record_shard

    out.mkdir()
    facts: list[ShardFacts] = []
    held = _Held(records)
    while not held.ended:
        facts.append(write_record_shard(out / f"{len(facts):05d}.shard", held.take(SHARD_BYTES)))
    write_manifest(out, "records", facts, {})


class _Held:
    """An iterator of records that is taken in portions of about so many bytes."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records, self._next = records, next(records, None)

    @property
    def ended(self) -> bool:
        return self._next is None

    def take(self, most: int) -> Iterator[Record]:
        taken = 0
        while self._next is not None and taken < most:
            record = self._next
            taken += sum(value.nbytes if isinstance(value, np.ndarray) else len(value) for value in _blobs(record))
            yield record
            self._next = next(self._records, None)


def _blobs(record: Record) -> Iterator[Any]:
    return (value for value in record.values() if isinstance(value, bytes | str | np.ndarray))


_MAGICS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp", b"II*\0": "tif"}


def write_images(records: Iterator[Record], out: Path) -> None:
    """A folder for each class with its images, as they are."""
    out.mkdir()
    for number, record in enumerate(records):
        image = next((value for value in record.values() if _image_suffix(value)), None)
        label = next(
            (
                record[name]
                for name in ("label", "cls", "class", "y", "target", "labels")
                if isinstance(record.get(name), int | str | bytes | np.integer)
            ),
            None,
        )
        if image is None or label is None:
            missing = "image" if image is None else "class (label, cls, class, y, target)"
            raise UserError(f"record {number} has no {missing} among its fields {', '.join(record)}")
        name = label.decode() if isinstance(label, bytes) else str(label)
        folder = out / name.replace("/", "_")
        folder.mkdir(exist_ok=True)
        content = image["bytes"] if isinstance(image, dict) else image
        (folder / f"{number:09d}.{_image_suffix(image)}").write_bytes(content)


def _image_suffix(value: Any) -> str:
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes | bytearray):
        return ""
    return next((suffix for magic, suffix in _MAGICS.items() if bytes(content).startswith(magic)), "")


def write_text(records: Iterator[Record], out: Path) -> None:
    """A folder with a text file for each record."""
    out.mkdir()
    for number, record in enumerate(records):
        text = next(
            (record[name] for name in ("text", "content", "txt") if isinstance(record.get(name), str | bytes)), None
        )
        if text is None:
            raise UserError(f"record {number} has no text (text, content, txt) among its fields {', '.join(record)}")
        (out / f"{number:09d}.txt").write_bytes(text.encode() if isinstance(text, str) else text)


WRITERS: dict[str, Writer] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "webdataset": write_webdataset,
    "mds": write_mds,
    "lmdb": write_lmdb,
    "hdf5": write_hdf5,
    "arrays": write_arrays,
    "megatron": write_megatron,
    "tokens": write_tokens,
    "shards": write_shards,
    "images": write_images,
    "text": write_text,
}
"""The formats that can be written."""
