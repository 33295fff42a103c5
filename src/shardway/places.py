"""The user's own folders: the home, those of the XDG Base Directory Specification, and paths with `~` or `$VARIABLES`.

An account may have no home: HOME is unset or not absolute and the system has no entry for the account, as in a
container that runs under a bare user id. Whatever is kept in a home is then absent, and work goes on without it.

Invariant: nothing here raises or creates anything, and no content of a folder is assumed.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

LENT = "SHARDWAY_LENT_CACHE"
"""The folder that a job lends to its container; it outlives the container and is created on use."""

_VARIABLE = re.compile(r"\$(\{)?(?P<name>[A-Za-z_]\w*)(?(1)\})", re.ASCII)
"""`$NAME` or `${NAME}`, as in a shell; any other `$` is a plain character."""

_BELOW_HOME = {"CACHE": ".cache", "CONFIG": ".config", "STATE": ".local/state"}


def find_home() -> Path | None:
    """$HOME, or the system's entry for this account; None if neither is an absolute path."""
    home = os.environ.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(home) if os.path.isabs(home) else None


def find_own_folder(kind: Literal["CACHE", "CONFIG", "STATE"], root: Path = Path("/")) -> Path | None:
    """Shardway's part of $XDG_<kind>_HOME or of its default below the home; None for an account without a home.

    In a container the cache is the one that the job lends (LENT), unless the user's own is mounted: files on the
    container's root file system are lost with it. If the root lies on the same file system as the mounted home, the two
    look alike and the lent one is used.
    """
    base, home = Path(os.environ.get(f"XDG_{kind}_HOME", "")), find_home()
    own = home / _BELOW_HOME[kind] / "shardway" if home else None
    if base.is_absolute():  # the specification ignores a relative one
        own = base / "shardway"
    lent = os.environ.get(LENT, "") if kind == "CACHE" else ""
    return Path(lent) / "shardway" if lent and (own is None or not _is_kept(own, root)) else own


def _is_kept(folder: Path, root: Path) -> bool:
    """Whether a folder (or the place where it would be created) is writable for the user and outside the root."""
    there = next((above for above in (folder, *folder.parents) if os.path.exists(above)), root)
    try:
        return os.access(there, os.W_OK) and there.stat().st_dev != root.stat().st_dev
    except OSError:  # it or its server has gone away
        return False


def expand_home(path: str | Path) -> Path:
    """A path with `~` or `~name` filled in; unchanged if the system has no such home."""
    text = str(path)
    if text == "~" or text.startswith("~/"):
        home = find_home()
        return Path(f"{home}{text[1:]}") if home else Path(text)
    return Path(os.path.expanduser(text))


def expand_place(path: str | Path) -> Path:
    """A path of a run file with `~` and `$VARIABLES` filled in; unset variables stay as they are.

    If a folder of the literal name exists, `$` included, the path means that folder.
    """
    text = str(path)
    if list_variables(text) and is_there_as_written(text):
        return Path(text)
    return expand_home(_VARIABLE.sub(lambda match: _value_of(match["name"]) or match[0], text))


def list_unset(path: str | Path) -> list[str]:
    """Names of the variables that `expand_place` cannot fill in."""
    text = str(path)
    return [] if is_there_as_written(text) else [name for name in list_variables(text) if not _value_of(name)]


def list_variables(path: str) -> list[str]:
    """Names of the variables in a path, each once."""
    return list(dict.fromkeys(match["name"] for match in _VARIABLE.finditer(path)))


def fill_variables(path: str, values: Mapping[str, str]) -> str:
    """A path with its variables replaced by these values."""
    return _VARIABLE.sub(lambda match: values[match["name"]], path)


def _value_of(name: str) -> str:
    return str(find_home() or "") if name == "HOME" else os.environ.get(name, "")


def is_there_as_written(path: str) -> bool:
    """Whether a folder exists whose name has the last `$` of a path."""
    before, dollar, after = path.rpartition("$")
    return bool(dollar) and os.path.lexists(before + dollar + after.partition("/")[0])


def folder_is_gone() -> bool:
    """Whether the current folder of this process was removed, so that relative paths lead nowhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    except OSError:  # a parent folder may be unreadable: relative paths still work
        return False
    return False
