"""Parts of a block written by hand for passes in bf16 that are not compiled, where every operator is a kernel that
reads and writes memory.

Invariants:
- Each function computes what the plain operators of its caller do, with at most as many roundings. It returns None
  where it does not apply: in other formats (fp32 keeps its bits), under a compiler (which fuses the plain operators),
  for few numbers (`FEWEST`), and for a linear layer that is more than a product with its own whole weight (split over
  ranks, in float8, with hooks of a script or an engine).
- Weights stay parameters of their own, by which gradients, optimizers and checkpoints know them. Joined copies are of
  fp32 weights only, which products copy into bf16 anyway: a copy of a gathered 16-bit weight would outlive it.
- A node of the graph that has weights has one output: schedules that split the backward pass into that of inputs and
  that of weights take no others in earlier versions of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

FEWEST = 2**22
"""Numbers of a tensor from which on a device takes longer to move it than the host to issue a kernel: 8 MB in bf16. In
Python these parts take the host a tenth longer than plain operators."""


def project_joined(x: torch.Tensor, *layers: nn.Linear) -> torch.Tensor | None:
    """The outputs of all layers side by side, [..., sum of features], as one product; the gradient of x is then one
    product too, where one for each layer would have to be added up."""
    if not _applies(x, *layers) or any(layer.weight.dtype != torch.float32 for layer in layers):
        return None
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        return None
    joined: torch.Tensor = _JoinedLinear.apply(x, len(layers), *(layer.weight for layer in layers), *biases)
    return joined


def split_rotated(
    joined: torch.Tensor, features: Sequence[int], cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Queries, keys (both rotated) and values [batch, seq, heads, head_dim] of what `project_joined` returned, with so
    many features each; `cos` and `sin` as of `rotation`."""
    if joined.dtype != cos.dtype:
        return None
    q, k, v = _SplitRotated.apply(joined, tuple(features), cos, sin)
    return q, k, v


def rotate_by_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """`rotate` in three kernels each way that move five times the size of x; its plain operators are four kernels that
    move nine times as much."""
    if torch.compiler.is_compiling() or x.numel() < FEWEST or not x.dtype == cos.dtype == torch.bfloat16:
        return None
    rotated: torch.Tensor = _Rotate.apply(x, cos, sin)
    return rotated


def multiply_gated(x: torch.Tensor, gate: nn.Linear, up: nn.Linear) -> torch.Tensor | None:
    """silu(gate(x)) * up(x); the gradient of x is added up inside the products that make it."""
    if not _applies(x, gate, up) or gate.bias is not None or up.bias is not None:
        return None
    hidden: torch.Tensor = _Gated.apply(x, gate.weight, up.weight)
    return hidden


def _applies(x: torch.Tensor, *layers: nn.Linear) -> bool:
    """Whether x is large and in bf16, all products of it are, and these layers are nothing but products."""
    if torch.compiler.is_compiling() or x.dtype != torch.bfloat16 or x.numel() < FEWEST:
        return False
    if not all(map(_is_plain, layers)):
        return False
    if all(layer.weight.dtype == torch.bfloat16 for layer in layers):
        return True
    device = x.device.type
    on = not x.is_meta and torch.is_autocast_enabled(device)  # the meta device has no autocast
    return on and torch.get_autocast_dtype(device) == torch.bfloat16


def _is_plain(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not any(hooks)


# --- linear layers


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: int, *parameters: torch.Tensor) -> torch.Tensor:
        weights, biases = parameters[:layers], parameters[layers:]
        weight = _join(weights, x)
        ctx.features = [each.shape[0] for each in weights]
        ctx.formats = [each.dtype for each in parameters]
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, _join(biases, x) if biases else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, _, *needed = ctx.needs_input_grad
        layers, rows = len(ctx.features), grad.flatten(0, -2)
        found: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[:layers]):
            found[:layers] = (rows.t() @ x.flatten(0, -2)).split(ctx.features)
        if any(needed[layers:]):
            found[layers:] = rows.sum(0).split(ctx.features)
        each = zip(found, needed, ctx.formats, strict=True)
        grads = (one.to(dtype) if one is not None and wanted else None for one, wanted, dtype in each)
        return (grad @ weight if for_x else None), None, *grads


def _join(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The parts below one another, copied into the format of `like` as they are joined."""
    rows = [len(part) for part in parts]
    joined = like.new_empty((sum(rows), *parts[0].shape[1:]))
    for place, part in zip(joined.split(rows), parts, strict=True):
        place.copy_(part)
    return joined


class _Gated(torch.autograd.Function):
    """What is kept for the backward pass is what the plain operators keep."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.formats = gate.dtype, up.dtype
        gate, up = gate.to(x.dtype), up.to(x.dtype)
        gates, ups = F.linear(x, gate), F.linear(x, up)
        opened = F.silu(gates)
        ctx.save_for_backward(x, gate, up, gates, ups, opened)
        return opened * ups

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, up, gates, ups, opened = ctx.saved_tensors
        for_x, for_gate, for_up = ctx.needs_input_grad
        inputs, grad_ups = x.flatten(0, -2), (grad * opened).flatten(0, -2)
        grad_gates = torch.ops.aten.silu_backward(grad * ups, gates).flatten(0, -2)
        grad_x = torch.addmm(grad_gates @ gate, grad_ups, up).view_as(x) if for_x else None
        grad_gate = (grad_gates.t() @ inputs).to(ctx.formats[0]) if for_gate else None
        return grad_x, grad_gate, (grad_ups.t() @ inputs).to(ctx.formats[1]) if for_up else None


# --- rotary positions


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _add_partners(x * cos, x, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _add_partners(grad * cos, grad, sin, -1), None, None


class _SplitRotated(torch.autograd.Function):
    """Values are copied out: a view of them would keep queries and keys before their rotation."""

    @staticmethod
    def forward(
        ctx: Any, joined: torch.Tensor, features: tuple[int, ...], cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.features = features
        ctx.save_for_backward(cos, sin)
        q, k, v = _split_heads(joined, features, cos.shape[-1])
        return _add_partners(q * cos, q, sin), _add_partners(k * cos, k, sin), v.clone(memory_format=_DENSE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        joined = grads[0].new_empty((*grads[0].shape[:2], sum(ctx.features)))
        q, k, v = _split_heads(joined, ctx.features, cos.shape[-1])
        for place, grad in ((q, grads[0]), (k, grads[1])):
            _add_partners(torch.mul(grad, cos, out=place), grad, sin, -1)
        v.copy_(grads[2])
        return joined, None, None, None


_DENSE = torch.contiguous_format


def _split_heads(joined: torch.Tensor, features: Sequence[int], width: int) -> list[torch.Tensor]:
    return [part.unflatten(-1, (-1, width)) for part in joined.split(list(features), dim=-1)]


def _add_partners(turned: torch.Tensor, x: torch.Tensor, sin: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """`turned`, in place, plus each feature's partner in x times the sine; -1 turns back."""
    half = x.shape[-1] // 2
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return turned
