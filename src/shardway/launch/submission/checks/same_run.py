"""A run that goes on: with other values than it was started with, or though all of it is done.

Invariant: what its ranks would refuse when they go on from its checkpoints, or find done, is refused before the queue.
Where there is no checkpoint, or the record of the run cannot be read, nothing is refused. This module must not change
anything.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from shardway.errors import UserError
from shardway.launch.hosts.base import Host
from shardway.resolve.resolved import Resolved
from shardway.resolve.same_run import check_same_run, find_changes
from shardway.rundir.directory import RunDir
from shardway.rundir.steps import step_name, step_of_checkpoint

_WAYS_OUT = "or submit it as another run (`shardway submit` with another run.name or --dir)"


def check_goes_on(host: Host, run: RunDir, resolved: Resolved) -> None:
    """Raise UserError where a key has changed that must not change between attempts, or nothing is left to do."""
    listed, record, status = host.run_many(
        [("ls", str(run.checkpoints)), ("cat", str(run.resolved_path)), ("cat", str(run.status_path))]
    )
    if not any(map(_is_complete, listed.out.splitlines())) or not record.ok:
        return
    try:
        saved = tomllib.loads(record.out)
    except (ValueError, RecursionError):
        return  # its ranks tell what to do about it
    tables = {name: table for name, table in saved.items() if isinstance(table, dict)}
    check_same_run(tables, resolved, str(run.path), _WAYS_OUT)
    if not find_changes(tables, resolved) and _is_finished(status.out):
        raise UserError(
            f"{run.path} has come to its end ({resolved.values.train.steps} were asked for), so a job of it would have "
            f"nothing to do.\n  To do: raise train.steps, {_WAYS_OUT}."
        )


def _is_finished(status: str) -> bool:
    """Whether status.json says that all was done."""
    try:
        table = json.loads(status)
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and table.get("state") == "finished"


def _is_complete(name: str) -> bool:
    """Whether a folder of that name is a complete checkpoint that was not set aside."""
    step = step_of_checkpoint(Path(name))
    return step is not None and name == step_name(step)
