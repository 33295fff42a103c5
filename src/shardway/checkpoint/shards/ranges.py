"""Reads ranges of one file into memory, block by block, each compared with its checksum.

Invariant: every byte of a block that holds a part of a range is read once and hashed where it was put; nobody is told
that a range is there before its last block was found whole. This module must not know tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardway.checkpoint.checksum import BLOCK, STEP, FileChecksum, describe_changed, find_short

MOST_PIECES = 512
"""Of one read; systems take 1024 (IOV_MAX)."""


@dataclass(frozen=True)
class Range:
    """Bytes of a file: the first, how many, the memory that they go into (asked for when it is needed), and what to do
    once they are there."""

    at: int
    length: int
    open: Callable[[], memoryview]
    done: Callable[[], None] | None = None

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.at + self.length


def read_ranges(folder: Path, name: str, seal: FileChecksum, ranges: Sequence[Range], *, whole: bool) -> str | None:
    """Read ranges that do not overlap; what is damaged, or None. `whole`: compare the blocks around which nothing is
    wanted as well. Raises OSError."""
    if short := find_short(folder, name, seal):
        return short
    if any(each.end > seal.bytes for each in ranges):
        return f"{name} has {seal.bytes} bytes, and more are said to be in it"
    pending = _Pending(ranges)
    with open(folder / name, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for number, wanted in enumerate(seal.blocks):
            first, end = number * BLOCK, min((number + 1) * BLOCK, seal.bytes)
            if (whole or pending.touches(first, end)) and _read_block(file.fileno(), first, end, pending) != wanted:
                return describe_changed(name, seal, number)
            pending.finish(end)
    return None


class _Pending:
    """The ranges that are still to be read, in the order of the file."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._left = sorted(ranges, key=lambda each: (each.at, each.end))
        self._next = 0

    def touches(self, first: int, end: int) -> bool:
        """Whether one has bytes there; what ends before is done already."""
        return self._next < len(self._left) and self._left[self._next].at < end

    def pieces(self, first: int, end: int, nowhere: memoryview) -> Iterator[memoryview]:
        """The memory into which the bytes from first to end go, in order. For those that nobody wants parts of
        `nowhere`, each of its own: all are hashed once all were read."""
        at, number = first, self._next
        while at < end:
            while number < len(self._left) and self._left[number].end <= at:
                number += 1
            found = self._left[number] if number < len(self._left) else None
            if found is None or found.at >= end:
                yield nowhere[at - first : end - first]
                return
            if found.at > at:
                yield nowhere[at - first : found.at - first]
                at = found.at
            stop = min(end, found.end)
            yield found.open()[at - found.at : stop - found.at]
            at = stop

    def finish(self, end: int) -> None:
        """All bytes before `end` are there and whole."""
        while self._next < len(self._left) and self._left[self._next].end <= end:
            if (done := self._left[self._next].done) is not None:
                done()
            self._next += 1


def _read_block(descriptor: int, first: int, end: int, pending: _Pending) -> str:
    """Read one block to where it belongs; its checksum."""
    digest, nowhere = xxhash.xxh3_128(), memoryview(bytearray(STEP))
    for at in range(first, end, STEP):
        stop = min(at + STEP, end)
        position, batch = at, []
        for piece in pending.pieces(at, stop, nowhere):
            batch.append(piece)
            if len(batch) == MOST_PIECES:
                position = _read_pieces(descriptor, batch, position, digest)
                batch = []
        _read_pieces(descriptor, batch, position, digest)
    return digest.hexdigest()


def _read_pieces(descriptor: int, pieces: list[memoryview], at: int, digest: xxhash.xxh3_128) -> int:
    """Fill all pieces from the file, one after the other, and hash them; where the file goes on."""
    left = [piece for piece in pieces if len(piece)]
    for piece in _filled(descriptor, left, at):
        digest.update(piece)
    return at + sum(map(len, left))


def _filled(descriptor: int, pieces: list[memoryview], at: int) -> list[memoryview]:
    left = list(pieces)
    while left:
        count = os.preadv(descriptor, left, at)
        if count == 0:
            raise OSError(5, "it ends too early")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:
            left[0] = left[0][count:]
    return pieces
