"""Gradient accumulation: when gradients travel between ranks.

Invariant: after the last micro-batch every gradient is the mean over ranks of the sums over micro-batches. This
module must not run a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardway.parallel.axes.replicate import check_all_used, find_copies


@contextlib.contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-batch: hold back what need not travel before the last one.

    Replicas average once, at the end; with a static graph after every micro-batch, since DDP fails where it may not
    average in the one that shows it the graph, and averages of averages are the same. Shards scatter after every
    micro-batch, so that a rank never holds the whole gradient, and only the averaging over hybrid replicas waits for
    the end. Raises UserError where a replica has a parameter without gradient.
    """
    if (copies := find_copies(model)) is not None:
        waits = not last and not copies.static_graph
        with copies.averaging(), copies.no_sync() if waits else contextlib.nullcontext():
            yield
        if last:
            check_all_used(copies)
        return
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
    yield
