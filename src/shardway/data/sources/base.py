"""What a source is: its protocol, its facts, and a view of a part of it.

Invariant: a source whose data lie in a file is pickled without them (a worker opens the file anew). This module must
not read files or depend on a kind of data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.errors import Problem, UserError, render_problems
from shardway.places import expand_place
from shardway.runfile.schema import DataSection

Ids = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Wants = Literal["tokens", "images"]


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a source that need no reading of samples.

    `sample_shape` is that of the inputs of one sample. `bytes_per_token` is the number of text bytes that a target
    token stands for, so that bits per byte = loss / ln 2 / bytes_per_token; None without text. `fingerprint` is
    xxh3-128 over what identifies the content: sizes, names, some blocks.
    """

    description: str
    fingerprint: str
    sample_shape: tuple[int, ...]
    vocab: int | None = None
    classes: int | None = None
    bytes_per_token: float | None = None


@runtime_checkable
class DataSource(Protocol):
    """Numbered samples, gathered many at once."""

    @property
    def facts(self) -> SourceFacts:
        """What is known without reading samples."""

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that a sample trains on; 1 for images."""

    def __len__(self) -> int:
        """The number of samples."""

    def batch(self, ids: Ids) -> Arrays:
        """ "inputs" and "targets" of samples, along the first axis; no ids give arrays of length 0 with the right
        remaining shape."""


@dataclass(frozen=True)
class Slice:
    """Samples start .. stop of another source, without a copy."""

    whole: DataSource
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens_per_sample(self) -> int:
        return self.whole.tokens_per_sample

    @property
    def facts(self) -> SourceFacts:
        facts = self.whole.facts
        return replace(
            facts,
            description=f"{facts.description}, samples {self.start} to {self.stop - 1}",
            fingerprint=fingerprint(facts.fingerprint, self.start, self.stop),
        )

    def batch(self, ids: Ids) -> Arrays:
        return self.whole.batch(ids + self.start)


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


@dataclass(frozen=True)
class DataRequest:
    """The run's request for its data: the [data] section, train.seed and what the model takes.

    `vocab` and `classes` are those of the model, None if it takes what the data have.
    """

    section: DataSection
    seed: int
    wants: Wants
    vocab: int | None = None
    classes: int | None = None


def data_error(key: str, what: str, allowed: str = "", remedy: str = "") -> UserError:
    """One problem of the data as an error."""
    return UserError(render_problems("the data", [Problem(key, what, allowed=allowed, remedy=remedy)]))


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
