"""Files of a folder by the names that Hugging Face gives them: shards `name-00000-of-00004`, and the splits train,
validation and test.

Invariant: a folder is refused where a guess would train on the test set, or on a part of the shards. This module reads
names only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from shardway.data.content import DataPath
from shardway.data.formats.base import DataFile, list_files
from shardway.errors import list_some
from shardway.units import render_plural

_SHARD = re.compile(r"(.*?)-(\d{5,})-of-(\d{5,})\b")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""https://huggingface.co/docs/hub/datasets-file-names-and-splits: the words count where no letter or digit adjoins."""

NAMES_LOOKED_AT = 4096
"""A folder is judged by so many names at most: a folder of a million images takes no longer than another."""


def has_file(path: Path, matches: Callable[[str], bool]) -> bool:
    """Whether a path is a file with such a name, a folder with one, or a pattern that gives one."""
    if path.is_dir():
        looked_at = 0
        for _, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if any(matches(name) for name in names if not name.startswith(".")):
                return True
            looked_at += len(names) + len(folders)
            if looked_at > NAMES_LOOKED_AT:
                return False
        return False
    return matches(path.name) and (path.is_file() or any(sign in path.name for sign in "*?[{"))


def list_whole(place: DataPath, matches: Callable[[str], bool], what: str) -> tuple[Path, list[DataFile]]:
    """`list_files`, refused where shards are missing, and for a folder that holds more than one split."""
    root, files = list_files(place, matches, what)
    path = place.path
    names = [file.name for file in files]
    if path.is_dir():
        _refuse_several_splits(place, names)
    if not path.is_file() and "-of-" not in path.name:  # a pattern with it picks shards on purpose
        _refuse_missing_shards(place, names)
    return root, files


def _refuse_missing_shards(place: DataPath, names: Sequence[str]) -> None:
    there: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if (match := _SHARD.match(name)) is not None:
            there.setdefault((match[1], match[3], name[match.end() :]), set()).add(int(match[2]))
    for (before, count, after), numbers in there.items():
        width = len(count)
        missing = [number for number in range(int(count)) if number not in numbers]
        if missing:
            files = [f"{before}-{number:0{width}d}-of-{count}{after}" for number in missing]
            raise place.error(
                f"lacks {len(missing)} of {int(count)} files: {list_some(files, 3)}",
                remedy=f'copy them, or name the files to take, such as "{before}-*-of-{count}{after}"',
            )


def _refuse_several_splits(place: DataPath, names: Sequence[str]) -> None:
    by_split = {split: [name for name in names if find_split(name) == split] for split in _SPLITS}
    found = {split: files for split, files in by_split.items() if files}
    if len(found) > 1:
        listed = ", ".join(f"{split} ({_count(files)}, such as {files[0]})" for split, files in found.items())
        raise place.error(
            f"holds more than one split: {listed}",
            allowed="one split",
            remedy=f'name the files of one, such as "{_suggest(place, next(iter(found.values()))[0])}"',
        )


def find_split(name: str) -> str:
    """The split that a name stands for, by the words in it; "" for none or several."""
    words = {word for word in re.split(r"[^a-z0-9]+", name.lower()) if word}
    found = [split for split, known in _SPLITS.items() if words.intersection(known)]
    return found[0] if len(found) == 1 else ""


def _suggest(place: DataPath, name: str) -> str:
    """A pattern that gives a file and the other shards of its set."""
    return os.path.join(place.text, _SHARD.sub(r"\1-*", name))


def _count(files: Sequence[str]) -> str:
    return render_plural(len(files), "file")
