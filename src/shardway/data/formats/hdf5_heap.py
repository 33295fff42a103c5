"""The global heap of an HDF5 file: where the values of variable length lie.

Invariant: nothing is believed that does not fit the file. A value is as long as its reference says, and lies within its
collection; anything else is an error with its offset, also where the library would give other bytes.

The layout is that of the HDF5 file format specification 3.0: "Global heap" (III.E), and the reference of a value of
variable length in a dataset (IV.B, "Variable-length"), with offsets and lengths of 8 bytes.
"""

from __future__ import annotations

import struct
from collections import OrderedDict

import numpy as np

from shardway.data.formats.base import FileParts

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
"""What a dataset holds of a value: its number of elements, the collection, and the object in it."""

_HEAD = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HHIQ")
_FIRST_BYTES = _HEAD.size + _OBJECT.size
_WHOLE_BYTES = 2**12
"""Collections of up to so many bytes, which hold several values, are kept whole; of others, where their values lie."""
_KEPT_BYTES = 2**24
_AT_ONCE_BYTES = 2**20
"""A value of up to so many bytes is read before its collection is looked at; of a longer one, whether it is there."""


class BadHeap(ValueError):
    """The heap cannot hold what a reference says: `what` at byte `offset` of the file."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset = offset


class GlobalHeap:
    """The values of variable length of one file; those collections that hold several and were used last are kept."""

    def __init__(self, parts: FileParts, number: int) -> None:
        self._parts, self._number, self._end = parts, number, parts.files[number].size
        self._kept: OrderedDict[int, tuple[bytes, dict[int, tuple[int, int]]]] = OrderedDict()
        self._kept_bytes = 0

    def read(self, address: int, index: int, size: int) -> bytes | memoryview:
        """The bytes of the object `index` of the collection at `address`, which has `size` of them. Raises BadHeap, or
        what `FileParts.read` raises."""
        if not size:
            return b""
        kept = self._kept.get(address)
        if kept is not None:
            self._kept.move_to_end(address)
        else:
            # Most values of many bytes are the first object of a collection of their own: one read gives all.
            if not 0 < address <= self._end - _FIRST_BYTES:
                raise BadHeap(address, f"its values would lie at byte {address}, and the file has {self._end} bytes")
            ahead = size if size <= _AT_ONCE_BYTES else 0
            content = self._parts.read(self._number, address, min(_FIRST_BYTES + ahead, self._end - address))
            whole = self._check(address, content)
            first, _, _, room = _OBJECT.unpack_from(content, _HEAD.size)
            if first == index and room == size and _FIRST_BYTES + size <= whole:
                if not ahead:
                    return self._parts.read(self._number, address + _FIRST_BYTES, size)
                return memoryview(content)[_FIRST_BYTES:]
            kept = self._keep(address, whole)
        collection, table = kept
        at, room = table.get(index, (0, 0))
        if not at or room < size:
            what = f"object {index} of the heap there has {room} bytes, and {size} were expected" if at else ""
            raise BadHeap(address, what or f"the heap there has no object {index}")
        if at + size <= len(collection):
            return collection[at : at + size]
        return self._parts.read(self._number, address + at, size)

    def _check(self, address: int, content: bytes) -> int:
        """The bytes of a collection, by its head."""
        sign, version, whole = _HEAD.unpack_from(content)
        if sign != b"GCOL" or version != 1:
            raise BadHeap(address, "no collection of values begins there")
        if not _FIRST_BYTES <= whole <= self._end - address:
            raise BadHeap(address, f"its collection of values would have {whole} bytes, and the file ends before")
        return int(whole)

    def _keep(self, address: int, whole: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
        """A collection, and where each object begins in it and how many bytes it has."""
        content = self._parts.read(self._number, address, min(whole, _WHOLE_BYTES))
        table: dict[int, tuple[int, int]] = {}
        at, start, part = _HEAD.size, 0, content
        while at + _OBJECT.size <= whole:
            if at + _OBJECT.size > start + len(part):
                start, part = at, self._parts.read(self._number, address + at, min(whole - at, _WHOLE_BYTES))
            index, _, _, size = _OBJECT.unpack_from(part, at - start)
            if not index:  # what is free, up to the end
                break
            begin = at + _OBJECT.size
            if begin + size > whole:
                raise BadHeap(address + at, f"a value there would have {size} bytes, and its collection ends before")
            if index in table:
                raise BadHeap(address + at, f"object {index} of the heap there is in it twice")
            table[index] = (begin, size)
            at = begin + -(-size // 8) * 8
        kept = self._kept[address] = (content if whole <= _WHOLE_BYTES else b"", table)
        self._kept_bytes += len(kept[0]) + 200 * len(table)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, (gone, objects) = self._kept.popitem(last=False)
            self._kept_bytes -= len(gone) + 200 * len(objects)
        return kept
