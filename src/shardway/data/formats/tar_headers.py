"""Headers of plain tar files: what members there are and where they lie, without their payload.

Invariants:
- A header is believed only if its checksum holds; whatever else is wrong is an error with its offset.
- Members, offsets and sizes are those that Python's tarfile gives, about three times as fast.

The layout of headers is that of POSIX.1-2001 (pax, "ustar Interchange Format" and "pax Extended Header") and of GNU tar
("The Standard Format", GNU tar manual, appendix D.5).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

_MAGIC = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz", b"BZh": "bunzip2"}
TAR_BLOCK_BYTES = 512
_END = bytes(TAR_BLOCK_BYTES)
_NEAR_BYTES, _FAR_BYTES = 2**12, 2**20
"""Headers are read in pieces between these sizes: large ones where members are small."""
_AFTER_END_BYTES = 2**20
"""So far behind the end of an archive another one is looked for."""
_AGAIN = "copy the file again from where it came"
REGULAR = frozenset(b"0\0" + b"7")
"""Type flags of regular files."""
_WITHOUT_PAYLOAD = frozenset(b"123456")
"""Links, devices, folders and pipes."""
_PAX, _PAX_GLOBAL, _LONG_NAME, _SPARSE = frozenset(b"xX"), ord("g"), ord("L"), ord("S")
_EXTENDED = frozenset(b"xXgLK")
"""Types whose payload says something of the next member, or of all that follow."""


class BadTar(Exception):
    """A tar file cannot be read: `what` is wrong at byte `offset`, and what to do."""

    def __init__(self, path: Path, offset: int, what: str, remedy: str = _AGAIN) -> None:
        super().__init__(path, offset, what, remedy)
        self.path, self.offset, self.what, self.remedy = path, offset, what, remedy

    def __str__(self) -> str:
        return f"{self.path}, byte {self.offset}: {self.what}"


class TarMember(NamedTuple):
    """A member of a tar file: its first header lies at `header`, its `size` bytes at `offset`; `type` is its type flag
    and `head` are the bytes of its headers."""

    name: str
    type: int
    header: int
    offset: int
    size: int
    head: bytes


def list_members(path: Path) -> Iterator[TarMember]:
    """The members of a plain tar file, of its headers alone. A missing end of the archive is legal if the last member
    is whole. Raises BadTar with the offset, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from _walk_headers(path, descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _walk_headers(path: Path, descriptor: int, end: int) -> Iterator[TarMember]:
    if not end:
        raise BadTar(path, 0, "it is empty (0 bytes)")
    window, base, span, at, header = b"", 0, _FAR_BYTES // 16, 0, 0
    head: list[bytes] = []
    own: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    while at < end:
        inner = at - base
        if inner + TAR_BLOCK_BYTES > len(window):
            span = min(2 * span, _FAR_BYTES) if inner < len(window) + span else max(span // 2, _NEAR_BYTES)
            window, base, inner = _read_part(descriptor, span, at), at, 0
        block = window[inner : inner + TAR_BLOCK_BYTES]
        if block == _END:
            if head:
                raise BadTar(path, at, "the archive ends after an extended header that belongs to a further member")
            _check_end(path, descriptor, at, end)
            return
        if len(block) < TAR_BLOCK_BYTES:
            if not any(block):
                break
            raise BadTar(path, at, f"the file ends within a header, after {end} bytes")
        if not _is_header(block):
            command = next((each for sign, each in _MAGIC.items() if not at and block.startswith(sign)), "")
            if command:
                raise BadTar(path, at, "it is compressed, and records in it cannot be read one by one", command)
            raise BadTar(path, at, "no header of a member lies there (its checksum does not match)")
        kind = block[156]
        try:
            size = _parse_number(block[124:136])
            if own or everywhere:
                size = int(own.get("size", everywhere.get("size", size)))
        except ValueError:
            size = -1
        if size < 0:
            raise BadTar(path, at, "the size of a member is no number")
        if not head:
            header = at
        head.append(block)
        at += TAR_BLOCK_BYTES
        if kind in _WITHOUT_PAYLOAD:
            size = 0
        if at + size > end:
            what = f"a member there needs {size} bytes and the file ends after {end - at} (it has {end} bytes)"
            raise BadTar(path, at, what)
        if kind in _EXTENDED:
            inner = at - base
            whole = -(-size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES
            content = window[inner : inner + whole]
            if len(content) < whole:
                content = _read_part(descriptor, whole, at)
            head.append(content)
            content = content[:size]
            try:
                if kind == _LONG_NAME:
                    own["path"] = content.split(b"\0", 1)[0].decode()
                elif kind == _PAX_GLOBAL:
                    everywhere.update(_parse_pax(content))
                elif kind in _PAX and _matters(content):
                    own.update(_parse_pax(content))
            except ValueError:
                raise BadTar(path, at, "an extended header cannot be read") from None
        else:
            try:
                name = own.get("path") or everywhere.get("path") or _parse_name(block)
            except UnicodeDecodeError:
                raise BadTar(path, header, "the name of a member is not UTF-8", "rename it and pack it again") from None
            if kind == _SPARSE or any(word.startswith("GNU.sparse.") for word in own):
                what = f'"{name}" is stored as a sparse file, which cannot be read in place'
                raise BadTar(path, header, what, "pack the shard again without --sparse")
            yield TarMember(name, kind, header, at, size, b"".join(head) if len(head) > 1 else block)
            head, own = [], {}
        at += -(-size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES
    if head:
        raise BadTar(path, header, "the file ends after an extended header that belongs to a further member")


def _read_part(descriptor: int, size: int, at: int) -> bytes:
    """Bytes of a file; fewer only at its end."""
    found = os.pread(descriptor, size, at)
    while len(found) < size and (more := os.pread(descriptor, size - len(found), at + len(found))):
        found += more
    return found


def _is_header(block: bytes) -> bool:
    """Whether the checksum of a header holds. A header with bytes over 127 may have been summed as signed ones."""
    try:
        expected = int(block[148:156].strip(b"\0 "), 8)
    except ValueError:
        return False
    # adler32 is the quickest sum of bytes: its low half is 1 + the sum, modulo 65521.
    if zlib.adler32(block[156:], zlib.adler32(block[:148])) & 0xFFFF == (expected - 8 * 32 + 1) % 65521:
        return True
    signed = np.frombuffer(block, np.int8).sum(dtype=np.int64)
    return int(signed - np.frombuffer(block, np.int8)[148:156].sum(dtype=np.int64)) + 8 * 32 == expected


def _parse_number(field: bytes) -> int:
    """A number of a header: octal digits, or base 256 (GNU tar). Raises ValueError."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    digits = field.strip(b"\0 ")
    return int(digits, 8) if digits else 0


def _parse_name(block: bytes) -> str:
    """The name in a header, with the prefix that POSIX headers have. Raises UnicodeDecodeError."""
    name = block[:100].split(b"\0", 1)[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode()


def _matters(content: bytes) -> bool:
    """Whether a pax header may say something of a name or a size; most hold times only."""
    return b" path=" in content or b" size=" in content or b" GNU.sparse." in content


def _parse_pax(content: bytes) -> dict[str, str]:
    """The records "length key=value" of a pax header that say a path, a size or that a file is sparse. Raises
    ValueError."""
    found, at = {}, 0
    while at < len(content) and content[at]:
        blank = content.index(b" ", at)
        end = at + int(content[at:blank])
        key, sign, value = content[blank + 1 : end - 1].partition(b"=")
        if not sign or end > len(content) or content[end - 1 : end] != b"\n":
            raise ValueError("a pax record has another length")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            found[key.decode()] = value.decode()
        at = end
    return found


def _check_end(path: Path, descriptor: int, at: int, end: int) -> None:
    """Refuse an archive behind the end of the first: tar programs ignore it, so its records would be missing."""
    rest = _read_part(descriptor, _AFTER_END_BYTES, at)
    inner = next(
        (
            i
            for i in range(0, len(rest) - TAR_BLOCK_BYTES + 1, TAR_BLOCK_BYTES)
            if rest[i : i + TAR_BLOCK_BYTES] != _END
        ),
        None,
    )
    if inner is not None and _is_header(rest[inner : inner + TAR_BLOCK_BYTES]):
        what = "a further archive begins there, behind the end of the first"
        raise BadTar(path, at + inner, what, "split it into two files, or join them by tar --concatenate")
