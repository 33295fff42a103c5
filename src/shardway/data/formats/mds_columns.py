"""The values in a sample of MosaicML Streaming: how each encoding lies in the bytes.

Source: streaming/base/format/mds/encodings.py of mosaicml-streaming 0.13. All numbers are little-endian.

Invariant: nothing is executed. A column that is pickled, or of an encoding that is not known, has no decoder and its
bytes are passed over.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.formats.base import Record

Decode = Callable[[bytes, int, int], Any]
"""(bytes, start, stop) -> the value that lies there. Raises ValueError, KeyError, IndexError or struct.error."""


@dataclass(frozen=True)
class MdsColumn:
    """A column: `size` is the bytes of each value, 0 where every sample has its own."""

    name: str
    encoding: str
    size: int


class MdsLayout:
    """How a sample of these columns is decoded."""

    def __init__(self, columns: tuple[MdsColumn, ...]) -> None:
        self.columns = columns
        self._decoders = [(column.name, column.size, find_decoder(column.encoding)) for column in columns]
        self._lengths = struct.Struct(f"<{sum(not column.size for column in columns)}I")

    def decode(self, content: bytes, at: int, end: int, wanted: frozenset[str] | None) -> Record:
        """The sample in content[at:end]. Raises ValueError, struct.error or others of a decoder."""
        if end - at < self._lengths.size:
            raise ValueError(f"it has {end - at} bytes, fewer than the lengths of its columns take")
        lengths = iter(self._lengths.unpack_from(content, at))
        at, record = at + self._lengths.size, {}
        for name, size, decode in self._decoders:
            stop = at + (size or next(lengths))
            if stop > end:
                raise ValueError(f"column {name} goes {stop - end} bytes beyond its end")
            if decode is not None and (wanted is None or name in wanted):
                record[name] = decode(content, at, stop)
            at = stop
        if at != end:
            raise ValueError(f"{end - at} bytes follow its last column")
        return record


@lru_cache(maxsize=64)
def make_layout(columns: tuple[MdsColumn, ...]) -> MdsLayout:
    """The layout of columns; shards with the same ones share it."""
    return MdsLayout(columns)


_SCALARS = {"int": "q", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float16": "e", "float32": "f",
            "float64": "d", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"}  # fmt: skip
"""Encoding -> code of `struct`."""

DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8",
          66: "<f8"}  # fmt: skip
"""The first byte of an array whose dtype is not in its encoding."""
_DTYPES_BY_NAME = {np.dtype(dtype).name: dtype for dtype in DTYPES.values()}

_MODES = {"L": "u1", "P": "u1", "1": "u1", "I": "<i4", "F": "<f4", "I;16": "<u2",
          **dict.fromkeys(("LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"), "u1")}  # fmt: skip
"""Mode of an image of the Python Imaging Library -> dtype of its pixels."""
_CHANNELS = {"LA": 2, "RGB": 3, "RGBA": 4, "RGBX": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "HSV": 3}


def _slice(content: bytes, start: int, stop: int) -> bytes:
    return content[start:stop]


def _decode_text(content: bytes, start: int, stop: int) -> str:
    return content[start:stop].decode()


def _decode_pil(content: bytes, start: int, stop: int) -> npt.NDArray[Any]:
    """[height, width] or [height, width, channels]: width, height and the length of the mode (uint32), mode, pixels."""
    width, height, length = struct.unpack_from("<3I", content, start)
    at = start + 12 + length
    mode = content[start + 12 : at].decode() if at <= stop else "?"
    if mode not in _MODES:
        raise ValueError(f"its image has the mode {mode!r}, allowed: {', '.join(_MODES)}")
    if mode == "1":
        rows = np.frombuffer(content, np.uint8, stop - at, at).reshape(height, -(-width // 8))
        return np.unpackbits(rows, axis=1, count=width).astype(np.bool_)
    dtype = np.dtype(_MODES[mode])
    shape = (height, width, _CHANNELS[mode]) if mode in _CHANNELS else (height, width)
    return _take_array(content, at, stop, dtype, shape)


def _take_array(content: bytes, at: int, stop: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A copy of its own, so that it can be written to and keeps no other bytes."""
    count, left = (stop - at) // dtype.itemsize, (stop - at) % dtype.itemsize
    if left or at > stop:
        raise ValueError(f"an array of {dtype.name} has {stop - at} bytes")
    return np.frombuffer(content, dtype, count, at).reshape(shape).copy()


