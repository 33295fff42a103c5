"""A folder of images with a folder for each class, as torchvision's `ImageFolder` reads it.

Invariants:
- Class numbers follow the sorted names of the folders of classes, also of those without an image. Record i is sample i
  of torchvision: classes in order, in each its folders sorted by path, in each of these the files sorted by name.
- Names and sizes come from an index that is made once, since a walk over millions of files takes minutes. It is made
  anew if a folder of a class, or one below it, has another time of change than it had: files that were added, removed
  or renamed are seen. A file that was written over in place is not, and reading it finds its other size.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import DataFile, Extent, Record, Records, Sums, check_ids, find_shard
from shardway.data.formats.indexes import FOLDER, IndexArrays, drop_index, read_sums, use_index
from shardway.data.formats.whole_files import FileTable, read_whole
from shardway.errors import list_some
from shardway.places import find_own_folder

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"},
)
"""Names of images end so, in small or capital letters."""

SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})
"""Usual names of folders that hold a part of the data each, with folders of classes inside."""

_INDEX = "image-files"
_LOOKED_AT = 64
"""So many entries of a folder show what it holds."""
_WALKERS = 16
"""Threads that list folders: on a network file system each waits for the server."""

Listing = tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]
"""(name, size, time of change) of files, and of folders with the size 0."""


class ImageFolder(Records):
    """Records {"image": bytes of the file, "label": number of its class, "name": its path below the folder}."""

    format = "images"

    def __init__(self, place: DataPath, classes: Sequence[str], index: IndexArrays) -> None:
        """Use `open`."""
        self.table = FileTable(index["names"], index["ends"], index["sizes"], index["times"])
        self.classes = tuple(classes)
        """The names of the classes, by number."""
        self._class_ends = index["class_ends"]
        self._fingerprint = index["fingerprint"].tobytes().decode()
        self.parts = self.table.parts(place.path, _find_sums(place.path, self.table))

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a folder without images of its own, of which a folder holds images."""
        if not path.is_dir():
            return False
        own = list(itertools.islice(_visible(path), _LOOKED_AT))
        if any(entry.is_file() and is_image(entry.name) for entry in own):
            return False
        return any(_holds_image(entry.path, levels=3) for entry in own if entry.is_dir())

    @classmethod
    def open(cls, place: DataPath) -> ImageFolder:
        """The images of a folder. The first time it is walked, with several threads, and the index is kept.

        The index belongs to the names and times of change of the folders of classes; it states those of the folders
        below them. Raises UserError for a folder without classes or images, or one of training and validation parts.
        """
        root = place.path
        allowed = "a folder that holds a folder of images for each class"
        if not root.is_dir():
            raise place.error("is not a folder" if root.exists() else "does not exist", allowed=allowed)
        entries = list(_visible(root))
        classes = sorted(entry.name for entry in entries if entry.is_dir())
        _check_layout(place, classes, entries, allowed)
        folders = [_describe_folder(root, name) for name in classes]

        def make() -> IndexArrays:
            return _make_index(place, classes)

        index = use_index(root, _INDEX, folders, make)
        if not _is_current(root, index):
            drop_index(root, _INDEX, folders)
            index = use_index(root, _INDEX, folders, make)
        if not len(index["sizes"]):
            raise place.error(f"has {len(classes)} folders and no image in them", allowed=allowed, remedy=_describe())
        return cls(place, classes, index)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def empty_classes(self) -> int:
        """How many classes have no image."""
        return int(np.count_nonzero(np.diff(self._class_ends, prepend=0) == 0))

    @property
    def fields(self) -> dict[str, str]:
        return {"image": "bytes", "label": "int", "name": "text"}

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def extent(self, number: int) -> Extent:
        return Extent(self.parts.root / self.table.name(number), 0, int(self.table.sizes[number]))

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        check_ids(ids, len(self))
        wanted = set(fields or self.fields)
        return [self._read_one(number, wanted) for number in ids]

    def _read_one(self, number: int, wanted: set[str]) -> Record:
        record: Record = {}
        name = self.table.name(number)
        if "image" in wanted:
            record["image"] = self._read_image(number, name)
        if "label" in wanted:
            record["label"] = find_shard(self._class_ends, number)[0]
        if "name" in wanted:
            record["name"] = name
        return record

    def _read_image(self, number: int, name: str) -> bytes:
        size = int(self.table.sizes[number])
        if not size:
            raise self.parts.damaged(number, 0, "the image is an empty file")
        return read_whole(self.parts, number, name, size)


