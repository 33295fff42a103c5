"""Energon: tar shards that Megatron Energon has prepared, with the shards of each split in a folder `.nv-meta`; and
metadatasets, YAML files that blend such folders.

Invariants:
- The records are those of the shards of one split, in the order in which split.yaml names them, without those that it
  excludes. Their fields have the names that they have in the shards; dataset.yaml, which may rename them, is not read.
- A shard that .info.json does not name, or that has another number of records than it says, is an error: the folder
  was changed after it was prepared.
- Whatever of a metadataset would change which records are seen, and is not understood, is refused.

The files are those of Megatron Energon 7.4: `.nv-meta/.info.json` (or .info.yaml) with `shard_counts`,
`.nv-meta/split.yaml` (or split.json) with `split_parts` and `exclude`, and metadatasets of the classes `Metadataset`
and `MetadatasetV2`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardway.data.content import DataPath, fingerprint
from shardway.data.formats.base import (
    Extent,
    Record,
    Records,
    check_ids,
    describe_file,
    expand_braces,
    need_library,
)
from shardway.data.formats.webdataset import WebDatasetRecords
from shardway.errors import UserError, list_some

FOLDER = ".nv-meta"
DEFAULT_SPLIT = "train"
_INFO = (".info.json", ".info.yaml")
_SPLITS = ("split.yaml", "split.json")
_SUFFIXES = (".yaml", ".yml")
_HEAD_BYTES = 2**16
_PREPARE = "run energon prepare on it again"
_NOT_READ = {
    "join": "joins data sets",
    "subset": "takes a part of a data set",
    "split_config": "takes its splits from another file",
    "aux": "names auxiliary data",
}
"""Keys of a metadataset that change what its records are."""


class EnergonRecords(Records):
    """Records of one split of a prepared folder."""

    format = "energon"

    def __init__(self, shards: WebDatasetRecords, excluded: Sequence[str] = ()) -> None:
        """`excluded`: names of records of the shards, as shard/key."""
        self.parts, self._shards, self._excluded = shards.parts, shards, tuple(sorted(excluded))
        names, kept = frozenset(excluded), np.ones(len(shards), np.bool_)
        folders, first = {name.rpartition("/")[0] for name in excluded}, 0
        for file, length in zip(shards.parts.files, shards.shard_lengths, strict=True):
            if any(folder == file.name or folder.startswith(f"{file.name}/") for folder in folders):
                own = (f"{file.name}/{shards.key(number)}" for number in range(first, first + length))
                kept[first : first + length] = [name not in names for name in own]
            first += length
        self._numbers = np.flatnonzero(kept)

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether it is a folder with .nv-meta/.info.json or .info.yaml, or a metadataset."""
        if path.name.lower().endswith(_SUFFIXES) and path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            return b"splits:" in head and any(word in head for word in (b"Metadataset", b"datasets:", b"blend"))
        return any((path / FOLDER / name).is_file() for name in _INFO)

    @classmethod
    def open(cls, place: DataPath) -> EnergonRecords:
        """The records of the split "train", or of all shards if there is no split of that name. Raises UserError for a
        folder that is not prepared, was changed since then, or has a shard that cannot be read; and for a metadataset
        of several data sets."""
        return open_split(place)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def fields(self) -> dict[str, str]:
        """Those of the shards."""
        return self._shards.fields

    @property
    def fingerprint(self) -> str:
        """xxh3-128 over the names and sizes of the shards and the names of excluded records."""
        return fingerprint(super().fingerprint, *self._excluded)

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        """These records, in this order."""
        check_ids(ids, len(self))
        return self._shards.read(self._numbers[np.asarray(ids, np.int64)].tolist(), fields)

    def extent(self, number: int) -> Extent:
        """From the first byte of a record's first field to the last of its last."""
        check_ids([number], len(self))
        return self._shards.extent(int(self._numbers[number]))

    def own_checks(self) -> str:
        return self._shards.own_checks()

    def index_files(self) -> list[str]:
        """The files of the preparation, also those that only Energon reads."""
        meta = (f"{FOLDER}/{path.name}" for path in (self.parts.root / FOLDER).iterdir() if path.is_file())
        indexes = (f"{file.name}.idx" for file in self.parts.files)
        return sorted((*meta, *(name for name in indexes if (self.parts.root / name).is_file())))

    def find_damage(self) -> Iterator[str]:
        """Damage of the shards, also in records that the split excludes; records are counted with those."""
        return self._shards.find_damage()


