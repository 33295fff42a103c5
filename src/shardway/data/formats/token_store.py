"""Documents of tokens, end to end over one or more files.

Invariants:
- Token t of a store is the same at every call and in every process; documents follow each other without a gap.
- A store is pickled without its mapped files: a loader process maps them anew, each when it is touched first.
- Where files have checksums and fit into half of the memory, a block is compared with its own when it is touched first,
  once in a process. A larger store is not checked while it is read: rows in random order touch every block long before
  memory has kept it, so that each process would read all of the store again. `shardway data verify` reads it once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, fingerprint_arrays
from shardway.data.formats.base import BLOCK_BYTES, FileParts, Offsets, describe_file, move_parts
from shardway.data.formats.npy import read_header
from shardway.errors import Bug
from shardway.hardware.limits import read_cgroup_limits

Tokens = npt.NDArray[Any]

MAPPED_FILES = 2**14
"""The most files that one store keeps mapped; Linux allows 65,530 mappings a process (vm.max_map_count)."""

SHORT_RUN = 128
"""Runs of fewer tokens on average are gathered at once, longer ones copied one after the other (measured)."""
LONG_ROW = 2**16
"""Longer rows are copied one after the other: addresses have 47 bits, and a view of rows must have less than 2^63
bytes."""


@dataclass(frozen=True)
class TokenFile:
    """Where tokens are stored: `tokens` of `dtype`, from byte `offset_bytes` of a file on."""

    path: Path
    dtype: str
    offset_bytes: int
    tokens: int

    def open(self) -> Tokens:
        """The tokens, mapped read-only: pages are read when they are used."""
        dtype, start = np.dtype(self.dtype), self.offset_bytes
        if not self.tokens:
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(self.path, dtype=dtype, mode="r", offset=start, shape=(self.tokens,)))

    def read(self, parts: FileParts, number: int, first: int, count: int) -> Tokens:
        """A copy of `count` tokens from `first` on, read and checked by `parts`, of which this is file `number`."""
        width = np.dtype(self.dtype).itemsize
        content = parts.read(number, self.offset_bytes + first * width, count * width)
        return np.frombuffer(content, self.dtype).copy()


def read_raw_tokens(place: DataPath, dtype: str) -> TokenFile:
    """A file that contains only tokens; raises UserError if its size is not a multiple of theirs."""
    size, width = place.path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0:
        raise place.error("is empty")
    if size % width:
        raise place.error(
            f"has {size} bytes, not a whole number of {dtype} tokens of {width} bytes: the file is truncated",
            remedy="copy the file again, or set data.token_dtype to its width",
        )
    return TokenFile(place.path, dtype, 0, size // width)


def read_npy_tokens(place: DataPath) -> TokenFile:
    """A NumPy file with one row of integers; raises UserError if its size is not what its header states."""
    size = place.path.stat().st_size
    try:
        with place.path.open("rb") as stream:
            shape, _, dtype = read_header(stream)
            start = stream.tell()
    except ValueError as error:
        raise place.error("is not a NumPy file: its header cannot be read", remedy="copy the file again") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise place.error(f"holds {dtype.name} of shape {list(shape)}", allowed="one row of integers")
    if size != start + shape[0] * dtype.itemsize:
        held = max(0, size - start) // dtype.itemsize
        raise place.error(
            f"should hold {shape[0]} tokens by its header but holds {held}: the file is truncated or damaged",
            remedy="copy the file again",
        )
    return TokenFile(place.path, dtype.str, start, shape[0])


@dataclass(eq=False)
class TokenStore:
    """Tokens of all `files`, one after the other, of one dtype.

    `counted`: files of uint8, one for each of `files`, 1 for a token that counts as a target and 0 for one that is only
    context; none: all count. `parts`: what checks the files, in their order; None: nothing can be checked.
    `memory_bytes`: the memory of this machine, for the decision whether blocks are checked; None: as it is.
    """

    files: tuple[TokenFile, ...]
    counted: tuple[TokenFile, ...] = ()
    parts: FileParts | None = None
    memory_bytes: int | None = None

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(file.tokens for file in self.files)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokens", "_marks")}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a token."""
        return np.dtype(self.files[0].dtype)

    def read_ends(self) -> Offsets | None:
        """The end of each document, counted in tokens from the first one on, rising; None where a format does not mark
        documents. A document may be empty."""
        return None

    def make_fingerprint(self, *parts: object) -> str:
        """A fingerprint of all tokens by type, number and sixteen blocks of each file (`fingerprint_arrays`), of the
        marks of what counts likewise, and of `parts`. A format whose index has one of all content uses that."""
        arrays = (file.open() for file in (*self.files, *self.counted))
        return fingerprint_arrays(arrays, *parts)

    def locate(self, start: int, length: int) -> str:
        """Where tokens lie: the file and their numbers in it."""
        number, first = 0, start
        while first >= self.files[number].tokens:
            first -= self.files[number].tokens
            number += 1
        return f"{self.files[number].path}, tokens {first} to {first + length - 1}"

    def staged(self, hold: Callable[[FileParts], Any]) -> TokenStore:
        """The same tokens, read from where `hold` has put the files."""
        paths = list(dict.fromkeys(file.path.absolute() for file in (*self.files, *self.counted)))
        root = Path(os.path.commonpath([path.parent for path in paths]))
        names = [path.relative_to(root).as_posix() for path in paths]
        parts = self.parts or FileParts(root, [describe_file(root, name) for name in names])
        put = hold(parts)
        moved = {path: put.root / path.relative_to(parts.root.absolute()) for path in paths}
        return replace(
            self,
            files=tuple(replace(file, path=moved[file.path.absolute()]) for file in self.files),
            counted=tuple(replace(file, path=moved[file.path.absolute()]) for file in self.counted),
            parts=move_parts(parts, put),
        )

    def file_starts(self) -> Offsets | None:
        """The first token of each file of `parts`, and at the end the number of all; None where a file of tokens is not
        one of these."""
        parts = self.parts
        if parts is None or len(parts.files) != len(self.files):
            return None
        paths = [parts.path(number).absolute() for number in range(len(parts.files))]
        for files in (self.files, self.counted):
            if files and [file.path.absolute() for file in files] != paths:
                return None
        return np.cumsum([0, *(file.tokens for file in self.files)], dtype=np.int64)

    def rows(self, starts: Offsets, length: int) -> Tokens:
        """[n, length]: the tokens from each of `starts` on. All must lie in the store."""
        return self._tokens.rows(starts, length)

    def count_rows(self, starts: Offsets, length: int) -> npt.NDArray[np.bool_] | None:
        """[n, length]: whether each token of `rows` counts as a target; None: all do."""
        if not self.counted:
            return None
        return self._marks.rows(starts, length).astype(np.bool_)

    def runs(self, starts: Offsets, lengths: Offsets) -> Tokens:
        """One row: the tokens of runs, each from one of `starts` on and at least one long, one run after the other. All
        must lie in the store."""
        return self._tokens.runs(starts, lengths)

    def count_runs(self, starts: Offsets, lengths: Offsets) -> npt.NDArray[np.bool_] | None:
        """One row: whether each token of `runs` counts as a target; None: all do."""
        if not self.counted:
            return None
        return self._marks.runs(starts, lengths).astype(np.bool_)

    @cached_property
    def _tokens(self) -> _MappedFiles | _PartialFiles:
        return self._map(self.files)

    @cached_property
    def _marks(self) -> _MappedFiles | _PartialFiles:
        return self._map(self.counted)

    def _map(self, files: Sequence[TokenFile]) -> _MappedFiles | _PartialFiles:
        if self.parts is not None and self.parts.origin is not None:
            return _PartialFiles(files, self.parts, self.parts.origin)
        size = sum(file.tokens * np.dtype(file.dtype).itemsize for file in (*self.files, *self.counted))
        checks = self.parts is not None and checks_blocks(size, self.memory_bytes)
        return _MappedFiles(files, self.parts if checks else None)


