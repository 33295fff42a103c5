"""Arrays with one row a record: .npy files, a .npz archive, MNIST's idx files.

Invariants:
- Nothing in a file is executed: arrays of objects, which NumPy pickles, are refused.
- A file is used only if its size is exactly what its header states.
- Rows that lie in a file as they are get read in place. What is compressed, or has Fortran order, is read whole when
  its first row is read, and kept; it is not pickled.

The .npy format is described in NumPy's `numpy.lib.format`. The idx format, as described with the MNIST database: two
zero bytes, a type code (0x08 = unsigned byte), the number of dimensions, each dimension as a big-endian uint32, then
the data in C order.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath
from shardway.data.formats.base import DataFile, Extent, FileParts, Offsets, Record, Records, check_ids, describe_file
from shardway.data.formats.indexes import read_sums
from shardway.data.formats.npy import read_header
from shardway.errors import UserError

Array = npt.NDArray[Any]

_KINDS = "biufcSU"
"""Kinds of NumPy types that are read: bool, integers, floating and complex numbers, bytes and text of one width."""

_UNPACK_ERRORS = (EOFError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""What damaged gzip and zip files raise (RuntimeError: one with a password)."""


@dataclass(frozen=True)
class ArrayColumn:
    """One array of a file: its type, its shape, and the byte at which its rows begin: of the file, or of what
    unpacking it gives.

    `packing`: "" rows lie in the file; "fortran" in Fortran order; "zip" compressed, as the member `member`; "gzip".
    """

    file: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    packing: Literal["", "fortran", "zip", "gzip"] = ""
    member: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self.shape[0]

    @property
    def type(self) -> str:
        """The type of a row, as `Records.fields` names it."""
        if len(self.shape) > 1:
            return f"{self.dtype.name}{list(self.shape[1:])}"
        return {"b": "bool", "i": "int", "u": "int", "f": "float", "S": "bytes", "U": "text"}.get(
            self.dtype.kind, self.dtype.name
        )


