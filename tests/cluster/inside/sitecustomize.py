"""What a test does to the ranks of a job: Python reads this file at its start where its folder is in PYTHONPATH.

    TEST_PAUSE_S=0.2              a pause in every step, so that a tiny run takes time but no processor
    TEST_FAULT=error:1:12         rank 1 fails in step 12 of the run: error, memory (takes all there is)
    TEST_MARKS=FOLDER             each rank writes a file there: its host, its system, a variable of a module

Invariant: without these variables nothing changes. This module must not import torch, which costs every process
seconds.
"""

from __future__ import annotations

import builtins
import os
import platform
import time
from pathlib import Path
from typing import Any

_BLOCK = 64 * 2**20
_import = builtins.__import__


def _pause_and_fail(run: type[Any]) -> None:
    plain, fault = run.step, os.environ.get("TEST_FAULT", "")
    kind, rank, at = fault.split(":") if fault else ("", "-1", "-1")

    def step(self: Any, *words: Any) -> float:
        time.sleep(float(os.environ.get("TEST_PAUSE_S", "0")))
        if self.rank == int(rank) and self._loop.moment().step == int(at):
            _fail(kind)
        return plain(self, *words)  # type: ignore[no-any-return]

    run.step = step


def _fail(kind: str) -> None:
    if kind == "error":
        raise RuntimeError("injected by the test")
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1)) * _BLOCK)


def _leave_mark(folder: Path, rank: int) -> None:
    told = platform.freedesktop_os_release()
    packages = os.environ.get("PYTHONPATH", "")
    module = os.environ.get("TEST_MODULE_Toolchain", "")
    system = Path("/usr/bin/sbatch").exists()
    (folder / str(rank)).write_text(f"{platform.node()}|{told['ID']}|{system}|{packages}|{module}")


def _patch_later(name: str, *words: Any, **named: Any) -> Any:
    """Import as ever, and change the class of runs once its module is there."""
    import sys

    found = _import(name, *words, **named)
    module = sys.modules.get("shardway.train.run")
    if module is not None and hasattr(module, "open_run"):
        builtins.__import__ = _import
        _pause_and_fail(module.Run)
    return found


if os.environ.get("TEST_PAUSE_S") or os.environ.get("TEST_FAULT"):
    builtins.__import__ = _patch_later
