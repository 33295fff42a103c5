"""The manifest of a folder of shards: which shards a data set has, what they hold, and where they come from.

Invariants:
- A manifest has a checksum, and its bytes are those that this module writes for its content: no flipped bit is missed.
- The fingerprint is over the footers of all shards in their order, and so over all content; names do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import DamagedData
from shardway.data.formats.shard_file import SHARD_SUFFIX, ShardFacts, read_shard_facts
from shardway.data.kinds import MANIFEST
from shardway.errors import UserError, list_some
from shardway.rundir.file_io import write_whole

FORMAT = "shardway shards"
MANIFEST_VERSION = 1

_COMPUTED = frozenset(
    ("format", "version", "kind", "samples", "tokens", "dtype", "fields", "fingerprint", "shards", "xxh3")
)
_UNKNOWN = {"vocab": None, "end": None, "tokenizer": None, "text_bytes": None, "source": None}
"""What every manifest says, if not otherwise."""


@dataclass(frozen=True)
class ShardManifest:
    """What shards.json says. `described` is what its writer added: "vocab", "end", "tokenizer", "text_bytes",
    "source", "seq_len" and more."""

    kind: str
    samples: int
    tokens: int
    dtype: str
    fields: Mapping[str, str]
    fingerprint: str
    shards: tuple[ShardFacts, ...]
    described: Mapping[str, Any] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    @property
    def vocab(self) -> int | None:
        """One more than the largest token, where that is known."""
        return self.described.get("vocab")

    @property
    def end(self) -> int | None:
        """The token that ends a document, if there is one."""
        return self.described.get("end")

    @property
    def text_bytes(self) -> int | None:
        """Bytes of the text that was made into tokens, where that is known."""
        return self.described.get("text_bytes")


def write_manifest(folder: Path, kind: str, facts: Sequence[ShardFacts], described: Mapping[str, Any]) -> None:
    """Write shards.json of shards that lie in a folder, in this order; `kind` is "tokens" or "records".

    `described`: what else is known, as JSON: "vocab", "end" (a token or None), "tokenizer", "text_bytes", "source",
    "seq_len". Raises UserError for shards that do not fit together.
    """
    write_whole(folder / MANIFEST, _render_manifest(kind, facts, described))


def _render_manifest(kind: str, facts: Sequence[ShardFacts], described: Mapping[str, Any]) -> str:
    taken = [name for name in described if name in _COMPUTED]
    if taken:
        raise UserError(f"a manifest computes {list_some(taken, 5)} itself")
    wrong = [each.name for each in facts if each.kind != kind]
    if wrong:
        raise UserError(f"shards that do not hold {kind}: {list_some(wrong, 5)}")
    dtypes = sorted({each.dtype for each in facts})
    if len(dtypes) > 1:
        raise UserError(f"shards of one data set hold tokens of one type, and these hold {', '.join(dtypes)}")
    fields: dict[str, str] = {}
    for each in facts:
        for name, found in each.fields.items():
            fields[name] = _merge_types(fields.get(name, found), found)
    return _render(
        {
            "format": FORMAT,
            "version": MANIFEST_VERSION,
            "kind": kind,
            "samples": sum(each.samples for each in facts),
            "tokens": sum(each.tokens for each in facts),
            "dtype": dtypes[0] if dtypes else "",
            "fields": fields,
            **_UNKNOWN,
            **described,
            "fingerprint": fingerprint(FORMAT, kind, *(each.xxh3 for each in facts)),
            "shards": [asdict(each) for each in facts],
        }
    )


def _merge_types(first: str, second: str) -> str:
    """The type of a field that has two."""
    if first == second or second == "null":
        return first
    if first == "null":
        return second
    lengths = [re.sub(r"\[[^,\]]+", "[?", each) for each in (first, second)]
    return lengths[0] if lengths[0] == lengths[1] else "any"


def _render(content: Mapping[str, Any]) -> str:
    """The manifest with the checksum of its content (as JSON without spaces) as the last entry."""
    bare = json.dumps(content, separators=(",", ":"))
    return json.dumps({**content, "xxh3": xxhash.xxh3_128_hexdigest(bare.encode())}, indent=1) + "\n"


def read_manifest(place: DataPath) -> ShardManifest:
    """The manifest of a folder, verified. Raises UserError if it is missing, damaged or of a later version."""
    path = find_folder(place.path) / MANIFEST
    remedy = "`shardway data repair` makes it anew from the shards, or copy it from another copy of the data"
    if not path.is_file():
        raise place.error(f"has no {MANIFEST}", allowed="a folder that Shardway has written", remedy=remedy)
    found = parse_manifest(path.read_bytes())
    if found is None:
        raise place.error(f"has a {MANIFEST} that is damaged (byte 0: checksum mismatch)", remedy=remedy)
    if found.version != MANIFEST_VERSION:
        raise place.error(
            f"has a {MANIFEST} of version {found.version}",
            allowed=f"up to {MANIFEST_VERSION}",
            remedy="update Shardway",
        )
    return found


def parse_manifest(text: bytes) -> ShardManifest | None:
    """The manifest in a file; of a later version only that; None if a byte is not what was written."""
    try:
        content = json.loads(text)
        expected = _render({name: value for name, value in content.items() if name != "xxh3"})
        if content.pop("xxh3") is None or expected.encode() != text or content["format"] != FORMAT:
            return None
        if content["version"] != MANIFEST_VERSION:
            return ShardManifest("", 0, 0, "", {}, "", (), {}, content["version"])
        return ShardManifest(
            content["kind"],
            content["samples"],
            content["tokens"],
            content["dtype"],
            content["fields"],
            content["fingerprint"],
            tuple(ShardFacts(**each) for each in content["shards"]),
            {name: value for name, value in content.items() if name not in _COMPUTED},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def find_folder(path: Path) -> Path:
    """The folder of shards that a path names: itself, or that of its manifest."""
    return path.parent if path.name == MANIFEST else path


def find_shard_kind(path: Path) -> str:
    """What shards at a path hold: "tokens" or "records"; "" where there are none. Shards tell it themselves where the
    manifest does not."""
    folder = find_folder(path)
    if not folder.is_dir():
        return ""
    manifest, first = folder / MANIFEST, folder / f"{0:05d}{SHARD_SUFFIX}"
    if manifest.is_file():
        found = parse_manifest(manifest.read_bytes())
        if found is not None:
            return found.kind or "records"
    if not first.is_file():
        return ""
    try:
        return read_shard_facts(first).kind
    except (DamagedData, UserError):
        return "records" if manifest.is_file() else ""
