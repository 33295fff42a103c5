"""Records: what a file format holds, numbered, each a set of named fields; and reading parts of files.

Invariants:
- Record i is the same at every call and in every process, and follows from the files alone.
- Length, fields and fingerprint come from headers, an index and sizes, never from reading all records.
- A reader is pickled without open files: a loader process opens what it reads.
- A read that gives fewer bytes than the index promises is an error that names the file and the offset, never a short
  record. Files are read with pread(2), not mapped, so a file that shrinks or a disk that fails raises an error and does
  not kill the process (SIGBUS).
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shlex
import socket
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data.content import DataPath, fingerprint
from shardway.errors import JobError, UserError, list_some
from shardway.places import find_own_folder

Record = dict[str, Any]
"""Field name -> bytes, text, a number, None, a list, a mapping or a NumPy array."""

Offsets = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]
"""The xxh3-64 of every BLOCK_BYTES of a file, in order."""

OPEN_FILES = 64
"""The most files that one reader keeps open."""

UNPACKED = ".unpacked"
"""The folder beside staged files with what compressed ones of them hold."""
WAIT_S = 1800.0
"""How long a read waits for a file that is staged while the run trains."""
FAILED = ".failed"
"""The folder of a staged set with what went wrong with files that are not in it, each by its number."""
_LOOK_S = 0.02

BLOCK_BYTES = 2**20
"""A checksum covers so many bytes of a file."""

RECORDS_AT_ONCE = 256
"""How many records a walk over all of them reads at once."""


@dataclass(frozen=True)
class DataFile:
    """A file of a data set: its name below the folder, its size, and when it was last changed."""

    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Extent:
    """Where a record lies: `size` bytes from byte `offset` of a file; `size` 0 where a format does not say."""

    path: Path
    offset: int
    size: int = 0

    def __str__(self) -> str:
        return f"{self.path}, byte {self.offset}"


class DamagedData(JobError):
    """Bytes of a file are not those that its index or checksum promises.

    `place` is where, if it is known. `of_copy`: the file is a copy on the disk of this node, which is made again.
    """

    def __init__(self, message: str, place: Extent | None = None, *, of_copy: bool = False) -> None:
        super().__init__(message)
        self.place, self.of_copy = place, of_copy


class Records(ABC):
    """The records of one format at one path. A format derives from it and reads its index in `open`.

    `parts` are the files that hold the records.
    """

    format: ClassVar[str]
    """The value of data.kind."""

    parts: FileParts

    @classmethod
    @abstractmethod
    def is_at(cls, path: Path) -> bool:
        """Whether the path is of this format, judged by names and the first bytes; the path may not exist."""

    @classmethod
    @abstractmethod
    def open(cls, place: DataPath) -> Records:
        """The records at a path. Raises UserError (`place.error`) for anything wrong with the index or the files."""

    @abstractmethod
    def __len__(self) -> int:
        """How many records there are."""

    @property
    @abstractmethod
    def fields(self) -> dict[str, str]:
        """Name -> type of each field ("bytes", "text", "int", "float32[28, 28]", "list"), of the first record where a
        format has no schema."""

    @abstractmethod
    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These records, in this order; of `fields`, or all. A field that a record lacks is left out.

        Raises DamagedData if their bytes cannot be what was written, UserError for a number that no record has.
        """

    def extent(self, number: int) -> Extent:
        """Where a record lies; of a format whose library does not say, its file."""
        return Extent(self.parts.path(0), 0)

    @property
    def fingerprint(self) -> str:
        """xxh3-128 over the format and the names and sizes of the files."""
        listed = (part for file in self.parts.files for part in (file.name, file.size))
        return fingerprint(self.format, *listed)

    def staged(self, hold: Callable[[FileParts], Any]) -> Records:
        """The same records, read from where `hold` has put the files. Whatever reads them shares their one `FileParts`
        in the copy too, so that it moves for all."""
        moved: Records = pickle.loads(pickle.dumps(self))  # without open files
        moved.parts.move(hold(self.parts))
        return moved

    def slow_in_random_order(self) -> str:
        """Why records come slowly in a random order, such as "a row group of 6 MiB is decoded for a record"; "" if they
        do not."""
        return ""

    def file_ends(self) -> Offsets | None:
        """The end of the records of each file of `parts`, where these are numbered file by file; None where they are
        not, or where a file must not be replaced while it is read."""
        return None

    def more_facts(self) -> dict[str, Any]:
        """What `shardway data info` says beside what every format has, such as the number of tokens."""
        return {}

    def describe_checks(self) -> str:
        """What `find_damage` can find, for a person."""
        if self.parts.sums:
            return "of every MiB"
        return f"{self.own_checks() or 'none'}; `shardway data index --checksum` makes some of every MiB"

    def own_checks(self) -> str:
        """What of these data the format itself has checksums of, such as "of each shard"; "" for nothing."""
        return ""

    def find_damage(self) -> Iterator[str]:
        """Everything that is found wrong when all is read, each as a sentence that names file and offset.

        Blocks that have a checksum are compared with it, and every record is read once. A format with checksums of its
        own adds them.
        """
        yield from self.parts.find_damage()
        for first in range(0, len(self), RECORDS_AT_ONCE):
            numbers = range(first, min(first + RECORDS_AT_ONCE, len(self)))
            try:
                self.read(numbers)
            except DamagedData:
                yield from self._find_damaged(numbers)

    @classmethod
    def find_damage_unopened(cls, path: Path) -> Iterator[str]:
        """As `find_damage`, for data that are too damaged to be opened; of a format with checksums of its own that can
        be compared then."""
        yield from ()

    def index_files(self) -> list[str]:
        """The files below the folder of `parts` that belong to the data and hold no record, such as an index of the
        format; they get checksums too."""
        return []

    def _find_damaged(self, numbers: Iterable[int]) -> Iterator[str]:
        for number in numbers:
            try:
                self.read([number])
            except DamagedData as error:
                yield f"record {number}: {str(error).splitlines()[0]}"


