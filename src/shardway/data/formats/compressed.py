"""A file that gzip or zstd has compressed, read at any byte of what it expands to.

Invariants:
- What is read forward is expanded as it goes; nothing is written.
- A file of several gzip members or zstd frames (bgzip, zstd's seekable format) is entered at the last one before a
  byte. One that has a single member has no such entry: as soon as jumping about has cost as much as expanding it all,
  it is expanded once into the user's cache folder (a staged one: beside itself), under another name that is replaced
  when all is written, and read from there.
- A file that ends inside of a member, or has anything else behind the last one, is damaged and never just shorter.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardway.data.content import fingerprint
from shardway.data.formats.base import FileParts, Offsets, describe_file
from shardway.errors import JobError

SUFFIXES = (".gz", ".zst")
"""How compressed files end."""

_READ_BYTES = 2**18
_PIECE_BYTES = 2**22
_ENTRY_BYTES = 2**18
"""Entries are kept no closer than this many expanded bytes."""

_FAR_BYTES = 2**21
"""A file whose entries are never further apart is read through them, without a copy."""


class Expander:
    """Expands a file from one of its members on. `entries` grows as it goes: [(file offset, expanded offset)]."""

    def __init__(self, parts: FileParts, number: int, entry: tuple[int, int] = (0, 0)) -> None:
        self._parts, self._number = parts, number
        self._at, self.expanded = entry
        self.entries: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of up to some MiB, in order. Raises DamagedData for a truncated or damaged file."""
        parts, number, size = self._parts, self._number, self._parts.files[self._number].size
        is_gzip = parts.files[number].name.endswith(".gz")
        what = "gzip member" if is_gzip else "zstd frame"
        begin, errors = _codec(is_gzip)
        member, began, pending, members = None, self._at, b"", 0
        while pending or self._at < size:
            if not pending:
                pending = parts.read(number, self._at, min(_READ_BYTES, size - self._at))
                self._at += len(pending)
            if member is None:
                if is_gzip and members:
                    pending = pending.lstrip(b"\0")  # padding, as of a tape; gzip(1) skips it
                    if not pending:
                        continue
                member, began, members = begin(), self._at - len(pending), members + 1
                self._add_entry(began)
            try:
                piece = member.decompress(pending, _PIECE_BYTES) if is_gzip else member.decompress(pending)
            except errors as error:
                raise parts.damaged(number, began, f"the {what} from there on cannot be expanded: {error}") from error
            pending = member.unused_data if member.eof else (member.unconsumed_tail if is_gzip else b"")
            if member.eof:
                member = None
            if piece:
                self.expanded += len(piece)
                yield piece
        if member is not None or not members:
            raise parts.damaged(
                number, size, f"the file is cut off there, inside of the {what} that begins at byte {began}"
            )

    def _add_entry(self, began: int) -> None:
        if not self.entries or self.expanded - self.entries[-1][1] >= _ENTRY_BYTES:
            self.entries.append((began, self.expanded))


def _codec(is_gzip: bool) -> tuple[Callable[[], Any], type[Exception]]:
    if is_gzip:
        return (lambda: zlib.decompressobj(wbits=31)), zlib.error
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj, zstandard.ZstdError


class CompressedFile:
    """One file of `parts`, read where it expands to. `entries` [n, 2] are those of an `Expander` that went over all of
    it, `size` the bytes that it expanded to."""

    def __init__(self, parts: FileParts, number: int, entries: Offsets, size: int) -> None:
        self._parts, self._number, self._entries, self.size = parts, number, entries, size
        gaps = np.diff(np.append(entries[:, 1], size))
        self.has_entries = bool(len(gaps)) and int(gaps.max()) <= _FAR_BYTES
        """Whether it is read at any place without a copy of what it expands to."""
        self._pieces: Iterator[bytes] | None = None
        self._piece, self._piece_at = b"", 0
        self._in_vain = 0
        """Bytes that were expanded and not asked for."""
        self._copy: FileParts | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pieces": None, "_piece": b"", "_piece_at": 0, "_copy": None}

    def rest(self) -> None:
        """Forget where the last read ended, and what it held in memory."""
        self._pieces, self._piece, self._piece_at = None, b"", 0

    def find_entry(self, offset: int) -> tuple[int, int]:
        """(file offset, expanded offset) of the last entry before an expanded byte."""
        before, at = self._entries[int(np.searchsorted(self._entries[:, 1], offset, side="right")) - 1].tolist()
        return before, at

    def read(self, offset: int, size: int) -> bytes:
        """`size` expanded bytes from `offset` on. Raises DamagedData; JobError if a copy cannot be made."""
        if self._copy is None:
            self._go_to(offset)
        if self._copy is not None:
            return self._copy.read(0, offset, size)
        self._in_vain = max(0, self._in_vain - size)
        found = []
        while size:
            start = offset - self._piece_at
            part = self._piece[start : start + size]
            found.append(part)
            offset, size = offset + len(part), size - len(part)
            if size:
                self._next_piece()
        return b"".join(found)

    def _go_to(self, offset: int) -> None:
        """Make the present piece the one that holds a byte, or turn to a copy."""
        entry = self.find_entry(offset)
        if self._pieces is None or offset < self._piece_at or self._piece_at + len(self._piece) < entry[1]:
            self._pieces, self._piece, self._piece_at = None, b"", entry[1]
        if not self.has_entries and self._in_vain > self.size:
            self.rest()
            self._copy = self._use_copy()
            return
        if self._pieces is None:
            self._pieces = iter(Expander(self._parts, self._number, entry))
        while offset >= self._piece_at + len(self._piece):
            self._next_piece()

    def _next_piece(self) -> None:
        try:
            piece = next(self._pieces, b"") if self._pieces is not None else b""
        except JobError:
            self.rest()
            raise
        if not piece:
            self.rest()
            size = self._parts.files[self._number].size
            raise self._parts.damaged(self._number, size, "it expands to fewer bytes than when it was indexed")
        self._in_vain += len(piece)
        self._piece_at += len(self._piece)
        self._piece = piece

    def _use_copy(self) -> FileParts:
        """What the file expands to, beside its staged copy or in the user's cache; made if it is not there."""
        source, file = self._parts.path(self._number), self._parts.files[self._number]
        own = self._parts.find_unpacked()
        reason = "the account has no home"
        if own is not None:
            name = fingerprint("expanded", source.resolve(), file.size, file.mtime_ns)
            folder = own / "expanded"
            try:
                if not (folder / name).is_file() or (folder / name).stat().st_size != self.size:
                    self._write_copy(str(folder), name)
                return FileParts(folder, [describe_file(folder, name)])
            except OSError as error:
                reason = f"{error.strerror}: {folder}"
        where, remedy = "the user's cache folder", "set XDG_CACHE_HOME to a folder with enough room"
        if self._parts.stage is not None:
            where, remedy = "its folder", "name a larger disk in data.stage"
        raise JobError(
            f"{source} is one compressed piece and is not read in order, which takes a copy of {self.size} bytes in "
            f"{where}, and none can be made there ({reason})\n  To do: expand the file, or {remedy}."
        )

    def _write_copy(self, folder: str, name: str) -> None:
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as stream:
                for piece in Expander(self._parts, self._number):
                    stream.write(piece)
                stream.flush()
                os.fsync(stream.fileno())
                written = stream.tell()
            if written != self.size:
                size = self._parts.files[self._number].size
                raise self._parts.damaged(
                    self._number, size, f"it expands to {written} bytes, and to {self.size} when it was indexed"
                )
            os.replace(temporary, os.path.join(folder, name))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
