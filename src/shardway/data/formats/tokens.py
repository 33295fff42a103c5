"""Files of tokens: a .npy file, a raw .bin file, or a folder of token shards; as records, one for each document.

Invariants:
- A file without documents is one record. Its size is what its header or the width of a token says, or it is refused.
- Records are copies: an array of a record is not a part of a mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from shardway.data.content import DataPath
from shardway.data.formats.base import Extent, FileParts, Offsets, Record, Records, check_ids, describe_file
from shardway.data.formats.indexes import read_sums
from shardway.data.formats.npy import read_header
from shardway.data.formats.shard_manifest import ShardManifest, find_shard_kind
from shardway.data.formats.shards import ShardParts, ShardRecords, ShardTokens, open_token_shards
from shardway.data.formats.token_store import TokenFile, TokenStore, read_npy_tokens, read_raw_tokens

RAW_DTYPE = "uint16"
"""What a raw .bin file holds unless data.token_dtype says another type."""


def open_token_store(place: DataPath, dtype: str = RAW_DTYPE) -> TokenStore:
    """The tokens of a .npy file, a raw .bin file of `dtype`, or a folder of token shards. Raises UserError."""
    path = place.path
    if find_shard_kind(path):
        return open_token_shards(place)
    if not path.exists():
        raise place.error("does not exist", allowed="a .npy or .bin token file")
    if path.suffix not in (".npy", ".bin") or not path.is_file():
        raise place.error(
            "is not a token file",
            allowed="a .npy file with one row of integers, or a raw .bin file",
            remedy='for text, set data.kind = "text"',
        )
    file = read_npy_tokens(place) if path.suffix == ".npy" else read_raw_tokens(place, dtype)
    files = [describe_file(path.parent, path.name)]
    sums = read_sums(path.parent, files)
    return TokenStore((file,), parts=FileParts(path.parent, files, sums) if sums else None)


class TokenRecords(Records):
    """Documents of tokens: "tokens" and, where the data say which of them count as targets, "counted" (bool)."""

    format: ClassVar[str] = "tokens"

    def __init__(self, store: TokenStore, parts: FileParts) -> None:
        self.store, self.parts = store, parts
        self._ends: Offsets | None = None
        self._count = 1
        if isinstance(store, ShardTokens):
            self._count = store.manifest.samples

    @classmethod
    def is_at(cls, path: Path) -> bool:
        if find_shard_kind(path) == "tokens":
            return True
        if path.suffix not in (".npy", ".bin") or not path.is_file():
            return False
        if path.suffix == ".bin":
            return not path.with_suffix(".idx").exists()
        try:
            with path.open("rb") as stream:
                shape, _, dtype = read_header(stream)
        except (OSError, ValueError):
            return False
        return len(shape) == 1 and dtype.kind in "iu"

    @classmethod
    def open(cls, place: DataPath, dtype: str = RAW_DTYPE) -> TokenRecords:
        store = open_token_store(place, dtype)
        if isinstance(store.parts, ShardParts):
            return cls(store, store.parts)
        path = place.path
        files = [describe_file(path.parent, path.name)]
        return cls(store, FileParts(path.parent, files, read_sums(path.parent, files)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ends": None}

    def staged(self, hold: Callable[[FileParts], Any]) -> TokenRecords:
        put = hold(self.parts)
        moved = cast(TokenRecords, super().staged(lambda parts: put))
        moved.store = self.store.staged(lambda parts: put)
        return moved

    def __len__(self) -> int:
        return self._count

    @property
    def manifest(self) -> ShardManifest | None:
        """What the manifest of shards says; None for a file."""
        return self.store.manifest if isinstance(self.store, ShardTokens) else None

    @property
    def fields(self) -> dict[str, str]:
        length = str(len(self.store)) if self._count == 1 else "?"
        found = {"tokens": f"{self.store.dtype.name}[{length}]"}
        return {**found, "counted": f"bool[{length}]"} if self.store.counted else found

    @property
    def fingerprint(self) -> str:
        return self.store.make_fingerprint() if self.manifest is None else self.manifest.fingerprint

    def more_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"tokens": len(self.store)}
        return facts if self.manifest is None else {**facts, "described": dict(self.manifest.described)}

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        check_ids(ids, len(self))
        numbers = np.asarray(ids, np.int64)
        if not len(numbers):
            return []
        bounds = self._bounds()
        starts, lengths = bounds[numbers], bounds[numbers + 1] - bounds[numbers]
        found: dict[str, list[Any]] = {}
        if not fields or "tokens" in fields:
            found["tokens"] = self._read_pieces(self.store.files, starts, lengths)
        if self.store.counted and (not fields or "counted" in fields):
            marks = self._read_pieces(self.store.counted, starts, lengths)
            found["counted"] = [piece.astype(np.bool_) for piece in marks]
        rows = zip(*found.values(), strict=True) if found else (() for _ in ids)
        return [dict(zip(found, row, strict=True)) for row in rows]

    def extent(self, number: int) -> Extent:
        check_ids([number], len(self))
        bounds = self._bounds()
        shard, inner = self._place(int(bounds[number]))
        file = self.store.files[shard]
        width = self.store.dtype.itemsize
        return Extent(file.path, file.offset_bytes + inner * width, int(bounds[number + 1] - bounds[number]) * width)

    def find_damage(self) -> Iterator[str]:
        """Every block whose checksum is another."""
        return self.parts.find_damage()

    @classmethod
    def find_damage_unopened(cls, path: Path) -> Iterator[str]:
        """Every damaged part of the manifest and the shards of a folder."""
        return ShardRecords.find_damage_unopened(path)

    def _bounds(self) -> Offsets:
        """The start of each document, and the end of the last."""
        if self._ends is None:
            ends = self.store.read_ends()
            self._ends = np.concatenate([[0], np.array([len(self.store)]) if ends is None else ends]).astype(np.int64)
        return self._ends

    def _place(self, token: int) -> tuple[int, int]:
        """(file, number of the token in it); of the end of all, the last file that has tokens."""
        starts = np.cumsum([0, *(file.tokens for file in self.store.files)])
        shard = min(int(np.searchsorted(starts, token, side="right")) - 1, len(self.store.files) - 1)
        return shard, token - int(starts[shard])

    def _read_pieces(self, files: Sequence[TokenFile], starts: Offsets, lengths: Offsets) -> list[Any]:
        """Documents, each read from its one file."""
        firsts = np.cumsum([0, *(file.tokens for file in files)])
        which = np.minimum(np.searchsorted(firsts, starts, side="right") - 1, len(files) - 1)
        found = []
        for shard, start, length in zip(which.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            file, inner = files[shard], start - int(firsts[shard])
            found.append(file.read(self.parts, shard, inner, length))
        return found
