"""What data.stage will copy to each node, as far as it is known before a run is queued.

Invariants:
- Sizes come from the files' entries in their folders: nothing is opened, prepared or indexed.
- NumPy is imported only to count: a submission without staging is not slower for it.
- What cannot be known from here is reported as such: sizes of data on another host, or of text that is prepared
  first; the room on a disk of another machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardway.data.kinds import MANIFEST
from shardway.errors import UserError
from shardway.hardware.mounts import find_mount, read_mounts
from shardway.places import expand_place, list_unset
from shardway.plugins import load_plugin
from shardway.runfile.schema import RunFile
from shardway.units import format_bytes

MOST_FILES = 100_000
"""Data of more files are not counted: that takes long on a file system that is busy."""

_AS_THEY_ARE = ("tokens", "megatron")
"""Kinds whose files are read as they are for a model of tokens; others are prepared into token files first."""


def describe_staging(values: RunFile, *, takes_tokens: bool, chosen: bool, data_here: bool, disk_here: bool) -> str:
    """A sentence on what a resolved run copies to each node before its first step; "" if nothing.

    `chosen`: the user has named the folder, else the site's profile. `data_here`, `disk_here`: whether the data, and
    the disk, are those of this machine.
    """
    section = values.data
    paths = [(part.kind or section.kind, part.path) for part in section.blend] or [(section.kind, section.path)]
    paths += [(section.kind, section.validation)] if section.validation else []
    if section.stage == "off" or not all(load_plugin("data_sources", kind).reads_files() for kind, _ in paths):
        return ""
    if data_here and not chosen and not _are_shared([path for _, path in paths]):
        return ""
    needed = _count_bytes(paths, takes_tokens=takes_tokens) if data_here else None
    copied = "data of a size that is not known here" if needed is None else f"{format_bytes(needed)} of data"
    shared = "" if data_here else "lie on a file system that nodes share and "
    unless = "" if chosen else f", if they {shared}fit there"
    folder, room = expand_place(section.stage), "n/a"
    if disk_here and not list_unset(section.stage):
        from shardway.data.stage import StageFolder

        free = StageFolder.below(folder).find_room()
        fits = "" if needed is None else ", enough" if free >= needed else ", too little"
        room = f"{format_bytes(free)}{fits}"
    return (
        f"data.stage copies {copied} to {section.stage} of each node before the first step{unless} "
        f"(room there: {room}; time: n/a)"
    )


def _are_shared(paths: list[str]) -> bool:
    """Whether all paths are on file systems that machines share."""
    mounts = read_mounts()
    places = [find_mount(os.path.abspath(expand_place(path)), mounts) for path in paths]
    return all(place is not None and place.shared for place in places)


def _count_bytes(paths: list[tuple[str, str]], *, takes_tokens: bool) -> int | None:
    """Bytes of all files at these paths; None if they are not there, too many, or prepared into others first."""
    from shardway.data.content import DataPath
    from shardway.data.formats.base import list_files

    total, files = 0, 0
    for kind, text in dict.fromkeys(paths):
        path = expand_place(text)
        if takes_tokens and kind not in _AS_THEY_ARE and not (path / MANIFEST).is_file():
            return None
        try:
            if path.is_dir():
                for folder, _, names in os.walk(path):
                    files += len(names)
                    if files > MOST_FILES:
                        return None
                    total += sum((Path(folder) / name).stat().st_size for name in names)
                continue
            name = str(path.with_name(f"{path.name}.bin")) if kind == "megatron" and not path.exists() else str(path)
            total += sum(file.size for file in list_files(DataPath("data.path", name), lambda name: True, "files")[1])
        except (OSError, UserError):
            return None
    return total
