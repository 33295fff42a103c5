"""Gradients after the backward passes: their global norm, and what every rank multiplies them with.

Invariant: each element of each gradient is counted once over all ranks, whatever axes its parameter is split over
(decision 0010). This module must not decide what to do with a norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardway.models.contract import held_by_rank
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
