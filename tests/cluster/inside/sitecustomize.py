"""What a test does to the ranks of a job: Python reads this file at its start where its folder is in PYTHONPATH.

    TEST_PAUSE=0.2:FILE           a pause in every step while that file is there, so that a tiny run takes time but no
                                  processor
    TEST_FAULT=error:1:12         rank 1 fails in step 12: error, or memory (it takes all there is)
    TEST_MARKS=yes                each rank writes a file beside the job script: its host, its system, a module

Invariant: without these variables nothing changes. This module must not import torch, which costs every process
seconds.
"""

from __future__ import annotations

import builtins
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

_MODULE = "TEST_MODULE_Toolchain"
_BLOCK = 64 * 2**20
_import = builtins.__import__


def _import_and_patch(name: str, *words: Any, **named: Any) -> Any:
    """Import as ever, and change the class of runs once its module is complete."""
    found = _import(name, *words, **named)
    module = sys.modules.get("shardway.train.run")
    if module is not None and hasattr(module, "open_run"):
        builtins.__import__ = _import
        module.LiveRun.step = _disturbed(module.LiveRun.step)
    return found


def _disturbed(plain: Any) -> Any:
    kind, rank, at = os.environ.get("TEST_FAULT", "none:0:0").split(":")
    pause, _, hold = os.environ.get("TEST_PAUSE", "").partition(":")

    def step(run: Any, *words: Any) -> Any:
        here = run.session.ranks.placement.rank
        _leave_mark(here)
        if pause and os.path.exists(hold):
            time.sleep(float(pause))
        if kind != "none" and here == int(rank) and run.step_number + 1 == int(at):
            _fail(kind)
        return plain(run, *words)

    return step


def _fail(kind: str) -> None:
    if kind == "error":
        raise RuntimeError("injected by the test")
    taken: list[bytearray] = []
    while True:
        taken.append(bytearray(b"x" * _BLOCK))


def _leave_mark(rank: int) -> None:
    system = Path("/usr/bin/sbatch").exists()
    if "TEST_MARKS" in os.environ:
        module = os.environ.get(_MODULE, "")
        text = f"{platform.node()} {'host' if system else 'image'} {module}".rstrip()
        Path(os.environ["SHARDWAY_ATTEMPT_DIR"], f"mark-{rank}").write_text(text)


if any(name in os.environ for name in ("TEST_PAUSE", "TEST_FAULT", "TEST_MARKS")):
    builtins.__import__ = _import_and_patch
