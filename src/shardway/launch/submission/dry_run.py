"""What a submission would do, as plain data: for `submit --dry-run --json`, and for tools that ask a person first.

Invariant: two submissions with one digest would run the same program, on the same code, with the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from shardway.launch.hosts.base import Host
from shardway.launch.submission.budget import GPU_HOURS, estimate_cost
from shardway.launch.submission.prepare import Prepared


def describe_prepared(prepared: Prepared, host: Host) -> dict[str, Any]:
    """What would be submitted, as plain data: the script, its cost, and a digest of all that the job is made of.
    `gpu_hours`: the most that all its attempts can use; 0 without GPUs, None where there is no limit of time."""
    job, cost = prepared.job, estimate_cost(prepared)
    gpus = cost.nodes * cost.per_node if cost.unit == GPU_HOURS else 0
    return {
        "run": str(job.run),
        "host": host.name,
        "attempt": job.attempt,
        "site": job.site,
        "scheduler": job.scheduler,
        "nodes": cost.nodes,
        "gpus": gpus,
        "walltime_s": cost.walltime_s or None,
        "attempts": cost.attempts,
        "gpu_hours": 0.0 if not gpus else cost.most if cost.walltime_s else None,
        "cost": cost.as_json(),
        "script": prepared.script,
        "warnings": list(prepared.warnings),
        "digest": digest_of_prepared(prepared),
    }


def digest_of_prepared(prepared: Prepared) -> str:
    """SHA-256 of the job script without its token, of the attempt's files, and of what the snapshot copies: equal for
    two submissions that would run the same."""
    digest = hashlib.sha256()

    def add(name: str, content: str) -> None:
        digest.update(json.dumps([name, content]).encode())

    add("script", prepared.script.replace(prepared.job.token, "TOKEN"))
    for path, text in sorted(prepared.files.items()):
        add(str(path), text)
    if prepared.snapshot is not None:
        for name in sorted(prepared.snapshot.files):
            add(name, _digest_of_file(prepared.snapshot.root / name))
        for link in prepared.snapshot.links:
            add(link.path, link.target)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    """Of what a link leads to, its name; of what cannot be read, nothing: submitting reports it."""
    try:
        if path.is_symlink():
            return os.readlink(path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
