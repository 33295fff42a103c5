"""Images with one label each, from arrays or MNIST's idx files, normalised when they are gathered.

Invariants:
- Inputs are float32 [n, C, H, W] (or [n, features]), targets int64 [n].
- Nothing in a file is executed (no pickles).
- Inputs of .npy files are mapped, and pickled as their place: a loader process maps them anew.
"""

from __future__ import annotations

import difflib
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, data_error, fingerprint_arrays
from shardway.data.formats.arrays import TRAIN, ArrayColumn, find_pair, list_npy, read_idx, refuse_npz
from shardway.data.formats.base import FileParts, describe_file
from shardway.data.sources.base import Arrays, DataRequest, Hold, Ids, SourceFacts
from shardway.errors import UserError


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

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.inputs, np.memmap) and self.inputs.flags.c_contiguous:
            mapped = self.inputs
            place = (mapped.filename, mapped.dtype, mapped.offset, mapped.shape)
            return {**self.__dict__, "inputs": None, "place": place}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "place" in state:
            filename, dtype, offset, shape = state.pop("place")
            state["inputs"] = np.memmap(filename, dtype, "r", offset, shape)
        self.__dict__.update(state)

    def staged(self, hold: Hold) -> Images:
        """The same, mapped from a staged file; arrays in memory stay there."""
        mapped = self.inputs
        if not isinstance(mapped, np.memmap) or mapped.filename is None or not mapped.flags.c_contiguous:
            return self
        path = Path(mapped.filename)
        put = hold(FileParts(path.parent, [describe_file(path.parent, path.name)]))
        return replace(self, inputs=np.memmap(put.root / path.name, mapped.dtype, "r", mapped.offset, mapped.shape))

    @property
    def tokens_per_sample(self) -> int:
        return 1

    def batch(self, ids: Ids) -> Arrays:
        unit = 255.0 if self.inputs.dtype == np.uint8 else 1.0
        pixels = np.asarray(self.inputs[ids]).astype(np.float32)
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
    return Images(shaped, np.asarray(labels).astype(np.int64), section.mean, section.std, facts)


# --- arrays by name


def open_arrays(place: DataPath, asked: DataRequest) -> Images:
    """The samples of the arrays data.inputs and data.targets ("auto" is x and y) of a .npz file, or of a folder of .npy
    files, which are mapped."""
    inputs, targets = asked.section.inputs, asked.section.targets
    inputs, targets = "x" if inputs == "auto" else inputs, "y" if targets == "auto" else targets
    if place.path.is_dir():
        columns = list_npy(place)
        pixels = _map_array(place, columns, "data.inputs", inputs)
        labels = _map_array(place, columns, "data.targets", targets)
    elif place.path.is_file():
        pixels, labels = _read_array(place, "data.inputs", inputs), _read_array(place, "data.targets", targets)
    else:
        raise place.error("does not exist", allowed="a .npz file")
    return make_images(pixels, labels, place, asked, f"arrays {inputs} and {targets} of {place.path}")


def _map_array(place: DataPath, columns: dict[str, ArrayColumn], key: str, name: str) -> npt.NDArray[Any]:
    if name not in columns:
        raise _refuse_name(place, key, name, columns)
    column = columns[name]
    if not column.size:
        return np.zeros(column.shape, column.dtype)
    order: Any = "F" if column.packing == "fortran" else "C"
    return np.memmap(place.path / f"{name}.npy", column.dtype, "r", column.start, column.shape, order)


def _read_array(place: DataPath, key: str, name: str) -> npt.NDArray[Any]:
    try:
        # A ZipFile of our own, because np.load also takes bare arrays and pickles.
        with zipfile.ZipFile(place.path), np.load(place.path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            if name in names:
                return arrays[name]
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        raise refuse_npz(place) from error
    raise _refuse_name(place, key, name, names)


def _refuse_name(place: DataPath, key: str, name: str, names: Iterable[str]) -> UserError:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return data_error(
        key,
        f'"{name}" is not an array of {place.path}',
        allowed=", ".join(sorted(names)) or "nothing: the file holds no arrays",
        remedy=f'did you mean "{near[0]}"?' if near else "",
    )


# --- MNIST's idx files


def open_idx(place: DataPath, asked: DataRequest, part: str = TRAIN) -> Images:
    """The images and labels of one part ("train" or "t10k") of a folder."""
    files = find_pair(place, part)
    pixels, classes = read_idx(place, files[0], dims=3), read_idx(place, files[1], dims=1)
    return make_images(pixels, classes, place, asked, f"{files[0].name} in {place.path}")
