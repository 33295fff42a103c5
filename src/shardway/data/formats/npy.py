"""The bytes of a `.npy` file as an array, without Python's parser.

Invariant: what is returned or raised is what `numpy.lib.format.read_array` returns or raises with `allow_pickle=False`;
a damaged header, for which NumPy raises many kinds of errors, is a ValueError. Headers as NumPy writes them are read
here, all others by it.

NumPy reads the header with `ast.literal_eval`. In a thread that reads ahead that may fail: while CPython 3.11 makes a
syntax tree, another thread that makes one too disturbs its count of depths ("AST constructor recursion depth
mismatch", github.com/python/cpython/issues/106905). It also takes longer than a small array takes to be copied.
"""

from __future__ import annotations

import io
import math
import re
import tokenize
from typing import IO, Any

import numpy as np
import numpy.typing as npt

MAGIC = b"\x93NUMPY"
_LENGTH = rb"(?:0|[1-9][0-9]*)"
_HEADER = re.compile(
    rb"\{'descr': '([<>|][biufcSU][1-9][0-9]*)', 'fortran_order': (False|True), "
    rb"'shape': \((|%b,|%b(?:, %b)+)\), \} *\n" % (_LENGTH, _LENGTH, _LENGTH)
)
"""NEP 1: a literal of a dict with sorted keys, padded with spaces; a structured type has a list as its `descr`."""
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DAMAGE = (KeyError, SyntaxError, tokenize.TokenError, TypeError, OverflowError, MemoryError, RecursionError)
"""What NumPy raises for a damaged header, besides ValueError and EOFError."""


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and type of the `.npy` file at the position of a stream, which is left where
    the numbers begin. Raises ValueError where it is none."""
    try:
        shape, fortran, dtype = _READERS[np.lib.format.read_magic(stream)](stream)
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return shape, fortran, dtype


def parse_npy(content: bytes) -> npt.NDArray[Any]:
    """A writable array. Raises ValueError or EOFError for bytes that are none, hold objects, or end too early."""
    found = _find_header(content)
    return _parse_any(content) if found is None else _take(content, *found)


def _find_header(content: bytes) -> tuple[re.Match[bytes], int] | None:
    """The header, where it is one that NumPy writes for a plain type, and where the numbers begin."""
    width = _LENGTH_BYTES.get((content[6], content[7])) if content.startswith(MAGIC) and len(content) > 8 else None
    if width is None:
        return None
    start = 8 + width + int.from_bytes(content[8 : 8 + width], "little")
    header = _HEADER.fullmatch(content, 8 + width, start) if start <= len(content) else None
    return (header, start) if header is not None else None


def _take(content: bytes, header: re.Match[bytes], start: int) -> npt.NDArray[Any]:
    try:
        dtype = np.dtype(header[1].decode())
        shape = tuple(int(length) for length in header[3].replace(b" ", b"").split(b",") if length)
    except (TypeError, ValueError):  # no such type; a number of thousands of digits
        return _parse_any(content)
    count = math.prod(shape)
    if start + count * dtype.itemsize > len(content):
        return _parse_any(content)
    values = np.frombuffer(content, dtype, count, start).copy()
    return values.reshape(shape[::-1]).transpose() if header[2] == b"True" else values.reshape(shape)


def _parse_any(content: bytes) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return array
