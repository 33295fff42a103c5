"""A path of the data as the user wrote it, errors that name it, and fingerprints of content.

Invariant: a fingerprint depends on content alone, not on the machine. This module must not read files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.errors import Problem, UserError, render_problems
from shardway.places import expand_place


@dataclass(frozen=True)
class DataPath:
    """A path as the user wrote it and the key that holds it, for messages that name both."""

    key: str
    text: str

    @property
    def path(self) -> Path:
        return expand_place(self.text)

    def error(self, what: str, allowed: str = "", remedy: str = "") -> UserError:
        """The error for this path: `what` follows the quoted path."""
        return data_error(self.key, f'"{self.text}" {what}', allowed, remedy)


def data_error(key: str, what: str, allowed: str = "", remedy: str = "") -> UserError:
    """One problem of the data as an error."""
    problems = [Problem(key, what, allowed=allowed, remedy=remedy)]
    return UserError(render_problems("the data", problems), problems)


def fingerprint(*parts: object) -> str:
    """xxh3-128 in hex over the strings of `parts`, each terminated so that no two lists give the same bytes."""
    digest = xxhash.xxh3_128()
    for part in parts:
        text = str(part).encode()
        digest.update(f"{len(text)}:".encode() + text)
    return digest.hexdigest()


def fingerprint_arrays(arrays: Iterable[npt.NDArray[Any]], *parts: object) -> str:
    """A fingerprint of arrays by type, shape and sixteen blocks of up to 4 KiB spread over each, and of `parts`."""
    blocks = [
        text
        for array in arrays
        for text in (array.dtype.str, str(array.shape), *(block.tobytes().hex() for block in sample_blocks(array)))
    ]
    return fingerprint(*blocks, *parts)


def sample_blocks(array: npt.NDArray[Any], blocks: int = 16, block_bytes: int = 4096) -> list[npt.NDArray[Any]]:
    """Flat pieces of an array, evenly spread, the first and the last included."""
    flat = array.reshape(-1)
    length = min(flat.size, block_bytes // array.itemsize)
    starts = np.linspace(0, flat.size - length, num=blocks, dtype=np.int64)
    return [flat[start : start + length] for start in np.unique(starts)]
