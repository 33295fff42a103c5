"""A reader of TensorBoard's event files, by the description of their format.

Invariant: it has no line of the writer's, so that a mistake there is found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert masked(data[:8]) == struct.unpack("<I", data[8:12])[0]
        content, data = data[12 : 12 + length], data[12 + length :]
        assert masked(content) == struct.unpack("<I", data[:4])[0]
        yield content
        data = data[4:]


def masked(data: bytes) -> int:
    """Bit by bit, with the polynomial of RFC 3720 from the front: another way than a table."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def read_fields(message: bytes) -> list[tuple[int, Any]]:
    """Fields of a protobuf message: its number, and an integer, bytes, or a float."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        field, wire = divmod(varint(), 8)
        if wire == 0:
            value: Any = varint()
        elif wire == 2:
            size = varint()
            value, at = message[at : at + size], at + size
        else:
            size, form = (8, "<d") if wire == 1 else (4, "<f")
            (value,), at = struct.unpack(form, message[at : at + size]), at + size
        found.append((field, value))
    return found


def read_scalars(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Steps and values of an event file."""
    events = [dict(read_fields(record)) for record in read_records(path)]
    assert events[0][3] == b"brain.Event:2"
    rows = []
    for event in events[1:]:
        values = [dict(read_fields(value)) for _, value in read_fields(event.get(5, b""))]
        rows.append((event[2], {value[1].decode(): value[2] for value in values}))
    return rows
