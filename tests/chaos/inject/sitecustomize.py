"""Imported by every Python that has this folder on its path: a rank hangs once, as a library in C would make it.

Set by SHARDWAY_TEST_HANG = RANK:STEP:FILE; a FILE that is there already means that it has been.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path


def _hang(folder: Path, rank: str, step: int, mark: Path) -> None:
    """Once this rank has done so many steps, take Python's lock and keep it."""
    from shardway.ranks.agent.page import page_path, read_page

    while (entry := read_page(page_path(folder, int(rank)))) is None or entry.step < step:
        time.sleep(0.002)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    library = ctypes.PyDLL(None)  # unlike CDLL, does not give the lock back
    while True:
        library.sleep(3600)


_wish = os.environ.get("SHARDWAY_TEST_HANG", "").split(":", 2)
_folder = os.environ.get("SHARDWAY_PROGRESS", "")
if len(_wish) == 3 and _folder and os.environ.get("RANK") == _wish[0]:
    threading.Thread(target=_hang, args=(Path(_folder), _wish[0], int(_wish[1]), Path(_wish[2])), daemon=True).start()
