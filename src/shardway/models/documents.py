"""Causal attention within documents, of which a sequence holds several (`data.pack`).

Invariants:
- What a token gets does not depend on other documents of its sequence. A document begins wherever its positions are 0,
  and with each sequence.
- Where documents end is found once in a forward pass, outside the blocks, and handed to each of them as one tensor; its
  form is that of the kernel which is fastest on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDEST_HEAD = 256
"""Features of a head that the kernels of FlashAttention 2 take at most."""


class DocumentMarks(nn.Module):
    """What a model marks its documents with; a module, so that an axis finds it."""

    of_part: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Positions of this rank's part of the sequences -> the marks that its attention takes; None: ranks hold sequences
    whole."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
        """The marks for blocks that take `x` and have heads of `width` features."""
        if self.of_part is not None:
            return self.of_part(positions)
        return mark_documents(positions, dtype_of_products(x), width)


def mark_documents(positions: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Where documents end in a batch with `positions` [batch, seq], for `attend_within_documents`.

    `dtype`, `width`: those of queries and keys. On a CUDA device the kernel for bf16 and fp16 takes ends (int32
    [documents + 1], the first 0, all sequences one after the other; the host waits until it knows how many they are).
    Everywhere else a mask is used (bool [batch, 1, seq, seq], true where a query sees a key).
    """
    begins = positions == 0
    begins[:, 0] = True
    if positions.is_cuda and dtype in (torch.bfloat16, torch.float16) and width <= WIDEST_HEAD:
        return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel()).to(torch.int32)
    documents, seq = begins.cumsum(1), positions.shape[1]
    earlier = torch.ones(seq, seq, dtype=torch.bool, device=positions.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


def attend_within_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(width)) v over earlier positions of the same document; [batch, heads, seq, width] each, k
    and v perhaps of fewer heads -> the shape of q."""
    return _attend_by_mask(q, k, v, marks) if marks.dtype == torch.bool else _attend_by_ends(q, k, v, marks)


def dtype_of_products(x: torch.Tensor) -> torch.dtype:
    """The number format in which products with `x` are taken now."""
    device = x.device.type
    on = not x.is_meta and torch.is_autocast_enabled(device)  # the meta device has no autocast
    return torch.get_autocast_dtype(device) if on else x.dtype


def _attend_by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda:  # the fused kernel that takes a mask there knows no groups
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


_GROUPED = {"enable_gqa": True} if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else {}
"""Torch 2.11 takes fewer heads of keys without being asked."""


def _attend_by_ends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # it loads torch's compiler, which other devices need not

    batch, _, seq, width = q.shape
    q, k, v = (y.type_as(v).transpose(1, 2).flatten(0, 1) for y in (q, k, v))
    if width % 8:  # which the kernel does not take
        q, k, v = (F.pad(y, (0, -width % 8)) for y in (q, k, v))
    # No document is longer than a sequence. (-1, 0): all earlier positions and no later one.
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": width**-0.5, **_GROUPED}
    mixed: Any = varlen_attn(q, k, v, ends, ends, seq, seq, **options)
    found: torch.Tensor = mixed[..., :width].unflatten(0, (batch, seq)).transpose(1, 2)
    return found
