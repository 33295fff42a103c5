"""WebDataset: tar shards in which consecutive members with one key are the fields of one record.

Invariants:
- The key of a member is its path up to the first dot of its base name; the rest, in lower case, is the field ("jpg",
  "cls", "seg.png"). Members that are no regular files, whose base name begins with a dot or has none, or that lie at
  `__name__` (metadata of WebDataset) are no fields.
- Records are numbered in the order of the shards' names and of their members.
- The index holds where each member lies, so a record is read without a walk through its shard: its members lie side by
  side and are read at once. It takes about 40 bytes a member and is made once, of the headers alone.
- A checksum of the headers of each record is in the index, so that every changed bit in them is found. A tar file has
  no checksum of its payload.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.content import DataPath
from shardway.data.formats.base import (
    DataFile,
    Extent,
    FileParts,
    Offsets,
    Record,
    Records,
    check_ids,
    find_shard,
    list_files,
)
from shardway.data.formats.indexes import IndexArrays, read_sums, use_index
from shardway.data.formats.tar_headers import REGULAR, TAR_BLOCK_BYTES, BadTar, list_members

SUFFIX = ".tar"
KEY = "__key__"
"""The field with the key of a record."""
SPREAD_BYTES = 2**28
"""Shards that are larger together are indexed in several processes."""

_COMPRESSED = {
    **dict.fromkeys((".tar.gz", ".tgz"), "gunzip"),
    **dict.fromkeys((".tar.zst", ".tzst"), "unzstd --rm"),
    **dict.fromkeys((".tar.xz", ".txz"), "unxz"),
    **dict.fromkeys((".tar.bz2", ".tbz2"), "bunzip2"),
}
_GAP_BYTES = 2**14
"""Members that lie so close are read at once: a read costs more than these bytes."""
_RUN_BYTES = 2**20
_FIRST_SHARDS = 8
"""The fields are those of the first record of so many shards."""
_FIRST_NAMES, _FIRST_FOLDERS = 1000, 16
"""Of a folder of images there may be millions; so many names and folders are looked at to tell a format."""


class WebDatasetRecords(Records):
    """Records of tar shards: values are bytes as they are in the members, `__key__` is text."""

    format = "webdataset"

    def __init__(self, parts: FileParts, index: IndexArrays, lowers_fields: bool = True) -> None:
        """`index`: of the files of `parts`, as `index_shards` makes it."""
        self.parts, self._lowers_fields = parts, lowers_fields
        self._offsets, self._sizes, self._heads = index["offsets"], index["sizes"], index["heads"]
        self._fields, self._names = index["fields"], _unpack_all(index["names"], index["name_ends"])
        self._keys, self._key_ends = index["keys"].tobytes(), index["key_ends"]
        self._firsts, self._stops = index["firsts"], index["stops"]
        self._ends = index["ends"]

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a tar file (also a compressed one, which `open` refuses), a pattern of such names, or a folder
        with one among the first names in it or in a folder in it."""
        if not path.is_dir():
            return _is_shard(path.name)
        inside = _list_first(path)
        folders = [entry for entry in inside if entry.is_dir()][:_FIRST_FOLDERS]
        within = (name for folder in folders for name in _list_first(folder.path))
        return any(_is_shard(entry.name) for entry in itertools.chain(inside, within) if not entry.name.startswith("."))

    @classmethod
    def open(cls, place: DataPath) -> WebDatasetRecords:
        """The records of a tar file, of all in a folder, or of those of a pattern. Raises UserError for a shard that is
        missing, compressed, damaged or truncated, and if there is no record."""
        root, files = list_files(place, _is_shard, f"tar shards (*{SUFFIX})")
        for file in files:
            for suffix, command in _COMPRESSED.items():
                if file.name.lower().endswith(suffix):
                    what = f"has a compressed shard, {file.name}, and records in it cannot be read one by one"
                    raise place.error(what, allowed=f"plain {SUFFIX} files", remedy=f"{command} {root / file.name}")
        return cls.open_shards(place, root, files)

    @classmethod
    def open_shards(
        cls, place: DataPath, root: Path, files: Sequence[DataFile], lowers_fields: bool = True
    ) -> WebDatasetRecords:
        """The records of these shards, in this order. `lowers_fields`: whether "JPG" is the field "jpg". Raises
        UserError as `open` does."""
        paths = [root / file.name for file in files]
        name = cls.format if lowers_fields else f"{cls.format}-as-written"
        try:
            index = use_index(root, name, files, lambda: index_shards(paths, lowers_fields))
        except BadTar as error:
            what = f"has a shard that cannot be read: {error.path.name}, byte {error.offset}: {error.what}"
            raise place.error(what, remedy=error.remedy) from error
        if not len(index["firsts"]):
            raise place.error("has no record in its shards", allowed="members named key.field, such as 0001.jpg")
        return cls(FileParts(root, files, read_sums(root, files)), index, lowers_fields)

    def __len__(self) -> int:
        return len(self._firsts)

    @property
    def fields(self) -> dict[str, str]:
        """`__key__` and the fields of the first record of each of the first shards."""
        found = {KEY: "text"}
        starts = (int(end) for end in (0, *self._ends[: _FIRST_SHARDS - 1]))
        for number in dict.fromkeys(start for start in starts if start < len(self)):
            members = self._fields[self._firsts[number] : self._stops[number]].tolist()
            found.update((self._names[member], "bytes") for member in members)
        return found

    @property
    def shard_lengths(self) -> list[int]:
        """How many records each shard has."""
        lengths: list[int] = np.diff(self._ends, prepend=0).tolist()
        return lengths

    def key(self, number: int) -> str:
        """The key of a record."""
        return self._keys[int(self._key_ends[number - 1]) if number else 0 : int(self._key_ends[number])].decode()

    def file_ends(self) -> Offsets:
        return self._ends

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These records, in this order. Members that lie close to each other are read at once."""
        check_ids(ids, len(self))
        numbers = np.asarray(ids, np.int64)
        found: list[Record]
        if not fields or KEY in fields:
            found = [{KEY: self.key(number)} for number in numbers.tolist()]
        else:
            found = [{} for _ in range(len(numbers))]
        counts = self._stops[numbers] - self._firsts[numbers]
        shards = np.searchsorted(self._ends, numbers, side="right")
        rows = np.repeat(np.arange(len(numbers)), counts)
        members = np.repeat(self._firsts[numbers] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        if fields:
            wanted = np.array([name in fields for name in self._names], np.bool_)[self._fields[members]]
            rows, members = rows[wanted], members[wanted]
        if not len(members):
            return found
        values = self._read_members(shards[rows], self._offsets[members], self._sizes[members])
        names = self._names
        for row, name, value in zip(rows.tolist(), self._fields[members].tolist(), values, strict=True):
            found[row][names[name]] = value
        return found

    def extent(self, number: int) -> Extent:
        """From the first byte of a record's first field to the last of its last."""
        check_ids([number], len(self))
        first, last = int(self._firsts[number]), int(self._stops[number]) - 1
        start = int(self._offsets[first])
        path = self.parts.path(find_shard(self._ends, number)[0])
        return Extent(path, start, int(self._offsets[last] + self._sizes[last]) - start)

    def own_checks(self) -> str:
        return "of the headers of members"

    def find_damage(self) -> Iterator[str]:
        """Damage as the base class finds it, and every header that is not the one that the index was made of. A changed
        byte of a payload is found only where checksums were made: the format has none."""
        yield from super().find_damage()
        first = 0
        for shard, end in enumerate(self._ends.tolist()):
            yield from self._find_changed_headers(shard, range(first, end))
            first = end

    def _read_members(self, shards: Any, offsets: Any, sizes: Any) -> list[bytes]:
        """The bytes of members of at least one record, in this order."""
        order = np.lexsort((offsets, shards))
        shards, starts = shards[order], offsets[order]
        stops = starts + sizes[order]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (shards[1:] != shards[:-1]) | (starts[1:] - stops[:-1] > _GAP_BYTES)
        begins[1:] |= starts[1:] // _RUN_BYTES != starts[:-1] // _RUN_BYTES
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(order)) - 1
        base = starts[first][np.cumsum(begins) - 1]
        runs = zip(shards[first].tolist(), starts[first].tolist(), stops[last].tolist(), strict=True)
        pieces = zip(order.tolist(), (starts - base).tolist(), (stops - base).tolist(), strict=True)
        found, read = [b""] * len(order), self.parts.read
        for (shard, start, stop), count in zip(runs, (last - first + 1).tolist(), strict=True):
            content = read(shard, start, stop - start)
            for _ in range(count):
                at, inner, end = next(pieces)
                found[at] = content[inner:end]
        return found

    def _find_changed_headers(self, shard: int, numbers: range) -> Iterator[str]:
        path = self.parts.path(shard)
        try:
            now = index_shard(path, self._lowers_fields)
        except BadTar as error:
            yield str(error)
            return
        except OSError:  # the base class has named it
            return
        before = self._heads[numbers.start : numbers.stop]
        if np.array_equal(now["heads"], before):
            return
        both = min(len(before), len(now["heads"]))
        other = np.flatnonzero(now["heads"][:both] != before[:both])
        if not len(other):
            yield f"{path} has {len(now['heads'])} records, and {len(before)} were there when its index was made"
        for number in (numbers.start + other).tolist():
            offset = int(self._offsets[self._firsts[number]]) - TAR_BLOCK_BYTES
            yield f"record {number}: {path}, byte {offset}: the headers of its members have changed"


