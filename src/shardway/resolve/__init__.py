"""RunFile + circumstances -> Resolved: settles every open key of a run.

Invariant: a `Resolved` holds no "auto" that could be settled, every value has its origin, and no rule changes what the
user set. This package does not import torch or read data; only `request` looks at the machine.
"""

from shardway.resolve.draft import Circumstances, DataFacts, Derived, Resolved
from shardway.resolve.request import check_same_run, find_changes, resolve, resolve_with_data, scale_of

__all__ = [
    "Circumstances",
    "DataFacts",
    "Derived",
    "Resolved",
    "check_same_run",
    "find_changes",
    "resolve",
    "resolve_with_data",
    "scale_of",
]
