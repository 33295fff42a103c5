"""Adafactor (Shazeer and Stern, arXiv:1804.04235): second moments of a matrix as one row and one column.

Invariant: row and column means, root mean squares and clipping are those of the whole parameter, added up over the
ranks that share it: three all-reduces per axis and group. All updates are never held at once: each is computed twice
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from shardway.models.contract import held_by_rank
from shardway.train.optim.base import LocalOptimizer, local_gradient, split_dim

BETA2_DECAY = -0.8
SMALLEST_RMS = 1e-3
CLIP_RMS = 1.0
"""Section 9: moments decay by 1 - t**-0.8, the scale of a parameter near 0, the RMS to which updates are clipped."""


@dataclass(frozen=True)
class _Sum:
    """A sum over this rank's elements; the whole one is over all ranks that `whole` splits these dims among, which
    count from the end."""

    value: torch.Tensor
    whole: torch.Tensor
    dims: tuple[int, ...]


class Adafactor(LocalOptimizer):
    """A group has `lr` and `weight_decay` (decoupled); an update has the RMS lr * max(1e-3, RMS of the parameter).

    States: `row_var` [..., rows, 1] and `col_var` [..., 1, columns] of a parameter of two or more dims, split as it is;
    `variance` of a vector. As `torch.optim.Adafactor`, without its limit of lr to 1 / sqrt(step): the schedule alone
    decides.
    """

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ()

    def new_states(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter.dim() < 2:
            return {"variance": torch.zeros_like(parameter)}
        return {"row_var": _zeros_without(parameter, -1), "col_var": _zeros_without(parameter, -2)}

    def advance(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        works = [_Work(parameter, self.state_of(group, parameter)) for parameter in parameters]
        add_up([each for work in works for each in work.moments()])
        for work in works:
            work.keep_moments()
        add_up([each for work in works for each in work.row_totals()])
        add_up([work.size() for work in works])
        for work in works:
            work.move(group["lr"], group["weight_decay"])


class _Work:
    """One parameter on its way through a step; the caller adds up what the methods return before the next one."""

    def __init__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] += 1
        self._whole = parameter
        self._factored = parameter.dim() >= 2
        self._weight = float(state["step"]) ** BETA2_DECAY
        self._parameter, self._gradient = held_by_rank(parameter), local_gradient(parameter)
        self._states = {name: held_by_rank(tensor) for name, tensor in state.items() if name != "step"}
        self._eps = torch.finfo(parameter.dtype).eps
        self._sums: dict[str, torch.Tensor] = {}

    def moments(self) -> Iterator[_Sum]:
        """Squares of the parameter, and of the gradient by row and by column."""
        yield self._sum("parameter", torch.linalg.vector_norm(self._parameter).square(), self._all_dims())
        if self._factored:
            rows, columns = (torch.linalg.vector_norm(self._gradient, dim=d, keepdim=True).square() for d in (-1, -2))
            yield self._sum("rows", rows, (-1,))
            yield self._sum("columns", columns, (-2,))

    def keep_moments(self) -> None:
        """Move the running means towards those of this step."""
        if not self._factored:
            self._states["variance"].lerp_(self._gradient.square(), self._weight)
            return
        rows, columns = self._whole.shape[-2:]
        self._states["row_var"].lerp_(self._sums["rows"] / columns, self._weight)
        self._states["col_var"].lerp_(self._sums["columns"] / rows, self._weight)

    def row_totals(self) -> Iterator[_Sum]:
        """What normalises the outer product of row and column."""
        if self._factored:
            yield self._sum("row total", self._states["row_var"].sum(dim=-2, keepdim=True), (-2,))

    def size(self) -> _Sum:
        """The squares of the update before it is clipped."""
        return self._sum("update", torch.linalg.vector_norm(self._update()).square(), self._all_dims())

    def move(self, lr: float, weight_decay: float) -> None:
        """Decay, and apply the clipped update. The scale stays a tensor: reading it would wait for the device."""
        elements = self._whole.numel()
        rms = (self._sums["parameter"] / elements).sqrt().clamp(min=SMALLEST_RMS)
        clip = ((self._sums["update"] / elements).sqrt() / CLIP_RMS).clamp(min=1.0)
        self._parameter.mul_(1 - lr * weight_decay)
        self._parameter.sub_(self._update().mul_(rms * lr / clip))

    def _update(self) -> torch.Tensor:
        if self._factored:
            mean = self._sums["row total"] / self._whole.shape[-2]
            estimate = (self._states["row_var"] @ self._states["col_var"]).div_(mean.clamp(min=self._eps))
        else:
            estimate = self._states["variance"].clone()
        return estimate.clamp_(min=self._eps**2).rsqrt_().mul_(self._gradient)

    def _sum(self, name: str, value: torch.Tensor, dims: tuple[int, ...]) -> _Sum:
        self._sums[name] = value
        return _Sum(value, self._whole, dims)

    def _all_dims(self) -> tuple[int, ...]:
        return tuple(range(-self._whole.dim(), 0))


def add_up(sums: Sequence[_Sum]) -> None:
    """Make each sum that of the whole parameter, in place; one all-reduce for each group of ranks."""
    shares: dict[Any, list[torch.Tensor]] = {}
    devices: dict[Any, str] = {}
    for each in sums:
        if not isinstance(each.whole, DTensor):
            continue
        wanted, mesh = {dim % each.whole.dim() for dim in each.dims}, each.whole.device_mesh
        for axis, placement in enumerate(each.whole.placements):
            if split_dim(placement) in wanted:  # this axis of the mesh splits one of these dims
                group = mesh.get_group(axis)
                shares.setdefault(group, []).append(each.value)
                devices[group] = mesh.device_type
    for group, values in shares.items():
        flat = torch.cat([value.reshape(-1) for value in values]).to(devices[group])  # offloaded ones are on the CPU
        dist.all_reduce(flat, group=group)
        for value, total in zip(values, flat.split([value.numel() for value in values]), strict=True):
            value.copy_(total.view(value.shape))


def _zeros_without(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros of the parameter's shape but for one entry in `dim`, placed as it is in the other dims."""
    local, split = held_by_rank(parameter), dim % parameter.dim()
    zeros = local.new_zeros([1 if at == split else size for at, size in enumerate(local.shape)])
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size(1 if at == split else size for at, size in enumerate(parameter.shape))
    state = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        [Replicate() if split_dim(each) == split else each for each in parameter.placements],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return state.to(parameter.device)  # from_local moves what is offloaded to the mesh's device