def stage_file(path: Path, hold: Callable[[FileParts], Any]) -> Path:
    """Where `hold` puts one file."""
    put = hold(FileParts(path.absolute().parent, [describe_file(path.absolute().parent, path.name)]))
    return Path(put.root / path.name)


def checks_blocks(store_bytes: int, memory_bytes: int | None = None) -> bool:
    """Whether blocks of a store are compared with their checksums while it is read: where it takes at most half of the
    memory (None: of this machine, or what its control group allows)."""
    if memory_bytes is None:
        allowed = read_cgroup_limits().memory_bytes
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_bytes = machine if allowed is None else min(allowed, machine)
    return store_bytes <= memory_bytes // 2


def check_tokens(tokens: Tokens, vocab: int | None, place: DataPath) -> None:
    """Raise UserError if a token is negative or not below `vocab` (None: any is allowed)."""
    if tokens.size == 0 or (tokens.dtype.kind == "u" and (vocab is None or vocab >= 256**tokens.itemsize)):
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


@dataclass(frozen=True, eq=False)
class _Mapping:
    """Files of a store where they lie in the address space of this process; mapped for as long as it is used.

    One view from the lowest address of a mapped token up to the highest has all of them in it, so that rows of several
    files are one gather. Only runs that lie within a mapped file may be read through it: what is between two files is
    never touched. `shifts` make the number of a token its place in the view, `limits` are the ends of files; -1 of one
    that is not mapped, and at the end, for a token of no file.
    """

    tokens: dict[int, Tokens]
    addresses: Offsets
    shifts: Offsets
    limits: Offsets
    lowest: int = -1
    """The file that the view begins with."""
    views: dict[int, Tokens] = field(default_factory=dict)

    def view_rows(self, length: int) -> Tokens:
        """Every run of `length` tokens from the lowest mapped address on, as one overlapping view."""
        view = self.views.get(length)
        if view is None:
            first = self.tokens[self.lowest]
            count = int((self.shifts + self.limits)[self.limits >= 0].max()) - length + 1
            shape, strides = (max(0, count), length), (first.itemsize, first.itemsize)
            view = self.views[length] = np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
        return view


