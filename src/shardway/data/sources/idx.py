"""MNIST's idx files: images and labels, gzip-compressed or not.

Format (as described with the MNIST database): two zero bytes, a type code (0x08 = unsigned byte), the number of
dimensions, each dimension as a big-endian uint32, then the data in C order.

Invariant: a file is used only when its size is exactly what its header says. This module must not know what the
arrays mean: `images` checks that they fit each other.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import DataPath, DataRequest
from shardway.data.sources.images import Images, make_images

TRAIN, TEST = "train", "t10k"

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"


def open_idx(place: DataPath, asked: DataRequest, part: str = TRAIN) -> Images:
    """The images and labels of one part ("train" or "t10k") of a folder."""
    if not place.path.is_dir():
        raise place.error("is not a folder", allowed="the folder that holds the idx files")
    images, labels = _find(place, f"{part}-images-idx3-ubyte"), _find(place, f"{part}-labels-idx1-ubyte")
    pixels, classes = read_idx(place, images, dims=3), read_idx(place, labels, dims=1)
    return make_images(pixels, classes, place, asked, f"{images.name} in {place.path}")


def open_idx_validation(place: DataPath, asked: DataRequest) -> Images:
    """The t10k part of a folder, or its train part where it has no t10k files."""
    return open_idx(place, asked, TEST if has_part(place, TEST) else TRAIN)


def has_part(place: DataPath, part: str) -> bool:
    """Whether the folder holds the images of this part."""
    return any(path.is_file() for path in _candidates(place, f"{part}-images-idx3-ubyte"))


def read_idx(place: DataPath, path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """The unsigned bytes of an idx file with `dims` dimensions; UserError for any other content."""
    content = _read_plain(place, path)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dims])
    if content[:4] != expected:
        raise place.error(
            f"holds {path.name}, which is not an idx file of bytes with {dims} dimensions: it starts with "
            f'"{content[:4].hex(" ")}"',
            allowed=f'"{expected.hex(" ")}"',
        )
    start = 4 + 4 * dims
    shape = struct.unpack(f">{dims}I", content[4:start].ljust(4 * dims, b"\0"))
    if len(content) - start != math.prod(shape):
        raise place.error(
            f"holds {path.name}, which is truncated or damaged: shape {list(shape)} needs {math.prod(shape)} bytes, "
            f"it holds {max(0, len(content) - start)}",
            remedy="copy the file again",
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _candidates(place: DataPath, name: str) -> list[Path]:
    return [place.path / f"{name}{suffix}" for suffix in ("", ".gz")]


def _find(place: DataPath, name: str) -> Path:
    for path in _candidates(place, name):
        if path.is_file():
            return path
    raise place.error(f"has no file {name} or {name}.gz")


def _read_plain(place: DataPath, path: Path) -> bytes:
    """The content, decompressed where it is gzip whatever its name says (a browser may have unpacked it)."""
    content = path.read_bytes()
    if content[:2] != _GZIP_MAGIC:
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise place.error(
            f"holds {path.name}, which cannot be decompressed: it is truncated or damaged",
            remedy="copy the file again",
        ) from error
