"""Folders that belong to the user on this machine.

Invariant: nothing is made here. This module must not know what is kept in them.
"""

from __future__ import annotations

import os
from pathlib import Path


def find_cache_folder() -> Path | None:
    """$XDG_CACHE_HOME, or ~/.cache (XDG Base Directory Specification); None for an account without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the specification says to ignore a relative one
        return base
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None
