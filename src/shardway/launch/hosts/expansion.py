"""`~` and `$VARIABLES` of a path, filled in with the values of the host that the path is on.

Invariant: nothing of a path is ever run: `$(...)`, backquotes and globs stay the characters that they are. This
module must not ask a host.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import PurePosixPath

from shardway import places
from shardway.errors import UserError


def list_variables(path: str) -> list[str]:
    """Names of the variables in a path, HOME for a leading `~`."""
    home = ["HOME"] if path == "~" or path.startswith("~/") else []
    return list(dict.fromkeys([*home, *places.list_variables(path)]))


def fill_in(path: str, values: Mapping[str, str], base: str, host: str) -> PurePosixPath:
    """The absolute path; a relative one is below `base`.

    Raises UserError for a variable that the host does not set, and for `~other`, whose folder nobody could check.
    """
    if path == "~" or path.startswith("~/"):
        path = "${HOME}" + path[1:]
    elif path.startswith("~"):
        raise UserError(f"the path {path}: only your own `~` is known.\n  To do: write that folder out.")
    missing = [name for name in list_variables(path) if not values.get(name)]
    if missing:
        where = host or "this machine"
        raise UserError(
            f"the path {path}: ${missing[0]} is not set on {where}.\n"
            "  To do: write the folder out, or set the variable there."
        )
    whole = places.fill_variables(path, values)
    # POSIX keeps two leading slashes; nobody means them.
    return PurePosixPath("/" + posixpath.normpath(posixpath.join(base, whole)).lstrip("/"))
