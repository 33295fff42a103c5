"""Whether a run directory may be continued with a run file that has changed since.

Invariant: a change that would make saved weights, optimizer state or the data position mean something else is
refused; every other change is allowed. This module must not look at checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardway.errors import Problem, check_no_problems
from shardway.resolve.applies import WEIGHT_KEYS
from shardway.resolve.resolved import Resolved

FIXED_AT_RESUME = (
    *(f"model.{name}" for name in WEIGHT_KEYS),
    *(f"data.{name}" for name in ("kind", "tokenizer", "include", "seq_len", "shuffle", "validation_fraction")),
    "train.engine",
    "train.seed",
    "deepspeed.stage",
    "deepspeed.offload_optimizer",
    "optim.name",
    "precision.weights",
)
"""Keys whose change would make the saved weights, optimizer state or data position mean something else."""


FREE_AT_RESUME = (
    "parallel",
    "recompute",
    "run",
    "site",
    "train.micro_batch",
    "train.compile_cache",
    "data.workers",
    "data.prefetch",
    "data.cache",
)
"""Sections and keys that change where a run goes on elsewhere, and nothing that it computes."""


WAYS_OUT = "choose another directory with --dir, or start {directory} over with --fresh, which sets it aside"
"""Where `shardway train` refuses it."""


def find_changes(saved: Mapping[str, Any], resolved: Resolved) -> dict[str, list[Any]]:
    """Keys that changed what is computed since the saved resolved run: key -> [before, now]."""
    changes = {}
    for section, table in resolved.values.model_dump(mode="json").items():
        before = saved.get(section, {}) if section not in FREE_AT_RESUME else {}
        for name in table.keys() & before.keys() if isinstance(table, dict) else ():
            if f"{section}.{name}" not in FREE_AT_RESUME and table[name] != before[name]:
                changes[f"{section}.{name}"] = [before[name], table[name]]
    return dict(sorted(changes.items()))


def check_same_run(saved: Mapping[str, Any], resolved: Resolved, directory: str, ways_out: str = WAYS_OUT) -> None:
    """Raise UserError where a key that must not change between attempts differs from the saved resolved run.

    `ways_out`: what else to do than to restore the value; "{directory}" in it is the run's.
    """
    now = resolved.values.model_dump(mode="json")
    problems = []
    for dotted in FIXED_AT_RESUME:
        section, name = dotted.split(".")
        before, after = saved.get(section, {}).get(name), now[section][name]
        if before not in (None, "auto") and after != "auto" and before != after:
            what = f"{after!r}, but the run in {directory} was started with {before!r}"
            problems.append(Problem(dotted, what, resolved.origins[dotted], repr(before)))
    if problems:
        problems[-1] = replace(
            problems[-1],
            remedy=f"restore the value, {ways_out.format(directory=directory)}",
        )
    check_no_problems(f"what has changed since {directory} was started", problems)
