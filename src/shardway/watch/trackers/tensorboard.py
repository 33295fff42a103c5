"""TensorBoard's event files, written without TensorBoard.

Invariant: a file is a row of records that TensorBoard reads as its own; a torn last one is skipped by its reader.

A record (TFRecord) is its length as uint64, the masked CRC-32C of these eight bytes, the content, and the masked
CRC-32C of that, all little-endian. The content is a protobuf `Event`: wall_time (1, double), step (2, varint),
file_version (3, string), summary (5) or session_log (7). A `Summary` repeats `Value` (1): tag (1, string), simple_value
(2, float).
Sources: tensorflow/core/lib/io/record_writer.cc, tensorboard/compat/proto/{event,summary}.proto.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from ctypes import c_float
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from shardway.places import expand_place
from shardway.watch.trackers.base import Tracker

FOLDER = "tensorboard"  # folder of the event files in the run directory, where the settings name none


class TensorBoard(Tracker):
    """`tensorboard --logdir RUNS` shows each run below a folder; a resumed run goes on in the same curves."""

    settings = {"folder": ""}  # noqa: RUF012

    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        folder = expand_place(self.given["folder"]) / name if self.given["folder"] else directory / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        taken = sum(1 for path in folder.iterdir() if path.name.startswith(stem))
        self._file: BinaryIO = (folder / f"{stem}.{taken}").open("xb", buffering=0)
        self._write(_event(time.time(), 0, _bytes(3, b"brain.Event:2")))
        return str(folder)

    def rewind(self, step: int) -> None:
        """A session that starts at a step makes TensorBoard drop what it has of that step and later ones."""
        self._write(_event(time.time(), step + 1, _bytes(7, _varint(1 << 3) + _varint(1))))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        # A value that fp32 cannot hold becomes infinite.
        rows = b"".join(
            _bytes(1, _bytes(1, name.encode()) + _key(2, 5) + struct.pack("<f", c_float(value).value))
            for name, value in values.items()
        )
        self._write(_event(time, step, _bytes(5, rows)))

    def log_text(self, step: int, texts: Mapping[str, str], time: float) -> None:
        # Summary.Value: the metadata name the plugin "text"; a tensor of dtype 7 (string) and shape [1] holds it.
        plugin, shape = _bytes(9, _bytes(1, _bytes(1, b"text"))), _bytes(2, _bytes(2, _varint(1 << 3) + _varint(1)))
        kind = _varint(1 << 3) + _varint(7)
        rows = b"".join(
            _bytes(1, _bytes(1, name.encode()) + _bytes(8, kind + shape + _bytes(8, text.encode())) + plugin)
            for name, text in texts.items()
        )
        self._write(_event(time, step, _bytes(5, rows)))

    def finish(self, state: str) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        self._file.write(frame(content))


def frame(content: bytes) -> bytes:
    """A record of a content."""

    def masked(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(content))
    return length + masked(length) + content + masked(content)


def crc32c(data: bytes) -> int:
    """The CRC of RFC 3720 (Castagnoli)."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(entry(value) for value in range(256))


def _event(wall_time: float, step: int, what: bytes) -> bytes:
    return _key(1, 1) + struct.pack("<d", wall_time) + _key(2, 0) + _varint(step) + what


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, 2) + _varint(len(content)) + content


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
