"""Bytes out of a checkpoint's files for whoever reads them a little at a time, in any order.

Invariant: a block is hashed before a byte of it is handed out, and that once, however many little pieces of it are
asked for; at most `HELD` blocks are in memory. This module must not know tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import xxhash

from shardway.checkpoint.checksum import BLOCK, FileChecksum, describe_changed, describe_unreadable, find_short
from shardway.checkpoint.manifest import Damaged

HELD = 8
"""Blocks that are kept for what is asked for next: one for each of a few files that are read side by side."""


class BlockReader:
    """Reads ranges of files of one checkpoint.

    What is wanted of a block that was let go of is read alone then, since the block was found whole before.
    """

    def __init__(self, folder: Path, seals: Mapping[str, FileChecksum]) -> None:
        self._folder = folder
        self._seals = seals
        self._held: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._whole: set[tuple[str, int]] = set()

    def read(self, name: str, at: int, target: memoryview) -> None:
        """Fill memory with the bytes of a file from `at` on. Raises Damaged where they are not what was saved."""
        seal = self._seals.get(name)
        if seal is None:
            raise Damaged(self._folder, [f"{name} is not in the manifest"])
        end = at + len(target)
        if at < 0 or end > seal.bytes:
            raise Damaged(self._folder, [f"{name} has {seal.bytes} bytes, and more are said to be in it"])
        for number in range(at // BLOCK, -(-end // BLOCK)):
            first, last = max(at, number * BLOCK), min(end, (number + 1) * BLOCK)
            self._take(name, number, first - number * BLOCK, target[first - at : last - at])

    def _take(self, name: str, number: int, start: int, target: memoryview) -> None:
        key = (name, number)
        if key not in self._held and key in self._whole:
            self._fill(name, number * BLOCK + start, target)
            return
        if key not in self._held:
            self._held[key] = self._load(name, number)
            self._whole.add(key)
            if len(self._held) > HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        target[:] = self._held[key][start : start + len(target)]

    def _load(self, name: str, number: int) -> memoryview:
        seal = self._seals[name]
        if short := find_short(self._folder, name, seal):
            raise Damaged(self._folder, [short])
        block = memoryview(bytearray(min(BLOCK, seal.bytes - number * BLOCK)))
        self._fill(name, number * BLOCK, block)
        if xxhash.xxh3_128_hexdigest(block) != seal.blocks[number]:
            raise Damaged(self._folder, [describe_changed(name, seal, number)])
        return block

    def _fill(self, name: str, at: int, target: memoryview) -> None:
        """Read from the file itself."""
        try:
            with open(self._folder / name, "rb", buffering=0) as file:
                file.seek(at)
                left = target
                while len(left):
                    count = file.readinto(left)
                    if not count:
                        raise OSError(5, "it ends too early")
                    left = left[count:]
        except OSError as error:
            raise Damaged(self._folder, [describe_unreadable(self._folder, name, error)]) from None