def _make_array_decoder(encoding: str) -> Decode | None:
    """That of ndarray[:dtype[:shape]]: what is not in the encoding stands before the values.

    The dtype is a byte; the shape a byte (axes << 2 | log2 of the bytes of a length) and the lengths.
    """
    _, *given = encoding.split(":")
    try:
        fixed_dtype = np.dtype(_DTYPES_BY_NAME[given[0]]) if given and given[0] else None
        fixed_shape = tuple(int(length) for length in given[1].split(",")) if len(given) > 1 else None
    except (KeyError, ValueError):
        return None

    def decode(content: bytes, start: int, stop: int) -> npt.NDArray[Any]:
        at, dtype, shape = start, fixed_dtype, fixed_shape
        if dtype is None:
            dtype, at = np.dtype(DTYPES[content[at]]), at + 1
        if shape is None:
            axes, width = content[at] >> 2, 1 << (content[at] & 3)
            if at + 1 + axes * width > stop:
                raise ValueError(f"an array has {axes} axes and no bytes for them")
            shape = tuple(np.frombuffer(content, f"<u{width}", axes, at + 1).tolist())
            at += 1 + axes * width
        return _take_array(content, at, stop, dtype, shape)

    return decode


def _make_list_decoder(decode: Decode, reserved: int) -> Decode:
    """That of a list: `reserved` bytes, the number of elements (uint32), their lengths (uint32), the elements."""

    def decode_list(content: bytes, start: int, stop: int) -> list[Any]:
        (count,) = struct.unpack_from("<I", content, start + reserved)
        at = start + reserved + 4 + 4 * count
        if at > stop:
            raise ValueError(f"a list says that it has {count} elements, more than its bytes hold")
        found = []
        for length in struct.unpack_from(f"<{count}I", content, start + reserved + 4):
            if at + length > stop:
                raise ValueError("an element of a list goes beyond its end")
            found.append(decode(content, at, at + length))
            at += length
        return found

    return decode_list


def _make_scalar_decoder(code: str) -> Decode:
    unpack = struct.Struct(f"<{code}").unpack_from
    return lambda content, start, stop: unpack(content, start)[0]


_DECODERS: dict[str, Decode] = {
    "bytes": _slice,
    "jpeg": _slice,
    "png": _slice,
    "str": _decode_text,
    "str_decimal": _decode_text,
    "str_int": lambda content, start, stop: int(content[start:stop]),
    "str_float": lambda content, start, stop: float(content[start:stop]),
    "json": lambda content, start, stop: json.loads(content[start:stop]),
    "pil": _decode_pil,
    "jpeg_array": _make_list_decoder(_slice, 0),
    "jpegarray": _make_list_decoder(_slice, 0),
    "list[jpeg]": _make_list_decoder(_slice, 4),
    "list[png]": _make_list_decoder(_slice, 4),
    "list[pil]": _make_list_decoder(_decode_pil, 4),
    **{name: _make_scalar_decoder(code) for name, code in _SCALARS.items()},
}
ENCODINGS = (*_DECODERS, "ndarray[:dtype[:shape]]")
_TYPES = {
    **dict.fromkeys(("bytes", "jpeg", "png"), "bytes"),
    **dict.fromkeys(("str", "str_decimal"), "text"),
    **dict.fromkeys(("jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]"), "list"),
    **{name: "float" if "float" in name else "int" for name in (*_SCALARS, "str_int", "str_float")},
    "json": "json",
    "pil": "array",
    "pkl": "pickle",
}


def find_decoder(encoding: str) -> Decode | None:
    """What decodes an encoding; None for one that is never decoded."""
    if encoding == "ndarray" or encoding.startswith("ndarray:"):
        return _make_array_decoder(encoding)
    return _DECODERS.get(encoding)


def find_size(encoding: str) -> int:
    """The bytes that every value of an encoding has; 0: they differ."""
    if encoding in _SCALARS:
        return struct.calcsize(f"<{_SCALARS[encoding]}")
    parts = encoding.split(":")
    if parts[0] == "ndarray" and len(parts) == 3 and find_decoder(encoding):
        return int(np.prod([int(length) for length in parts[2].split(",")])) * np.dtype(parts[1]).itemsize
    return 0


def describe_type(encoding: str) -> str:
    """The type of the field that a column of an encoding is."""
    name, *given = encoding.split(":")
    if name != "ndarray":
        return _TYPES.get(encoding, "unknown")
    if not given or not given[0]:
        return "array"
    return f"{given[0]}[{given[1].replace(',', ', ')}]" if len(given) > 1 else f"{given[0]}[...]"
