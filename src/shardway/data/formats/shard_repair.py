"""Finds damage in a folder of shards, and mends it from another copy or from what is whole.

Invariants:
- What was mended is verified beside the damaged file before it takes its place: nothing is ever made worse.
- Bytes are copied from a copy with the same fingerprint only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from shardway.data.formats.base import BLOCK_BYTES, DamagedData
from shardway.data.formats.shard_file import (
    SHARD_SUFFIX,
    FoundDamage,
    ShardFacts,
    find_shard_damage,
    parse_footer,
    read_shard_facts,
)
from shardway.data.formats.shard_manifest import ShardManifest, find_folder, parse_manifest, write_manifest
from shardway.data.kinds import MANIFEST
from shardway.errors import UserError, list_some
from shardway.rundir.file_io import write_whole


def find_folder_damage(folder: Path) -> Iterator[FoundDamage]:
    """Every damaged part of the manifest and the shards of a folder, all of which is read."""
    manifest = _read_quietly(folder)
    if manifest is None:
        path = folder / MANIFEST
        what = "checksum mismatch of the manifest" if path.is_file() else "it is missing"
        yield FoundDamage(path, 0, path.stat().st_size if path.is_file() else 0, what)
        for name in _list_shards(folder):
            yield from find_shard_damage(folder / name)
        return
    for shard in manifest.shards:
        yield from find_shard_damage(folder / shard.name, shard)


def repair_shards(folder: Path, source: Path | None = None) -> tuple[list[str], list[str]]:
    """Mend a data set of shards; returns what was done and what is left, as sentences.

    Damaged parts are copied from `source`, another copy with the same fingerprint. Without it a manifest is made anew
    from shards that are whole, and checksums from blocks that are. What was mended is verified before it takes the
    place of the damaged file.
    """
    folder, other = find_folder(folder), None if source is None else find_folder(source)
    whole = None if other is None else _read_quietly(other)
    if other is not None and whole is None:
        return [], [f"{other / MANIFEST} is damaged or missing too, so nothing is copied from there"]
    manifest, done, left = _mend_manifest(folder, other, whole)
    if manifest is None:
        return done, left
    if whole is not None and whole.fingerprint != manifest.fingerprint:
        return done, [*left, f"{other} is another data set (its fingerprint is {whole.fingerprint})"]
    for shard in manifest.shards:
        damage = list(find_shard_damage(folder / shard.name, shard))
        if not damage:
            continue
        mended = _mend_shard(folder / shard.name, shard, damage, None if other is None else other / shard.name)
        if mended:
            done.append(mended)
        else:
            left += [str(each) for each in damage]
    return done, left


def _read_quietly(folder: Path) -> ShardManifest | None:
    try:
        found = parse_manifest((folder / MANIFEST).read_bytes())
    except OSError:
        return None
    return found if found is not None and found.kind else None


def _list_shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{SHARD_SUFFIX}") if not path.name.startswith("."))


def _mend_manifest(
    folder: Path, other: Path | None, whole: ShardManifest | None
) -> tuple[ShardManifest | None, list[str], list[str]]:
    """The manifest of a folder: as it is, copied, or made anew; and what was done and what is left."""
    found = _read_quietly(folder)
    if found is not None:
        return found, [], []
    path, names = folder / MANIFEST, _list_shards(folder)
    facts = {name: fact for name in names if (fact := _read_facts_quietly(folder / name)) is not None}
    if other is not None and whole is not None:
        known = {shard.xxh3 for shard in whole.shards}
        if not facts or any(fact.xxh3 not in known for fact in facts.values()):
            return None, [], [f"{path} is damaged or missing, and {other} is not seen to be the same data set"]
        write_whole(path, (other / MANIFEST).read_text())
        return whole, [f"{path} was copied"], []
    damage = [str(each) for name in names for each in find_shard_damage(folder / name)]
    expected = [f"{number:05d}{SHARD_SUFFIX}" for number in range(len(names))]
    if damage or not names or names != expected:
        missing = sorted(set(expected) - set(names))
        why = "shards are damaged" if damage else f"{list_some(missing, 5)} is missing" if missing else "has no shards"
        return None, [], [f"{path} is damaged or missing and cannot be made anew: {why}", *damage]
    kinds = {fact.kind for fact in facts.values()}
    if len(kinds) > 1 or len({fact.dtype for fact in facts.values()}) > 1:
        return None, [], [f"{path} is damaged or missing and cannot be made anew: the shards do not fit together"]
    write_manifest(folder, kinds.pop(), [facts[name] for name in names], {})
    what = (
        f"{path} was made anew from {len(names)} shards (the last may be missing); vocabulary and source are not known"
    )
    return _read_quietly(folder), [what], []


def _read_facts_quietly(path: Path) -> ShardFacts | None:
    try:
        return read_shard_facts(path)
    except (OSError, DamagedData, UserError):
        return None


def _mend_shard(path: Path, shard: ShardFacts, damage: Sequence[FoundDamage], source: Path | None) -> str:
    """Mend a shard; returns what was done, "" if nothing could be."""
    if path.is_file() and path.stat().st_size == shard.bytes:
        if source is None:
            return _mend_sums(path, shard, damage)
        if source.is_file():
            parts = [(each.offset, _read_part(source, each.offset, each.size)) for each in damage]
            if _replace_parts(path, shard, parts):
                blocks = sum(-(-each.size // BLOCK_BYTES) for each in damage)
                return f"{path}: {blocks} of {-(-shard.bytes // BLOCK_BYTES)} blocks were copied"
    if source is None or not source.is_file() or list(find_shard_damage(source, shard)):
        return ""
    return f"{path} was copied whole" if _replace_parts(path, shard, [], source) else ""


def _mend_sums(path: Path, shard: ShardFacts, damage: Sequence[FoundDamage]) -> str:
    """Make damaged checksums anew, which the blocks give if they are whole."""
    try:
        with path.open("rb") as stream:
            footer = parse_footer(path, stream.fileno())
            if [each.offset for each in damage] != [footer.sums.offset]:
                return ""
            starts = range(0, footer.covered, BLOCK_BYTES)
            blocks = (os.pread(stream.fileno(), min(BLOCK_BYTES, footer.covered - at), at) for at in starts)
            sums = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], "<u8")
    except DamagedData:
        return ""
    mended = _replace_parts(path, shard, [(footer.sums.offset, sums.tobytes())])
    return f"{path}: its checksums were made anew" if mended else ""


def _read_part(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(size)


def _replace_parts(
    path: Path, shard: ShardFacts, parts: Sequence[tuple[int, bytes]], source: Path | None = None
) -> bool:
    """Write a file (or `source`) with some parts replaced in its place, if that is the shard."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        shutil.copyfile(source or path, temporary)
        with temporary.open("r+b") as stream:
            for offset, content in parts:
                stream.seek(offset)
                stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if list(find_shard_damage(temporary, shard)):
            return False
        os.replace(temporary, path)
        return True
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
