"""Writes a profile into the user's own folder.

Invariant: a file that is there is never written over, and a new one appears whole. This module must not know what a
profile says.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardway.errors import UserError
from shardway.rundir.atomic import write_new
from shardway.sites.find import list_shipped, own_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def keep_profile(name: str, text: str) -> Path:
    """Write a profile as NAME.toml and return its path.

    Raises UserError for a name that is no file's or that of a shipped profile, for a file that is there, and where the
    folder cannot be written.
    """
    path = find_place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = write_new(path, text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot write {path}: {reason}\n  to do: write the profile elsewhere: without --write"
        ) from error
    if not is_new:
        raise _refuse(path)
    return path


def find_place(name: str) -> Path:
    """Where a new profile of that name belongs. Raises UserError as `keep_profile` does, before any work is done."""
    if not _NAME.fullmatch(name) or name.endswith(".toml"):
        raise UserError(
            f'"{name}" is no name of a site\n'
            "  allowed: letters, digits, - _ and ., without .toml\n"
            "  to do: choose another"
        )
    if name in list_shipped():
        raise UserError(
            f'"{name}" is the name of a shipped profile\n'
            f'  to do: choose another name, or write a profile by hand that says extends = "{name}"'
        )
    folder = own_folder()
    if folder is None:
        raise UserError(
            "this account has no home folder for profiles\n  to do: set XDG_CONFIG_HOME, or leave out --write"
        )
    path = folder / f"{name}.toml"
    if os.path.lexists(path):
        raise _refuse(path)
    return path


def _refuse(path: Path) -> UserError:
    return UserError(
        f"{path} is there and is not written over\n  to do: choose another name, or move the file away first"
    )
