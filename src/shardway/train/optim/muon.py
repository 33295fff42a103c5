"""Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) for matrices, AdamW for the
rest.

Invariant: a whole matrix is orthogonalised, however it is sharded: the ranks of a mesh exchange their parts so that
each has its share of whole matrices, and exchange the results back. Of experts stacked in one parameter, each is a
matrix. This module must not depend on the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardway.train.optim.base import AdamW, ParameterPart

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that is applied repeatedly to the singular values: steep at 0, near 1 from there on
(Jordan et al., 2024)."""
_EPS = 1e-7


class Muon(AdamW):
    """A group with `muon` true holds matrices [rows, columns] or stacks of them [experts, rows, columns].

    It has `lr`, `weight_decay`, `momentum`, `iterations` and `adjust`, and the state `momentum_buffer`; the momentum is
    Nesterov's. The other groups are AdamW's. Gradients of the matrices must be there, or be missing, on all ranks of
    their mesh alike.
    """

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["muon"] else super().state_names(group)

    def advance(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        if not group["muon"]:
            super().advance(group, parameters)
            return
        for batch in _batches(parameters):
            parts = self.next_parts(group, batch)
            updates = orthogonalise_whole(self._directions(group, parts), batch[0], group["iterations"])
            moves = [
                part._replace(gradient=update.to(part.parameter), states=())
                for part, update in zip(parts, updates, strict=True)
            ]

            def move(some: Sequence[ParameterPart]) -> None:
                """Decay, and step along the orthogonalised direction."""
                for part in some:
                    rate = group["lr"] * adjustment(group["adjust"], *part.shape[-2:])
                    part.parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    part.parameter.add_(part.gradient, alpha=-rate)

            self.run(move, moves)

    def _directions(self, group: dict[str, Any], parts: Sequence[ParameterPart]) -> list[torch.Tensor]:
        """The Nesterov momentum of each part in bf16, which is enough to orthogonalise and to send."""
        copies = [part._replace(gradient=part.gradient.to(torch.float32, copy=True)) for part in parts]

        def add_momentum(some: Sequence[ParameterPart]) -> None:
            """Move the buffer towards the gradient, then the gradient towards the buffer."""
            gradients, buffers = [part.gradient for part in some], [part.states[0] for part in some]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            torch._foreach_lerp_(gradients, buffers, group["momentum"])

        self.run(add_momentum, copies)
        return [part.gradient.to(torch.bfloat16) for part in copies]


def adjustment(name: str, rows: int, columns: int) -> float:
    """What the rate of a matrix is multiplied with.

    `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), an update of the size that AdamW's usually have, so that both can
    share rate and decay (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2). `original`:
    sqrt(max(1, rows / columns)) (Jordan et al., 2024).
    """
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def orthogonalise(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
    """U f(S) V^T of each matrix U S V^T in [n, rows, columns], in its own dtype; f brings singular values near 1.

    Singular values are first divided by the Frobenius norm, so that none is above 1.
    """
    a, b, c = COEFFICIENTS
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.mT


def orthogonalise_whole(parts: Sequence[torch.Tensor], like: torch.Tensor, iterations: int) -> list[torch.Tensor]:
    """The parts of orthogonalised matrices, from the parts of matrices that are all laid out as `like` is.

    Plain matrices are whole already. Parts of DTensors are stacked into one [n, rows, columns] that is split as `like`
    is; splitting it by n instead brings each rank whole matrices.
    """
    stacked = like.dim() == 3
    stack = parts[0] if stacked else torch.stack(list(parts))
    if isinstance(like, DTensor):
        shape, mesh = like.shape if stacked else torch.Size((len(parts), *like.shape)), like.device_mesh
        stride = torch.empty(shape, device="meta").stride()
        split = [_shift(placement, len(shape) - like.dim()) for placement in like.placements]
        by_matrix: list[Placement] = [Shard(0) for _ in split]

        def wrap(local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
            """A DTensor whose parts may be uneven."""
            whole = local.contiguous()
            return DTensor.from_local(whole, mesh, placements, run_check=False, shape=shape, stride=stride)

        shared = wrap(stack, split).redistribute(placements=by_matrix)
        result = orthogonalise(shared.to_local(), iterations)
        stack = wrap(result, by_matrix).redistribute(placements=split).to_local()
    else:
        stack = orthogonalise(stack, iterations)
    return [stack] if stacked else list(stack.unbind())


def _shift(placement: Placement, dims: int) -> Placement:
    """The placement of a tensor that has so many dims in front."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + dims, split_factor=placement.split_factor)
    return Shard(placement.dim + dims) if isinstance(placement, Shard) else placement


def _batches(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Matrices of one shape and layout, as many as ranks share them; a stack of experts by itself."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
        alike.setdefault((parameter.shape, layout), []).append(parameter)
    for same in alike.values():
        size = same[0].device_mesh.size() if isinstance(same[0], DTensor) and same[0].dim() == 2 else 1
        yield from (same[first : first + size] for first in range(0, len(same), size))
