"""How a global batch is cut over the ranks: arithmetic on a draft that rules share.

Invariant: a degree that is still "auto" counts as 1, which is so only where another rule has refused it. This module
must not refuse or derive.
"""

from __future__ import annotations

import math

from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import ceil_div


def replicas_of(draft: Draft) -> int:
    """Over how many ranks a global batch is shared."""
    degrees = (draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard"))
    return math.prod(degree for degree in degrees if degree != "auto")


def share_of(draft: Draft) -> int:
    """The most samples of a step that a rank has."""
    return ceil_div(draft.get("train.global_batch"), replicas_of(draft))


def accumulation_of(draft: Draft) -> int:
    """Into how many micro-batches a rank's share is cut."""
    return ceil_div(share_of(draft), draft.get("train.micro_batch"))