def is_image(name: str) -> bool:
    """Whether a file has the name of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _describe() -> str:
    return f"names of images end in {', '.join(sorted(IMAGE_SUFFIXES))}"


def _check_layout(place: DataPath, classes: Sequence[str], entries: Sequence[os.DirEntry[str]], allowed: str) -> None:
    """Raise UserError unless there are folders that may be classes."""
    images = [entry.name for entry in entries if is_image(entry.name) and entry.is_file()]
    if images and classes:
        raise place.error(
            f"holds images beside folders of classes: {list_some(sorted(images), 3)}",
            allowed=allowed,
            remedy="move them into the folder of their class, or out of this folder",
        )
    if images:
        raise place.error(
            f"holds {len(images)} images and no folder of a class",
            allowed=allowed,
            remedy="move the images of each class into a folder of its name; those of a single class too",
        )
    if not classes:
        raise place.error("is an empty folder" if not entries else "has no folders in it", allowed=allowed)
    if SPLITS.issuperset(classes):
        raise place.error(
            f"holds the parts {', '.join(classes)} of a data set, not classes",
            allowed=allowed,
            remedy=f'set {place.key} to "{Path(place.text) / classes[0]}", and data.validation to another part',
        )


# --- the walk


def _make_index(place: DataPath, classes: Sequence[str]) -> IndexArrays:
    root = place.path
    with ThreadPoolExecutor(min(_WALKERS, len(classes))) as walkers:
        listings = list(walkers.map(lambda name: _walk_class(root, name), classes))
    files = FileTable.of((file for found, _ in listings for file in found), place)
    folders = FileTable.of((folder for _, found in listings for folder in found), place)
    parts = (part for file in files for part in (file.name, file.size))
    return {
        "names": files.names,
        "ends": files.ends,
        "sizes": files.sizes,
        "times": files.times,
        "class_ends": np.cumsum([len(found) for found, _ in listings], dtype=np.int64),
        "folder_names": folders.names,
        "folder_ends": folders.ends,
        "folder_times": folders.times,
        "fingerprint": np.frombuffer(fingerprint(ImageFolder.format, *classes, *parts).encode(), np.uint8),
    }


def _walk_class(root: Path, name: str) -> Listing:
    """The images of a class and the folders below it, sorted by path; links are followed, loops are not."""
    files: list[tuple[str, int, int]] = []
    folders: list[tuple[str, int, int]] = []
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [(name, frozenset())]
    while pending:
        below, above = pending.pop()
        stat = os.stat(root / below)
        me = (stat.st_dev, stat.st_ino)
        if me in above:
            continue
        if below != name:
            folders.append((below, 0, stat.st_mtime_ns))
        for entry in _visible(root / below):
            path = f"{below}/{entry.name}"
            if entry.is_dir():
                pending.append((path, above | {me}))
            elif is_image(entry.name):
                files.append((path, *_describe_image(entry)))
    return sorted(files, key=lambda file: os.path.split(file[0])), sorted(folders)


def _describe_image(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Size and time of change of a file; 0 of a link that leads nowhere, which reading then reports."""
    try:
        return entry.stat().st_size, entry.stat().st_mtime_ns
    except FileNotFoundError:
        return 0, 0


def _is_current(root: Path, index: IndexArrays) -> bool:
    """Whether the folders below those of classes still have their times of change."""
    try:
        times = index["folder_times"]
        folders = FileTable(index["folder_names"], index["folder_ends"], np.zeros_like(times), times)
        return all(os.stat(root / folder.name).st_mtime_ns == folder.mtime_ns for folder in folders)
    except FileNotFoundError:
        return False


def _describe_folder(root: Path, name: str) -> DataFile:
    return DataFile(name, 0, os.stat(root / name).st_mtime_ns)


def _visible(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder that are not hidden."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _holds_image(folder: str, levels: int) -> bool:
    """Whether one of the first entries of a folder, or of the folders in it, is an image."""
    try:
        entries = list(itertools.islice(_visible(folder), _LOOKED_AT))
    except OSError:
        return False
    if any(is_image(entry.name) for entry in entries):
        return True
    inside = [entry.path for entry in entries if entry.is_dir()]
    return levels > 1 and any(_holds_image(path, levels - 1) for path in inside[:4])


def _find_sums(root: Path, table: FileTable) -> list[Sums]:
    """The checksums of the images, if any were made of files of this folder or kept in the cache; to look for those of
    a million names takes a second."""
    own = find_own_folder("CACHE")
    kept = [root / FOLDER, *([] if own is None else [own / "indexes"])]
    return read_sums(root, table) if any(path for folder in kept for path in folder.glob("sums-*")) else []
