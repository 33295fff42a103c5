"""Images with one label each, from .npz arrays or MNIST's idx files, normalised when they are gathered.

Invariants:
- Inputs are float32 [n, C, H, W] (or [n, features]), targets int64 [n].
- Nothing in a file is executed (no pickles).
- An idx file is used only if its size is exactly what its header states.

The idx format, as described with the MNIST database: two zero bytes, a type code (0x08 = unsigned byte), the number of
dimensions, each dimension as a big-endian uint32, then the data in C order.
"""

from __future__ import annotations

import difflib
import gzip
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import Arrays, DataPath, DataRequest, Ids, SourceFacts, data_error, fingerprint_arrays


@dataclass(frozen=True, eq=False)
class Images:
    """Samples (x - mean) / std of `inputs` [N, ...] with the classes `labels` [N]; uint8 is scaled to 0..1 first."""

    inputs: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    mean: float
    std: float
    facts: SourceFacts

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def tokens_per_sample(self) -> int:
        return 1

    def batch(self, ids: Ids) -> Arrays:
        unit = 255.0 if self.inputs.dtype == np.uint8 else 1.0
        pixels = self.inputs[ids].astype(np.float32)
        pixels *= np.float32(1.0 / (unit * self.std))
        pixels -= np.float32(self.mean / self.std)
        return {"inputs": pixels, "targets": self.labels[ids]}


def make_images(
    inputs: npt.NDArray[Any], labels: npt.NDArray[Any], place: DataPath, asked: DataRequest, description: str
) -> Images:
    """The samples of an input and a label array; UserError if they do not fit each other or the model.

    `inputs`: uint8 or floating [N, H, W], [N, C, H, W] or [N, features]; `labels`: integers [N] from 0 on.
    """
    if inputs.dtype != np.uint8 and inputs.dtype.kind != "f":
        raise place.error(f"has inputs of type {inputs.dtype}", allowed="uint8, or a floating type")
    if inputs.ndim not in (2, 3, 4):
        raise place.error(f"has inputs of shape {list(inputs.shape)}", allowed="[N, features], [N, H, W], [N, C, H, W]")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise place.error(f"has targets of type {labels.dtype}, shape {list(labels.shape)}", allowed="integers [N]")
    if len(inputs) != len(labels):
        raise place.error(f"has {len(inputs)} inputs but {len(labels)} targets", allowed="one target for each input")
    if len(labels) == 0:
        raise place.error("has no samples")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        raise place.error(f"has the target {lowest}", allowed="0 and above")
    if asked.classes is not None and highest >= asked.classes:
        raise place.error(
            f"has the target {highest}",
            allowed=f"0 to {asked.classes - 1}, for {asked.classes} classes",
            remedy="set model.classes to the number of classes of the data",
        )
    classes = highest + 1 if asked.classes is None else asked.classes
    shaped = inputs[:, None] if inputs.ndim == 3 else inputs
    section = asked.section
    facts = SourceFacts(
        description=f"{len(labels)} images of shape {list(shaped.shape[1:])}, {classes} classes, {description}",
        fingerprint=fingerprint_arrays([shaped, labels], section.mean, section.std),
        sample_shape=tuple(shaped.shape[1:]),
        classes=classes,
    )
    return Images(shaped, labels.astype(np.int64), section.mean, section.std, facts)


# --- one .npz file


def open_arrays(place: DataPath, asked: DataRequest) -> Images:
    """The samples of the arrays data.inputs and data.targets of a .npz file."""
    if not place.path.is_file():
        raise place.error("does not exist", allowed="a .npz file")
    section = asked.section
    inputs = _read_array(place, "data.inputs", section.inputs)
    labels = _read_array(place, "data.targets", section.targets)
    return make_images(inputs, labels, place, asked, f"arrays {section.inputs} and {section.targets} of {place.path}")


def _read_array(place: DataPath, key: str, name: str) -> npt.NDArray[Any]:
    try:
        # A ZipFile of our own, because np.load also takes bare arrays and pickles.
        with zipfile.ZipFile(place.path), np.load(place.path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            if name in names:
                return arrays[name]
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        raise place.error(
            "is not a .npz file that can be read: it is damaged, truncated or holds pickled objects",
            remedy="write it with numpy.savez from plain arrays, or copy it again",
        ) from error
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    raise data_error(
        key,
        f'"{name}" is not an array of {place.path}',
        allowed=", ".join(sorted(names)) or "nothing: the file holds no arrays",
        remedy=f'did you mean "{near[0]}"?' if near else "",
    )


# --- MNIST's idx files, gzip-compressed or not

TRAIN, TEST = "train", "t10k"

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"


def open_idx(place: DataPath, asked: DataRequest, part: str = TRAIN) -> Images:
    """The images and labels of one part ("train" or "t10k") of a folder."""
    if not place.path.is_dir():
        raise place.error("is not a folder", allowed="the folder that holds the idx files")
    files = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        found = next((path for path in _candidates(place, name) if path.is_file()), None)
        if found is None:
            raise place.error(f"has no file {name} or {name}.gz")
        files.append(found)
    pixels, classes = _read_idx(place, files[0], dims=3), _read_idx(place, files[1], dims=1)
    return make_images(pixels, classes, place, asked, f"{files[0].name} in {place.path}")


def has_part(place: DataPath, part: str) -> bool:
    """Whether the folder holds the images of this part."""
    return any(path.is_file() for path in _candidates(place, f"{part}-images-idx3-ubyte"))


def _candidates(place: DataPath, name: str) -> list[Path]:
    return [place.path / f"{name}{suffix}" for suffix in ("", ".gz")]


def _read_idx(place: DataPath, path: Path, dims: int) -> npt.NDArray[np.uint8]:
    """The unsigned bytes of an idx file with `dims` dimensions, decompressed if it is gzip, whatever its name (a
    browser may have unpacked it); UserError for any other content."""
    content = path.read_bytes()
    if content[:2] == _GZIP_MAGIC:
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise place.error(
                f"holds {path.name}, which cannot be decompressed: it is truncated or damaged",
                remedy="copy the file again",
            ) from error
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
