"""A colour map as a PNG, and its scale: rows over time, a pixel for each bin.

Invariant: colours grow lighter with the value on light and dark pages alike, in print and for the colour-blind; a
missing value is transparent.
"""

from __future__ import annotations

import base64
import struct
import zlib
from functools import cache
from typing import Any

from shardway.plain_arrays import find_arrays

MISSING = 255  # the level of no value; others are 0 to 254
_ANCHORS = ("1d2150", "2a4b9b", "2c86a8", "3fae8c", "a9cb4f", "fbeea0")


@cache
def _palette() -> bytes:
    """The colours of all levels as RGB."""
    anchors = [tuple(bytes.fromhex(each)) for each in _ANCHORS]
    colours = bytearray()
    for level in range(MISSING):
        at = level / (MISSING - 1) * (len(anchors) - 1)
        low = min(int(at), len(anchors) - 2)
        colours += bytes(
            round(before + (after - before) * (at - low))
            for before, after in zip(anchors[low], anchors[low + 1], strict=True)
        )
    return bytes(colours) + b"\xff\xff\xff"


def find_levels(values: Any, top: float) -> Any:
    """Values from 0 to `top` as levels, uint8; MISSING for NaN."""
    np = find_arrays()

    known = np.isfinite(values)
    scaled = np.clip(np.where(known, values, 0.0) / top, 0, 1) * (MISSING - 1)
    return np.where(known, np.rint(scaled), MISSING).astype(np.uint8)


def render_png(levels: Any) -> str:
    """A data URI of levels (rows, columns)."""
    rows, columns = levels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in levels)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", _palette()),
            _chunk(b"tRNS", b"\xff" * MISSING + b"\0"),
            _chunk(b"IDAT", zlib.compress(lines, 9)),
            _chunk(b"IEND", b""),
        )
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def render_gradient() -> str:
    """The scale as a CSS gradient, lowest value first."""
    return f"linear-gradient(to right, {', '.join(f'#{each}' for each in _ANCHORS)})"
