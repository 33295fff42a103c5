"""A run as it lies over ranks that read or write its weights and do not train.

Invariant: what says which weights there are and what they mean stays; what says how and where they are trained is left
to its default, so that a machine without GPUs can do it. This module must not resolve anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardway.runfile.load import DEFAULT, LoadedRunFile, load_run

_OF_TRAIN = ("micro_batch", "compile", "compile_cache")
"""Of [train], what says how and where."""


def lay_evenly(asked: LoadedRunFile) -> LoadedRunFile:
    """The same run with weights that all ranks share, on CPUs, and without what says how it is trained."""
    fresh = load_run(None).values
    narrow = asked.values.precision.weights == "bf16"
    updates: dict[str, dict[str, Any]] = {
        "train": {name: getattr(fresh.train, name) for name in _OF_TRAIN},
        "run": {"device": "cpu"},
        "precision": {**dict(fresh.precision), "weights": asked.values.precision.weights},
        "parallel": {**dict(fresh.parallel), "dp_replicate": 1, "dp_shard": "auto"},
        "recompute": dict(fresh.recompute),
    }
    updates["precision"]["compute"] = "bf16" if narrow else "fp32"
    sections = {name: getattr(asked.values, name).model_copy(update=update) for name, update in updates.items()}
    reset = {dotted: DEFAULT for dotted in asked.origins if is_of_layout(dotted)}
    return replace(asked, values=asked.values.model_copy(update=sections), origins={**asked.origins, **reset})


def is_of_layout(dotted: str) -> bool:
    """Whether a key says how and where a run is trained, and nothing of its weights."""
    section, _, name = dotted.partition(".")
    whole = section in ("parallel", "recompute") or (section == "precision" and name != "weights")
    return whole or dotted == "run.device" or (section == "train" and name in _OF_TRAIN)