# --- the index


def index_shards(paths: Sequence[Path], lowers_fields: bool = True) -> dict[str, npt.NDArray[Any]]:
    """The index of tar files, one after the other; of many bytes in several processes. Raises BadTar, OSError.

    Member m lies at `offsets[m]` of its file, has `sizes[m]` bytes and is the field `fields[m]` of `names`. Record r
    has the members `firsts[r]` to `stops[r]` - 1, and the checksum `heads[r]` over their headers. Shard s has the
    records up to `ends[s]`. Texts are one after the other as UTF-8: key r of `keys` ends at `key_ends[r]`, and a name
    likewise.
    """
    shards = _index_apart(paths, lowers_fields)
    names = list(dict.fromkeys(name for shard in shards for name in _unpack_all(shard["names"], shard["name_ends"])))
    number_of = {name: number for number, name in enumerate(names)}
    members = np.cumsum([0, *(len(shard["offsets"]) for shard in shards)])
    for shard, first in zip(shards, members.tolist(), strict=False):
        shard["firsts"] += first
        shard["stops"] += first
        own = [number_of[name] for name in _unpack_all(shard["names"], shard["name_ends"])]
        shard["fields"] = np.array(own, _smallest_type(len(names)))[shard["fields"]]
    joined = ("offsets", "sizes", "fields", "firsts", "stops", "heads", "keys")
    lengths = np.concatenate([np.diff(shard["key_ends"], prepend=0) for shard in shards])
    text, name_ends = _pack(names)
    return {
        **{name: np.concatenate([shard[name] for shard in shards]) for name in joined},
        "key_ends": np.cumsum(lengths, dtype=np.int64),
        "ends": np.cumsum([len(shard["heads"]) for shard in shards], dtype=np.int64),
        "names": text,
        "name_ends": name_ends,
    }


