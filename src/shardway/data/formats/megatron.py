"""Documents of tokens as Megatron-LM indexes them: name.bin has the tokens, name.idx says where sequences and documents
are.

The index is, without gaps and little-endian: 9 bytes _MAGIC; u64 version 1; u8 code of the type of a token; u64 number
of sequences s; u64 number of marks d; int32 lengths [s] in tokens; int64 pointers [s] in bytes; int64 marks [d], the
first 0 and each other the number of sequences before the end of a document; in multimodal data int8 modes [s].
Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py (_IndexWriter, _IndexReader).

Invariants:
- Opening reads the header of the index, its last length, pointer and mark, and the sizes of both files: no more,
  however many documents there are.
- Sequences follow each other without a gap, as Megatron's writer leaves them; an index that says otherwise is refused
  when documents are asked for.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath
from shardway.data.formats.base import Extent, FileParts, Offsets, Record, Records, check_ids, describe_file
from shardway.data.formats.indexes import read_sums
from shardway.data.formats.token_store import TokenFile, TokenStore, stage_file
from shardway.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_AT_ONCE = 2**20
"""Sequences of an index that are compared at once."""


@dataclass(frozen=True)
class MegatronIndex:
    """Where everything lies in an index: `sequences` and `marks` of documents, the type of a token, and the file."""

    path: Path
    dtype: str
    sequences: int
    marks: int
    size: int

    @property
    def pointers_at(self) -> int:
        """The byte from which on it holds pointers."""
        return _HEADER.size + 4 * self.sequences

    @property
    def marks_at(self) -> int:
        """The byte from which on it holds marks of documents."""
        return self.pointers_at + 8 * self.sequences

    @property
    def end(self) -> int:
        """The size of the file without modes."""
        return self.marks_at + 8 * self.marks

    def lengths(self) -> npt.NDArray[np.int32]:
        """The length of each sequence in tokens, mapped."""
        return self._map("<i4", _HEADER.size, self.sequences)

    def pointers(self) -> Offsets:
        """The byte of the .bin file where each sequence begins, mapped."""
        return self._map("<i8", self.pointers_at, self.sequences)

    def document_marks(self) -> Offsets:
        """The number of sequences before each end of a document; the first mark is 0; mapped."""
        return self._map("<i8", self.marks_at, self.marks)

    def _map(self, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
        if not count:
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def name_files(path: Path) -> tuple[Path, Path]:
    """The .bin and the .idx file of a path: one of them, what both names begin with, or a folder with one such pair."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if path.is_dir() and not stem.with_name(f"{stem.name}.idx").is_file():
        pairs = [each.with_suffix("") for each in path.glob("*.idx") if each.with_suffix(".bin").is_file()]
        stem = pairs[0] if len(pairs) == 1 else stem
    return stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")


def is_megatron(path: Path) -> bool:
    """Whether a path names Megatron's files."""
    try:
        content, index = name_files(path)
        with index.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC and content.is_file()
    except (OSError, ValueError):
        return False


def read_megatron_index(place: DataPath) -> MegatronIndex:
    """The index at a path, checked by the sizes of both files. Raises UserError."""
    if not place.path.name:
        raise place.error("is a folder", allowed="name.bin, name.idx, or name")
    content, path = name_files(place.path)
    missing = [each.name for each in (content, path) if not each.is_file()]
    if missing:
        raise place.error(
            f"lacks {' and '.join(missing)}",
            allowed="name.bin, name.idx, or name, with both files there, or a folder with one such pair",
        )
    copy = f"copy {path.name} and {content.name} again"
    size, held = path.stat().st_size, content.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
        if not head.startswith(_MAGIC):
            raise place.error(f"has {path.name} that is no index of Megatron-LM (byte 0)", remedy=copy)
        if len(head) < _HEADER.size:
            raise place.error(f"has {path.name} of {size} bytes, too few for an index of Megatron-LM", remedy=copy)
        _, version, code, sequences, marks = _HEADER.unpack(head)
        if version != 1:
            raise place.error(f"has {path.name} of version {version} (byte 9)", allowed="1")
        dtype = _DTYPES.get(code, f"of code {code}")
        if code not in _DTYPES or np.dtype(dtype).kind == "f":
            raise place.error(f"has {path.name} with tokens {dtype} (byte 17)", allowed="integers")
        index = MegatronIndex(path, dtype, sequences, marks, size)
        if size not in (index.end, index.end + sequences):
            what = f"has {path.name} of {size} bytes, and {sequences} sequences in {marks} documents need {index.end}"
            raise place.error(what, remedy=copy)
        _check_last(place, index, held, copy)
    return index


