"""The B+ tree of an LMDB environment, read with pread(2): its newest meta page, and where each key's value lies.

The layout is that of LMDB 0.9 (data version 1) on a 64-bit little-endian machine. A page begins with its own number
(uint64), two unused bytes, flags, and the ends of its list of nodes (uint16 each); for a value on pages of its own the
last two are the number of those (uint32). A node is two halves of a size, flags, the length of the key (uint16 each),
the key, and the value, the number of the value's first page, or (in a branch) nothing: its size is a page number.

Invariant: damaged bytes of the tree give DamagedData with their offset, or entries that lie in the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.formats.base import FileParts, Offsets

HEAD_BYTES = 16
"""Bytes before the content of a page."""
META_BYTES = 152
PAGES_AT_ONCE = 4096
MAGIC = struct.pack("<I", 0xBEEFC0DE)

_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _SUB, _DUPLICATES = 1, 2, 4
"""Flags of a node: the value has pages of its own, is a database, or is several values."""
_ORDERED_OTHERWISE = 0x02 | 0x08
"""Flags of a database whose keys are not in the order of their bytes: reversed, or integers."""
_NO_PAGE = 2**64 - 1

Words = npt.NDArray[np.uint16]


class UnreadableTree(Exception):
    """An environment that is whole and not of a kind that is read here; the text says why."""


@dataclass(frozen=True)
class LmdbTree:
    """A database: flags, the number of its levels, pages of each sort, entries, and the page of its root."""

    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def unpack(cls, content: bytes) -> LmdbTree:
        """From the 48 bytes of an MDB_db."""
        return cls(*struct.unpack("<4xHH5Q", content))


@dataclass(frozen=True)
class LmdbMeta:
    """What the newest meta page says; `transaction` is the number of the last write."""

    page_bytes: int
    transaction: int
    tree: LmdbTree


@dataclass(frozen=True)
class LmdbEntries:
    """All entries in key order: `keys` end to end (uint8) and their ends; the offset and size of each value in the
    file; whether it has pages of its own."""

    keys: npt.NDArray[np.uint8]
    key_ends: Offsets
    offsets: Offsets
    sizes: Offsets
    big: npt.NDArray[np.bool_]


def read_meta(parts: FileParts) -> LmdbMeta:
    """The newer of the two meta pages. Raises UnreadableTree for another format or version, DamagedData."""
    first = _read_meta_page(parts, 0)
    second = _read_meta_page(parts, first.page_bytes)
    return second if second.transaction > first.transaction else first


def _read_meta_page(parts: FileParts, offset: int) -> LmdbMeta:
    content = parts.read(0, offset, META_BYTES)
    flags = int.from_bytes(content[10:12], "little")
    magic, version = content[16:20], int.from_bytes(content[20:24], "little")
    if magic != MAGIC or not flags & _META:
        if magic == MAGIC[::-1]:
            raise UnreadableTree("was written on a big-endian machine")
        if offset == 0:
            raise UnreadableTree("is not an LMDB environment: its first page is no meta page")
        raise parts.damaged(0, offset, "there is no second meta page")
    if version != 1:
        raise UnreadableTree(f"is an LMDB environment of version {version}, and version 1 (LMDB 0.9) is read")
    page_bytes = int.from_bytes(content[40:44], "little")
    if page_bytes not in (2**power for power in range(8, 17)):
        raise UnreadableTree(f"has pages of {page_bytes} bytes, or was written on a 32-bit machine")
    return LmdbMeta(
        page_bytes=page_bytes,
        transaction=int.from_bytes(content[144:152], "little"),
        tree=LmdbTree.unpack(content[88:136]),
    )


def walk_tree(parts: FileParts, meta: LmdbMeta, tree: LmdbTree | None = None) -> LmdbEntries:
    """All entries of a database (of the main one, or of the only database in it), each page read once and checked.

    Raises UnreadableTree for several databases, and for keys with several values; DamagedData.
    """
    main, tree = tree is None, tree or meta.tree
    if tree.flags & 0x04:
        raise UnreadableTree("has several values for a key (MDB_DUPSORT)")
    if tree.root != _NO_PAGE and tree.root >= parts.files[0].size // meta.page_bytes:
        raise parts.damaged(0, parts.files[0].size, f"page {tree.root}, the root, is needed and the file ends there")
    pages = np.array([tree.root] if tree.root != _NO_PAGE else [], np.int64)
    branches = 0
    for _ in range(tree.depth - 1):
        branches += len(pages)
        batches = (pages[at : at + PAGES_AT_ONCE] for at in range(0, len(pages), PAGES_AT_ONCE))
        pages = np.concatenate([np.zeros(0, np.int64), *(_read_children(parts, meta, batch) for batch in batches)])
        if len(pages) > tree.leaves + tree.branches:
            raise parts.damaged(0, tree.root * meta.page_bytes, f"{len(pages)} pages are under it, more than there are")
    found: list[_Leaves] = []
    for at in range(0, len(pages), PAGES_AT_ONCE):
        before = found[-1][0][-int(found[-1][1][-1]) :].tobytes() if found and len(found[-1][1]) else b""
        found.append(_read_leaves(parts, meta, pages[at : at + PAGES_AT_ONCE], tree, before))
    entries, flags = _join(found), np.concatenate([np.zeros(0, np.uint16), *(flags for *_, flags in found)])
    if main and len(flags) and (flags & _SUB).all():
        return _walk_only(parts, meta, entries)
    if (flags & (_SUB | _DUPLICATES)).any():
        raise UnreadableTree("has databases beside values, or several values for a key (MDB_DUPSORT)")
    _check_count(parts, meta, tree, "entries", len(flags), tree.entries)
    _check_count(parts, meta, tree, "branch pages", branches, tree.branches)
    _check_count(parts, meta, tree, "leaf pages", len(pages), tree.leaves)
    overflows = int(count_pages(entries.sizes[entries.big], meta.page_bytes).sum())
    _check_count(parts, meta, tree, "pages of large values", overflows, tree.overflows)
    return entries


def count_pages(sizes: Offsets, page_bytes: int) -> Offsets:
    """The pages that a large value takes, with the head of the first."""
    return (HEAD_BYTES - 1 + sizes) // page_bytes + 1


def is_head_of(content: bytes, offset: int, size: int, page_bytes: int) -> bool:
    """Whether bytes begin with the head of the pages of a large value of `size` bytes, its first page at `offset`."""
    number, flags, pages = struct.unpack_from("<QxxHI", content)
    return bool(
        number == offset // page_bytes and flags & _OVERFLOW and pages == (HEAD_BYTES - 1 + size) // page_bytes + 1
    )


def _walk_only(parts: FileParts, meta: LmdbMeta, entries: LmdbEntries) -> LmdbEntries:
    """The entries of the only database in the main one."""
    names = split_keys(entries.keys, entries.key_ends)
    if len(names) > 1:
        some = ", ".join(repr(name) for name in names[:5])
        raise UnreadableTree(f"has {len(names)} databases ({some}), and one is read")
    offset, size = int(entries.offsets[0]), int(entries.sizes[0])
    if size != 48:
        raise parts.damaged(0, offset, f"the database {names[0]!r} is described by {size} bytes, not 48")
    return walk_tree(parts, meta, LmdbTree.unpack(parts.read(0, offset, 48)))


def split_keys(keys: npt.NDArray[np.uint8], ends: Offsets) -> list[bytes]:
    """Keys that lie end to end, each as bytes."""
    blob, stops = keys.tobytes(), ends.tolist()
    return [blob[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


# --- pages


def _read_pages(parts: FileParts, meta: LmdbMeta, numbers: Offsets, kind: int) -> Words:
    """[pages, words] of pages in the order of `numbers`. Raises DamagedData for a missing one or one of another
    kind."""
    order = np.argsort(numbers, kind="stable")
    ordered, size, whole = numbers[order], meta.page_bytes, parts.files[0].size
    for number in ordered[(ordered < 2) | (ordered >= whole // meta.page_bytes)][:1].tolist():
        raise parts.damaged(0, number * size, f"page {number} is needed and the file ends at byte {whole}")
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    pieces = [parts.read(0, int(run[0]) * size, len(run) * size) for run in np.split(ordered, cuts) if len(run)]
    words = np.empty((len(numbers), size // 2), np.uint16)
    words[order] = np.frombuffer(b"".join(pieces), "<u2").reshape(-1, size // 2)
    own = words[:, :4].copy().view("<u8")[:, 0]
    lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
    wrong = (own != numbers.astype(np.uint64)) | (words[:, 5] & (_BRANCH | _LEAF | _OVERFLOW | _META) != kind)
    wrong |= (lower < HEAD_BYTES) | (lower > upper) | (upper > size) | (lower % 2 == 1)
    for place in np.flatnonzero(wrong)[:1].tolist():
        number = int(numbers[place])
        raise parts.damaged(
            0, number * size, f"page {number} is not the {_name_kind(kind)} page that was written there"
        )
    return words


@dataclass(frozen=True)
class _Nodes:
    """The nodes of pages, flat: the row of each in `words`, its start in the page (bytes), and its four head words."""

    rows: Offsets
    starts: Offsets
    low: Offsets
    high: Offsets
    flags: Offsets
    key_sizes: Offsets


def _find_nodes(parts: FileParts, meta: LmdbMeta, numbers: Offsets, words: Words) -> _Nodes:
    counts = (words[:, 6].astype(np.int64) - HEAD_BYTES) // 2
    rows = np.repeat(np.arange(len(numbers)), counts)
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = words[rows, HEAD_BYTES // 2 + slots].astype(np.int64)
    wrong = (starts < words[rows, 7]) | (starts + 8 > meta.page_bytes) | (starts % 2 == 1)
    _refuse_nodes(parts, meta, numbers[rows], wrong)
    low, high, flags, key_sizes = (words[rows, starts // 2 + part].astype(np.int64) for part in range(4))
    _refuse_nodes(parts, meta, numbers[rows], starts + 8 + key_sizes > meta.page_bytes)
    return _Nodes(rows, starts, low, high, flags, key_sizes)


def _read_children(parts: FileParts, meta: LmdbMeta, numbers: Offsets) -> Offsets:
    """The pages below branch pages, in key order."""
    nodes = _find_nodes(parts, meta, numbers, _read_pages(parts, meta, numbers, _BRANCH))
    return nodes.low | nodes.high << 16 | nodes.flags << 32


_Leaves = tuple[npt.NDArray[np.uint8], Offsets, Offsets, Offsets, npt.NDArray[np.bool_], Offsets]


def _read_leaves(parts: FileParts, meta: LmdbMeta, numbers: Offsets, tree: LmdbTree, before: bytes) -> _Leaves:
    """(keys, their sizes, offsets of values, sizes of values, whether on pages of their own, flags) of leaf pages;
    `before` is the key before them."""
    size = meta.page_bytes
    words = _read_pages(parts, meta, numbers, _LEAF)
    nodes = _find_nodes(parts, meta, numbers, words)
    pages, big = numbers[nodes.rows], (nodes.flags & _BIG).astype(np.bool_)
    sizes, values = nodes.low | nodes.high << 16, nodes.starts + 8 + nodes.key_sizes
    _refuse_nodes(parts, meta, pages, values + np.where(big, 8, sizes) > size)
    flat, base = words.view(np.uint8).reshape(-1), nodes.rows * size
    offsets = pages * size + values
    for byte in range(8) if big.any() else ():
        part = flat[(base + values + byte)[big]].astype(np.int64) << 8 * byte
        offsets[big] = part if byte == 0 else offsets[big] | part
    last = parts.files[0].size // size
    _refuse_nodes(parts, meta, pages, big & ((offsets < 2) | (offsets > last)))
    offsets[big] = offsets[big] * size + HEAD_BYTES
    for place in np.flatnonzero(offsets + sizes > parts.files[0].size)[:1].tolist():
        raise parts.damaged(
            0, int(offsets[place]), f"a value of {int(sizes[place])} bytes is there, and the file ends before"
        )
    keys = flat[_list_bytes(base + nodes.starts + 8, nodes.key_sizes)]
    if not tree.flags & _ORDERED_OTHERWISE:
        texts = [before, *split_keys(keys, np.cumsum(nodes.key_sizes))]
        falls = [one >= other for one, other in pairwise(texts)]
        if any(falls):
            raise parts.damaged(0, int(pages[falls.index(True)]) * size, "the keys of its page do not rise")
    return keys, nodes.key_sizes, offsets, sizes, big, nodes.flags


def _list_bytes(starts: Offsets, sizes: Offsets) -> Offsets:
    """The number of each byte of pieces."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(int(ends[-1]) if len(ends) else 0)


def _join(found: list[_Leaves]) -> LmdbEntries:
    def join(part: int, dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(piece[part] for piece in found)])

    key_ends = np.cumsum(join(1, np.int64))
    return LmdbEntries(join(0, np.uint8), key_ends, join(2, np.int64), join(3, np.int64), join(4, np.bool_))


def _refuse_nodes(parts: FileParts, meta: LmdbMeta, pages: Offsets, wrong: npt.NDArray[np.bool_]) -> None:
    for page in pages[wrong][:1].tolist():
        raise parts.damaged(0, page * meta.page_bytes, f"an entry of page {page} leads out of it or to no page")


def _check_count(parts: FileParts, meta: LmdbMeta, tree: LmdbTree, what: str, found: int, expected: int) -> None:
    if found != expected:
        place = 0 if tree.root == _NO_PAGE else tree.root * meta.page_bytes
        raise parts.damaged(0, place, f"its tree has {found} {what}, and {expected} were written")


def _name_kind(kind: int) -> str:
    return "branch" if kind == _BRANCH else "leaf"
