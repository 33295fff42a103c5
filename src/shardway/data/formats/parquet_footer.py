"""The footer of a Parquet file: where its row groups lie.

Invariant: a footer that is damaged raises ValueError or IndexError. (pyarrow ends the process for some damage when it
is asked for a column chunk's place, so it is not asked.)

Source: Apache Parquet, parquet.thrift; Thrift compact protocol, thrift-compact-protocol.md.
"""

from __future__ import annotations

import struct
from typing import Any

from shardway.data.kinds import ParquetKind

TAIL_BYTES = 8
"""A file ends with the length of the footer, 4 bytes, and the magic."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MOST_DEPTH = 64

_FILE_ROWS, _FILE_GROUPS = 3, 4
_GROUP_COLUMNS, _GROUP_ROWS = 1, 3
_CHUNK_META = 3
_META_SIZE, _META_DATA_PAGE, _META_DICTIONARY_PAGE = 7, 9, 11
"""Numbers of fields in parquet.thrift: FileMetaData, RowGroup, ColumnChunk, ColumnMetaData."""


def parse_tail(tail: bytes) -> int:
    """The length of the footer, of the last TAIL_BYTES of a file. Raises ValueError."""
    if tail[4:] == b"PARE":
        raise ValueError("the footer is encrypted")
    if tail[4:] != ParquetKind.magic:
        raise ValueError("it does not end with PAR1")
    return int.from_bytes(tail[:4], "little")


def parse_groups(footer: bytes) -> tuple[list[int], list[int], list[int]]:
    """Of each row group: its rows, its first byte in the file, and the bytes that it takes there."""
    meta = _Reader(footer).read_struct(0)
    rows, offsets, sizes = [], [], []
    try:
        for group in meta.get(_FILE_GROUPS, []):
            chunks = [chunk[_CHUNK_META] for chunk in group[_GROUP_COLUMNS]]
            rows.append(int(group[_GROUP_ROWS]))
            offsets.append(min((_first_page(chunk) for chunk in chunks), default=0))
            sizes.append(sum(int(chunk[_META_SIZE]) for chunk in chunks))
        stated = int(meta[_FILE_ROWS])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the footer lacks a field: {error}") from error
    if min(rows, default=0) < 0 or sum(rows) != stated:
        raise ValueError(f"the footer states {stated} rows, and its row groups have {sum(rows)}")
    return rows, offsets, sizes


def _first_page(chunk: dict[int, Any]) -> int:
    """Where a column chunk begins: at its dictionary, where it has one."""
    return int(chunk.get(_META_DICTIONARY_PAGE) or chunk[_META_DATA_PAGE])


class _Reader:
    """Reads Thrift's compact protocol: a struct is a dict from the numbers of its fields."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def read_struct(self, depth: int) -> dict[int, Any]:
        """The fields of a struct up to its stop byte. Raises IndexError at the end of the bytes."""
        if depth > _MOST_DEPTH:
            raise ValueError("the footer has structs in structs without end")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._zigzag()
            found[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == _DOUBLE:
            return struct.unpack("<d", self._take(8))[0]
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list, a bool is a byte
            return self._byte()
        if kind == _MAP and (count := self._varint()):
            kinds = self._byte()
            return [(self._value(kinds >> 4, depth + 1), self._value(kinds & 15, depth + 1)) for _ in range(count)]
        if kind == _MAP:
            return []
        raise ValueError(f"the footer has a field of the unknown type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._content):
            raise IndexError("the footer ends inside of a field")
        self._at += size
        return self._content[self._at - size : self._at]

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise ValueError("the footer has a number of over 64 bits")

    def _zigzag(self) -> int:
        found = self._varint()
        return (found >> 1) ^ -(found & 1)
