"""The files of a project that is in no git repository: what looks written by people, up to where data begins.

Invariant: a folder with more entries than the limit is not walked. This module must not copy.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from shardway.launch.snapshot.listing import Listing, Outside
from shardway.launch.snapshot.names import is_cache, is_secret, is_source
from shardway.launch.snapshot.values import ExcludedPath, SnapshotLimits

_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
_INSTALLED = frozenset(("node_modules", "site-packages"))


@dataclass
class _WalkResult:
    """What a walk collects."""

    files: list[str] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    left_out: list[ExcludedPath] = field(default_factory=list)


def list_folder(root: Path, limits: SnapshotLimits) -> Listing:
    """Source-like files; folders without any, environments and other files stay outside; hidden ones are left out."""
    found = _walk(str(root), "", limits.entries)
    if isinstance(found, str):
        return Listing((), notes=(f"{root} {found}: none of it is copied.",))
    return Listing(tuple(found.files), tuple(found.outside), tuple(found.left_out))


def _walk(root: str, below: str, most: int) -> _WalkResult | str:
    """What is in a folder, or why it is to be taken as one thing."""
    try:
        with os.scandir(os.path.join(root, below)) as scan:
            entries = sorted(itertools.islice(scan, most + 1), key=lambda entry: entry.name)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(entries) > most:
        return f"holds more than {most} entries"
    names = {entry.name for entry in entries}
    if names.intersection(_ENVIRONMENT_MARKS):
        return "is an environment"
    found = _WalkResult()
    for entry in entries:
        _sort(root, below, entry, most, found)
    return found


def _sort(root: str, below: str, entry: os.DirEntry[str], most: int, found: _WalkResult) -> None:
    path = f"{below}/{entry.name}" if below else entry.name
    if is_cache(entry.name):
        return
    if entry.is_dir(follow_symlinks=False):
        _sort_folder(root, path, most, found)
    elif is_secret(entry.name):
        found.files.append(path)  # whoever looks at each file tells why it is left out
    elif entry.name.startswith("."):
        found.left_out.append(ExcludedPath(path, "hidden"))
    elif is_source(entry.name) or entry.is_symlink():
        found.files.append(path)
    else:
        found.outside.append(Outside(path, "not source code"))


def _sort_folder(root: str, path: str, most: int, found: _WalkResult) -> None:
    name = path.rpartition("/")[2]
    inner = "holds installed packages" if name in _INSTALLED else _walk(root, path, most)
    hidden = name.startswith(".")
    if isinstance(inner, str):
        found.outside.append(Outside(path, f"folder that {inner}"))
    elif hidden:
        found.left_out.append(ExcludedPath(path, "hidden"))
    elif not inner.files:
        found.outside.append(Outside(path, "folder without source code"))
    else:
        found.files += inner.files
        found.outside += inner.outside
        found.left_out += inner.left_out