class _ColumnRecords(Records):
    """Records whose fields are rows of arrays of one length."""

    def __init__(self, root: Path, files: Sequence[DataFile], columns: Mapping[str, ArrayColumn]) -> None:
        """Use `open`."""
        self.parts = FileParts(root, files, read_sums(root, files))
        self._columns = dict(columns)
        self._length = next(iter(columns.values())).shape[0]
        self._loaded: dict[str, Array] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}}

    def __len__(self) -> int:
        return self._length

    @property
    def fields(self) -> dict[str, str]:
        return {name: column.type for name, column in self._columns.items()}

    def own_checks(self) -> str:
        is_zipped = all(column.packing == "gzip" for column in self._columns.values())
        return "of each array" if is_zipped or self.parts.files[0].name.endswith(".npz") else ""

    def extent(self, number: int) -> Extent:
        """Where the row of the first array lies; of a compressed file, the file."""
        column = next(iter(self._columns.values()))
        if column.packing:
            return Extent(self.parts.path(column.file), 0)
        return Extent(self.parts.path(column.file), column.start + number * column.row_bytes, column.row_bytes)

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These records: rows as arrays; elements of a one-dimensional array as numbers, text or bytes of Python."""
        check_ids(ids, len(self))
        numbers = np.array(ids, np.int64)
        found = {
            name: self._gather(name, column, numbers)
            for name, column in self._columns.items()
            if not fields or name in fields
        }
        if not found:
            return [{} for _ in ids]
        rows = [list(array) if array.ndim > 1 else array.tolist() for array in found.values()]
        return [dict(zip(found, row, strict=True)) for row in zip(*rows, strict=True)]

    def _gather(self, name: str, column: ArrayColumn, numbers: Offsets) -> Array:
        if column.packing:
            if name not in self._loaded:
                self._loaded[name] = self._load(column)
            rows: Array = self._loaded[name][numbers]
        else:
            distinct, which = np.unique(numbers, return_inverse=True)
            rows = self._read_rows(column, distinct)
            if len(distinct) != len(numbers) or not np.array_equal(distinct, numbers):
                rows = rows[which]
        return rows if column.dtype.isnative else rows.astype(column.dtype.newbyteorder("="))

    def _read_rows(self, column: ArrayColumn, distinct: Offsets) -> Array:
        """Rows with rising numbers; those of neighbours are read at once."""
        breaks = np.flatnonzero(np.diff(distinct) != 1) + 1
        firsts, width = distinct[np.concatenate([[0], breaks])] if len(distinct) else distinct, column.row_bytes
        counts = np.diff(np.concatenate([[0], breaks, [len(distinct)]])) if len(distinct) else distinct
        offsets, sizes = column.start + firsts * width, counts * width
        read, file = self.parts.read, column.file
        pieces = [read(file, at, size) for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        # A bytearray, so that rows may be written to.
        return np.frombuffer(bytearray().join(pieces), column.dtype).reshape(len(distinct), *column.shape[1:])

    def _load(self, column: ArrayColumn) -> Array:
        """All rows of an array that has to be unpacked."""
        if column.packing == "fortran":
            content = self.parts.read(column.file, column.start, column.size)
            return np.frombuffer(content, column.dtype).reshape(column.shape, order="F")
        try:
            with self.parts.stream(column.file) as stream:
                if column.packing == "gzip":
                    content = gzip.GzipFile(fileobj=io.BufferedReader(stream)).read()
                else:
                    with zipfile.ZipFile(io.BufferedReader(stream)) as archive:
                        content = archive.read(column.member)
        except _UNPACK_ERRORS as error:
            raise self.parts.damaged(column.file, 0, f"it cannot be decompressed: {error}") from error
        if len(content) != column.start + column.size:
            what = f"it holds {len(content)} bytes, and its header states {column.start + column.size}"
            raise self.parts.damaged(column.file, 0, what)
        if column.packing == "zip" and _is_fortran(content):
            return np.frombuffer(content, column.dtype, offset=column.start).reshape(column.shape, order="F")
        return np.frombuffer(content, column.dtype, offset=column.start).reshape(column.shape)


class ArrayRecords(_ColumnRecords):
    """Rows of the arrays of a .npz archive, of a .npy file (one field of its name), or of the .npy files of a folder (a
    field each)."""

    format = "arrays"

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is such a file, or a folder with .npy files."""
        if path.is_dir():
            return any(path.glob("*.npy"))
        return path.suffix in (".npy", ".npz") and path.is_file()

    @classmethod
    def open(cls, place: DataPath) -> ArrayRecords:
        """The records of arrays of one length. Raises UserError for arrays of several lengths or types that are not
        read, and damaged files."""
        path = place.path
        if path.is_dir():
            columns = list_npy(place)
            files, root = [describe_file(path, f"{name}.npy") for name in columns], path
        elif not path.is_file():
            raise place.error("does not exist", allowed="a .npz or .npy file, or a folder of .npy files")
        else:
            root, files = path.parent, [describe_file(path.parent, path.name)]
            columns = {path.stem: read_npy(place, path)} if path.suffix == ".npy" else _list_npz(place)
        lengths = {name: column.shape[0] for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise place.error(
                "holds arrays of several lengths: " + ", ".join(f"{name} {each}" for name, each in lengths.items()),
                allowed="arrays whose first dimension is the same",
                remedy="write those that belong together to a file of their own",
            )
        return cls(root, files, columns)

    def find_damage(self) -> Iterator[str]:
        """Also each array of an archive whose CRC is another."""
        yield from super().find_damage()
        if not self.parts.files[0].name.endswith(".npz"):
            return
        try:
            with zipfile.ZipFile(self.parts.path(0)) as archive:
                for member in archive.infolist():
                    try:
                        with archive.open(member) as content:
                            while content.read(2**20):
                                pass
                    except _UNPACK_ERRORS as error:
                        yield f"{self.parts.path(0)} is damaged at byte {member.header_offset}: {error}"
        except (OSError, *_UNPACK_ERRORS) as error:
            yield f"{self.parts.path(0)} cannot be read: {error}"


# --- .npy files and .npz archives


def list_npy(place: DataPath) -> dict[str, ArrayColumn]:
    """The arrays of the .npy files of a folder by their names without ending, sorted; numbered in this order."""
    paths = sorted(path for path in place.path.glob("*.npy") if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise place.error("has no .npy files", allowed="a .npz file, or a folder of .npy files such as x.npy and y.npy")
    return {path.stem: read_npy(place, path, number) for number, path in enumerate(paths)}


def read_npy(place: DataPath, path: Path, number: int = 0) -> ArrayColumn:
    """The array of a .npy file, from its header. Raises UserError if that cannot be read, or the size does not fit."""
    with path.open("rb") as stream:
        column = _read_header(place, stream, path.name, number)
    held = path.stat().st_size - column.start
    if held != column.size:
        raise place.error(
            f"holds {path.name}, which is truncated or damaged: shape {list(column.shape)} of {column.dtype.name} "
            f"needs {column.size} bytes, it holds {max(0, held)}",
            remedy="copy the file again",
        )
    return column


def _read_header(place: DataPath, stream: IO[bytes], name: str, number: int = 0) -> ArrayColumn:
    try:
        shape, fortran, dtype = read_header(stream)
    except ValueError as error:
        what = f"holds {name}, which is not a NumPy file: its header cannot be read"
        raise place.error(what, remedy="copy the file again") from error
    if dtype.hasobject or dtype.kind not in _KINDS:
        what = "pickled objects" if dtype.hasobject else f"the type {dtype}"
        raise place.error(f"holds {name}, an array of {what}", allowed="numbers, text or bytes")
    if not shape:
        raise place.error(f"holds {name}, a single value", allowed="arrays with a row for each record")
    # One dimension has the same order either way.
    return ArrayColumn(number, dtype, shape, stream.tell(), "fortran" if fortran and len(shape) > 1 else "")


def _is_fortran(content: bytes) -> bool:
    return read_header(io.BytesIO(content))[1]


def refuse_npz(place: DataPath) -> UserError:
    """The error for an archive that cannot be read."""
    return place.error(
        "is not a .npz file that can be read: it is damaged, truncated or holds pickled objects",
        remedy="write it with numpy.savez from plain arrays, or copy it again",
    )


def _list_npz(place: DataPath) -> dict[str, ArrayColumn]:
    """The arrays of an archive. Those of `numpy.savez` lie in it as they are, `numpy.savez_compressed` packs them."""
    try:
        with place.path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            columns = {member.filename[:-4]: _read_member(place, stream, archive, member) for member in members}
    except (*_UNPACK_ERRORS, struct.error) as error:
        raise refuse_npz(place) from error
    if not columns:
        raise place.error("holds no arrays", allowed="a .npz file with at least one")
    return columns


def _read_member(place: DataPath, stream: IO[bytes], archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ArrayColumn:
    with archive.open(member) as content:
        header = _read_header(place, content, member.filename)
    if member.file_size != header.start + header.size:
        raise refuse_npz(place)
    if member.compress_type != zipfile.ZIP_STORED:
        return ArrayColumn(0, header.dtype, header.shape, header.start, "zip", member.filename)
    # The local header of a member has lengths of its own for name and extra field (APPNOTE.TXT 4.3.7).
    stream.seek(member.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
    start = member.header_offset + 30 + name_bytes + extra_bytes + header.start
    return ArrayColumn(0, header.dtype, header.shape, start, header.packing)


# --- MNIST's idx files, gzip-compressed or not

TRAIN, TEST = "train", "t10k"

IDX_IMAGES, IDX_LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"


class IdxRecords(_ColumnRecords):
    """Records {"image": uint8 [H, W], "label": int} of MNIST's idx files, or one of these fields where only its file is
    there."""

    format = "idx"

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a folder with one of MNIST's files, or an idx file of unsigned bytes."""
        if path.is_dir():
            place = DataPath("", str(path))
            return any(find_idx(place, f"{part}-{IDX_IMAGES}") for part in (TRAIN, TEST))
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            head = stream.read(4)
        names = (f"{name}{suffix}" for name in (IDX_IMAGES, IDX_LABELS) for suffix in ("", ".gz"))
        return head[:3] == bytes([0, 0, _UNSIGNED_BYTE]) or (head[:2] == _GZIP_MAGIC and path.name.endswith((*names,)))

    @classmethod
    def open(cls, place: DataPath) -> IdxRecords:
        """The train part of a folder (its t10k part if it has no other), or the part of an idx file: the images and the
        labels beside them. Raises UserError for what is missing, damaged or does not fit."""
        path = place.path
        if path.is_dir():
            part = next((each for each in (TRAIN, TEST) if find_idx(place, f"{each}-{IDX_IMAGES}")), TRAIN)
            paths = dict(zip(("image", "label"), find_pair(place, part), strict=True))
        elif path.is_file():
            paths = _find_beside(path)
        else:
            raise place.error("does not exist", allowed="the folder that holds the idx files, or one of them")
        columns = {
            name: _read_idx_header(place, each, number, 1 if name == "label" else None)
            for number, (name, each) in enumerate(paths.items())
        }
        lengths = {columns[name].shape[0] for name in columns}
        if len(lengths) > 1:
            what = f"has {columns['image'].shape[0]} images but {columns['label'].shape[0]} labels"
            raise place.error(what, allowed="one label for each image")
        root = next(iter(paths.values())).parent
        return cls(root, [describe_file(root, each.name) for each in paths.values()], columns)


def find_idx(place: DataPath, name: str) -> Path | None:
    """The idx file of this name in a folder, compressed or not; None if it is not there."""
    candidates = (place.path / f"{name}{suffix}" for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def find_pair(place: DataPath, part: str) -> tuple[Path, Path]:
    """The images and labels of a part ("train" or "t10k") of a folder. Raises UserError if one is missing."""
    if not place.path.is_dir():
        raise place.error("is not a folder", allowed="the folder that holds the idx files")
    files = []
    for name in (f"{part}-{IDX_IMAGES}", f"{part}-{IDX_LABELS}"):
        found = find_idx(place, name)
        if found is None:
            raise place.error(f"has no file {name} or {name}.gz")
        files.append(found)
    return files[0], files[1]


def has_part(place: DataPath, part: str) -> bool:
    """Whether the folder holds the images of this part."""
    return find_idx(place, f"{part}-{IDX_IMAGES}") is not None


def read_idx(place: DataPath, path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """The unsigned bytes of an idx file with `dims` dimensions, decompressed if it is gzip, whatever its name (a
    browser may have unpacked it); UserError for any other content."""
    content = path.read_bytes()
    if content[:2] == _GZIP_MAGIC:
        try:
            content = gzip.decompress(content)
        except _UNPACK_ERRORS as error:
            raise _refuse_gzip(place, path) from error
    start = 4 + 4 * dims
    shape = _check_idx(place, path, content[:start], len(content), dims)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _check_idx(place: DataPath, path: Path, head: bytes, size: int, dims: int) -> tuple[int, ...]:
    """The shape that the first bytes of an idx file state. Raises UserError unless a file of `size` bytes has it."""
    expected = bytes([0, 0, _UNSIGNED_BYTE, dims])
    if head[:4] != expected:
        raise place.error(
            f"holds {path.name}, which is not an idx file of bytes with {dims} dimensions: it starts with "
            f'"{head[:4].hex(" ")}"',
            allowed=f'"{expected.hex(" ")}"',
        )
    start = 4 + 4 * dims
    shape = struct.unpack(f">{dims}I", head[4:start].ljust(4 * dims, b"\0"))
    if size - start != math.prod(shape):
        raise place.error(
            f"holds {path.name}, which is truncated or damaged: shape {list(shape)} needs {math.prod(shape)} bytes, "
            f"it holds {max(0, size - start)}",
            remedy="copy the file again",
        )
    return shape


def _read_idx_header(place: DataPath, path: Path, number: int, dims: int | None) -> ArrayColumn:
    """The array of an idx file, from its header; of a gzip file also from its last four bytes, which state the size of
    the content modulo 2**32 (RFC 1952, section 2.3.1). `dims` None: any that the header states."""
    with path.open("rb") as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(max(0, size - 4))
        stated = int.from_bytes(stream.read(4), "little")
        stream.seek(0)
        zipped = stream.read(2) == _GZIP_MAGIC
        stream.seek(0)
        try:
            with gzip.GzipFile(fileobj=stream) if zipped else stream as content:
                head = content.read(4)
                dims = dims or max(1, head[3] if len(head) > 3 else 1)
                head += content.read(4 * dims)
        except _UNPACK_ERRORS as error:
            raise _refuse_gzip(place, path) from error
    if not zipped:
        shape = _check_idx(place, path, head, size, dims)
        return ArrayColumn(number, np.dtype(np.uint8), shape, 4 + 4 * dims)
    needed = 4 + 4 * dims + math.prod(struct.unpack(f">{dims}I", head[4:].ljust(4 * dims, b"\0")))
    if needed % 2**32 != stated and head[:3] == bytes([0, 0, _UNSIGNED_BYTE]):
        raise _refuse_gzip(place, path)
    shape = _check_idx(place, path, head, needed, dims)
    return ArrayColumn(number, np.dtype(np.uint8), shape, 4 + 4 * dims, "gzip")


def _refuse_gzip(place: DataPath, path: Path) -> UserError:
    return place.error(
        f"holds {path.name}, which cannot be decompressed: it is truncated or damaged", remedy="copy the file again"
    )


def _find_beside(path: Path) -> dict[str, Path]:
    """The images and labels of the part that an idx file belongs to; one of them if the other is not there."""
    for own, (mine, other) in {"image": (IDX_IMAGES, IDX_LABELS), "label": (IDX_LABELS, IDX_IMAGES)}.items():
        if mine not in path.name:
            continue
        base = path.name.partition(mine)[0]
        found = find_idx(DataPath("", str(path.parent)), f"{base}{other}")
        pair = {own: path} if found is None else {own: path, "label" if own == "image" else "image": found}
        return {name: pair[name] for name in ("image", "label") if name in pair}
    with path.open("rb") as stream:
        return {"label" if stream.read(4)[3:4] == b"\1" else "image": path}
