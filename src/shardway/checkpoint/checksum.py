"""Seals: the size of a file and a checksum of each of its blocks.

Invariant: a seal is computed from what was in memory when a file was written, or from the file alone, and is the same
in both ways; a file that differs from its seal in one bit is found. This module must not know what is in a file.

torch's own formats load a flipped bit or a zeroed page without a word, so each block carries an XXH3-128 checksum
(https://xxhash.com), which costs far less than reading the block. Blocks, so that who wants a part of a file needs to
read no more than the blocks around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardway.rundir.look import check_answers

BLOCK = 2**24
"""Bytes of a file that share a checksum."""

STEP = 2**20
"""Bytes that are read or written at once: small enough to stay in a core's cache until they are hashed."""


@dataclass(frozen=True)
class FileChecksum:
    """Size of one file, and the checksum of each block (`BLOCK` bytes, the last one what is left) in hexadecimal."""

    bytes: int
    blocks: tuple[str, ...]


class ChecksumWriter:
    """Computes the seal of bytes that come one after another."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self._bytes = 0

    def update(self, data: memoryview | bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK - self._bytes % BLOCK]
            self._digest.update(part)
            self._bytes += len(part)
            view = view[len(part) :]
            if self._bytes % BLOCK == 0:
                self._blocks.append(self._digest.hexdigest())
                self._digest.reset()

    def seal(self) -> FileChecksum:
        """Of all bytes that came."""
        rest = [self._digest.hexdigest()] if self._bytes % BLOCK else []
        return FileChecksum(self._bytes, (*self._blocks, *rest))


def seal_bytes(data: bytes) -> FileChecksum:
    """The seal of a file with this content."""
    sealer = ChecksumWriter()
    sealer.update(data)
    return sealer.seal()


def seal_file(path: Path) -> FileChecksum:
    """Read a whole file and compute its seal."""
    sealer, step = ChecksumWriter(), memoryview(bytearray(STEP))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(step):
            sealer.update(step[:count])
    return sealer.seal()


def find_damage(folder: Path, name: str, seal: FileChecksum) -> str | None:
    """What is wrong with one file of a checkpoint, or None."""
    if short := find_short(folder, name, seal):
        return short
    try:
        found = seal_file(folder / name)
    except OSError as error:
        return describe_unreadable(folder, name, error)
    if found.bytes != seal.bytes:
        return _format_size(name, found.bytes, seal)
    changed = (i for i, pair in enumerate(zip(found.blocks, seal.blocks, strict=False)) if pair[0] != pair[1])
    return None if found == seal else describe_changed(name, seal, next(changed, 0))


def find_short(folder: Path, name: str, seal: FileChecksum) -> str | None:
    """What is wrong with the size of one file of a checkpoint, or None; its content is not read."""
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return describe_unreadable(folder, name, error)
    return None if size == seal.bytes else _format_size(name, size, seal)


def describe_unreadable(folder: Path, name: str, error: OSError) -> str:
    """A file that cannot be opened or read. Raises JobError where its file system is away: that is no damage."""
    check_answers(folder / name, error)
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error.strerror})"


def describe_changed(name: str, seal: FileChecksum, block: int) -> str:
    """A block that is not what was saved."""
    first, end = block * BLOCK, min((block + 1) * BLOCK, seal.bytes)
    which = "its checksum" if len(seal.blocks) == 1 else f"the checksum of its bytes {first} to {end}"
    return f"the content of {name} has changed ({which} is another)"


def _format_size(name: str, size: int, seal: FileChecksum) -> str:
    return f"{name} has {size} bytes, the manifest says {seal.bytes}"
