"""`~` and `$VARIABLES` of a path, filled in with the values of the host that the path is on.

Invariant: nothing of a path is ever run: `$(...)`, backquotes and globs stay the characters that they are. This
module must not ask a host.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from shardway.errors import UserError

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)


def list_variables(path: str) -> list[str]:
    """Names of the variables in a path, HOME for a leading `~`."""
    names = [match[1] or match[2] for match in _VARIABLE.finditer(path)]
    return list(dict.fromkeys((["HOME"] if path == "~" or path.startswith("~/") else []) + names))


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
    whole = _VARIABLE.sub(lambda match: values[match[1] or match[2]], path)
    # POSIX keeps two leading slashes; nobody means them.
    return PurePosixPath("/" + posixpath.normpath(posixpath.join(base, whole)).lstrip("/"))
