"""Shardway: carries a PyTorch training job from a laptop to a supercomputer without rewriting it.

The public names, nothing else. Invariant: `import shardway` is quick and does not import torch; a name that needs
torch loads it when it is first used, and without torch is an error that names the command to install it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardway.errors import Bug, JobError, ShardwayError, SiteError, UserError
from shardway.installed import describe_missing, find_missing
from shardway.untouched import is_untouched as _is_untouched  # noqa: F401  # looks before a script seeds
from shardway.version import __version__

if TYPE_CHECKING:
    from shardway.api.jobs import Executor, FunctionJob, open_job, submit
    from shardway.api.run import Run
    from shardway.data.grouping import LengthGroupedBatches
    from shardway.launch.calls.notebook import notebook_launch
    from shardway.train.loss import LossSum, causal_lm_loss, class_cross_entropy, token_cross_entropy
    from shardway.train.run import LiveRun, start

__all__ = [
    "Bug",
    "Executor",
    "FunctionJob",
    "JobError",
    "LengthGroupedBatches",
    "LiveRun",
    "LossSum",
    "Run",
    "ShardwayError",
    "SiteError",
    "UserError",
    "__version__",
    "causal_lm_loss",
    "class_cross_entropy",
    "notebook_launch",
    "open_job",
    "start",
    "submit",
    "token_cross_entropy",
]

_API = {
    **dict.fromkeys(("Executor", "FunctionJob", "open_job", "submit"), "shardway.api.jobs"),
    "Run": "shardway.api.run",
    "notebook_launch": "shardway.launch.calls.notebook",
}
"""Name -> its module, of those that need no torch."""


@contextmanager
def _missing_explained() -> Iterator[None]:
    """While entered, the absence of torch is a UserError, which a script ends with as a message."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (package := find_missing(error)):
            raise
        from shardway.ranks.stop import report_errors

        report_errors()
        raise UserError(describe_missing(package, "this script")) from None


@_missing_explained()
def __getattr__(name: str) -> Any:
    if name in _API:
        from importlib import import_module

        return getattr(import_module(_API[name]), name)
    if name in ("LiveRun", "start"):
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