def need_library(name: str, place: DataPath, kind: str, extra: str = "data") -> Any:
    """A library that reads a format. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise place.error(
            f"is {kind} data, which the Python package {package} reads, and it cannot be imported: {error}",
            remedy=f'pip install "shardway[{extra}]"',
        ) from error


# --- parts of files


class FileParts:
    """Reads parts of the files of a data set; keeps some of them open; checks blocks that have a checksum, each once in
    a process."""

    def __init__(self, root: Path, files: Sequence[DataFile], sums: Sequence[Sums] = ()) -> None:
        """`sums`: those of each file, empty for one that has none; none: nothing can be checked."""
        self.root, self.files, self.sums = root, tuple(files), list(sums)
        self.stage: Path | None = None
        """The folder of all that is staged on this node, if these files are."""
        self.unpacked_bytes = 0
        """What readers may write into `find_unpacked`."""
        self.origin: FileParts | None = None
        """These files where they lie, if they are staged window by window: then a file is here while it is needed."""
        self._checked: dict[int, npt.NDArray[np.bool_]] = {}
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_checked": {}}

    def __del__(self) -> None:
        self._close()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def path(self, number: int) -> Path:
        """The path of a file."""
        return self.root / self.files[number].name

    def ready(self, number: int) -> Path:
        """The path of a file, once it is there. Raises JobError if it does not come."""
        path = self.path(number)
        if self.origin is not None and not path.exists():
            self._wait_for(number, path)
        return path

    def version(self, number: int) -> int:
        """What differs when a file was staged anew; 0 for files that stay as they are."""
        return 0 if self.origin is None else self.ready(number).stat().st_ino

    def list_keys(self) -> list[str]:
        """What stands for the content of each file: its checksums, or else its path, size and time of change."""
        root, keys = self.root.resolve(), []
        for number, file in enumerate(self.files):
            known = self.sums and len(self.sums[number])
            sums = xxhash.xxh3_128_hexdigest(self.sums[number].tobytes()) if known else ""
            keys.append(f"{file.size}-{sums or fingerprint(f'{root}/{file.name}', file.size, file.mtime_ns)}")
        return keys

    def check_copy(self, number: int, copied: Path, sums: Sequence[int]) -> None:
        """Compare a file, as it was read for the copy at `copied`, with its checksums; `sums` are those of what was
        read. Raises DamagedData."""
        for block, (found, known) in enumerate(zip(sums, self.sums[number] if self.sums else (), strict=False)):
            if found != int(known):
                raise self.damaged(number, block * BLOCK_BYTES, "the checksum of the MiB from there on is another")

    def move(self, put: Any) -> None:
        """Read the files from now on where they are staged (a `shardway.data.stage.StagedSet`), and check them by the
        checksums that were made on the way if they had none."""
        self._close()
        self.__dict__.update(self.__getstate__())
        self.origin = pickle.loads(pickle.dumps(self)) if put.is_partial else None
        self.root, self.stage = put.root, put.folder
        self.sums = self.sums or list(put.sums)

    def find_unpacked(self) -> Path | None:
        """The folder for what compressed files hold: beside staged ones, so that both go together, else the user's
        cache; None for an account without one."""
        return find_own_folder("CACHE") if self.stage is None else self.root / UNPACKED

    def read(self, number: int, offset: int, size: int) -> bytes:
        """`size` bytes of a file from `offset` on. Raises DamagedData for fewer, or a block with another checksum."""
        if self.sums:
            self.check(number, offset, size)
        try:
            found = os.pread(self._descriptor(number), size, offset)
            while len(found) < size:
                more = os.pread(self._descriptor(number), size - len(found), offset + len(found))
                if not more:
                    raise self._describe_end(number, offset, size, len(found))
                found += more
        except OSError as error:
            raise JobError(f"{self.path(number)} cannot be read at byte {offset}: {error.strerror}") from error
        return found

    def stream(self, number: int) -> io.RawIOBase:
        """A file as a stream for a library, checked as `read` does."""
        return _PartStream(self, number)

    def check(self, number: int, offset: int, size: int) -> None:
        """Compare the blocks around a part with their checksums, each once in this process. Raises DamagedData."""
        sums = self.sums[number]
        checked = self._checked.setdefault(number, np.zeros(len(sums), np.bool_))
        for block in range(offset // BLOCK_BYTES, min(-(-(offset + size) // BLOCK_BYTES), len(sums))):
            if not checked[block]:
                self._check_block(number, block)
                checked[block] = True

    def find_damage(self) -> Iterator[str]:
        """Each block whose checksum is another, and each file that has another size, as a sentence."""
        for number, file in enumerate(self.files):
            try:
                size = self.path(number).stat().st_size
            except OSError as error:
                yield f"{self.path(number)}: {error.strerror}"
                continue
            if size != file.size:
                yield f"{self.path(number)} has {size} bytes, and {file.size} were expected"
            for block in range(len(self.sums[number]) if self.sums else 0):
                try:
                    self._check_block(number, block)
                except DamagedData as error:
                    yield str(error).splitlines()[0]

    def damaged(self, number: int, offset: int, what: str, mend: str = "") -> DamagedData:
        """The error for a place in a file; `mend`: how a person may mend it there, where that is possible."""
        path, again = self.path(number), "copy the file again from where it came."
        remedy = f"{mend}, or {again}" if mend else again
        if self.origin is not None and path.is_symlink():  # read where it lies, since no copy of it is whole
            return self.origin.damaged(number, offset, what, mend)
        if self.stage is not None:
            remove = f"find {shlex.quote(str(self.stage))} -samefile {shlex.quote(str(path))} -delete"
            remedy = f"`{remove}` on {socket.gethostname()} removes it, and the next run copies it again."
        message = f"{path} is damaged at byte {offset}: {what}\n  To do: {remedy}"
        return DamagedData(message, Extent(path, offset), of_copy=self.stage is not None)

    def _close(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)

    def _descriptor(self, number: int) -> int:
        if number in self._open:
            if self.origin is None or os.fstat(self._open[number]).st_nlink:
                self._open.move_to_end(number)
                return self._open[number]
            os.close(self._open.pop(number))  # it was removed, and may be there anew
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[number] = os.open(self.ready(number), os.O_RDONLY | os.O_CLOEXEC)
        return self._open[number]

    def _wait_for(self, number: int, path: Path) -> None:
        until = time.monotonic() + WAIT_S
        failed = self.root / FAILED / f"{number}"
        while not path.exists():
            if failed.exists():
                raise JobError(failed.read_text())
            if time.monotonic() > until:
                raise JobError(
                    f"{path} was not there {WAIT_S:.0f} s after it was needed: the disk of {socket.gethostname()} is "
                    "full, or the data are copied there far more slowly than they are read.\n"
                    '  To do: make room there, name a folder on a larger disk, or set data.stage = "off".'
                )
            time.sleep(_LOOK_S)

    def _describe_end(self, number: int, offset: int, size: int, found: int) -> DamagedData:
        now = os.fstat(self._descriptor(number)).st_size
        return self.damaged(
            number, offset, f"{size} bytes were expected there and the file ends after {found} (it has {now} bytes now)"
        )

    def _check_block(self, number: int, block: int) -> None:
        start = block * BLOCK_BYTES
        expected = max(0, min(BLOCK_BYTES, self.files[number].size - start))
        try:
            content = os.pread(self._descriptor(number), expected, start)
        except OSError as error:
            raise JobError(f"{self.path(number)} cannot be read at byte {start}: {error.strerror}") from error
        if len(content) != expected or xxhash.xxh3_64_intdigest(content) != int(self.sums[number][block]):
            raise self.damaged(number, start, f"the checksum of the {expected} bytes from there on is another")


class _PartStream(io.RawIOBase):
    """One file of a `FileParts`, seekable."""

    def __init__(self, parts: FileParts, number: int) -> None:
        super().__init__()
        self._parts, self._number, self._at = parts, number, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._parts.files[self._number].size
        self._at = max(0, {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = self._parts.files[self._number].size - self._at
        size = max(0, min(len(buffer), left))
        if size:
            buffer[:size] = self._parts.read(self._number, self._at, size)
            self._at += size
        return size


def move_parts(parts: FileParts, put: Any) -> FileParts:
    """A copy of `parts` that reads the files where they are staged."""
    moved: FileParts = pickle.loads(pickle.dumps(parts))
    moved.move(put)
    return moved


def sum_blocks(path: Path) -> Sums:
    """The xxh3-64 of every BLOCK_BYTES of a file."""
    with path.open("rb", buffering=0) as stream:
        blocks = iter(lambda: stream.read(BLOCK_BYTES), b"")
        return np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)


# --- which files


def describe_file(root: Path, name: str) -> DataFile:
    """A file below a folder as it is now. Raises OSError."""
    stat = (root / name).stat()
    return DataFile(name, stat.st_size, stat.st_mtime_ns)


def list_files(place: DataPath, matches: Callable[[str], bool], what: str) -> tuple[Path, list[DataFile]]:
    """The folder of a path and its files whose names match, sorted by path: a file itself, those in a folder (not in
    hidden ones), or those of a `*` or `{000..012}` pattern.

    Raises UserError if there is none, and for files of a pattern with braces that are missing, with their names.
    """
    path, allowed = place.path, f"a folder with {what}, one such file, or a pattern such as name-{{000..012}}.tar"
    if path.is_file():
        return path.parent, [describe_file(path.parent, path.name)]
    if path.is_dir():
        found = sorted(_walk(path, matches))
        if not found:
            raise place.error(f"has no {what}", allowed=allowed)
        return path, [describe_file(path, name) for name in found]
    wanted, names = list(expand_braces(path.name)), match_files(path)
    missing = [name for name in wanted if not any(sign in name for sign in "*?[") and not (path.parent / name).exists()]
    if not names:
        raise place.error("does not exist", allowed=allowed)
    if missing:
        raise place.error(f"names files that are missing: {list_some(missing, 5)}", remedy="copy them, or name fewer")
    return path.parent, [describe_file(path.parent, name) for name in names]


def match_files(path: Path) -> list[str]:
    """The names of files that a `*` or `{000..012}` pattern in the last part of a path stands for, sorted."""
    return sorted({name for pattern in expand_braces(path.name) for name in _glob(path.parent, pattern)})


def expand_braces(pattern: str) -> Iterator[str]:
    """The names that `{000..012}` and `{a,b}` in a pattern stand for, as a shell expands them."""
    before, opened, rest = pattern.partition("{")
    inner, closed, after = rest.partition("}")
    if not opened or not closed:
        yield pattern
        return
    first, dots, last = inner.partition("..")
    if dots and first.isdigit() and last.isdigit():
        words: Iterable[str] = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    else:
        words = inner.split(",")
    tails = list(expand_braces(after))
    for word in words:
        yield from (f"{before}{word}{tail}" for tail in tails)


def _walk(root: Path, matches: Callable[[str], bool]) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = Path(folder).relative_to(root)
        yield from ((below / name).as_posix() for name in names if matches(name) and not name.startswith("."))


def _glob(folder: Path, pattern: str) -> list[str]:
    if not any(sign in pattern for sign in "*?["):
        return [pattern] if (folder / pattern).is_file() else []
    return [path.name for path in folder.glob(pattern) if path.is_file()]


# --- numbers of records


def find_shard(ends: Offsets, number: int) -> tuple[int, int]:
    """(shard, number in it) of a record; `ends` are the cumulated lengths of the shards."""
    shard = int(np.searchsorted(ends, number, side="right"))
    return shard, number - (int(ends[shard - 1]) if shard else 0)


def check_ids(ids: Sequence[int], length: int) -> None:
    """Raise UserError for a number that no record has."""
    wrong = [number for number in ids if not 0 <= number < length]
    if wrong:
        raise UserError(f"there is no record {wrong[0]}; allowed: 0 to {length - 1}")
