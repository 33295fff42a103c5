"""Indexes and checksums of files that have none: kept beside the data in a folder .shardway, or in the user's cache
folder where that may not be written.

Invariants:
- An index states which files it was made of, by name, size and time of change; for other files a new one is made.
- Checksums state names and sizes only, so that those of a copied data set still hold; they are made on request and
  never anew by themselves, since they would take damage for content. They are found without opening the data, which
  may be too damaged for it.
- Each is written beside its final name and renamed, so that a kill leaves no half index and two makers do no harm. A
  damaged one is never believed (its own checksum is the last thing in it).
"""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.content import fingerprint
from shardway.data.formats.base import BLOCK_BYTES, DataFile, Sums, describe_file, match_files, sum_blocks
from shardway.errors import UserError
from shardway.places import find_own_folder

IndexArrays = Mapping[str, npt.NDArray[Any]]
"""The arrays of an index, without objects in them."""

FOLDER = ".shardway"
INDEX_VERSION = 1
_MAGIC = b"shardway index\n"
_DIGEST_BYTES = 16


def use_index(root: Path, name: str, files: Sequence[DataFile], make: Callable[[], IndexArrays]) -> IndexArrays:
    """The index `name` of files below a folder: read, or made now and kept where it can be kept.

    `make` may take long; several processes may be in it at once. Where nothing can be written the index is made each
    time.
    """
    key = fingerprint(INDEX_VERSION, name, *(part for file in files for part in (file.name, file.size, file.mtime_ns)))
    places = _find_places(root, name, files)
    for place in places:
        found = _read(place, key)
        if found is not None:
            return found
    made = make()
    _keep(places, key, made)
    return made


def drop_index(root: Path, name: str, files: Sequence[DataFile]) -> None:
    """Forget an index, so that it is made anew."""
    for place in _find_places(root, name, files):
        with contextlib.suppress(OSError):
            place.unlink()


def read_sums(root: Path, files: Sequence[DataFile]) -> list[Sums]:
    """The kept checksums of files: one array each; none if they were never made."""
    for place in _find_places(root, "sums", files):
        found = _read(place, _sums_key(files))
        if found is not None:
            return [found[str(number)] for number in range(len(files))]
    return []


def make_sums(root: Path, files: Sequence[DataFile], others: Sequence[str] = ()) -> Path:
    """Make and keep the checksums of files as they are now, and of `others` below the folder, which hold no records;
    returns where. Raises UserError if nothing can be written."""
    every = [*files, *(describe_file(root, name) for name in others)]
    made: dict[str, npt.NDArray[Any]] = {str(number): sum_blocks(root / file.name) for number, file in enumerate(every)}
    made["names"] = np.frombuffer("\0".join(file.name for file in every).encode(), np.uint8)
    made["sizes"] = np.array([file.size for file in every], np.int64)
    kept = _keep(_find_places(root, "sums", files), _sums_key(files), made)
    if kept is None:
        raise UserError(f"checksums cannot be kept: neither {root / FOLDER} nor the user's cache folder can be written")
    return kept


def find_sums_damage(path: Path, checked: Sequence[DataFile] = ()) -> Iterator[str]:
    """What is wrong, as sentences, of all files at a path (a file, a folder or a pattern) whose checksums are kept, and
    of these themselves; without the files that are `checked` elsewhere, if it is their checksums that are kept."""
    root = path if path.is_dir() else path.parent
    wanted = frozenset[str]() if path.is_dir() else frozenset(match_files(path))
    for place in _list_kept(root):
        kept = _read(place)
        if kept is None:
            yield f"{place} is damaged at byte 0: the checksums that are kept there are not those that were written"
            continue
        names = kept["names"].tobytes().decode().split("\0")
        if path.is_dir() or not wanted.isdisjoint(names):
            is_own = bool(checked) and _read(place, _sums_key(checked)) is not None
            own = frozenset(file.name for file in checked) if is_own else frozenset()
            yield from _compare(root, names, kept, own)


def _compare(root: Path, names: Sequence[str], kept: IndexArrays, without: Collection[str]) -> Iterator[str]:
    """Each block of files that has another checksum than is kept, and each file of another size."""
    for number, (name, size) in enumerate(zip(names, kept["sizes"].tolist(), strict=True)):
        if name in without:
            continue
        try:
            now, found = (root / name).stat().st_size, sum_blocks(root / name)
        except OSError as error:
            yield f"{root / name}: {error.strerror}"
            continue
        if now != size:
            yield f"{root / name} has {now} bytes, and had {size} when its checksums were made"
            continue
        for block in np.flatnonzero(found != kept[str(number)]).tolist():
            start = block * BLOCK_BYTES
            what = f"the checksum of the {min(BLOCK_BYTES, size - start)} bytes from there on is another"
            yield f"{root / name} is damaged at byte {start}: {what}"


def _sums_key(files: Sequence[DataFile]) -> str:
    return fingerprint(INDEX_VERSION, "sums", *(part for file in files for part in (file.name, file.size)))


def _list_kept(root: Path) -> list[Path]:
    """The files of checksums of data below a folder."""
    own = find_own_folder("CACHE")
    found = [*(root / FOLDER).glob("sums-*")]
    return sorted(found if own is None else [*found, *(own / "indexes").glob(f"sums-{_mark(root)}-*")])


def _mark(root: Path) -> str:
    return fingerprint(root.resolve())[:16]


def _find_places(root: Path, name: str, files: Sequence[DataFile]) -> list[Path]:
    """Beside the data, and in the cache; one file for each list of names, so that parts of a folder have their own."""
    names = fingerprint(*(file.name for file in files))[:16]
    places = [root / FOLDER / f"{name}-{names}"]
    own = find_own_folder("CACHE")
    if own is not None:
        places.append(own / "indexes" / f"{name}-{_mark(root)}-{names}")
    return places


def _read(place: Path, key: str = "") -> IndexArrays | None:
    """An index of this key, or of any; None if there is no whole one."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC + key.encode()) or xxhash.xxh3_128_digest(body) != digest:
        return None
    with np.load(io.BytesIO(body[body.index(b"\n", len(_MAGIC)) + 1 :]), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _keep(places: Sequence[Path], key: str, arrays: IndexArrays) -> Path | None:
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **dict(arrays))
    body = _MAGIC + key.encode() + b"\n" + stream.getvalue()
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, body + xxhash.xxh3_128_digest(body))
            return place
    return None


def _write(place: Path, content: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.parent / f".{place.name}.{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
