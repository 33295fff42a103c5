"""Imported by every Python that has this folder on its path; what its variables say happens to a rank.

SHARDWAY_TEST_HANG = RANK:STEP:FILE: it hangs once, as a library in C would make it. SHARDWAY_TEST_STALL =
RANK:BATCH:FILE: it waits for a batch of training that does not come. A FILE that is there already means that it has
been. SHARDWAY_TEST_SLOW = SECONDS: each batch of a validation takes so much longer.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


class _Changed(importlib.abc.MetaPathFinder):
    """Changes modules once they were imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_changed(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_changed  # type: ignore[method-assign]
        return spec


def _stall(batch: int, mark: Path) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        fetch = module.StepLoader.batches

        def batches(*arguments: Any, **named: Any) -> Any:
            for number, each in enumerate(fetch(*arguments, **named)):
                if number == batch and not mark.exists():
                    mark.touch()
                    time.sleep(3600)
                yield each

        module.StepLoader.batches = batches

    return change


def _slow(seconds: float) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        evaluate = module.Passes.evaluate

        def slowly(*arguments: Any) -> Any:
            time.sleep(seconds)
            return evaluate(*arguments)

        module.Passes.evaluate = slowly

    return change


_changes: dict[str, Callable[[Any], None]] = {}
_stalls = os.environ.get("SHARDWAY_TEST_STALL", "").split(":", 2)
if len(_stalls) == 3 and os.environ.get("RANK") == _stalls[0]:
    _changes["shardway.data.loader"] = _stall(int(_stalls[1]), Path(_stalls[2]))
if os.environ.get("SHARDWAY_TEST_SLOW"):
    _changes["shardway.train.passes"] = _slow(float(os.environ["SHARDWAY_TEST_SLOW"]))
if _changes:
    sys.meta_path.insert(0, _Changed(_changes))
