"""Folders that agents had for their pages and gates, and that are left although their agents are gone."""

from __future__ import annotations

from pathlib import Path

from shardway.ranks.heartbeat import FolderKind, find_memory
from shardway.rundir.lease import take_left_folder


def list_left_folders(kind: FolderKind, since: float) -> list[Path]:
    """Those that are younger than this (Unix seconds), and that nobody holds."""
    return [path for path in find_memory().glob(f"{kind.prefix}*") if path.stat().st_mtime >= since and _is_left(path)]


def _is_left(folder: Path) -> bool:
    try:
        with take_left_folder(folder):
            return True
    except OSError:
        return False