class _MappedFiles:
    """Files of one dtype as one row, mapped when they are touched; blocks checked when they are touched first.

    Rows of several files are one gather too; copied one by one, short ones take three times as long (measured). Threads
    may read at once: a mapping is replaced as a whole.
    """

    def __init__(self, files: Sequence[TokenFile], parts: FileParts | None) -> None:
        self._files, self._parts = tuple(files), parts
        self._width = np.dtype(files[0].dtype).itemsize
        counts = np.array([file.tokens for file in files], np.int64)
        offsets = np.array([file.offset_bytes for file in files], np.int64)
        self._starts: Offsets = np.concatenate([[0], np.cumsum(counts)])
        """The first token of each file, and at the end the number of all."""
        self._mapping = self._map_none()
        # Blocks are numbered through all files: those that hold a token of the first, then those of the second, ...
        first = offsets // BLOCK_BYTES
        blocks = np.where(counts > 0, -(-(offsets + counts * self._width) // BLOCK_BYTES) - first, 0)
        self._offsets, self._block_ends = offsets, np.cumsum(blocks)
        self._block_shifts = self._block_ends - blocks - first
        """What makes the number of a block in its file one among all."""
        self._checked = np.zeros(int(blocks.sum()) if parts is not None else 0, np.bool_)
        self._is_checked = not len(self._checked)

    def rows(self, starts: Offsets, length: int) -> Tokens:
        """[n, length]: the tokens from each of `starts` on. Raises IndexError for a row that is not there."""
        if not len(starts) or not length:
            return np.empty((len(starts), length), self._files[0].dtype)
        if length > LONG_ROW:
            return self.runs(starts, np.full(len(starts), length)).reshape(len(starts), length)
        if not self._is_checked:
            self._check(starts, length)
        if len(self._files) == 1:
            return self._map(0).view_rows(length)[starts]
        which = self._starts.searchsorted(starts, side="right") - 1
        mapping = self._mapping
        if not np.count_nonzero(starts + length > mapping.limits[which]):  # the usual case, kept to a few quick calls
            return mapping.view_rows(length)[starts + mapping.shifts[which]]
        mapping = self._map_all(which, starts)
        whole = starts + length <= mapping.limits[which]
        found = np.empty((len(starts), length), self._files[0].dtype)
        found[whole] = mapping.view_rows(length)[(starts + mapping.shifts[which])[whole]]
        for row in np.flatnonzero(~whole).tolist():
            self._join(found[row], int(starts[row]))
        return found

    def runs(self, starts: Offsets, lengths: Offsets) -> Tokens:
        """[sum of lengths]: the tokens of runs, each at least one long. Raises IndexError for one that is not there."""
        if not len(starts):
            return np.empty(0, self._files[0].dtype)
        if not self._is_checked:
            self._check(starts, lengths)
        which = np.searchsorted(self._starts, starts, side="right") - 1
        mapping = self._map_all(which, starts)
        ends = np.cumsum(lengths)
        cut = starts + lengths > mapping.limits[which]
        if ends[-1] < SHORT_RUN * len(starts) and not cut.any():
            places = np.repeat(starts + mapping.shifts[which] - (ends - lengths), lengths) + np.arange(ends[-1])
            return mapping.view_rows(1)[places, 0]
        found = np.empty(int(ends[-1]), self._files[0].dtype)
        filled = 0
        inner = (starts - self._starts[which]).tolist()
        for run, (number, first, length) in enumerate(zip(which.tolist(), inner, lengths.tolist(), strict=True)):
            if cut[run]:
                self._join(found[filled : filled + length], int(starts[run]))
            else:
                found[filled : filled + length] = mapping.tokens[number][first : first + length]
            filled += length
        return found

    def _map_none(self) -> _Mapping:
        none = np.zeros(len(self._files) + 1, np.int64)
        return _Mapping({}, none, none, none - 1)

    def _map_all(self, which: Offsets, starts: Offsets) -> _Mapping:
        """A mapping of the files of tokens. Raises IndexError for a token that is not there."""
        if which.min() < 0 or which.max() >= len(self._files):
            raise IndexError(f"tokens from {starts.min()} to {starts.max()} of {self._starts[-1]}")
        mapping = self._mapping
        return self._map(*np.unique(which).tolist()) if (mapping.limits[which] < 0).any() else mapping

    def _map(self, *numbers: int) -> _Mapping:
        """A mapping of files, with those of before as far as there is room."""
        mapping = self._mapping
        new = [number for number in numbers if number not in mapping.tokens]
        if not new:
            return mapping
        if mapping.tokens and len(mapping.tokens) + len(new) > MAPPED_FILES:
            mapping, new = self._map_none(), list(numbers)
        tokens = mapping.tokens | {number: self._files[number].open() for number in new}
        addresses, limits = mapping.addresses.copy(), mapping.limits.copy()
        addresses[new] = [tokens[number].ctypes.data for number in new]
        limits[new] = self._starts[1:][new]
        mapped = np.flatnonzero(limits >= 0)
        lowest = int(mapped[addresses[mapped].argmin()])
        apart = addresses - addresses[lowest]
        if (apart[mapped] % self._width).any():
            raise Bug("tokens of several files start at offsets that are no multiple of their width")
        found = self._mapping = _Mapping(tokens, addresses, apart // self._width - self._starts, limits, lowest)
        return found

    def _join(self, row: Tokens, start: int) -> None:
        """Fill a row that goes over the end of a file."""
        if start + len(row) > self._starts[-1]:
            raise IndexError(f"tokens from {start} to {start + len(row)} of {self._starts[-1]}")
        filled = 0
        while filled < len(row):
            number = int(np.searchsorted(self._starts, start + filled, side="right")) - 1
            inner = start + filled - int(self._starts[number])
            piece = self._map(number).tokens[number][inner : inner + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)

    def _check(self, starts: Offsets, lengths: Offsets | int) -> None:
        """Compare the blocks that runs touch with their checksums, each once. Raises DamagedData."""
        first, last = self._find_blocks(starts), self._find_blocks(starts + lengths - 1)
        near = bool((last - first <= 1).all())
        if near and self._checked[first].all() and self._checked[last].all():
            return
        for low, high in np.unique(np.stack([first, last], axis=1), axis=0).tolist():
            for block in (low + np.flatnonzero(~self._checked[low : high + 1])).tolist():
                self._check_block(block)
        self._is_checked = bool(self._checked.all())

    def _find_blocks(self, tokens: Offsets) -> Offsets:
        """The number of the block of each token, counted through all files."""
        which = np.searchsorted(self._starts, tokens, side="right") - 1
        inside = self._offsets[which] + (tokens - self._starts[which]) * self._width
        found: Offsets = self._block_shifts[which] + inside // BLOCK_BYTES
        return found

    def _check_block(self, block: int) -> None:
        number = int(np.searchsorted(self._block_ends, block, side="right"))
        if self._parts is not None:
            self._parts.check(number, int(block - self._block_shifts[number]) * BLOCK_BYTES, 1)
        self._checked[block] = True


class _PartialFiles:
    """As `_MappedFiles`, of files that are staged window by window: read, since a mapped file may be removed, and not
    checked, since they were when they were copied.

    The tokens of a row that lie in another file than its first are read where the data lie, and checked: there are
    fewer of them than a row has for each file, and that file may not be here. So is a damaged file, of which there is
    no copy.
    """

    def __init__(self, files: Sequence[TokenFile], parts: FileParts, origin: FileParts) -> None:
        self._files = tuple(files)
        self._origin = origin
        self._parts = FileParts(parts.root, parts.files)
        self._parts.origin, self._parts.stage = self._origin, parts.stage
        self._starts: Offsets = np.cumsum([0, *(file.tokens for file in files)], dtype=np.int64)

    def rows(self, starts: Offsets, length: int) -> Tokens:
        """[n, length]: the tokens from each of `starts` on. Raises IndexError for a row that is not there."""
        return self.runs(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def runs(self, starts: Offsets, lengths: Offsets) -> Tokens:
        """[sum of lengths]: the tokens of runs. Raises IndexError for one that is not there."""
        if len(starts) and (starts.min() < 0 or (starts + lengths).max() > self._starts[-1]):
            raise IndexError(f"tokens from {starts.min()} to {(starts + lengths).max()} of {self._starts[-1]}")
        found = np.empty(int(lengths.sum()), self._files[0].dtype)
        filled = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            parts: FileParts | None = None
            end = filled + length
            while filled < end:
                at = start + length - (end - filled)
                number = int(np.searchsorted(self._starts, at, side="right")) - 1
                count = min(end - filled, int(self._starts[number + 1]) - at)
                inner = at - int(self._starts[number])
                parts = self._origin if parts is not None or self._lies_there(number) else self._parts
                found[filled : filled + count] = self._files[number].read(parts, number, inner, count)
                filled += count
        return found

    def _lies_there(self, number: int) -> bool:
        """Whether a file is read where it lies, once it is known."""
        return self._parts.ready(number).is_symlink()
