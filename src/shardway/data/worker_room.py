"""How many loader processes a rank can have where the machine limits processes, threads or open files.

Invariant: never more than were asked for, and the samples of a step do not depend on how many there are. This module
must not start any, nor import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardway.hardware.limits import TaskLimit, count_open_files, read_file_limit

OWN_TASKS = 5
"""A loader process itself, its three threads (one watches the rank, two send), and the rank's thread that asks it."""
SPARE_TASKS = 12
"""Threads that a rank starts besides: of collectives, saves, the watch over a stop."""
OWN_FILES = 4
"""Open files of a rank for each of its loader processes."""
SPARE_FILES = 24
"""What a rank opens besides while it trains: connections, checkpoints, its events."""


def fit_workers(
    wanted: int, ranks: int, limit: TaskLimit | None, to_come: int = 0, environ: Mapping[str, str] = os.environ
) -> tuple[int, str]:
    """How many of the `wanted` loader processes each of `ranks` on this node can have, and why no more ("": all).

    `limit`: as it was before any rank had some. `to_come`: threads that a rank will start to compute with. A validation
    has as many loader processes again.
    """
    if not wanted:
        return 0, ""
    by_tasks, by_files = wanted, wanted
    if limit is not None:
        each = OWN_TASKS + _count_library_threads(environ)
        by_tasks = max(0, limit.left // ranks - SPARE_TASKS - to_come) // (2 * each)
    if (files := read_file_limit()) is not None:
        by_files = max(0, files - count_open_files() - SPARE_FILES) // (2 * OWN_FILES)
    fit = min(wanted, by_tasks, by_files)
    if fit == wanted:
        return wanted, ""
    if limit is not None and by_tasks <= by_files:
        why, remedy = f"{limit}", limit.remedy
    else:
        why, remedy = f"ulimit -n allows {files} open files", "raise `ulimit -n`"
    who = "the rank" if ranks == 1 else f"each of the {ranks} ranks of this node"
    has = "reads its batches itself" if not fit else f"has {fit} loader process{'' if fit == 1 else 'es'}"
    return fit, (
        f"{why}: too few for data.workers = {wanted}, and as many for a validation, so {who} {has}. "
        f"To do: {remedy}, or set data.workers = {fit}."
    )


def _count_library_threads(environ: Mapping[str, str]) -> int:
    """Threads that numpy's OpenBLAS starts in each process that imports it, besides the one that is there."""
    text = environ.get("OPENBLAS_NUM_THREADS") or environ.get("OMP_NUM_THREADS", "")
    first = text.split(",")[0].strip()
    return (int(first) if first.isdecimal() and int(first) else min(64, os.cpu_count() or 1)) - 1