def index_shard(path: Path, lowers_fields: bool = True) -> dict[str, npt.NDArray[Any]]:
    """The index of one tar file, of its headers. Raises BadTar, OSError."""
    offsets: list[int] = []
    sizes: list[int] = []
    fields: list[int] = []
    names: dict[str, int] = {}
    firsts: list[int] = []
    keys: list[str] = []
    heads: list[int] = []
    seen: dict[str, int] = {}
    again: list[tuple[int, int]] = []
    head: list[bytes] = []
    have: set[str] = set()
    for member in list_members(path):
        split = _split_name(member.name) if member.type in REGULAR else None
        if split is None:
            continue
        key, field = split
        if lowers_fields:
            field = field.lower()
        if not keys or key != keys[-1]:
            if keys:
                heads.append(xxhash.xxh3_64_intdigest(b"".join(head)))
            if key in seen:
                again.append((len(keys), seen[key]))
            seen[key] = len(keys)
            firsts.append(len(offsets))
            keys.append(key)
            head, have = [], {KEY}
        if field in have:
            what = f'"{member.name}" is the second field "{field}" of its record'
            raise BadTar(path, member.header, what, "pack the shard again with each field once")
        have.add(field)
        head.append(member.head)
        offsets.append(member.offset)
        sizes.append(member.size)
        fields.append(names.setdefault(field, len(names)))
    if keys:
        heads.append(xxhash.xxh3_64_intdigest(b"".join(head)))
    text, key_ends = _pack(keys)
    name_text, name_ends = _pack(list(names))
    index = {
        "offsets": np.array(offsets, np.int64),
        "sizes": np.array(sizes, np.int64),
        "fields": np.array(fields, _smallest_type(len(names))),
        "firsts": np.array(firsts, np.int64),
        "stops": np.array([*firsts[1:], len(offsets)] if firsts else [], np.int64),
        "heads": np.array(heads, np.uint64),
        "keys": text,
        "key_ends": key_ends,
        "names": name_text,
        "name_ends": name_ends,
    }
    _check_whole(path, again, index, keys)
    return index


