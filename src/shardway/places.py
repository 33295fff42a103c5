"""Where the person's own files are: the home folder, the folders of the XDG Base Directory Specification, and paths
that are written with `~` or `$VARIABLES`.

An account may have no home: HOME is not set (or no whole path) and the system does not know the account, as in a
container that runs under a bare number. What is kept in a home is then not there, and work goes on without it.

Invariant: nothing here raises, and nothing is made. This module must not know what is kept in a folder.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

LENT = "SHARDWAY_LENT_CACHE"
"""The folder that a job in a container lends, which lasts longer than the container; made where it is used."""

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
"""`$NAME` or `${NAME}`, as a shell has it; any other `$` is a character of a name."""

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
    there = next((above for above in (folder, *folder.parents) if os.path.exists(above)), root)
    try:
        return os.access(there, os.W_OK) and there.stat().st_dev != root.stat().st_dev
    except OSError:  # it went away meanwhile, or its server did
        return False


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


def expand_place(path: str | Path) -> Path:
    """A path of a run file, whose `~` and `$VARIABLES` are filled in; what is not set stays as it is.

    A folder that is there under the very name, `$` and all, is meant by it.
    """
    text = str(path)
    if list_variables(text) and is_there_as_written(text):
        return Path(text)
    return expand_home(_VARIABLE.sub(lambda match: _value_of(match) or match[0], text))


def list_unset(path: str | Path) -> list[str]:
    """Names of the variables that `expand_place` cannot fill in."""
    text = str(path)
    if is_there_as_written(text):
        return []
    return list(dict.fromkeys(_name_of(match) for match in _VARIABLE.finditer(text) if not _value_of(match)))


def list_variables(path: str) -> list[str]:
    """Names of the variables in a path, each once."""
    return list(dict.fromkeys(map(_name_of, _VARIABLE.finditer(path))))


def fill_variables(path: str, values: Mapping[str, str]) -> str:
    """A path whose variables have these values."""
    return _VARIABLE.sub(lambda match: values[_name_of(match)], path)


def _name_of(match: re.Match[str]) -> str:
    return match[1] or match[2]


def _value_of(match: re.Match[str]) -> str:
    name = _name_of(match)
    return str(find_home() or "") if name == "HOME" else os.environ.get(name, "")


def is_there_as_written(path: str) -> bool:
    """Whether the folder is there whose name holds the last `$` of a path."""
    before, dollar, after = path.rpartition("$")
    return bool(dollar) and os.path.lexists(before + dollar + after.partition("/")[0])


def folder_is_gone() -> bool:
    """Whether the current folder of this process was removed, so that no relative path leads anywhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    except OSError:  # a folder above may not be read: relative paths still lead somewhere
        return False
    return False
