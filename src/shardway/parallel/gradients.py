"""Gradients over several passes and all ranks: sums that wait, their global norm, numbers on their way to a device.

Invariants:
- Each element of each gradient is counted once over all ranks, whatever axes its parameter is split over (decision
  0010).
- After the last micro-batch every gradient is the mean over ranks of the sums over micro-batches.
- The host does not wait for the device, which goes on with what it has to do. A plain copy from memory that may be
  swapped waits until all that was asked for before is done; then the device stands still until the host goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardway.models.contract import held_by_rank
from shardway.parallel.axes.replicate import check_all_used, find_copies
from shardway.parallel.mesh import Mesh


@torch.no_grad()
def own_squares(parameters: Sequence[nn.Parameter], mesh: Mesh, device: torch.device) -> torch.Tensor:
    """The sum of squares, float64 and 0-dim, of the gradient elements that this rank answers for.

    Summed over all ranks it is the square of the global norm.
    """
    grads = [_added_up(held_by_rank(p.grad)) for p in parameters if p.grad is not None and mesh.answers_for(p)]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [norm.to(device) for norm in torch._foreach_norm(grads)]
    return torch.stack(norms).double().square().sum()


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by a factor."""
    if factor == 1.0:
        return  # a pass over all gradients less
    held = [held_by_rank(p.grad) for p in parameters if p.grad is not None]
    grads = [grad._values() if grad.is_sparse else grad for grad in held]
    for kind in {(grad.device, grad.dtype) for grad in grads}:
        same = [grad for grad in grads if (grad.device, grad.dtype) == kind]
        torch._foreach_mul_(same, factor)


def _added_up(grad: torch.Tensor) -> torch.Tensor:
    """Of a sparse gradient (one rank alone has them) the numbers that are there, each row once."""
    return grad.coalesce().values() if grad.is_sparse else grad


# --- gradient accumulation


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


# --- host values sent to a device


def send(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one dim on `device`. torch keeps the memory that it comes from until it has arrived."""
    here = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
