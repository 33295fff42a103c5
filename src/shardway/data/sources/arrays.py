"""Images and labels out of one .npz file.

Invariant: nothing in the file is executed (no pickles). This module must not know what the arrays mean beyond
their names: `images` checks shapes and types.
"""

from __future__ import annotations

import difflib
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import DataPath, DataRequest, data_error
from shardway.data.sources.images import Images, make_images


@dataclass(frozen=True, eq=False)
class _Archive:
    names: list[str]
    found: npt.NDArray[Any] | None


def open_arrays(place: DataPath, asked: DataRequest) -> Images:
    """The samples of the arrays data.inputs and data.targets of a .npz file."""
    if not place.path.is_file():
        raise place.error("does not exist", allowed="a .npz file")
    section = asked.section
    inputs = _read_array(place, "data.inputs", section.inputs)
    labels = _read_array(place, "data.targets", section.targets)
    return make_images(inputs, labels, place, asked, f"arrays {section.inputs} and {section.targets} of {place.path}")


def _read_array(place: DataPath, key: str, name: str) -> npt.NDArray[Any]:
    arrays = _read_named(place, name)
    if arrays.found is not None:
        return arrays.found
    near = difflib.get_close_matches(name, arrays.names, n=1, cutoff=0.4)
    raise data_error(
        key,
        f'"{name}" is not an array of {place.path}',
        allowed=", ".join(sorted(arrays.names)) or "nothing: the file holds no arrays",
        remedy=f'did you mean "{near[0]}"?' if near else "",
    )


def _read_named(place: DataPath, name: str) -> _Archive:
    try:
        # A ZipFile of our own, because np.load also takes bare arrays and pickles.
        with zipfile.ZipFile(place.path), np.load(place.path, allow_pickle=False) as arrays:
            return _Archive(list(arrays.files), arrays[name] if name in arrays.files else None)
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        raise place.error(
            "is not a .npz file that can be read: it is damaged, truncated or holds pickled objects",
            remedy="write it with numpy.savez from plain arrays, or copy it again",
        ) from error