def _check_last(place: DataPath, index: MegatronIndex, held: int, copy: str) -> None:
    """Compare the ends of the index with the .bin file."""
    width = np.dtype(index.dtype).itemsize
    if not held:
        raise place.error("is empty")
    if not index.sequences:
        raise place.error("has an index without sequences", remedy=copy)
    first, last = int(index.pointers()[0]), int(index.pointers()[-1])
    end = last + int(index.lengths()[-1]) * width
    if first != 0:
        raise _refuse_gaps(place, index, 0)
    if end != held:
        raise place.error(
            f"holds {held} bytes of tokens and its index ends at byte {end}: "
            + ("the file is truncated" if held < end else "the index belongs to another file"),
            remedy=copy,
        )
    marks = index.document_marks()
    if len(marks) and int(marks[-1]) > index.sequences:
        at = index.end - 8
        raise place.error(f"has {index.path.name} with a document beyond its sequences (byte {at})", remedy=copy)


def _refuse_gaps(place: DataPath, index: MegatronIndex, sequence: int) -> UserError:
    """The error for a sequence that does not follow the one before."""
    return place.error(
        f"has {index.path.name} in which sequence {sequence} does not follow the one before "
        f"(byte {index.pointers_at + 8 * sequence})",
        allowed="sequences one after the other, as Megatron's own writer leaves them",
        remedy=f"copy {index.path.name} again, or write the data anew in the order of the index",
    )


@dataclass(eq=False)
class MegatronStore(TokenStore):
    """Documents of a .bin file."""

    index: MegatronIndex = field(kw_only=True)
    place: DataPath = field(kw_only=True)

    def staged(self, hold: Callable[[FileParts], Any]) -> MegatronStore:
        """The same documents and their index, read from where `hold` has put the files."""
        moved = replace(self.index, path=stage_file(self.index.path, hold))
        return replace(cast(MegatronStore, super().staged(hold)), index=moved)

    def read_ends(self) -> Offsets:
        """The end of each document in tokens. Raises UserError for an index that contradicts itself."""
        index, place = self.index, self.place
        ends = self._end_sequences(index, place)
        marks = index.document_marks()
        if len(marks) and marks[0] == 0:
            marks = marks[1:]
        if len(marks) == 0:
            return ends
        wrong = (marks[1:] < marks[:-1]).any() or marks[0] < 0 or marks[-1] > index.sequences
        if wrong:
            raise place.error(f"has {index.path.name} with documents out of order (byte {index.marks_at})")
        found: Offsets = np.concatenate([np.zeros(1, np.int64), ends])[marks]
        # Sequences behind the last mark, which end_document() was not called for, are a document of their own.
        return np.append(found, len(self)) if marks[-1] < index.sequences else found

    def _end_sequences(self, index: MegatronIndex, place: DataPath) -> Offsets:
        """The end of each sequence in tokens, where lengths and pointers agree."""
        lengths, pointers, width = index.lengths(), index.pointers(), np.dtype(index.dtype).itemsize
        if (short := np.flatnonzero(lengths < 0)).size:
            at = _HEADER.size + 4 * int(short[0])
            raise place.error(f"has {index.path.name} with a length below 0 (byte {at})")
        ends = np.cumsum(lengths, dtype=np.int64)
        for first in range(0, len(ends) - 1, _AT_ONCE):
            here = slice(first + 1, min(first + 1 + _AT_ONCE, len(ends)))
            apart = np.flatnonzero(pointers[here] != ends[first : here.stop - 1] * width)
            if apart.size:
                raise _refuse_gaps(place, index, first + 1 + int(apart[0]))
        return ends


def open_megatron_store(place: DataPath) -> MegatronStore:
    """The documents at a path, as `name_files` has it. Raises UserError for files that do not fit together."""
    index = read_megatron_index(place)
    content, _ = name_files(place.path)
    tokens = content.stat().st_size // np.dtype(index.dtype).itemsize
    files = [describe_file(content.parent, content.name)]
    sums = read_sums(content.parent, [*files, describe_file(content.parent, index.path.name)])
    parts = FileParts(content.parent, files, sums[:1]) if sums else None
    file = TokenFile(content, np.dtype(index.dtype).newbyteorder("<").str, 0, tokens)
    return MegatronStore((file,), parts=parts, index=index, place=place)


