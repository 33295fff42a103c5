"""Data sets copied to a node's own disk, once for all jobs of a user on it.

Invariants:
- A staged file has its final name only when every byte of it was copied, compared with its checksums where there are
  some, and is durable; a kill at any moment leaves a temporary file that the next copy removes.
- One process of a node copies a file; others wait for it and use it. So each byte is read once a node from the shared
  file system.
- A set in use is never removed: its users hold a shared lock (flock(2)), which the kernel drops when they end.
- The data themselves are never changed.

Below the folder: `objects/` holds the files by their content's key, `sets/<key>/` hard links to them under their own
names, `locks/` one lock for each set, some for objects, and one for making room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from shardway.data.content import fingerprint
from shardway.data.formats.base import BLOCK_BYTES, DamagedData, FileParts, Sums
from shardway.data.sources.base import DataSource, stage_source
from shardway.errors import JobError, SiteError
from shardway.hardware.mounts import find_mount, read_mounts
from shardway.places import expand_place
from shardway.refusals import FULL
from shardway.units import render_bytes

SPARE_BYTES = 2**30
"""Room that is left on the disk for what else the job writes there."""

_COPY_BLOCKS = 8


@dataclass(eq=False)
class StagedSet:
    """A staged data set: the same files below `root`, with the checksums that were made while they were copied.

    It may be used until `close`, or until the process ends.
    """

    root: Path
    sums: list[Sums]
    copied_bytes: int
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
        self, parts: FileParts, tell: Callable[[str], object] = lambda line: None, spare: int = SPARE_BYTES
    ) -> StagedSet:
        """The files of a data set on this disk, copied if they are not there, and held against removal.

        Sets that no process uses are removed for it, those first that were used longest ago. Raises SiteError if there
        is too little room even then or the folder cannot be written, DamagedData if a block is not what its checksum
        says, JobError if a file cannot be read.
        """
        keys = [self._key_of(parts, number) for number in range(len(parts.files))]
        name = fingerprint(*(text for pair in zip(keys, parts.files, strict=True) for text in (pair[0], pair[1].name)))
        try:
            for folder in ("objects", "sets", "locks"):
                (self.path / folder).mkdir(0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / "locks" / f"set-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SiteError(f"data.stage: {self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(lock)
            copied = self._fill(parts, keys, name, tell, spare)
            sums = [*parts.sums] or self._read_sums(keys)
        except BaseException:
            os.close(lock)
            raise
        return StagedSet(self.path / "sets" / name, sums, copied, lock)

    def find_missing(self, parts: FileParts) -> int:
        """Bytes of a data set that are not on this disk yet."""
        missing = 0
        for number, file in enumerate(parts.files):
            if not (self.path / "objects" / self._key_of(parts, number)).exists():
                missing += file.size
        return missing

    def find_room(self) -> int:
        """Bytes that can be had: free ones, and those of sets that no process uses."""
        there = next(above for above in (self.path, *self.path.parents) if above.exists())
        free = shutil.disk_usage(there).free
        unused = 0
        for lock in self._unused_sets():
            unused += self._size_of(lock.name.removeprefix("set-"))
        return free + unused

    # --- copying

    @staticmethod
    def _key_of(parts: FileParts, number: int) -> str:
        """What stands for a file's content: its checksums, or else its path, size and time of change."""
        file = parts.files[number]
        if parts.sums:
            return f"{file.size}-{xxhash.xxh3_128_hexdigest(parts.sums[number].tobytes())}"
        return f"{file.size}-{fingerprint(parts.path(number).resolve(), file.size, file.mtime_ns)}"

    def _fill(self, parts: FileParts, keys: Sequence[str], name: str, tell: Callable[[str], object], spare: int) -> int:
        copied = 0
        missing = self.find_missing(parts)
        if missing:
            self._make_room(missing + spare, parts, spare)
            tell(f"staging {render_bytes(missing)} to {self.path}")
        for number, key in enumerate(keys):
            link = self.path / "sets" / name / parts.files[number].name
            if link.exists():
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(_lock_of(key)):  # also while it is linked, for an object without a set may be removed
                if not (self.path / "objects" / key).exists():
                    copied += self._copy(parts, number, key)
                with contextlib.suppress(FileExistsError):
                    os.link(self.path / "objects" / key, link)
        return copied

    def _copy(self, parts: FileParts, number: int, key: str) -> int:
        """Copy a file whose lock is held; its checksums become durable before its name."""
        file, target = parts.files[number], self.path / "objects" / key
        temporary = target.with_name(f".{key}.part")
        sums: list[int] = []
        source = -1
        try:
            source = os.open(parts.path(number), os.O_RDONLY | os.O_CLOEXEC)
            with temporary.open("wb", buffering=0) as stream:
                at = 0
                while at < file.size:
                    piece = _read_exactly(source, min(_COPY_BLOCKS * BLOCK_BYTES, file.size - at), at)
                    if not piece:
                        raise parts.damaged(number, at, f"it ends there and had {file.size} bytes when it was opened")
                    sums += [
                        xxhash.xxh3_64_intdigest(piece[start : start + BLOCK_BYTES])
                        for start in range(0, len(piece), BLOCK_BYTES)
                    ]
                    self._compare(parts, number, sums, at)
                    stream.write(piece)
                    at += len(piece)
                os.utime(stream.fileno(), ns=(file.mtime_ns, file.mtime_ns))  # an index of the data still holds
                if file.size >= BLOCK_BYTES:
                    os.fsync(stream.fileno())
            if file.size >= BLOCK_BYTES:
                self._write_sums(key, np.array(sums, np.uint64))
            os.replace(temporary, target)
        except OSError as error:
            raise self._explain(error, parts.path(number)) from error
        finally:
            if source >= 0:
                os.close(source)
            with contextlib.suppress(OSError):
                temporary.unlink()
        return file.size

    @staticmethod
    def _compare(parts: FileParts, number: int, sums: Sequence[int], at: int) -> None:
        if not parts.sums:
            return
        known = parts.sums[number]
        for block in range(at // BLOCK_BYTES, len(sums)):
            if sums[block] != int(known[block]):
                raise parts.damaged(number, block * BLOCK_BYTES, "the checksum of the MiB from there on is another")

    def _explain(self, error: OSError, source: Path) -> Exception:
        if error.errno in FULL:
            return SiteError(
                f"data.stage: {self.path} is full ({error.strerror})\n"
                '      to do: set data.stage = "off", or name a folder on a larger disk'
            )
        return JobError(f"{source} could not be copied to {self.path}: {error}")

    def _write_sums(self, key: str, sums: Sums) -> None:
        place = self.path / "objects" / f"{key}.sums"
        temporary = place.with_name(f".{key}.sums.part")
        with temporary.open("wb") as stream:
            stream.write(sums.tobytes() + xxhash.xxh3_64_digest(sums.tobytes()))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, place)

    def _read_sums(self, keys: Sequence[str]) -> list[Sums]:
        """The checksums that were made of files while they were copied; none if a file is too small to have some."""
        found = []
        for key in keys:
            place = self.path / "objects" / f"{key}.sums"
            if not place.exists():
                return []
            content = place.read_bytes()
            if xxhash.xxh3_64_digest(content[:-8]) != content[-8:]:
                raise DamagedData(f"{place} is damaged\n  To do: remove {self.path}.")
            found.append(np.frombuffer(content[:-8], np.uint64))
        return found

    # --- room

    def _make_room(self, needed: int, parts: FileParts, spare: int) -> None:
        """Remove unused sets until so many bytes are free."""
        with self._locked("room"):
            for lock in self._unused_sets():
                if shutil.disk_usage(self.path).free >= needed:
                    break
                self._remove(lock.name.removeprefix("set-"))
            free = shutil.disk_usage(self.path).free
        if free < needed:
            raise SiteError(
                f"data.stage: {self.path} has {render_bytes(free)} free, and {render_bytes(needed - spare)} of "
                f"{parts.root} are to be copied there, with {render_bytes(spare)} to spare\n"
                '      to do: set data.stage = "off", or name a folder on a larger disk'
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

    def _size_of(self, name: str) -> int:
        """Bytes that go free if a set is removed: of files that no other set has."""
        size = 0
        for path in (self.path / "sets" / name).rglob("*"):
            with contextlib.suppress(OSError):
                known = path.stat()
                size += known.st_size if path.is_file() and known.st_nlink <= 2 else 0
        return size

    def _remove(self, name: str) -> None:
        shutil.rmtree(self.path / "sets" / name, ignore_errors=True)
        for path in (self.path / "objects").iterdir():
            with contextlib.suppress(OSError):
                left = path.name.startswith(".") and time.time() - path.stat().st_mtime > 3600
                if left or (
                    not path.name.endswith(".sums") and not path.name.startswith(".") and path.stat().st_nlink == 1
                ):
                    self._remove_object(path)

    def _remove_object(self, path: Path) -> None:
        """Remove a file that no set links to, unless it is being linked at this moment."""
        descriptor = os.open(self.path / "locks" / _lock_of(path.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.sums").unlink(missing_ok=True)
        except BlockingIOError:
            return
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = os.open(self.path / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    found = os.pread(descriptor, size, offset)
    while len(found) < size:
        more = os.pread(descriptor, size - len(found), offset + len(found))
        if not more:
            break
        found += more
    return found


def _lock_of(key: str) -> str:
    """The lock of an object: one of 256, so that a million small files need no million locks."""
    return f"objects-{xxhash.xxh3_64_intdigest(key.encode()) % 256:02x}"


# --- the data of a run


def find_folder(wanted: str, sources: Sequence[DataSource], *, by_user: bool) -> tuple[Path | None, str]:
    """The folder to stage to, or None and why not. `wanted`: data.stage, a folder or "off".

    `by_user`: whether the user named the folder; if so, data that do not fit raise SiteError. Else only data of a file
    system that machines share are staged, and only if they fit.
    """
    if wanted == "off":
        return None, "data.stage is off"
    folder = StageFolder.below(expand_place(wanted))
    held = [parts for source in sources for parts in list_parts(source)]
    if not held:
        return None, "these data have no files"
    mounts = read_mounts()
    places = [find_mount(str(parts.root.resolve()), mounts) for parts in held]
    if not by_user and not all(place is not None and place.shared for place in places):
        return None, "the data lie on this machine"
    needed, room = sum(folder.find_missing(parts) for parts in held) + SPARE_BYTES, folder.find_room()
    if needed <= room or by_user:  # what is too much is refused when it is copied
        return folder.path, ""
    return None, f"{render_bytes(needed)} do not fit into {render_bytes(room)} of {folder.path}"


def list_parts(source: DataSource) -> list[FileParts]:
    """The files that a source reads."""
    found: list[FileParts] = []

    def note(parts: FileParts) -> StagedSet:
        found.append(parts)
        return StagedSet(parts.root, list(parts.sums), 0)

    stage_source(source, note)
    return found


def hold_all(
    sources: Sequence[DataSource], folder: Path, tell: Callable[[str], object]
) -> tuple[list[DataSource], list[StagedSet]]:
    """The same sources, reading what is staged below a folder, and what to keep as long as they are read."""
    held: list[StagedSet] = []

    def hold(parts: FileParts) -> StagedSet:
        held.append(StageFolder(folder).hold(parts, tell))
        return held[-1]

    return [stage_source(source, hold) for source in sources], held
