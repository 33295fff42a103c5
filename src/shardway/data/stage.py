"""Data sets copied to a node's own disk, once for all jobs of a user on it.

Invariants:
- A staged file has its final name only when every byte of it was copied and compared with its checksum where there is
  one; a file of a MiB or more is also durable by then. A kill at any moment leaves a temporary file that the next copy
  removes.
- One process of a node copies a file; others copy other files, or wait and use it. So each byte is read once a node
  from the shared file system; once for all nodes of a job where these fetch it from each other (`joint_copy`).
- A set in use is never removed: its users hold a shared lock (flock(2)), which the kernel drops when they end.
- The data themselves are never changed.
- Of a partial set a file is removed only if no process reads it now or next, and it is used later than the file that
  is to come in its place.

Below the folder: `objects/` holds the files by their content's key, `sets/<key>/` hard links to them under their own
names, `locks/` one lock for each set, some for objects, one for making room, and a claim of each process that reads a
partial set.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from shardway.data.content import fingerprint
from shardway.data.formats.base import BLOCK_BYTES, FAILED, UNPACKED, DamagedData, FileParts, Sums
from shardway.data.joint_copy import GrowingFile, JointCopy, read_exactly
from shardway.data.sources.base import DataSource, stage_source
from shardway.data.stage_peers import FoundPart, PartState, StagePeers, count_parts, span_of
from shardway.errors import JobError, SiteError
from shardway.refusals import FULL
from shardway.units import format_bytes

SPARE_BYTES = 2**30
"""Room that is left on the disk for what else the job writes there."""

MANY_FILES = 10_000
"""In a set of more files, those of less than a MiB get no checksums: each would be a file more."""

_LARGER = '  To do: set data.stage = "off", or name a folder on a larger disk.'
_LOOK_S = 0.02
"""How often a process looks whether another one has copied a file."""


class CopyGivenUp(JobError):
    """A copy that was asked to end before it was complete."""


class CopyProgress:
    """How far a copy is, for another thread, which may end it."""

    def __init__(self) -> None:
        self.copied_bytes = 0
        """Bytes that this process has copied."""
        self.fetched_bytes = 0
        """Those of them that came from other nodes."""
        self.awaited_bytes = 0
        """Bytes of the file that another process copies and this one waits for."""
        self._given_up, self._mutex = False, threading.Lock()

    def give_up(self) -> None:
        """End the copy soon: it raises CopyGivenUp."""
        self._given_up = True

    def note(self, copied: int = 0, is_fetched: bool = False) -> None:
        """Count bytes; raises CopyGivenUp after `give_up`."""
        with self._mutex:
            self.copied_bytes += copied
            self.fetched_bytes += copied if is_fetched else 0
        if self._given_up:
            raise CopyGivenUp("the copy was given up")


@dataclass(eq=False)
class StagedSet:
    """A staged data set: the same files below `root`.

    `sums`: those made while files were copied that had none, of each file; empty for one that has none. `folder`: the
    whole of what is staged. It may be used until `close`, or until the process ends.
    """

    root: Path
    sums: list[Sums]
    copied_bytes: int
    folder: Path | None = None
    is_partial: bool = False
    """Whether its files come and go with the windows that the run is in (`PartialSet`)."""
    _lock: int = field(default=-1, repr=False)

    def close(self) -> None:
        """Let others remove it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@dataclass(frozen=True)
