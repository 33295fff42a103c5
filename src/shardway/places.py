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

LENT = "SHARDWAY_LENT_CACHE"
"""The folder that a job in a container lends, which lasts longer than the container; made where it is used."""

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


def find_own_folder(kind: Literal["CACHE", "CONFIG", "STATE"], root: Path = Path("/")) -> Path | None:
    """Shardway's part of $XDG_<kind>_HOME or of its default below the home; None for an account without a home.

    In a container the cache is the one that its job lends (LENT), unless that of the user was brought in: what is on
    the file system of the container's root ends with it. A container whose root lies on the same file system as the
    home that was brought in cannot be told from that, and uses the lent one.
    """
    own, lent = _find_by_rule(kind), os.environ.get(LENT, "") if kind == "CACHE" else ""
    return Path(lent) / "shardway" if lent and (own is None or not _is_kept(own, root)) else own


def _is_kept(folder: Path, root: Path) -> bool:
    """Whether the user may write to a folder, or to where it would be made, and it is not part of the root."""
    there = next(above for above in (folder, *folder.parents) if os.path.exists(above))
    return os.access(there, os.W_OK) and there.stat().st_dev != root.stat().st_dev


def _find_by_rule(kind: str) -> Path | None:
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
