"""Windows over one long row of tokens, memory-mapped from a file.

Invariant: sample i is tokens iL .. iL + L (L + 1 of them): neighbouring windows share one token, and every token but
the first is a target once. This module must not depend on where the tokens come from.
"""

from __future__ import annotations

import tokenize
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.sources.base import (
    Arrays,
    DataPath,
    DataRequest,
    Ids,
    SourceFacts,
    fingerprint_arrays,
    sample_blocks,
)
from shardway.units import render_count

_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class TokenFile:
    """Where tokens are stored: `tokens` of `dtype`, from byte `offset_bytes` of a file on."""

    path: Path
    dtype: str
    offset_bytes: int
    tokens: int

    def open(self) -> npt.NDArray[Any]:
        """The tokens, mapped read-only: pages are read when they are used."""
        mapped = np.memmap(
            self.path, dtype=np.dtype(self.dtype), mode="r", offset=self.offset_bytes, shape=(self.tokens,)
        )
        return np.asarray(mapped)


@dataclass(eq=False)
class TokenWindows:
    """Samples of `seq_len` tokens, int64: inputs [n, L], targets [n, L] one token later.

    `batch` raises UserError for a token at or above the vocabulary (below 0 for signed files), because on a device
    it would end in an unreadable fault of the embedding.
    """

    file: TokenFile
    seq_len: int
    place: DataPath
    facts: SourceFacts
    _windows: npt.NDArray[Any] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return (self.file.tokens - 1) // self.seq_len

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": None}

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_len

    def batch(self, ids: Ids) -> Arrays:
        if self._windows is None:
            self._windows = self._open_windows()
        rows = self._windows[ids]
        check_tokens(rows, self.facts.vocab, self.place)
        return {"inputs": rows[:, :-1].astype(np.int64), "targets": rows[:, 1:].astype(np.int64)}

    def _open_windows(self) -> npt.NDArray[Any]:
        """All samples as one overlapping view [samples, L + 1], so that a batch is one gather of whole rows."""
        tokens = self.file.open()
        shape, strides = (len(self), self.seq_len + 1), (self.seq_len * tokens.itemsize, tokens.itemsize)
        return np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)


def check_tokens(tokens: npt.NDArray[Any], vocab: int | None, place: DataPath) -> None:
    """Raise UserError if a token is negative or not below `vocab` (None: any is allowed)."""
    if tokens.size == 0:
        return
    highest = int(tokens.max())
    lowest = int(tokens.min()) if tokens.dtype.kind == "i" else 0
    if lowest < 0:
        raise place.error(f"holds the token {lowest}", allowed="0 and above")
    if vocab is not None and highest >= vocab:
        raise place.error(
            f"holds the token {highest}",
            allowed=f"0 to {vocab - 1}, because the vocabulary has {vocab}",
            remedy="raise model.vocab, or check the width of a token (data.token_dtype)",
        )


def make_windows(file: TokenFile, place: DataPath, asked: DataRequest, facts: SourceFacts) -> TokenWindows:
    """The samples of a token file; the fingerprint combines that of `facts` and the tokens.

    Raises UserError if there are too few tokens for one sample, or if sampled tokens exceed the vocabulary.
    """
    seq_len = asked.section.seq_len
    if file.tokens < seq_len + 1:
        raise place.error(
            f"holds {file.tokens} tokens, too few for one sample",
            allowed=f"at least data.seq_len + 1 = {seq_len + 1}",
            remedy="give more data or a smaller data.seq_len",
        )
    tokens = file.open()
    for block in sample_blocks(tokens):
        check_tokens(block, facts.vocab, place)
    complete = replace(facts, fingerprint=fingerprint_arrays([tokens], seq_len, facts.fingerprint))
    return TokenWindows(file, seq_len, place, complete)


def open_tokens(place: DataPath, asked: DataRequest) -> TokenWindows:
    """The samples of a .npy or raw .bin token file; their vocabulary is the model's if that is given."""
    readers = {".npy": read_npy, ".bin": lambda place: read_raw(place, asked.section.token_dtype)}
    path = place.path
    if not path.exists():
        raise place.error("does not exist", allowed="a .npy or .bin token file")
    if path.suffix not in readers or not path.is_file():
        raise place.error(
            "is not a token file",
            allowed="a .npy file with one row of integers, or a raw .bin file",
            remedy='for text, set data.kind = "text"',
        )
    file = readers[path.suffix](place)
    description = f"{render_count(file.tokens)} tokens ({np.dtype(file.dtype).name}) in {path}"
    return make_windows(file, place, asked, SourceFacts(description, "", (asked.section.seq_len,), vocab=asked.vocab))


def read_raw(place: DataPath, dtype: str) -> TokenFile:
    """A file that contains only tokens; its size must be a multiple of theirs."""
    size, width = place.path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0:
        raise place.error("is empty")
    if size % width:
        raise place.error(
            f"has {size} bytes, not a whole number of {dtype} tokens of {width} bytes: the file is truncated",
            remedy="copy the file again, or set data.token_dtype to its width",
        )
    return TokenFile(place.path, dtype, 0, size // width)


def read_npy(place: DataPath) -> TokenFile:
    """A NumPy file with one row of integers; its size must be what its header states."""
    size = place.path.stat().st_size
    shape, dtype, offset_bytes = _read_npy_header(place)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise place.error(f"holds {dtype.name} of shape {list(shape)}", allowed="one row of integers")
    if size != offset_bytes + shape[0] * dtype.itemsize:
        held = max(0, size - offset_bytes) // dtype.itemsize
        raise place.error(
            f"should hold {shape[0]} tokens by its header but holds {held}: the file is truncated or damaged",
            remedy="copy the file again",
        )
    return TokenFile(place.path, dtype.str, offset_bytes, shape[0])


def _read_npy_header(place: DataPath) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    try:
        with place.path.open("rb") as stream:
            version = np.lib.format.read_magic(stream)
            shape, _, dtype = _HEADER_READERS[version](stream)
            return shape, dtype, stream.tell()
    except (ValueError, KeyError, SyntaxError, tokenize.TokenError) as error:
        raise place.error("is not a NumPy file: its header cannot be read", remedy="copy the file again") from error
