"""An LMDB environment: the folder of a data.mdb, or a single .mdb or .lmdb file. Its values in key order.

A record has the fields `value` (bytes) and `key` (text; in hex if a key of the environment is not UTF-8). Where every
key is a name and a number, and each number has all names ("image-000000001", "label-000000001"), a record is a number
and its fields are the names, as in data for text recognition. Keys with facts about the whole (__len__, __keys__, and
length and num-samples with a number) are no records. A pickled value is given as its bytes: nothing in a file is
executed.

LMDB cannot reach its n-th entry, so an index of the keys is made once from the pages of the tree.

What is not detected: LMDB has no checksums, so a byte that changes inside a value is found only with those of
`shardway data`. A value is compared with what lies before it (its key, or the number and the length of its pages), so
that one that has moved since the index was made is an error. An environment must not be written while it is read.

Invariants:
- The file is read with pread(2), not by the LMDB library. That maps the file, so a truncated one or a block that the
  disk cannot read ends the process (SIGBUS); it refuses a second reader of one environment in a process.
- An index belongs to a file of one size and time of change; a file that changes after it was opened is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import (
    DamagedData,
    DataFile,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    check_ids,
    describe_file,
)
from shardway.data.formats.indexes import IndexArrays, read_sums, use_index
from shardway.data.formats.lmdb_tree import (
    HEAD_BYTES,
    MAGIC,
    LmdbEntries,
    LmdbMeta,
    UnreadableTree,
    is_head_of,
    read_meta,
    split_keys,
    walk_tree,
)
from shardway.errors import JobError, list_some

FILE = "data.mdb"
FACTS = (b"__len__", b"__keys__")
"""Keys that are never records."""
COUNTS = (b"length", b"num-samples")
"""Keys that are no records if their value is a number in digits."""
MOST_FIELDS = 8
"""Keys are taken for numbered fields with up to so many names."""
READ_RUN_BYTES = 2**17
"""Neighbours are read at once up to so many bytes."""

_NUMBERED = re.compile(rb"([A-Za-z]\w*?)[-_.:]?(\d+)")


class LmdbRecords(Records):
    """The values of an environment in key order, or its numbered fields."""

    format = "lmdb"

    def __init__(self, parts: FileParts, meta: LmdbMeta, index: IndexArrays) -> None:
        self.parts, self._meta = parts, meta
        self._index: IndexArrays | None = index
        self._names = tuple(bytes(name).decode() for name in index["names"].tolist())
        self._length, self._in_hex = len(index["records"]), bool(index["in_hex"][0])

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a folder with a data.mdb, or a file that begins with a meta page or is named .lmdb."""
        if path.is_dir():
            return (path / FILE).is_file()
        try:
            with path.open("rb") as stream:
                head = stream.read(20)
        except OSError:
            return False
        return path.suffix == ".lmdb" or head[16:] == MAGIC

    @classmethod
    def open(cls, place: DataPath) -> LmdbRecords:
        """The records of an environment; makes the index if there is none. Raises UserError for anything wrong with the
        meta pages or the tree."""
        root, file = _find_file(place)
        files = [file]
        if not file.size:
            raise place.error(f"is empty: {root / file.name} has 0 bytes")
        parts = FileParts(root, files, read_sums(root, files))
        try:
            meta = read_meta(parts)
            index = use_index(root, "lmdb", files, lambda: _make_index(parts, meta))
        except UnreadableTree as error:
            raise place.error(str(error), "an LMDB environment with one database, one value for a key") from error
        except DamagedData as error:
            remedy = "copy it again from where it came, with every byte, while nothing writes to it"
            raise place.error(f"cannot be read: {str(error).splitlines()[0]}", remedy=remedy) from error
        if not len(index["records"]):
            raise place.error(f"has no records: the environment holds {meta.tree.entries} keys")
        return cls(parts, meta, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    def __len__(self) -> int:
        return self._length

    @property
    def fields(self) -> dict[str, str]:
        """`value` and `key`, or the names of the numbered fields and `key`, their number."""
        return {**dict.fromkeys(self._names, "bytes"), "key": "text"}

    @property
    def fingerprint(self) -> str:
        """xxh3-128 over name and size of the file, and the number of its entries and of its last write."""
        (file,) = self.parts.files
        return fingerprint(self.format, file.name, file.size, self._meta.tree.entries, self._meta.transaction)

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These records. Raises DamagedData if something else than the value of the key lies where the index says."""
        numbers = np.asarray(ids, np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= len(self)):
            check_ids(ids, len(self))
        index = self._load()
        entries = index["records"][numbers]
        columns = [place for place, name in enumerate(self._names) if not fields or name in fields]
        values = self._read_values(index, entries[:, columns].reshape(-1)) if columns else []
        names = [self._names[column] for column in columns]
        found: list[Record] = [
            dict(zip(names, values[at * len(names) : (at + 1) * len(names)], strict=True)) for at in range(len(numbers))
        ]
        if not fields or "key" in fields:
            for record, entry in zip(found, entries[:, 0].tolist(), strict=True):
                record["key"] = self._describe_key(_key_of(index, entry))
        return found

    def extent(self, number: int) -> Extent:
        """Where the first value of a record lies."""
        index = self._load()
        entry = int(index["records"][number, 0])
        return Extent(self.parts.path(0), int(index["offsets"][entry]), int(index["sizes"][entry]))

    def find_damage(self) -> Iterator[str]:
        """Blocks whose checksum is another, what is wrong with the tree, and values that are not at their place."""
        try:
            made = _make_index(self.parts, read_meta(self.parts))
            index = self._load()
            if any(not np.array_equal(made[name], index[name]) for name in index):
                yield f"{self.parts.path(0)} holds other keys, or at other places, than when it was opened"
        except UnreadableTree as error:
            yield f"{self.parts.path(0)} {error}"
        except JobError as error:
            yield str(error).splitlines()[0]
        yield from super().find_damage()

    def _load(self) -> IndexArrays:
        """The index, read again in another process."""
        if self._index is None:
            root, files = self.parts.root, self.parts.files
            now = [describe_file(root, file.name) for file in files]
            if now != list(files):
                raise JobError(f"{self.parts.path(0)} has changed since it was opened; nothing may write to it")
            self._index = use_index(root, "lmdb", files, lambda: _make_index(self.parts, self._meta))
        return self._index

    def _describe_key(self, key: bytes) -> str:
        if self._in_hex:
            return key.hex()
        if self._names != ("value",):
            return _split_name(key)[1].decode()
        return key.decode()

    def _read_values(self, index: IndexArrays, entries: Offsets) -> list[bytes]:
        """The values of entries; those that are neighbours in the file are read at once."""
        offsets, sizes, big = index["offsets"][entries], index["sizes"][entries], index["big"][entries]
        stops = index["key_ends"][entries]
        lengths = stops - np.where(entries > 0, index["key_ends"][entries - 1], 0)
        starts, ends = (offsets - np.where(big, HEAD_BYTES, lengths)).tolist(), (offsets + sizes).tolist()
        values, is_big, blob = offsets.tolist(), big.tolist(), index["keys"].data
        keys = list(zip((stops - lengths).tolist(), stops.tolist(), strict=True))
        found = [b""] * len(entries)
        order, page_bytes = np.argsort(offsets, kind="stable").tolist(), self._meta.page_bytes
        first = 0
        while first < len(order):
            start, end, last = starts[order[first]], ends[order[first]], first + 1
            while last < len(order) and starts[order[last]] <= end + page_bytes:
                if ends[order[last]] - start > READ_RUN_BYTES:
                    break
                end, last = max(end, ends[order[last]]), last + 1
            content = self.parts.read(0, start, end - start)
            for at in order[first:last]:
                head, value, stop = starts[at] - start, values[at] - start, ends[at] - start
                if is_big[at]:
                    whole = is_head_of(content[head:value], starts[at], stop - value, page_bytes)
                else:
                    whole = content[head:value] == blob[keys[at][0] : keys[at][1]]
                if not whole:
                    name = self._describe_key(bytes(blob[keys[at][0] : keys[at][1]]))
                    raise self.parts.damaged(0, starts[at], f'the value of key "{name}" is not there any more')
                found[at] = content[value:stop]
            first = last
        return found


def _find_file(place: DataPath) -> tuple[Path, DataFile]:
    path = place.path
    allowed = f"a folder with a {FILE}, or a .mdb or .lmdb file"
    if path.is_dir():
        try:
            return path, describe_file(path, FILE)
        except FileNotFoundError as error:
            below = sorted(found.parent.name for found in path.glob(f"*/{FILE}"))
            remedy = f"name one of its folders: {list_some(below, 5)}" if below else ""
            raise place.error(f"has no {FILE}", allowed, remedy) from error
    try:
        return path.parent, describe_file(path.parent, path.name)
    except FileNotFoundError as error:
        raise place.error("does not exist", allowed) from error


# --- the index


def _make_index(parts: FileParts, meta: LmdbMeta) -> dict[str, npt.NDArray[Any]]:
    """Where each value lies, and which entries are the fields of each record."""
    entries = walk_tree(parts, meta)
    keys = split_keys(entries.keys, entries.key_ends)
    kept = [number for number, key in enumerate(keys) if not _is_fact(parts, entries, number, key)]
    numbered = _group([keys[number] for number in kept])
    names, places = numbered or ([b"value"], np.arange(len(kept)).reshape(-1, 1))
    return {
        "keys": entries.keys,
        "key_ends": entries.key_ends,
        "offsets": entries.offsets,
        "sizes": entries.sizes,
        "big": entries.big,
        "records": np.array(kept, np.int64)[places],
        "names": np.array(names, np.bytes_),
        "in_hex": np.array([not _is_text(keys)]),
    }


def _is_fact(parts: FileParts, entries: LmdbEntries, number: int, key: bytes) -> bool:
    """Whether a key says something about the whole environment."""
    if key in FACTS:
        return True
    size = int(entries.sizes[number])
    return key in COUNTS and 0 < size <= 20 and parts.read(0, int(entries.offsets[number]), size).strip().isdigit()


def _group(keys: Sequence[bytes]) -> tuple[list[bytes], Offsets] | None:
    """The names of numbered fields and [records, fields] of the places of their keys; None if keys are otherwise."""
    places: dict[bytes, dict[bytes, int]] = {}
    for place, key in enumerate(keys):
        name, number = _split_name(key)
        if not name:
            return None
        numbers = places.setdefault(name, {})
        if number in numbers or len(places) > MOST_FIELDS:
            return None
        numbers[number] = place
    names = list(places)
    first = places[names[0]] if names else {}
    if len(names) < 2 or b"key" in places or any(numbers.keys() != first.keys() for numbers in places.values()):
        return None
    return names, np.array([[places[name][number] for name in names] for number in first], np.int64)


def _split_name(key: bytes) -> tuple[bytes, bytes]:
    """("image", "0001") of "image-0001"; ("", "") of a key that is not a name and a number."""
    match = _NUMBERED.fullmatch(key)
    return (match[1], match[2]) if match else (b"", b"")


def _is_text(keys: Sequence[bytes]) -> bool:
    try:
        b"\n".join(keys).decode()
    except UnicodeDecodeError:
        return False
    return True


def _key_of(index: IndexArrays, entry: int) -> bytes:
    ends = index["key_ends"]
    return bytes(index["keys"][ends[entry - 1] if entry else 0 : ends[entry]])