class MegatronRecords(Records):
    """Documents of Megatron-LM: {"tokens": array}."""

    format: ClassVar[str] = "megatron"

    def __init__(self, store: MegatronStore, parts: FileParts) -> None:
        self.store, self.parts = store, parts
        self._kept: Offsets | None = None

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return is_megatron(path)

    @classmethod
    def open(cls, place: DataPath) -> MegatronRecords:
        store, paths = open_megatron_store(place), name_files(place.path)
        files = [describe_file(path.parent, path.name) for path in paths]
        return cls(store, FileParts(paths[0].parent, files, read_sums(paths[0].parent, files)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def staged(self, hold: Callable[[FileParts], Any]) -> MegatronRecords:
        put = hold(self.parts)
        moved = cast(MegatronRecords, super().staged(lambda parts: put))
        moved.store = self.store.staged(lambda parts: put)
        return moved

    def __len__(self) -> int:
        index = self.store.index
        marks = index.document_marks()
        ends = len(marks) - int(len(marks) > 0 and marks[0] == 0)
        return ends + int(marks[-1] < index.sequences) if ends else index.sequences

    @property
    def fields(self) -> dict[str, str]:
        return {"tokens": f"{self.store.dtype.name}[?]"}

    def more_facts(self) -> dict[str, Any]:
        return {"tokens": len(self.store), "sequences": self.store.index.sequences}

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        check_ids(ids, len(self))
        if fields and "tokens" not in fields:
            return [{} for _ in ids]
        numbers, bounds, file = np.asarray(ids, np.int64), self._bounds(), self.store.files[0]
        places = zip(bounds[numbers].tolist(), bounds[numbers + 1].tolist(), strict=True)
        return [{"tokens": file.read(self.parts, 0, start, stop - start)} for start, stop in places]

    def extent(self, number: int) -> Extent:
        check_ids([number], len(self))
        first, last = (int(bound) * self.store.dtype.itemsize for bound in self._bounds()[number : number + 2])
        return Extent(self.store.files[0].path, first, last - first)

    def find_damage(self) -> Iterator[str]:
        """Each block whose checksum is another, and what contradicts itself in the index."""
        try:
            self.store.read_ends()
        except UserError as error:
            yield " ".join(str(error).splitlines()[1:2]).strip()
        yield from self.parts.find_damage()

    def _bounds(self) -> Offsets:
        """The start of each document in tokens, and the end of the last."""
        if self._kept is None:
            self._kept = np.concatenate([np.zeros(1, np.int64), self.store.read_ends()])
        return self._kept


# --- writing


def write_megatron_files(prefix: Path, documents: Iterable[npt.NDArray[Any]]) -> None:
    """Write documents [n] of tokens as prefix.bin and prefix.idx, each one sequence. The first decides the type: uint8
    and uint16 stay, others become int32.

    The files have their names only when they are whole. Raises UserError for a token that the type does not hold.
    """
    content, index = name_files(prefix.with_name(f"{prefix.name}.bin"))
    lengths, dtype = array("i"), ""
    temporaries = [path.with_name(f".{path.name}.tmp") for path in (content, index)]
    try:
        with temporaries[0].open("wb") as stream:
            for tokens in documents:
                dtype = dtype or (tokens.dtype.name if tokens.dtype.name in ("uint8", "uint16") else "int32")
                limit = np.iinfo(dtype).max
                if tokens.size and (int(tokens.max()) > limit or int(tokens.min()) < 0):
                    wrong = int(tokens.max()) if int(tokens.max()) > limit else int(tokens.min())
                    raise UserError(f"document {len(lengths)} holds the token {wrong}\n  allowed: 0 to {limit}")
                stream.write(np.ascontiguousarray(tokens, np.dtype(dtype).newbyteorder("<")).data)
                lengths.append(tokens.size)
            stream.flush()
            os.fsync(stream.fileno())
        with temporaries[1].open("wb") as stream:
            counts, code = (
                np.array(lengths, "<i4"),
                next(code for code, name in _DTYPES.items() if name == (dtype or "int32")),
            )
            starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[: len(counts)]
            stream.write(_HEADER.pack(_MAGIC, 1, code, len(counts), len(counts) + 1))
            stream.write(counts.data)
            stream.write((starts * np.dtype(_DTYPES[code]).itemsize).astype("<i8").data)
            stream.write(np.arange(len(counts) + 1, dtype="<i8").data)
            stream.flush()
            os.fsync(stream.fileno())
        for temporary, path in zip(temporaries, (content, index), strict=True):
            os.replace(temporary, path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