def open_split(place: DataPath, split: str = "") -> EnergonRecords:
    """The records of a split of a prepared folder, such as "val"; "": of "train", or of all shards if there is no such
    split. A metadataset may name one data set only. Raises UserError as `EnergonRecords.open` does."""
    if place.path.is_file():
        parts = read_metadataset(place, split or DEFAULT_SPLIT)
        if len(parts) > 1:
            blended = list_some([name for name, _, _ in parts], 5)
            raise place.error(
                f"blends {len(parts)} data sets: {blended}", remedy="name one of them, or blend them here"
            )
        inner, _, split = parts[0]
        return open_split(DataPath(place.key, inner), split)
    prepared = _read_prepared(place)
    names = _list_shards(place, prepared, split)
    files = []
    for name in names:
        try:
            files.append(describe_file(place.path, name))
        except OSError as error:
            raise place.error(f"names a shard that cannot be read: {name}: {error.strerror}") from error
    shards = WebDatasetRecords.open_shards(place, place.path, files, lowers_fields=False)
    for name, found in zip(names, shards.shard_lengths, strict=True):
        if found != prepared.counts[name]:
            what = f"has {found} records in {name}, and {prepared.counts[name]} were there when it was prepared"
            raise place.error(what, remedy=_PREPARE)
    records = EnergonRecords(shards, [name for name in prepared.excluded if name.rpartition("/")[0]])
    if not len(records):
        raise place.error("has no record that its split does not exclude")
    return records


# --- .nv-meta


@dataclass(frozen=True)
class _Prepared:
    """What `.nv-meta` says: the number of records of each shard, the shards of each split, and what is excluded (shard,
    or shard/key)."""

    counts: Mapping[str, int]
    splits: Mapping[str, Sequence[str]]
    excluded: frozenset[str]


def _read_prepared(place: DataPath) -> _Prepared:
    info, name = _read_first(place, _INFO)
    counts = info.get("shard_counts") if isinstance(info, dict) else None
    if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()) or not counts:
        raise place.error(f"has no shards in {FOLDER}/{name}", allowed="shard_counts: shard: records", remedy=_PREPARE)
    splits, name = _read_first(place, _SPLITS, needed=False)
    if splits is None:
        return _Prepared(counts, {}, frozenset())
    parts: Any = splits.get("split_parts") if isinstance(splits, dict) else None
    excluded: Any = (splits.get("exclude") or []) if isinstance(splits, dict) else []
    lists = [*parts.values(), excluded] if isinstance(parts, dict) else [None]
    if not all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in lists):
        allowed = "split_parts: split: [shards], and exclude: [shards]"
        raise place.error(f"has no lists of shards in {FOLDER}/{name}", allowed=allowed, remedy=_PREPARE)
    return _Prepared(counts, parts, frozenset(_expand(excluded)))


def _list_shards(place: DataPath, prepared: _Prepared, split: str) -> list[str]:
    if split and split not in prepared.splits:
        raise place.error(f'has no split "{split}"', allowed=", ".join(prepared.splits) or "no split at all")
    chosen = split or DEFAULT_SPLIT
    listed = _expand(prepared.splits[chosen]) if chosen in prepared.splits else list(prepared.counts)
    names = [name for name in listed if name not in prepared.excluded]
    if not names:
        raise place.error(f'has no shard in its split "{chosen}"', allowed="a split with shards", remedy=_PREPARE)
    if unknown := [name for name in names if name not in prepared.counts]:
        what = f'has shards in its split "{chosen}" that were not prepared: {list_some(unknown, 5)}'
        raise place.error(what, remedy=_PREPARE)
    return names


def _expand(patterns: Sequence[str]) -> list[str]:
    return [name for pattern in patterns for name in expand_braces(pattern)]


def _read_first(place: DataPath, names: Sequence[str], needed: bool = True) -> tuple[Any, str]:
    """The content of the first file of these in .nv-meta that exists, and its name."""
    for name in names:
        if (place.path / FOLDER / name).is_file():
            return _parse(place, place.path / FOLDER / name, f"{FOLDER}/{name}"), name
    if needed:
        what = f"has no {FOLDER}/{names[0]}" if place.path.exists() else "does not exist"
        raise place.error(what, allowed="a folder that Energon has prepared", remedy=f"energon prepare {place.text}")
    return None, names[0]


def _parse(place: DataPath, path: Path, shown: str) -> Any:
    """A YAML or JSON file. Raises UserError with the line that cannot be read."""
    try:
        content = path.read_bytes()
        if path.name.endswith(".json"):
            return json.loads(content)
        yaml = need_library("yaml", place, "Energon")
        return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise place.error(f"cannot be read: {shown}: {error.strerror}") from error
    except UserError:
        raise
    except Exception as error:  # of the parsers: not UTF-8, or no such syntax
        raise place.error(f"has a file that cannot be read, {shown}: {' '.join(str(error).split())}") from error


# --- metadatasets


@dataclass(frozen=True)
class _Leaf:
    """A data set of a metadataset. `weight` is a share of 1, or how often its records come in an epoch if
    `repeats`; None: neither was said."""

    path: str
    split: str
    weight: float | None = None
    repeats: bool = False


