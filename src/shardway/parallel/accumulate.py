"""Gradient accumulation: when gradients travel between ranks.

Invariant: after the last micro-batch every gradient is the mean over ranks of the sums over micro-batches. This
module must not run a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-batch: hold back what need not travel before the last one.

    Replicas average once, at the end. Shards scatter after every micro-batch, so that a rank never holds the whole
    gradient, and only the averaging over hybrid replicas waits for the end.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
    yield
