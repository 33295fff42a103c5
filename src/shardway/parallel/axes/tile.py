"""Attention of some queries to some keys, with what is needed to join the results: the logarithm of the softmax's sum.

Invariant: joining the tiles of all keys gives attention to all of them, and `attend_backward` with the joined output
and logarithm gives each tile's share of the gradients (Dao et al., FlashAttention, arXiv:2205.14135, appendix B). This
module must not communicate.

Shapes: q [batch, heads, queries, width], k and v [batch, kv_heads, keys, width]; `log_sum` [batch, heads, queries].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from shardway.errors import UserError


@dataclass(frozen=True)
class AttentionTile:
    """Queries, keys and values of one tile; `causal` where query i sees keys 0 to i only."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool

    @property
    def repeats(self) -> int:
        """How many query heads share one key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def with_all_heads(self) -> AttentionTile:
        """The same tile with a key/value head for each query head."""
        if self.repeats == 1:
            return self
        k, v = (each.repeat_interleave(self.repeats, dim=1) for each in (self.k, self.v))
        return AttentionTile(self.q, k, v, self.causal)


@dataclass(frozen=True)
class TileGrads:
    """Gradients of one tile's queries, keys and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch, heads, queries, width] and `log_sum` of a tile."""
    return _kernels(tile.q.device).forward(tile.with_all_heads())


def attend_backward(tile: AttentionTile, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> TileGrads:
    """The tile's share of the gradients; `grad`, `out` and `log_sum` are those of attention to all keys."""
    grads = _kernels(tile.q.device).backward(tile.with_all_heads(), grad, out, log_sum)
    if tile.repeats == 1:
        return grads
    return TileGrads(grads.q, *(each.unflatten(1, (-1, tile.repeats)).sum(2) for each in (grads.k, grads.v)))


def join(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, more_log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of keys out of attention to each; in the number format of `log_sum`."""
    both = torch.logaddexp(log_sum, more_log_sum)
    weight, more_weight = (log_sum - both).exp()[..., None], (more_log_sum - both).exp()[..., None]
    return out * weight + more * more_weight, both


@dataclass(frozen=True)
class _Kernels:
    forward: Callable[[AttentionTile], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[AttentionTile, torch.Tensor, torch.Tensor, torch.Tensor], TileGrads]


def _forward_cpu(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return run(tile.q, tile.k, tile.v, 0.0, tile.causal)


def _backward_cpu(tile: AttentionTile, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> TileGrads:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return TileGrads(*run(grad, tile.q, tile.k, tile.v, out, log_sum, 0.0, tile.causal))


def _forward_cuda(tile: AttentionTile) -> tuple[torch.Tensor, torch.Tensor]:
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(tile.q, tile.k, tile.v, 0.0, tile.causal)
    return out, log_sum


def _backward_cuda(tile: AttentionTile, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor) -> TileGrads:
    run = torch.ops.aten._scaled_dot_product_flash_attention_backward
    queries, keys = tile.q.shape[2], tile.k.shape[2]
    unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # the random state of dropout, which is off
    grads = run(grad, tile.q, tile.k, tile.v, out, log_sum, None, None, queries, keys, 0.0, tile.causal, unused, unused)
    return TileGrads(*grads)


_KERNELS: Mapping[str, _Kernels] = MappingProxyType(
    {"cpu": _Kernels(_forward_cpu, _backward_cpu), "cuda": _Kernels(_forward_cuda, _backward_cuda)}
)


def _kernels(device: torch.device) -> _Kernels:
    if device.type not in _KERNELS:
        raise UserError(f"the context axis has no attention kernel for {device.type}; allowed: {', '.join(_KERNELS)}.")
    return _KERNELS[device.type]