def read_metadataset(place: DataPath, split: str) -> list[tuple[str, float, str]]:
    """The data sets that a metadataset blends in a split: (path, weight, split of that data set), with metadatasets in
    it replaced by theirs; the weights are shares of the samples, and their sum is 1.

    The weight of a data set in `blend_epochized` is its repetitions times its number of records. Paths are those of the
    file, which count from its folder. Raises UserError for a file that cannot be read, a split that it does not have,
    and what is not understood: join, subset, split_config, aux.
    """
    leaves = _read_splits(place, place.path, split, ())
    if any(leaf.repeats for leaf in leaves):
        sizes = [(leaf.weight or 0.0) * _count_records(place, leaf) for leaf in leaves]
    else:
        sizes = [1.0 if leaf.weight is None else leaf.weight for leaf in leaves]
    total = sum(sizes)
    if not total > 0:
        raise place.error(f'has no data set with a weight over 0 in its split "{split}"')
    return [(leaf.path, size / total, leaf.split) for leaf, size in zip(leaves, sizes, strict=True)]


def _read_splits(place: DataPath, path: Path, split: str, above: tuple[Path, ...]) -> list[_Leaf]:
    if path.resolve() in above:
        raise place.error(f"is a metadataset that contains itself: {path}")
    content = _parse(place, path, path.name)
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, dict):
        raise place.error(f"is no metadataset: {path.name} has no splits", allowed="a file with splits: train: ...")
    kind = str(content.get("__class__", "Metadataset"))
    if kind not in ("Metadataset", "MetadatasetV2"):
        raise place.error(f'is of the class "{kind}" ({path.name})', allowed="Metadataset, MetadatasetV2")
    if split not in splits:
        raise place.error(f'has no split "{split}" in {path.name}', allowed=", ".join(str(each) for each in splits))
    return _read_node(place, path, split, splits[split], (*above, path.resolve()))


def _read_node(place: DataPath, file: Path, split: str, node: Any, above: tuple[Path, ...]) -> list[_Leaf]:
    """The data sets of a split or of an entry of a blend."""
    if not isinstance(node, dict):
        raise place.error(f'has an entry in its split "{split}" of {file.name} that is no mapping')
    for key, does in _NOT_READ.items():
        if node.get(key) is not None:
            raise place.error(
                f'{does} in its split "{split}" of {file.name}, which is not read', allowed="path, blend, weight"
            )
    for key, by, default in (
        ("blend", "weight", 1.0),
        ("datasets", "weight", 1.0),
        ("blend_epochized", "repetitions", 1),
    ):
        if key in node:
            entries = node[key]
            if not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
                raise place.error(f"has no data sets below {key} in {file.name}")
            weights = [_read_weight(place, file, entry.get(by, default), by) for entry in entries]
            inner = [_read_node(place, file, split, entry, above) for entry in entries]
            return _blend(place, file, inner, weights, key == "blend_epochized")
    if not isinstance(node.get("path"), str):
        raise place.error(f'has an entry in its split "{split}" of {file.name} without a path')
    own = str(node.get("split_part") or split)
    text = node["path"] if "://" in node["path"] else str(file.parent / node["path"])
    if "://" not in text and text.lower().endswith(_SUFFIXES):
        return _read_splits(place, Path(text), own, above)
    return [_Leaf(text, own)]


def _blend(
    place: DataPath, file: Path, inner: Sequence[Sequence[_Leaf]], weights: Sequence[float], repeats: bool
) -> list[_Leaf]:
    total = 1.0 if repeats else sum(weights)
    if not total > 0:
        raise place.error(f"has weights in {file.name} whose sum is 0", allowed="a weight over 0")
    found = []
    for leaves, weight in zip(inner, weights, strict=True):
        for leaf in leaves:
            if leaf.weight is not None and leaf.repeats != repeats:
                raise place.error(f"mixes blend and blend_epochized in {file.name}", allowed="one of the two")
            share = (1.0 if leaf.weight is None else leaf.weight) * weight / total
            found.append(_Leaf(leaf.path, leaf.split, share, repeats))
    return found


def _read_weight(place: DataPath, file: Path, value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise place.error(f"has {name} = {value} in {file.name}", allowed="a number of 0 or more")
    return float(value)


def _count_records(place: DataPath, leaf: _Leaf) -> int:
    """How many records Energon has counted in the split of a data set."""
    if not Path(leaf.path).is_dir():
        what = f"repeats {leaf.path}, whose number of records is not known"
        raise place.error(what, allowed="folders that Energon has prepared", remedy="use blend with weights")
    inner = DataPath(place.key, leaf.path)
    prepared = _read_prepared(inner)
    return sum(prepared.counts[name] for name in _list_shards(inner, prepared, leaf.split))
