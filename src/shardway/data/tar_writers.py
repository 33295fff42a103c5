"""Writes tar shards: as WebDataset reads them, and with the files by which Megatron Energon takes a folder as prepared.

Invariants:
- Records come back with the fields that were written: a key never joins two records or hides one. No two records of a
  shard have one key, and no two of a folder for Energon.
- The files of Energon are those that `energon prepare` 7.4.1 makes of the same shards: the same rows of index.sqlite,
  the same bytes of each .tar.idx.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tarfile
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from shardway.data.formats.base import Record
from shardway.data.formats.tar_headers import TAR_BLOCK_BYTES
from shardway.data.record_writers import (
    IMAGE_MAGICS,
    OTHERWISE,
    SHARD_BYTES,
    as_bytes,
    fields_of,
    find_image_suffix,
    refuse_empty,
)
from shardway.errors import UserError


def write_webdataset(records: Iterator[Record], out: Path) -> None:
    """Tar shards 000000.tar, 000001.tar ...: a member for each field, of bytes (`as_bytes`); null is left out. A record
    keeps its key (`__key__`) unless it is no name of files or taken in its shard."""
    out.mkdir()
    current, keys = 0, set[str]()

    def is_taken(shard: int, key: str) -> bool:
        nonlocal current
        if shard != current:
            current = shard
            keys.clear()
        return key in keys

    for written in _write_shards(records, out, is_taken):
        keys.add(written.key)


# --- Energon

_META, _VERSION = ".nv-meta", "7.4.1"
_TABLES = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
                      byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
                           content_byte_size INTEGER);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset,
                                                   content_byte_size);
"""


def write_energon(records: Iterator[Record], out: Path) -> None:
    """Tar shards as `write_webdataset` writes them, prepared for Megatron Energon: all in the split "train", as samples
    of `CrudeWebdataset`, so that no class for them is needed. No key is there twice."""
    import sqlite3

    (out / _META).mkdir(parents=True)
    starts: list[list[int]] = []
    place = f"file:{quote(str(out / _META / 'index.sqlite'))}?nolock=1"  # no other process has it yet
    with contextlib.closing(sqlite3.connect(place, uri=True, isolation_level=None)) as index:
        # A kill leaves a folder that nothing reads, so nothing needs to be undone.
        index.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; {_TABLES}")

        def is_taken(shard: int, key: str) -> bool:
            return bool(index.execute("SELECT 1 FROM samples WHERE sample_key = ?", (key,)).fetchone())

        for shard, key, start, end, members in _write_shards(records, out, is_taken):
            if shard == len(starts):
                starts.append([start])
            number = len(starts[shard]) - 1
            starts[shard].append(end)
            index.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", (shard, key, number, start, end - start))
            rows = ((shard, number, *member) for member in members)
            index.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", rows)
        index.commit()
        index.executescript(_INDEXES)
    for shard, offsets in enumerate(starts):
        (out / f"{_name(shard)}.idx").write_bytes(np.array(offsets, "<u8").tobytes())
    counts = {_name(shard): len(offsets) - 1 for shard, offsets in enumerate(starts)}
    names = _name(0) if len(starts) == 1 else f"'{{{0:06d}..{len(starts) - 1:06d}}}.tar'"
    for name, content in {
        ".info.json": json.dumps({"energon_version": _VERSION, "shard_counts": counts}, indent=2),
        "split.yaml": f"split_parts:\n  train:\n  - {names}\nexclude: []\n",
        "dataset.yaml": "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
        "index.uuid": str(uuid.uuid4()),
    }.items():
        (out / _META / name).write_text(content)


# --- shards


class _Written(NamedTuple):
    """A record in a shard: its key, the bytes from `start` to `end`, and each of its fields (name, where its bytes
    begin, how many they are)."""

    shard: int
    key: str
    start: int
    end: int
    members: list[tuple[str, int, int]]


def _write_shards(records: Iterator[Record], out: Path, is_taken: Callable[[int, str], bool]) -> Iterator[_Written]:
    """Write all records below a folder, and say of each where it lies. `is_taken`: whether a shard may have no other
    record with this key."""
    upcoming = enumerate(records)
    following = next(upcoming, None)
    suffixes: dict[str, str] = {}  # that of each field follows from its first value, and is the same in all records
    for shard in count():
        with tarfile.open(out / _name(shard), "w", format=tarfile.GNU_FORMAT) as tar:
            while following is not None and tar.offset < SHARD_BYTES:
                number, record = following
                key = next(key for key in _list_keys(number, record) if not is_taken(shard, key))
                start = tar.offset
                members = _add_members(tar, key, suffixes, number, record)
                yield _Written(shard, key, start, tar.offset, members)
                following = next(upcoming, None)
        if following is None:
            return


def _name(shard: int) -> str:
    return f"{shard:06d}.tar"


_KEY = re.compile(r"(?:[^/\0-\x1f]+/)*[^/.\0-\x1f]+")


def _list_keys(number: int, record: Record) -> Iterator[str]:
    """The keys that a record may have, best first: its own, if readers of tar files take it as one; its number."""
    own = str(record.get("__key__", ""))
    folders = own.split("/")[:-1]
    is_key = _KEY.fullmatch(own) and not own.startswith("__") and not {".", ".."} & {*folders}
    if is_key and not own.rpartition("/")[2].startswith("__") and _is_text(own):
        yield own
    yield f"{number:09d}"
    yield from (f"{number:09d}-{again}" for again in count(2))


def _is_text(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def _add_members(
    tar: tarfile.TarFile, key: str, suffixes: dict[str, str], number: int, record: Record
) -> list[tuple[str, int, int]]:
    fields = {name: value for name, value in fields_of(record).items() if value is not None}
    if not fields:
        refuse_empty(number, "a tar shard")
    wrong = next((name for name in fields if not name or {"/", "\0"} & {*name} or not _is_text(name)), None)
    if wrong is not None:
        raise UserError(
            f"the field {json.dumps(wrong)} cannot be the suffix of a member of a tar shard\n  to do: {OTHERWISE}"
        )
    own = set[str]()
    members = []
    for name, value in fields.items():
        blob = value["bytes"] if find_image_suffix(value) and isinstance(value, dict) else value
        content = as_bytes(blob, number, name)
        suffix = suffixes.setdefault(name, _suffix(name, value))
        suffix = f"{name}.{suffix}" if suffix.lower() in own else suffix
        own.add(suffix.lower())
        member = tarfile.TarInfo(f"{key}.{suffix}")
        member.size, member.mode = len(content), 0o644
        tar.addfile(member, io.BytesIO(content))
        padded = -(-len(content) // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES
        members.append((suffix, tar.offset - padded, len(content)))
    return members


def _suffix(name: str, value: Any) -> str:
    """The field as the suffix of a member, by which readers of WebDataset know what it is: that of an image's format
    unless it is one already, "cls" for a label, with ".npy" for an array and ".json" for a table."""
    if image := find_image_suffix(value):
        return name if name in IMAGE_MAGICS.values() or name == "jpeg" else image
    if name == "label" and isinstance(value, int | np.integer):
        return "cls"
    if isinstance(value, np.ndarray) and not name.endswith("npy"):
        return f"{name}.npy"
    return f"{name}.json" if isinstance(value, dict | list) and not name.endswith("json") else name