def _index_apart(paths: Sequence[Path], lowers_fields: bool) -> list[dict[str, npt.NDArray[Any]]]:
    """The index of each tar file; of many bytes made by as many processes as there are cores.

    They run this module anew, not a copy of this process: it may hold a device, and its main module may have no guard.
    """
    workers = min(len(paths), len(os.sched_getaffinity(0)))
    if workers < 2 or not sys.executable or sum(path.stat().st_size for path in paths) < SPREAD_BYTES:
        return [index_shard(path, lowers_fields) for path in paths]
    shares = [paths[number::workers] for number in range(workers)]
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
            processes.append(process)
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it has died, and its return code says so
                    process.stdin.write(pickle.dumps((share, lowers_fields)))
                    process.stdin.close()
                process.stdin = None
        found: dict[Path, Any] = {}
        for process in processes:
            answered, complaint = process.communicate()
            if process.returncode:
                raise OSError(f"a process that reads headers failed: {complaint.decode(errors='replace').strip()}")
            found.update(pickle.loads(answered))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    wrong = [found[path] for path in paths if isinstance(found.get(path), Exception)]
    if wrong:
        raise wrong[0]
    return [found[path] for path in paths]


def answer() -> None:
    """Index the tar files that a parent process names on standard input; the answer goes to standard output."""
    paths, lowers_fields = pickle.load(sys.stdin.buffer)
    found: dict[Path, Any] = {}
    for path in paths:
        try:
            found[path] = index_shard(path, lowers_fields)
        except (BadTar, OSError) as error:
            found[path] = error
            break
    pickle.dump(found, sys.stdout.buffer)


def _split_name(name: str) -> tuple[str, str] | None:
    """(key, field) of a member; None if it is none of a record."""
    if name.startswith("__") and name.partition("/")[0].endswith("__"):
        return None
    folder, slash, base = name.rpartition("/")
    stem, dot, field = base.partition(".")
    return (f"{folder}{slash}{stem}", field) if stem and dot else None


def _check_whole(path: Path, again: Iterable[tuple[int, int]], index: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Refuse a record whose members do not follow each other. `again`: (record, earlier record with the same key); two
    that share a field are two records."""
    for number, earlier in again:
        own, other = (
            set(index["fields"][index["firsts"][each] : index["stops"][each]].tolist()) for each in (number, earlier)
        )
        if own.isdisjoint(other):
            at, before = (int(index["offsets"][index["firsts"][each]]) - TAR_BLOCK_BYTES for each in (number, earlier))
            what = f'members of the record "{keys[number]}" do not follow those at byte {before}: others lie between'
            raise BadTar(path, at, what, "pack it again with sorted names, such as tar --sort=name")


def _pack(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """UTF-8 of texts one after the other, and where each ends."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def _unpack_all(text: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> list[str]:
    content, stops = text.tobytes(), ends.tolist()
    return [content[start:stop].decode() for start, stop in zip([0, *stops], stops, strict=False)]


def _smallest_type(count: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if count <= 2**8 else np.uint16 if count <= 2**16 else np.uint32


def _list_first(folder: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(itertools.islice(entries, _FIRST_NAMES))


def _is_shard(name: str) -> bool:
    return name.lower().endswith((SUFFIX, *_COMPRESSED))
