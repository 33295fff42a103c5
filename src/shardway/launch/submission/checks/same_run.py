"""A run that goes on: with other values than it was started with, or though all of it is done.

Invariant: what its ranks would refuse when they go on from its newest checkpoint, or find done, is refused before the
queue, as far as it can be known without the data. Where there is no checkpoint, or the record of the run cannot be
read, nothing is refused. This module must not change anything.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Any

from shardway.errors import UserError
from shardway.launch.hosts.base import Host
from shardway.launch.runs.ledger import Ledger
from shardway.resolve.resolved import Resolved
from shardway.resolve.same_run import check_same_run, find_changes
from shardway.rundir.steps import find_steps

_SAY_HOW_MANY = frozenset(("train.steps", "train.global_batch"))
"""Keys on which it depends how many steps an amount of samples, tokens or epochs is."""

_WAYS_OUT = "or submit it as another run (`shardway submit` with another run.name or --dir)"


def check_goes_on(host: Host, ledger: Ledger, resolved: Resolved) -> None:
    """Raise UserError where a key has changed that must not change between attempts, or nothing is left to do."""
    run = ledger.run
    listed, record = host.run_many([("ls", str(run.checkpoints)), ("cat", str(run.resolved_path))])
    steps = find_steps(listed.out.splitlines())
    if not steps or not record.ok:
        return
    try:
        saved = tomllib.loads(record.out)
    except (ValueError, RecursionError):
        return  # its ranks tell what to do about it
    tables = {name: table for name, table in saved.items() if isinstance(table, dict)}
    check_same_run(tables, resolved, str(run.path), _WAYS_OUT)
    total = _find_total(tables, resolved, ledger.status)
    if total is not None and steps[-1] >= total:
        raise UserError(
            f"{run.path} has a checkpoint of step {steps[-1]}, and {total} steps are asked for, so a job would have "
            f"nothing to do.\n  To do: raise train.steps, {_WAYS_OUT}."
        )


def _find_total(saved: Mapping[str, Any], resolved: Resolved, status: Mapping[str, Any]) -> int | None:
    """How many steps are asked for. Where the data has a say: what it said before, if what it depends on has not
    changed; else None."""
    if resolved.values.train.steps.unit == "steps":
        return math.ceil(resolved.values.train.steps.amount)
    if any(key in _SAY_HOW_MANY or key.startswith("data.") for key in find_changes(saved, resolved)):
        return None
    total = status.get("total_steps")
    return total if isinstance(total, int) else None
