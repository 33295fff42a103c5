"""The tensor axis: weights split over ranks, each computing its part of a sum (Megatron-LM, arXiv:1909.08053), with
the residual stream split by sequence between the sums (arXiv:2205.05198).

Invariant: outside the regions of a plan a tensor is either the same on all ranks of the axis or, with sequence
parallelism, this rank's part of the sequence; weights are DTensors, what is computed with is local (decision 0008).
This module must not know other axes.

A weight that is not split but used for a part of a sum or of the sequence has a gradient on each rank that is a part
of the whole: `apply_tensor` returns their names, `sum_partial_gradients` adds them up once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardway.errors import UserError
from shardway.models.contract import ModelPlan, Split, held_by_rank, match_modules, match_parameters
from shardway.parallel.axes.collectives import (
    copy_in,
    gather_sequence,
    gather_whole,
    narrow_to_rank,
    scatter_sum,
    split_parameter,
    sum_out,
)
from shardway.parallel.precision import linear_with


@dataclass(frozen=True)
class _Axis:
    """One rank's view of the tensor axis, and how tensors enter and leave a region."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    sequence: bool
    split_logits: bool
    kv_width: int

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What a region computes with: the whole sequence, the same on all ranks."""
        return gather_sequence(x, self.group) if self.sequence else copy_in(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """What a region's summands become: their sum, this rank's part of the sequence of it."""
        return scatter_sum(x, self.group) if self.sequence else sum_out(x, self.group)


def apply_tensor(
    model: nn.Module, plan: ModelPlan, mesh: DeviceMesh, *, sequence: bool, split_logits: bool
) -> frozenset[str]:
    """Split a model's weights over `mesh` (one dim) as its plan says, in place. `sequence`: the residual stream is
    split too, where the plan allows it; `split_logits`: logits stay split for the loss.

    Returns the names of the parameters whose gradients are parts of a sum. Raises UserError where a weight does not
    split evenly or a pattern matches nothing.
    """
    sequence = sequence and "sequence" in plan.tensor.values()
    axis = _Axis(mesh, mesh.get_group(), sequence, split_logits, plan.kv_width)
    for name, dim in match_parameters(model, plan.held):
        if not isinstance(model.get_parameter(name), DTensor):  # the expert axis has split it over both
            split_parameter(model, name, mesh, [dim])
    splits = {name: split for pattern, split in plan.tensor.items() for name, _ in match_modules(model, [pattern])}
    regions = match_modules(model, plan.regions)
    inside = tuple(f"{name}." for name, _ in regions)
    for name, split in splits.items():
        # No collective would sum its parts: each rank would continue with its own.
        if split in ("row", "column", "key_value") and not f"{name}.".startswith(inside):
            raise UserError(
                f"the plan of {type(model).__name__} splits {name} ({split!r}), which is in none of its "
                "regions, so no rank would have the whole of what it computes.\n"
                '  To do: name the module that holds all "column" and "row" modules of one sum in `regions`.'
            )
    for name, module in match_modules(model, splits):
        _CHANGES[splits[name]](axis, module)
    for _, region in regions:
        region.register_forward_pre_hook(lambda _, inputs: (axis.enter(inputs[0]), *inputs[1:]))
        region.register_forward_hook(lambda _, __, output: axis.leave(output))
    whole = [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ())
    ]
    return frozenset(name for name in whole if sequence or name.startswith(inside))


def sum_partial_gradients(model: nn.Module, names: frozenset[str], group: dist.ProcessGroup) -> None:
    """Add up the gradients of these parameters over the tensor axis, in one message per number format."""
    grads = [held_by_rank(p.grad) for name, p in model.named_parameters() if name in names and p.grad is not None]
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = _flatten_dense_tensors(same)
        dist.all_reduce(flat, group=group)
        for grad, total in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
            grad.copy_(total)


# --- what becomes of a module, by its word in the plan


def _split_columns(axis: _Axis, module: nn.Module) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        split_parameter(module, name, axis.mesh, [0])
    module.forward = partial(_linear, module, None)


def _split_key_value(axis: _Axis, module: nn.Module) -> None:
    """By heads; with fewer heads than ranks, as many ranks as share a head compute it each for itself."""
    heads, ranks = module.get_parameter("weight").shape[0] // axis.kv_width, axis.group.size()
    if heads % ranks == 0:
        _split_columns(axis, module)
    elif ranks % heads == 0:
        start = axis.group.rank() * heads // ranks * axis.kv_width
        module.forward = partial(_linear, module, slice(start, start + axis.kv_width))
    else:
        raise UserError(f"{heads} key/value heads neither divide nor are divided by the tensor degree {ranks}.")


def _linear(module: nn.Module, rows: slice | None, x: torch.Tensor) -> torch.Tensor:
    weight, bias = _held(module, "weight"), _held_bias(module)
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    return linear_with(module, x, weight, bias)


def _split_rows(axis: _Axis, module: nn.Module) -> None:
    split_parameter(module, "weight", axis.mesh, [1])
    module.forward = partial(_summand_linear, module, axis.group.rank() == 0)


def _summand_linear(module: nn.Module, adds_bias: bool, x: torch.Tensor) -> torch.Tensor:
    """The bias counts once; on the other ranks it takes part with the factor 0, so that it has a gradient there too."""
    bias = _held_bias(module)
    return linear_with(module, x, _held(module, "weight"), bias if bias is None or adds_bias else bias * 0)


def _split_vocabulary(axis: _Axis, module: nn.Module) -> None:
    split_parameter(module, "weight", axis.mesh, [0])
    module.forward = partial(_lookup, module, axis)


def _lookup(module: nn.Module, axis: _Axis, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the table that this rank holds, zeros for the others, summed over the ranks."""
    weight = _held(module, "weight")
    local = ids - axis.group.rank() * weight.shape[0]
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
    return axis.leave(rows.masked_fill(elsewhere[..., None], 0))


def _split_logits(axis: _Axis, module: nn.Module) -> None:
    """Also of an output layer without a weight of its own, which is called with the embedding's."""
    if next(module.parameters(recurse=False), None) is not None:
        _split_columns(axis, module)

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (axis.enter(inputs[0]), *(held_by_rank(each) for each in inputs[1:]))

    def after(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if axis.split_logits:
            return DTensor.from_local(output, axis.mesh, [Shard(output.dim() - 1)], run_check=False)
        return gather_whole(output, axis.group)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _split_nothing(axis: _Axis, module: nn.Module) -> None:
    """A norm works on any part of a sequence; what a table of positions gives is cut to this rank's part."""
    if axis.sequence and isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _, __, output: narrow_to_rank(output, output.dim() - 2, axis.group))


_CHANGES: Mapping[Split, Callable[[_Axis, nn.Module], None]] = MappingProxyType(
    {
        "column": _split_columns,
        "key_value": _split_key_value,
        "row": _split_rows,
        "vocabulary": _split_vocabulary,
        "logits": _split_logits,
        "sequence": _split_nothing,
    }
)


def _held(module: nn.Module, name: str) -> torch.Tensor:
    return held_by_rank(cast(torch.Tensor, getattr(module, name)))


def _held_bias(module: nn.Module) -> torch.Tensor | None:
    return None if getattr(module, "bias", None) is None else _held(module, "bias")
