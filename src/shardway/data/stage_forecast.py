"""What data.stage will copy to each node, as far as it is known before a run is queued.

Invariants:
- Sizes come from the files' entries in their folders: nothing is prepared or indexed. Of files that are here a little
  is read, to know how long the copy takes; whatever goes wrong with that leaves the time unknown.
- NumPy is imported only to count: a submission without staging is not slower for it.
- What cannot be known from here is reported as such: sizes of data on another host, or of text that is prepared
  first; the room on a disk of another machine.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardway.data.kinds import MANIFEST
from shardway.data.read_rate import THREADS, measure_read_rate
from shardway.errors import UserError
from shardway.hardware.mounts import find_mount, read_mounts
from shardway.installed import is_installed
from shardway.places import expand_place, list_unset
from shardway.plugins import load_plugin
from shardway.runfile.schema import RunFile
from shardway.units import format_bytes

MOST_FILES = 100_000
"""Data of more files are not counted: that takes long on a file system that is busy."""

_AS_THEY_ARE = ("tokens", "megatron")
"""Kinds whose files are read as they are for a model of tokens; others are prepared into token files first."""


@dataclass(frozen=True)
class StagingForecast:
    """What a run copies to each node before its first step; None is unknown.

    `condition`: under which it does, "" for none. `read_rate`: bytes a second from where the data lie; `why_no_rate`:
    why that is unknown. `room_bytes`: what can be had on the disk.
    """

    folder: str
    bytes: int | None
    room_bytes: int | None
    read_rate: float | None
    why_no_rate: str
    condition: str = ""
    by_windows: bool = False
    """Whether data that do not fit are staged while the run trains."""

    @property
    def seconds(self) -> float | None:
        """How long a node reads the data."""
        return None if self.bytes is None or self.read_rate is None else self.bytes / self.read_rate

    def __str__(self) -> str:
        copied = (
            "data of a size that is not known here" if self.bytes is None else f"{format_bytes(self.bytes)} of data"
        )
        room = "n/a"
        if self.room_bytes is not None:
            too_little = ", too little: window by window" if self.by_windows else ", too little"
            fits = "" if self.bytes is None else ", enough" if self.room_bytes >= self.bytes else too_little
            room = f"{format_bytes(self.room_bytes)}{fits}"
        time = f"n/a: {self.why_no_rate}"
        if self.seconds is not None and self.read_rate is not None:
            time = (
                f"about {_round(self.seconds)} at {_render_rate(self.read_rate)}, as {socket.gethostname()} reads "
                "these data now"
            )
        return (
            f"data.stage copies {copied} to {self.folder} of each node before the first step{self.condition} "
            f"(room there: {room}; time: {time})"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "folder": self.folder,
            "bytes": self.bytes,
            "room_bytes": self.room_bytes,
            "bytes_per_second": self.read_rate,
            "seconds": self.seconds,
            "why_no_time": self.why_no_rate,
        }


def forecast_staging(
    values: RunFile, ranks_per_node: int, *, takes_tokens: bool, chosen: bool, data_here: bool, disk_here: bool
) -> StagingForecast | None:
    """What a resolved run copies to each node before its first step; None if nothing.

    `chosen`: the user has named the folder, else the site's profile. `data_here`, `disk_here`: whether the data, and
    the disk, are those of this machine. Takes less than about a second more than listing the files.
    """
    section = values.data
    paths = [(part.kind or section.kind, part.path) for part in section.blend] or [(section.kind, section.path)]
    paths += [(section.kind, section.validation)] if section.validation else []
    if section.stage == "off" or not all(load_plugin("data_sources", kind).reads_files() for kind, _ in paths):
        return None
    if data_here and not chosen and not _are_shared([path for _, path in paths]):
        return None
    counts = is_installed("numpy")  # a login node may lack it
    files = _list_files(paths, takes_tokens=takes_tokens) if data_here and counts else None
    needed = None if files is None else sum(size for _, size in files)
    shared = "" if data_here else "lie on a file system that nodes share and "
    condition = "" if chosen else f", if they {shared}fit there"
    room = None
    if disk_here and counts and not list_unset(section.stage):
        from shardway.data.stage import StageFolder

        room = StageFolder.below(expand_place(section.stage)).find_room()
    rate, why = None, "the data are not on this machine" if not data_here else "their size is not known here"
    if data_here and not counts:
        why = "numpy, which counts them, is not installed here"
    if files is not None:
        try:
            rate, why = measure_read_rate(files, threads=min(THREADS, ranks_per_node)), ""
        except OSError as error:
            at = f"{error.filename}: " if error.filename else ""
            why = f"{at}{error.strerror or error}"
    return StagingForecast(section.stage, needed, room, rate, why, condition, section.shuffle == "windows")


def _round(seconds: float) -> str:
    """A time that is an estimate: "1 s", "4 min", "2.5 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _render_rate(rate: float) -> str:
    """Bytes a second with two figures: "1.2 GB/s", "85 MB/s"."""
    unit, size = next(
        each for each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if rate >= each[1] or each[1] == 1
    )
    return f"{float(f'{rate / size:.2g}'):g} {unit}/s"


def _are_shared(paths: list[str]) -> bool:
    """Whether all paths are on file systems that machines share."""
    mounts = read_mounts()
    places = [find_mount(os.path.abspath(expand_place(path)), mounts) for path in paths]
    return all(place is not None and place.shared for place in places)


def _list_files(paths: list[tuple[str, str]], *, takes_tokens: bool) -> list[tuple[Path, int]] | None:
    """All files at these paths with their bytes, but the indexes kept beside them; None if they are not there, too
    many, or prepared into others."""
    from shardway.data.content import DataPath
    from shardway.data.formats.base import list_files
    from shardway.data.formats.indexes import FOLDER

    found: list[tuple[Path, int]] = []
    for kind, text in dict.fromkeys(paths):
        path = expand_place(text)
        if takes_tokens and kind not in _AS_THEY_ARE and not (path / MANIFEST).is_file():
            return None
        try:
            if path.is_dir():
                for folder, folders, names in os.walk(path):
                    folders[:] = [each for each in folders if each != FOLDER]
                    if len(found) + len(names) > MOST_FILES:
                        return None
                    found += [(each, each.stat().st_size) for each in (Path(folder) / name for name in names)]
                continue
            name = str(path.with_name(f"{path.name}.bin")) if kind == "megatron" and not path.exists() else str(path)
            root, files = list_files(DataPath("data.path", name), lambda name: True, "files")
            found += [(root / file.name, file.size) for file in files]
        except (OSError, UserError):
            return None
    return found
