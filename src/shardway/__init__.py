"""Shardway: carries a PyTorch training job from a laptop to a supercomputer without rewriting it.

The public names, nothing else. Invariant: `import shardway` is quick and does not import torch; a name that needs
torch loads it when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardway.errors import Bug, JobError, ShardwayError, SiteError, UserError
from shardway.version import __version__

if TYPE_CHECKING:
    from shardway.data.grouping import LengthGroupedBatches
    from shardway.train.loss import LossSum, causal_lm_loss, class_cross_entropy, token_cross_entropy
    from shardway.train.run import Run, start

__all__ = [
    "Bug",
    "JobError",
    "LengthGroupedBatches",
    "LossSum",
    "Run",
    "ShardwayError",
    "SiteError",
    "UserError",
    "__version__",
    "causal_lm_loss",
    "class_cross_entropy",
    "start",
    "token_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name in ("Run", "start"):
        _ensure_temporary()
        from shardway.train import run

        return getattr(run, name)
    if name in ("LossSum", "causal_lm_loss", "class_cross_entropy", "token_cross_entropy"):
        from shardway.train import loss

        return getattr(loss, name)
    if name == "LengthGroupedBatches":
        from shardway.data import grouping

        return grouping.LengthGroupedBatches
    raise AttributeError(f"module 'shardway' has no attribute {name!r}")


def _ensure_temporary() -> None:
    from shardway.hardware.limits import ensure_temporary

    try:
        ensure_temporary()
    except SiteError:
        from shardway.ranks.stop import report_errors

        report_errors()
        raise