class StageFolder:
    """What one user has staged below a folder of a node's disk."""

    path: Path

    @classmethod
    def below(cls, folder: Path) -> StageFolder:
        """The user's own part of a folder that all may write to."""
        return cls(folder / f"shardway-stage-{os.getuid()}")

    def hold(
        self,
        parts: FileParts,
        tell: Callable[[str], object] = lambda line: None,
        spare: int | None = None,
        progress: CopyProgress | None = None,
        peers: StagePeers | None = None,
    ) -> StagedSet:
        """The files of a data set on this disk, copied if they are not there, and held against removal; together with
        other nodes (`peers`), of which each reads a part of them.

        Sets that no process uses are removed for it, those first that were used longest ago. Raises SiteError if there
        is too little room even then or the folder cannot be written, DamagedData if a block is not what its checksum
        says, JobError if a file cannot be read, CopyGivenUp.
        """
        keys = parts.list_keys()
        name = _name_set(parts, keys)
        self._make_folders()
        lock = self._hold_set(name)
        try:
            self._remove_leftovers()
            room = SPARE_BYTES if spare is None else spare
            copied = self._fill(parts, keys, name, tell, room, progress or CopyProgress(), peers)
            sums = [] if parts.sums else self._read_sums(keys)
        except OSError as error:
            os.close(lock)
            raise self._explain(error, parts.root) from error
        except BaseException:
            os.close(lock)
            raise
        return StagedSet(self.path / "sets" / name, sums, copied, self.path, _lock=lock)

    def find_missing(self, *held: FileParts) -> int:
        """Bytes of data sets that are not on this disk yet; those of a file that is being copied count as there."""
        return self._count_missing(_list_sizes(held))

    def find_room(self, *held: FileParts) -> int:
        """Bytes that can be had: free ones, and those of sets that no process uses, without the files of some data
        sets."""
        kept = {_inode_of(f"{self.path}/objects/{key}") for key in _list_sizes(held)}
        there = next(above for above in (self.path, *self.path.parents) if above.exists())
        free = shutil.disk_usage(there).free
        unused = 0
        for lock in self._unused_sets():
            unused += self._size_of(lock.name.removeprefix("set-"), kept)
        return free + unused

    def list_there(self, *held: FileParts) -> dict[str, bool]:
        """Key -> whether a file is on this disk."""
        return {key: _size_at(f"{self.path}/objects/{key}") == size for key, size in _list_sizes(held).items()}

    def find_part(self, key: str, part: int) -> FoundPart | PartState:
        """A part of a file that is on this disk, with its checksums; for other nodes of a job."""
        try:
            descriptor = os.open(self.path / "objects" / key, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return PartState.NEVER
        size = os.fstat(descriptor).st_size
        if part >= count_parts(size) or not key.startswith(f"{size}-"):
            os.close(descriptor)
            return PartState.NEVER
        offset, length = span_of(size, part)
        try:
            (known,) = self._read_sums([key])
            first = offset // BLOCK_BYTES
            sums = known[first : first + -(-length // BLOCK_BYTES)].tolist()
            if not sums:  # a small one of many
                content = memoryview(read_exactly(descriptor, length, offset))
                starts = range(0, length, BLOCK_BYTES)
                sums = [xxhash.xxh3_64_intdigest(content[start : start + BLOCK_BYTES]) for start in starts]
        except (OSError, DamagedData):
            os.close(descriptor)
            return PartState.NEVER
        return FoundPart(descriptor, offset, length, np.array(sums, np.uint64).tobytes())

    def check_room(self, *held: FileParts) -> None:
        """Raise SiteError if data sets do not fit, whatever may be removed for them."""
        missing, room = self.find_missing(*held), self.find_room(*held)
        unpacked = sum(self._count_unpacked(parts, _name_set(parts, parts.list_keys())) for parts in held)
        if missing + unpacked and missing + unpacked + SPARE_BYTES > room:
            raise self._lacks_room(missing, unpacked, room, SPARE_BYTES)

    # --- folders and locks

    def _make_folders(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(0o700, exist_ok=True)
            if self.path.lstat().st_uid != os.getuid():
                raise SiteError(
                    f"data.stage: {self.path} on {_host()} is another user's.\n"
                    "  To do: name another folder; an administrator can remove that one."
                )
            for folder in ("objects", "sets", "locks"):
                (self.path / folder).mkdir(0o700, exist_ok=True)
        except OSError as error:
            why = "a file is in the place of a folder" if isinstance(error, FileExistsError) else error.strerror
            raise SiteError(
                f"data.stage: {self.path} on {_host()} cannot be written: {why}.\n"
                '  To do: set data.stage = "off", or name a folder that you may write to on every node.'
            ) from error

    def _hold_set(self, name: str) -> int:
        """A descriptor with a shared lock on a set. Its lock's file may be removed with the set: then another one."""
        place = self.path / "locks" / f"set-{name}"
        while True:
            lock = self._open_lock(place.name)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                os.utime(lock)
                if place.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _open_lock(self, name: str) -> int:
        try:
            return os.open(self.path / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._explain(error, self.path) from error

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = self._open_lock(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _take_lock(self, name: str) -> int | None:
        """A descriptor that holds a lock; None if another process has it."""
        descriptor = self._open_lock(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return descriptor

    @contextlib.contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        """Whether a lock is held from now on, or is another process's."""
        descriptor = self._take_lock(name)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    # --- copying

    def _fill(
        self,
        parts: FileParts,
        keys: Sequence[str],
        name: str,
        tell: Callable[[str], object],
        spare: int,
        progress: CopyProgress,
        peers: StagePeers | None,
    ) -> int:
        sizes = {key: file.size for key, file in zip(keys, parts.files, strict=True)}
        missing, unpacked = self._count_missing(sizes), self._count_unpacked(parts, name)
        if missing + unpacked:
            self._make_room(sizes, unpacked, spare)
        if missing:
            tell(f"staging {format_bytes(missing)} to {self.path}")
        before, left = progress.copied_bytes, list(range(len(keys)))
        if peers is not None:
            JointCopy(_WholeSet(self, parts, list(keys), name), peers, progress.note).run()
            left = []
        while left:  # files that another process copies are left for the next round
            busy = [number for number in left if not self._take(parts, number, keys[number], name, progress)]
            if len(busy) == len(left):
                progress.awaited_bytes = _count_written(self._temporary(keys[busy[0]]))
                progress.note()
                time.sleep(_LOOK_S)
            left = busy
        return progress.copied_bytes - before

    def _take(self, parts: FileParts, number: int, key: str, name: str, progress: CopyProgress) -> bool:
        """Whether a file is in its set by now; not if another process copies it."""
        if self._is_in_set(parts, number, name):
            return True
        with self._try_lock(_lock_of(key)) as taken:  # also while it is linked, for an object without a set may go
            if not taken:
                return False
            progress.note()
            if _size_at(self.path / "objects" / key) != parts.files[number].size:
                self._copy(parts, number, key, progress)
            self._link(parts, number, key, name)
        return True

    def _is_in_set(self, parts: FileParts, number: int, name: str) -> bool:
        return _size_at(f"{self.path}/sets/{name}/{parts.files[number].name}") == parts.files[number].size

    def _link(self, parts: FileParts, number: int, key: str, name: str) -> None:
        """Give a file that is there its name in a set."""
        link = self.path / "sets" / name / parts.files[number].name
        link.parent.mkdir(parents=True, exist_ok=True)
        if _size_at(link) not in (-1, parts.files[number].size):
            link.unlink()
        with contextlib.suppress(FileExistsError):
            os.link(self.path / "objects" / key, link)

    def _copy(self, parts: FileParts, number: int, key: str, progress: CopyProgress) -> None:
        """Copy a file whose lock is held."""
        growing = self._grow(parts, number, key)
        try:
            for part in range(count_parts(growing.size)):
                growing.read_part(part, progress.note)
            self._put(growing)
        except OSError as error:
            raise self._explain(error, parts.path(number)) from error
        finally:
            self._abandon(growing)

    def _grow(self, parts: FileParts, number: int, key: str) -> GrowingFile:
        """A file to put together; its lock is held."""
        try:
            return GrowingFile(parts, number, key, self._temporary(key))
        except OSError as error:
            raise self._explain(error, parts.path(number)) from error

    def _put(self, growing: GrowingFile) -> None:
        """Check a file whose parts are all there, and give it its name; its checksums are there before."""
        parts, file, key = growing.parts, growing.parts.files[growing.number], growing.key
        os.utime(growing.descriptor, ns=(file.mtime_ns, file.mtime_ns))  # an index of the data still holds
        if file.size >= BLOCK_BYTES:
            os.fsync(growing.descriptor)
        parts.check_copy(growing.number, growing.temporary, growing.sums.tolist())
        if file.size >= BLOCK_BYTES or len(parts.files) <= MANY_FILES:
            self._write_sums(key, growing.sums, durable=file.size >= BLOCK_BYTES)
        os.replace(growing.temporary, self.path / "objects" / key)

    def _abandon(self, growing: GrowingFile) -> None:
        """End work on a file, whether it has its name or not; while its lock is held."""
        growing.close()
        with contextlib.suppress(OSError):
            growing.temporary.unlink()

    def _temporary(self, key: str) -> Path:
        return self.path / "objects" / f".{key}.part"

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed have left half copied."""
        for path in (self.path / "objects").glob(".*.part"):
            key = path.name.removeprefix(".").removesuffix(".part").removesuffix(".sums")
            with self._try_lock(_lock_of(key)) as taken:
                if taken:
                    path.unlink(missing_ok=True)

    def _explain(self, error: OSError, source: Path) -> Exception:
        if error.errno in FULL:
            return SiteError(f"data.stage: {self.path} on {_host()} is full ({error.strerror}).\n{_LARGER}")
        return JobError(f"{source} could not be copied to {self.path} on {_host()}: {error}")

    def _write_sums(self, key: str, sums: Sums, *, durable: bool) -> None:
        place = self.path / "objects" / f"{key}.sums"
        temporary = self._temporary(f"{key}.sums")
        with temporary.open("wb") as stream:
            stream.write(sums.tobytes() + xxhash.xxh3_64_digest(sums.tobytes()))
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, place)

    def _read_sums(self, keys: Sequence[str]) -> list[Sums]:
        """The checksums that were made of files while they were copied."""
        found = []
        for key in keys:
            place = self.path / "objects" / f"{key}.sums"
            try:
                content = place.read_bytes()
            except FileNotFoundError:
                found.append(np.empty(0, np.uint64))
                continue
            if xxhash.xxh3_64_digest(content[:-8]) != content[-8:]:
                raise DamagedData(f"{place} on {_host()} is damaged\n  To do: remove {self.path}.")
            found.append(np.frombuffer(content[:-8], np.uint64))
        return found

    # --- room

    def _count_missing(self, sizes: dict[str, int]) -> int:
        objects = f"{self.path}/objects"
        return sum(
            size - min(size, _count_written(self._temporary(key)))
            for key, size in sizes.items()
            if size and _size_at(f"{objects}/{key}") != size
        )

    def _count_unpacked(self, parts: FileParts, name: str) -> int:
        """Bytes that readers of a set may still write beside it."""
        if not parts.unpacked_bytes:
            return 0
        written = (path for path in (self.path / "sets" / name / UNPACKED).rglob("*") if path.is_file())
        return max(0, parts.unpacked_bytes - sum(max(0, _size_at(path)) for path in written))

    def _make_room(self, sizes: dict[str, int], unpacked: int, spare: int) -> None:
        """Remove unused sets until the files that are missing, what they unpack to and `spare` bytes fit."""
        with self._locked("room"):
            missing, free = self._remove_unused(sizes, unpacked, spare)
        if missing + unpacked and missing + unpacked + spare > free:
            raise self._lacks_room(missing, unpacked, free, spare)

    def _remove_unused(self, sizes: dict[str, int], unpacked: int, spare: int) -> tuple[int, int]:
        """(bytes that are missing of some files, bytes that are free), after sets that no process uses were removed,
        those first that were used longest ago, until what is missing fits or none is left; while "room" is locked."""
        unused = self._unused_sets()
        while True:
            missing = self._count_missing(sizes)  # before what is free, which others fill meanwhile
            free = shutil.disk_usage(self.path).free
            if not missing + unpacked or missing + unpacked + spare <= free or (lock := next(unused, None)) is None:
                return missing, free
            self._remove(lock)

    def _lacks_room(self, missing: int, unpacked: int, free: int, spare: int) -> SiteError:
        compressed = f", {format_bytes(unpacked)} more are what compressed files hold" if unpacked else ""
        return SiteError(
            f"data.stage: {self.path} on {_host()} has {format_bytes(free)} free, and {format_bytes(missing)} are to "
            f"be copied there{compressed}, with {format_bytes(spare)} to spare.\n{_LARGER}"
        )

    def _unused_sets(self) -> Iterator[Path]:
        """Each lock of a set that no process holds, used longest ago first, held meanwhile by this one."""
        found = []
        with contextlib.suppress(OSError):
            found = sorted((self.path / "locks").glob("set-*"), key=lambda path: path.stat().st_mtime)
        for lock in found:
            try:
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield lock
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)

    def _size_of(self, name: str, kept: Set[int]) -> int:
        """Bytes that go free if a set is removed: of files that no other set has, and whose inode is not kept."""
        size = 0
        for path in (self.path / "sets" / name).rglob("*"):
            with contextlib.suppress(OSError):
                known = path.stat()
                is_free = path.is_file() and known.st_nlink <= 2 and known.st_ino not in kept
                size += known.st_size if is_free else 0
        return size

    def _remove(self, lock: Path) -> None:
        """Remove a set whose lock is held, and the files that no other has."""
        shutil.rmtree(self.path / "sets" / lock.name.removeprefix("set-"), ignore_errors=True)
        lock.unlink(missing_ok=True)
        for path in (self.path / "objects").glob("[!.]*"):
            if not path.name.endswith(".sums") and _is_alone(path):
                with self._try_lock(_lock_of(path.name)) as taken:
                    if taken and _is_alone(path):  # it may have been linked meanwhile
                        path.unlink(missing_ok=True)
                        path.with_name(f"{path.name}.sums").unlink(missing_ok=True)


def _name_set(parts: FileParts, keys: Sequence[str]) -> str:
    """The name of a set: of the content and the names of its files."""
    return fingerprint(*(text for key, file in zip(keys, parts.files, strict=True) for text in (key, file.name)))


def _list_sizes(held: Sequence[FileParts]) -> dict[str, int]:
    """Key -> bytes of each file, however many sets have it."""
    return {key: file.size for parts in held for key, file in zip(parts.list_keys(), parts.files, strict=True)}


def _size_at(path: str | Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _inode_of(path: str) -> int:
    """The inode of a file; 0 if there is none."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _is_alone(path: Path) -> bool:
    """Whether no set links to an object."""
    with contextlib.suppress(OSError):
        return path.stat().st_nlink == 1
    return False


def _host() -> str:
    return socket.gethostname()


def _count_written(path: Path) -> int:
    """Bytes of a file that have room on its disk; of one that is put together in any order, those that are there."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return min(found.st_size, found.st_blocks * 512)


def _lock_of(key: str) -> str:
    """The lock of an object: one of 256, so that a million small files need no million locks."""
    return f"objects-{xxhash.xxh3_64_intdigest(key.encode()) % 256:02x}"


class _SharedHost:
    """What filling a whole set and a partial one together with other nodes have in common (a `CopyHost`)."""

    def __init__(self, folder: StageFolder, parts: FileParts, keys: list[str], name: str) -> None:
        self.parts, self.keys = parts, keys
        self._folder, self._name = folder, name
        self._locks: dict[str, int] = {}

    def begin(self, number: int) -> GrowingFile | bool:
        folder, key = self._folder, self.keys[number]
        lock = folder._take_lock(_lock_of(key))
        if lock is None:
            return False
        try:
            if _size_at(folder.path / "objects" / key) == self.parts.files[number].size:
                folder._link(self.parts, number, key, self._name)
                os.close(lock)
                return True
            growing = folder._grow(self.parts, number, key)
        except BaseException:
            os.close(lock)
            raise
        self._locks[key] = lock
        return growing

    def end(self, growing: GrowingFile) -> None:
        try:
            self._folder._put(growing)
            self._folder._link(self.parts, growing.number, growing.key, self._name)
        except OSError as error:
            raise self._folder._explain(error, self.parts.path(growing.number)) from error

    def release(self, growing: GrowingFile) -> None:
        self._folder._abandon(growing)
        os.close(self._locks.pop(growing.key))


class _WholeSet(_SharedHost):
    """All files of a set, in their order."""

    def __init__(self, folder: StageFolder, parts: FileParts, keys: list[str], name: str) -> None:
        super().__init__(folder, parts, keys, name)
        self._left = deque(range(len(keys)))

    def next_number(self) -> int | None:
        while self._left:
            number = self._left.popleft()
            if not self._folder._is_in_set(self.parts, number, self._name):
                return number
        return None

    def is_urgent(self, number: int) -> bool:
        return True

    def finish(self, number: int) -> None:
        pass

    def fail(self, number: int, error: Exception) -> None:
        if isinstance(error, OSError):
            raise self._folder._explain(error, self.parts.path(number)) from error
        raise error


# --- sets of which only some files are there at a time


@dataclass(frozen=True)
class _Claim:
    """What one process wants of a partial set, by numbers of files: those that it may read `now`, those that it reads
    `later` in the order of their use; and the files that it copies, as (key, bytes)."""

    name: str
    now: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    copying: tuple[tuple[str, int], ...] = ()


class PartialSet:
    """A data set of which this disk holds the files that are read now, and as many of the next as have room.

    Each process that reads it says what it wants in a claim, a file whose lock it holds, and copies what is missing;
    several processes of a node share the work. For a file that is wanted others are removed, those first that are used
    last, and never one that a claim says is read now. A removed file is cut to nothing, so that its room is free even
    if some process has it open.
    """

    def __init__(self, folder: StageFolder, parts: FileParts, *, leave_damaged: bool = False) -> None:
        """`leave_damaged`: a damaged file is read where it lies, for its whole samples. Raises SiteError if the folder
        cannot be written."""
        self.parts, self._leave_damaged = parts, leave_damaged
        self._folder, self._keys = folder, parts.list_keys()
        self._name = f"{_name_set(parts, self._keys)}-windows"
        self._numbers: dict[str, list[int]] = {}
        for number, key in enumerate(self._keys):
            self._numbers.setdefault(key, []).append(number)
        self._claim = _Claim(self._name)
        self._wanted = frozenset[str]()
        folder._make_folders()
        self._lock = folder._hold_set(self._name)
        self._claim_path = folder.path / "locks" / f"claim-{uuid.uuid4().hex}"
        self._claim_lock = -1
        try:
            folder._remove_leftovers()
            self.root.mkdir(exist_ok=True)
            with folder._locked("room"):
                self._forget_failures()
                self._claim_lock = folder._open_lock(self._claim_path.name)
                fcntl.flock(self._claim_lock, fcntl.LOCK_EX)
                self._write_claim(self._claim)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise folder._explain(error, parts.root) from error
            raise

    @property
    def folder(self) -> Path:
        """The whole of what is staged."""
        return self._folder.path

    @property
    def root(self) -> Path:
        """The folder of the files under their names."""
        return self._folder.path / "sets" / self._name

    def as_staged(self) -> StagedSet:
        """What reads the files from here, as they come and go."""
        return StagedSet(self.root, [], 0, self._folder.path, is_partial=True)

    def want(self, now: Sequence[int], later: Sequence[int]) -> None:
        """Say which files may be read from now on, and which follow in the order of their use."""
        with self._folder._locked("room"):
            self._write_claim(_Claim(self._name, tuple(now), tuple(later), self._claim.copying))
        self._wanted = frozenset(self._keys[number] for number in (*now, *later))

    def list_missing(self, numbers: Sequence[int]) -> list[int]:
        """Those of some files that are not there yet."""
        return [number for number in numbers if not self._is_there(number)]

    def find_failure(self, numbers: Sequence[int]) -> str:
        """Why one of some files could not be copied; "" if none failed."""
        for number in numbers:
            with contextlib.suppress(OSError):
                return (self.root / FAILED / f"{number}").read_text()
        return ""

    def is_wanted(self, key: str) -> bool:
        """Whether this process wants a file, now or later."""
        return key in self._wanted

    def copy_together(self, peers: StagePeers, progress: CopyProgress) -> bool:
        """Copy all files that are wanted and not there, together with other nodes, as far as there is room; files that
        are wanted meanwhile too. Otherwise as `copy_next`."""
        before = progress.copied_bytes
        JointCopy(_WantedFiles(self, self._folder, self._keys, self._name), peers, progress.note).run()
        return progress.copied_bytes > before

    def copy_next(self, progress: CopyProgress) -> bool:
        """Copy the first file that is wanted and not there. Returns whether one was copied; False: all are there, other
        processes copy them, or there is no room before the run has gone on. A file that cannot be copied is noted for
        those that wait for it. Raises CopyGivenUp."""
        for number in self._list_next():
            if not self._reserve(number):
                return False
            try:
                taken = self._folder._take(self.parts, number, self._keys[number], self._name, progress)
            except (JobError, SiteError, OSError) as error:
                return self._note_failure(number, error)
            finally:
                self._free(number)
            if taken:
                return True
        return False

    def _list_next(self) -> Iterator[int]:
        """Files that are wanted and not there, in the order of their use."""
        claim = self._claim
        for number in (*claim.now, *claim.later):
            if not self._is_there(number) and not (self.root / FAILED / f"{number}").exists():
                yield number

    def _reserve(self, number: int) -> bool:
        """Whether there is room for a file, which this process copies from now on; False too if it does already."""
        copied = self._keys[number], self.parts.files[number].size
        with self._folder._locked("room"):
            if copied in self._claim.copying or not self._make_room(number):
                return False
            self._write_copying((*self._claim.copying, copied))
        return True

    def _free(self, number: int) -> None:
        """This process does not copy a file any more."""
        with self._folder._locked("room"):
            self._write_copying(tuple(each for each in self._claim.copying if each[0] != self._keys[number]))

    def close(self) -> None:
        """Let others remove what this process has wanted."""
        if self._claim_lock >= 0:
            self._claim_path.unlink(missing_ok=True)
            os.close(self._claim_lock)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = self._claim_lock = -1

    def _is_there(self, number: int) -> bool:
        file, path = self.parts.files[number], f"{self.root}/{self.parts.files[number].name}"
        return _size_at(path) == file.size or os.path.islink(path)

    def _note_failure(self, number: int, error: Exception) -> bool:
        """Note for those that wait for a file why it cannot be copied; returns whether that is known for good, which a
        full disk is not. Raises CopyGivenUp."""
        if isinstance(error, CopyGivenUp):
            raise error
        if isinstance(error, SiteError):  # another program has filled the disk
            return False
        leaves = self._leave_damaged and isinstance(error, DamagedData)
        place = self.root / (self.parts.files[number].name if leaves else f"{FAILED}/{number}")
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
        if leaves:
            temporary.symlink_to(self.parts.path(number).absolute())
        else:
            temporary.write_text(str(error))
        os.replace(temporary, place)
        return True

    def _forget_failures(self) -> None:
        """Let files be copied that could not be before; while "room" is locked."""
        shutil.rmtree(self.root / FAILED, ignore_errors=True)
        for file in self.parts.files:
            path = self.root / file.name
            if path.is_symlink():
                path.unlink(missing_ok=True)

    # --- claims: written and read while "room" is locked

    def _write_copying(self, copying: tuple[tuple[str, int], ...]) -> None:
        self._write_claim(_Claim(self._name, self._claim.now, self._claim.later, copying))

    def _write_claim(self, claim: _Claim) -> None:
        self._claim = claim
        if self._claim_lock < 0:
            return
        content = memoryview(json.dumps([claim.name, claim.now, claim.later, claim.copying]).encode())
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self._claim_lock, content[written:], written)
            os.ftruncate(self._claim_lock, written)
        except OSError as error:
            raise self._folder._explain(error, self._claim_path) from error

    def _read_others(self) -> list[_Claim]:
        """The claims of other processes that live; those of others are removed."""
        found = []
        for path in (self._folder.path / "locks").glob("claim-*"):
            if path == self._claim_path:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                content = read_exactly(descriptor, os.fstat(descriptor).st_size, 0)
                try:
                    name, now, later, copying = json.loads(content)
                    found.append(_Claim(name, tuple(now), tuple(later), tuple((key, size) for key, size in copying)))
                except ValueError:  # it could not be written, so it may want anything
                    found.append(_Claim(self._name, tuple(range(len(self._keys)))))
            finally:
                os.close(descriptor)
        return found

    # --- room, while "room" is locked

    def _make_room(self, number: int) -> bool:
        """Whether a file can be written, after others were removed for it if that suffices; not if it is not wanted any
        more."""
        if number not in self._claim.now and number not in self._claim.later:
            return False
        others = self._read_others()
        copies = {self._keys[number]: self.parts.files[number].size}
        copies.update(each for claim in (self._claim, *others) for each in claim.copying)
        missing, free = self._folder._remove_unused(copies, 0, SPARE_BYTES)
        lacks = missing + SPARE_BYTES - free
        return lacks <= 0 or self._remove_later(number, lacks, others)

    def _remove_later(self, number: int, lacks: int, others: Sequence[_Claim]) -> bool:
        """Whether so many bytes are free after files were removed that are used later than another one."""
        claims = [self._claim, *(claim for claim in others if claim.name == self._name)]
        next_use: dict[int, float] = {}
        for claim in claims:
            for place, each in enumerate(claim.later):
                next_use[each] = min(next_use.get(each, float("inf")), place)
        next_use.update((each, -1) for claim in claims for each in claim.now)
        own = -1.0 if number in self._claim.now else float(self._claim.later.index(number))
        there = []
        for key in os.listdir(self._folder.path / "objects"):
            use = min((next_use.get(each, float("inf")) for each in self._numbers.get(key, ())), default=-1)
            if use > own and (size := self._size_if_alone(key)):
                there.append((use, size, key))
        there.sort(reverse=True)
        if sum(size for _, size, _ in there) < lacks:
            return False
        for _, _, key in there:
            lacks -= self._remove(key)
            if lacks <= 0:
                return True
        return False

    def _size_if_alone(self, key: str) -> int:
        """Bytes of an object that this set alone has; 0 of another."""
        with contextlib.suppress(OSError):
            known = (self._folder.path / "objects" / key).stat()
            links = sum(self._is_there(number) for number in self._numbers[key])
            return known.st_size if known.st_nlink == 1 + links else 0
        return 0

    def _remove(self, key: str) -> int:
        """Remove a file from this set; the bytes that are free by it."""
        target = self._folder.path / "objects" / key
        with self._folder._try_lock(_lock_of(key)) as taken:  # so that no process links to it meanwhile
            size = self._size_if_alone(key) if taken else 0
            if size:
                for number in self._numbers[key]:
                    (self.root / self.parts.files[number].name).unlink(missing_ok=True)
                descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
                target.unlink()
                os.ftruncate(descriptor, 0)
                os.close(descriptor)
                target.with_name(f"{key}.sums").unlink(missing_ok=True)
        return size


class _WantedFiles(_SharedHost):
    """The files that a partial set wants, as there is room."""

    def __init__(self, partial: PartialSet, folder: StageFolder, keys: list[str], name: str) -> None:
        super().__init__(folder, partial.parts, keys, name)
        self._partial, self._begun, self._is_full = partial, set[int](), False

    def next_number(self) -> int | None:
        for number in self._partial._list_next():
            if number not in self._begun:
                if self._is_full or not self._partial._reserve(number):
                    return None
                self._begun.add(number)
                return number
        return None

    def is_urgent(self, number: int) -> bool:
        return number in self._partial._claim.now

    def finish(self, number: int) -> None:
        self._partial._free(number)
        self._begun.discard(number)

    def fail(self, number: int, error: Exception) -> None:
        if isinstance(error, JobError | SiteError | OSError):
            self._is_full |= not self._partial._note_failure(number, error)
        else:
            raise error


# --- the data of a run


def list_parts(source: DataSource) -> list[FileParts]:
    """The files that a source reads."""
    found: list[FileParts] = []

    def note(parts: FileParts) -> StagedSet:
        found.append(parts)
        return StagedSet(parts.root, [], 0)

    stage_source(source, note)
    return found


def hold_all(
    sources: Sequence[DataSource],
    folder: Path,
    tell: Callable[[str], object] = lambda line: None,
    progress: CopyProgress | None = None,
    peers: StagePeers | None = None,
) -> tuple[list[DataSource], list[StagedSet]]:
    """The same sources, reading what is staged below a folder, and what to keep as long as they are read."""
    held: list[StagedSet] = []

    def hold(parts: FileParts) -> StagedSet:
        held.append(StageFolder(folder).hold(parts, tell, progress=progress, peers=peers))
        return held[-1]

    try:
        return [stage_source(source, hold) for source in sources], held
    except BaseException:
        for each in held:
            each.close()
        raise
