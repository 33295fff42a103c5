"""Where the person's own files are: the home folder, and the folders of the XDG Base Directory Specification.

An account may have no home: HOME is not set (or no whole path) and the system does not know the account, as in a
container that runs under a bare number. What is kept in a home is then not there, and work goes on without it.

Invariant: nothing here raises, and nothing is made. This module must not know what is kept in a folder.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Literal

_BELOW_HOME = {"CACHE": ".cache", "CONFIG": ".config", "STATE": ".local/state"}


def find_home() -> Path | None:
    """$HOME, or what the system says of this account; None where neither is a whole path."""
    home = os.environ.get("HOME") or _look_up_home()
    return Path(home) if os.path.isabs(home) else None


def _look_up_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def find_own_folder(kind: Literal["CACHE", "CONFIG", "STATE"]) -> Path | None:
    """Shardway's part of $XDG_<kind>_HOME or of its default below the home; None for an account without a home."""
    base, home = Path(os.environ.get(f"XDG_{kind}_HOME", "")), find_home()
    if base.is_absolute():  # the specification says to ignore a relative one
        return base / "shardway"
    return home / _BELOW_HOME[kind] / "shardway" if home else None


def expand_home(path: str | Path) -> Path:
    """A path whose `~` or `~name` is filled in; one of which the system knows no home stays as it is."""
    text = str(path)
    if text == "~" or text.startswith("~/"):
        home = find_home()
        return Path(f"{home}{text[1:]}") if home else Path(text)
    return Path(os.path.expanduser(text))


def folder_is_gone() -> bool:
    """Whether the current folder of this process was removed, so that no relative path leads anywhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    except OSError:  # a folder above may not be read: relative paths still lead somewhere
        return False
    return False
